"""Under which conditions a run was measured or trained, written when it starts.

    conditions.json   {"directory": "../..",            where it was started, seen from the folder
                       "actor":   {model, weights …},   what was measured or trained
                       "engine":  {kind, version},      by what it was sampled; not of an endpoint
                       "players": {role: [player]},     everybody beside the actor, in any task
                       "tasks":   {task: {"rows": {id: hash}, "players": …, "sampling": …}},
                       "material": {model, machine …}}  of a training: what a resume must find again

config.yaml says what was asked for, this file what it came to: the address behind a name, the rows
behind a path. `summary.json` repeats it with every set of rows as their number and one hash.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from soulkit.errors import RunError
from soulkit.runs.folder import CONFIG, ENVIRONMENT, read_config, read_environment
from soulkit.runs.jsonl import SCHEMA, SUMMARY_SCHEMA, form_of, read_object, read_value, write_json
from soulkit.types import row_id

CONDITIONS, BATCHES = "conditions.json", "batches.json"
OLDER = ("provenance.json", "material.json")
"""What runs of earlier versions have in its place."""
SCORING = ("judge", "auditor", "partner", "environment")
"""The roles that a score may depend on."""
SETTINGS = ("seed", "repeats", "steps")
"""Numbers of config.yaml that say how much was played, and from which seed."""
_VERSIONS = ("soulkit", "python", "commit", "packages")
_ACTOR = ("kind", "model", "adapter", "base_url")

Facts = Mapping[str, Any]
"""Plain JSON values by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerFacts:
    """Who a model is, as far as anybody knows: empty members are unknown."""

    kind: str = ""
    model: str = ""
    adapter: str | None = None
    address: str = ""
    path: str = ""
    sha256: str = ""
    """Of a script."""
    weights: str = ""
    weights_basis: str = ""
    """Of weights on attached servers: `declared` where nothing shows that they compute with them,
    `verified` where log-probs do. Empty for weights that soulkit loaded or served itself."""
    revision: str = ""
    """The commit of a model of the hub."""
    adapter_weights: str = ""
    adapter_revision: str = ""
    args: str = ""
    """The flags of its vLLM server."""
    trained: bool = False
    """Whether it is what the run trains."""
    sampling: Facts = field(default_factory=dict)

    def known(self) -> dict[str, Any]:
        """What is known of it, by name; its sampling among the rest."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "sampling"}
        return {name: value for name, value in own.items() if value not in ("", False)} | {
            **self.sampling
        }

    def same_as(self, other: PlayerFacts) -> bool:
        """Whether two players are one, as far as both records say. A script is what it holds and a
        checkpoint its weights where it lies, however its path was written."""
        a, b = self.known(), other.known()
        proven = any(name in a and name in b for name in ("sha256", "path"))
        shared = (a.keys() & b.keys()) - {"weights_basis"} - ({"model"} if proven else set())
        return all(_as_localhost(a[name]) == _as_localhost(b[name]) for name in shared)


def _as_localhost(value: Any) -> Any:
    """An address on this machine under one name; anything else as it is."""
    if not isinstance(value, str):
        return value
    return re.sub(r"^(https?://)(?:127\.0\.0\.1|\[::1\])(?=[:/]|$)", r"\1localhost", value)


Panel = Mapping[str, tuple[PlayerFacts, ...]]
"""Role → its players."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """With whom, on which rows and by which rules a task is played."""

    roles: tuple[str, ...] = SCORING
    """The roles that are asked beside the actor."""
    players: Panel = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    """Question → how many opinions the task asks for."""
    sampling: Facts = field(default_factory=dict)
    """Of the actor, as asked for."""
    sent: Facts = field(default_factory=dict)
    """Role → model → the sets of parameters that were sent, with their calls."""
    dropped_settings: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
    """Role → model → setting that its server refused → share of its calls; None until the end."""
    budgets: Mapping[str, int] = field(default_factory=dict)
    """Column → the words that it may hold."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Option → hash of its value."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Row → its hash, played or not; those of a training in their order."""
    origins: Mapping[str, int] = field(default_factory=dict)
    """Where rows are from → how many."""
    taken: int = 0
    """How often a training takes its rows, where it does not take each once."""
    prompts: str = ""
    """Hash of the prompts that a training makes of its rows."""
    dev_rows: Mapping[str, str] = field(default_factory=dict)
    dev_prompts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """A source of conversations."""

    rows: int | None
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterialFacts:
    """The models of a training, its conversations, and the machine of one that promises equal bits,
    as hashes."""

    model: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    """What the base's numbers were, and in which they are computed."""
    adapter: str | None = None
    teacher: Mapping[str, str] | None = None
    teacher_adapter: str | None = None
    teacher_adapters: Mapping[str, str | None] = field(default_factory=dict)
    machine: Facts | None = None
    corpora: Mapping[str, CorpusFacts] = field(default_factory=dict)
    validation: Mapping[str, CorpusFacts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What `conditions.json` holds."""

    players: Panel
    tasks: Mapping[str, TaskFacts]
    directory: str = ""
    actor: PlayerFacts = PlayerFacts()
    engine: Facts = field(default_factory=dict)
    teacher: PlayerFacts | None = None
    teachers: Mapping[str, PlayerFacts] = field(default_factory=dict)
    """Task → its own teacher."""
    panel: Facts = field(default_factory=dict)
    """How several opinions become one: `samples`, `combine`, `orders`."""
    servers: Mapping[str, Facts] = field(default_factory=dict)
    """`MODEL@ADDRESS` → engine, defaults and context, as far as they are known."""
    suite: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Task of the suite that is not trained on → why."""
    material: MaterialFacts | None = None

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What the run in `folder` recorded; None for one that has not begun. RunError or DataError
        for a damaged file, and for a run of an earlier version."""
        path = folder / CONDITIONS
        if path.is_file():
            return read_value(cls, read_object(path), f"'{path}'")
        if older := older_file(folder):
            raise RunError(
                f"'{folder}' was written by an earlier version of soulkit: it has {older} instead "
                f"of {CONDITIONS}.",
                "This version does not read the older file.",
                "Start the run again in another folder, or use the version that wrote it.",
            )
        return None

    def write(self, folder: Path) -> None:
        """Keep it in the run's folder."""
        write_json(folder / CONDITIONS, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without members that have their default."""
        made: dict[str, Any] = form_of(Conditions).dump_python(
            self, mode="json", exclude_defaults=True
        )
        return made

    def of_task(self, task: str) -> TaskFacts:
        """What is recorded of a task; nothing of one that is not there."""
        return self.tasks.get(task) or TaskFacts()


def older_file(folder: Path) -> str:
    """What the run in `folder` has instead of conditions, where an earlier version wrote it."""
    names = (name for name in OLDER if (folder / name).is_file())
    return "" if (folder / CONDITIONS).is_file() else next(names, "")


# -- in a summary ----------------------------------------------------------------------------------


def with_provenance(folder: Path, summary: Facts) -> dict[str, Any]:
    """A summary about to be written, with its schema, its provenance and the date of now."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = provenance_of(folder, summary)
    return {
        SCHEMA: SUMMARY_SCHEMA,
        **summary,
        "provenance": {**origin, "dates": {**origin["dates"], "finished": now}},
    }


def provenance_of(folder: Path, summary: Facts) -> dict[str, Any]:
    """How the numbers of the run in `folder` came about, as far as its files tell; RunError or
    DataError when one is damaged. What the summary holds was written with the numbers, and goes
    first."""
    written = summary.get("provenance")
    if isinstance(written, Mapping):
        return dict(written)
    settings = read_config(folder) if (folder / CONFIG).is_file() else {}
    noted = read_environment(folder) if (folder / ENVIRONMENT).is_file() else {}
    conditions = Conditions.read(folder) or Conditions(players={}, tasks={})
    known, material = conditions.as_dict(), conditions.material or MaterialFacts()
    base = {"weights": material.model.get("weights"), "adapter_weights": material.adapter}
    base = {name: digest for name, digest in base.items() if digest}
    origin: dict[str, Any] = {
        "command": str(noted.get("command", "")),
        "dates": {
            "started": noted.get("started"),
            "resumed": [start.get("started") for start in noted.get("resumed", [])],
        },
        "versions": {name: noted[name] for name in _VERSIONS if name in noted},
        **{name: settings[name] for name in SETTINGS if name in settings},
        "protocol": summary.get("protocol") or settings.get("protocol", ""),
        "prompts": summary.get("prompts", {}),
        "actor": {**{name: settings[name] for name in _ACTOR if settings.get(name) is not None},
                  **base, **known.get("actor", {})},
        **{name: known.get(name, {})
           for name in ("engine", "teacher", "players", "panel", "servers")},
        "tasks": _counted(known["tasks"], material),
        "batches": _batches(read_object(folder / BATCHES)),
    }  # fmt: skip
    return {name: value for name, value in origin.items() if value not in ("", {}, None, [])}


def _batches(book: Facts) -> list[dict[str, Any]]:
    """The batches in which replies came. How they travelled is no part of what is compared."""
    names = ("batch_id", "model", "base_url", "requests", "status")
    return [{name: one.get(name) for name in names} for one in book.get("batches", ())]


def _counted(tasks: Facts, material: MaterialFacts) -> dict[str, Any]:
    """The tasks with their rows as one number and one hash, and the conversations likewise."""
    counted: dict[str, Any] = {}
    for name, entry in tasks.items():
        rows = {kind: {"n": len(set(map(row_id, entry[kind]))), "sha256": rows_hash(entry[kind])}
                for kind in ("rows", "dev_rows") if kind in entry}  # fmt: skip
        counted[name] = {**entry, **rows}
    for kind, several in (("rows", material.corpora), ("dev_rows", material.validation)):
        for name, one in several.items():
            counted.setdefault(name, {})[kind] = {"n": one.rows, "sha256": one.sha256}
    return counted


def rows_hash(rows: Mapping[str, str]) -> str:
    """sha256 over the ids and contents of rows, in whatever order they were read."""
    text = json.dumps(sorted(rows.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
