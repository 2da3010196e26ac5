"""The conditions under which a run is measured or trained, written when it starts.

    conditions.json   {"directory": "../..",            start folder, relative to the run folder
                       "actor":   {model, weights …},   the measured or trained model
                       "engine":  {kind, version},      its sampling engine; not for API models
                       "players": {role: [player]},     players other than the actor, in all tasks
                       "tasks":   {task: {"rows": {id: hash}, "players": …, "sampling": …}},
                       "material": {model, machine …}}  training only: must be equal on resume

config.yaml contains the settings; this file contains what they resolve to: the address behind a
name, the rows behind a path. `summary.json` repeats it with the number and one hash of the rows.
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
from soulkit.runs.jsonl import (
    SCHEMA,
    SUMMARY_SCHEMA,
    damaged,
    form_of,
    read_object,
    read_value,
    write_json,
)
from soulkit.types import row_id

CONDITIONS, BATCHES = "conditions.json", "batches.json"
OLDER = ("provenance.json", "material.json")
"""Files that earlier versions wrote instead."""
SCORING = ("judge", "auditor", "partner", "environment")
"""The roles that can affect a score."""
SETTINGS = ("seed", "repeats", "steps")
"""Settings that are copied into the provenance."""
_VERSIONS = ("soulkit", "python", "commit", "packages")
_PARTS = ("engine", "teacher", "players", "panel", "servers")
_ACTOR = ("kind", "model", "adapter", "base_url")

Facts = Mapping[str, Any]
"""Plain JSON values by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerFacts:
    """The identity of a model; empty fields are unknown."""

    kind: str = ""
    model: str = ""
    adapter: str | None = None
    address: str = ""
    path: str = ""
    sha256: str = ""
    """Hash of a script."""
    weights: str = ""
    weights_basis: str = ""
    """For attached servers: `declared` if the weights were not checked, `verified` if they were
    checked by log-probs. Empty for weights that soulkit loaded or served itself."""
    revision: str = ""
    """Commit of a Hub model."""
    adapter_weights: str = ""
    adapter_revision: str = ""
    args: str = ""
    """Flags of its vLLM server."""
    trained: bool = False
    """Whether the run trains this model."""
    system_prompt: str = ""
    """Name and hash of the actor's own system prompt."""
    sampling: Facts = field(default_factory=dict)

    def known(self) -> dict[str, Any]:
        """The known fields by name, including those of its sampling."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "sampling"}
        return {name: value for name, value in own.items() if value not in ("", False)} | {
            **self.sampling
        }

    def same_as(self, other: PlayerFacts) -> bool:
        """Whether two players are equal in all fields known to both. Scripts are compared by
        content, and checkpoints by resolved path and weights, not by the name as written."""
        a, b = self.known(), other.known()
        proven = any(name in a and name in b for name in ("sha256", "path"))
        shared = (a.keys() & b.keys()) - {"weights_basis"} - ({"model"} if proven else set())
        return all(_as_localhost(a[name]) == _as_localhost(b[name]) for name in shared)


def _as_localhost(value: Any) -> Any:
    """A loopback address with the host `localhost`; any other value unchanged."""
    if not isinstance(value, str):
        return value
    return re.sub(r"^(https?://)(?:127\.0\.0\.1|\[::1\])(?=[:/]|$)", r"\1localhost", value)


Panel = Mapping[str, tuple[PlayerFacts, ...]]
"""Role → its players."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFacts:
    """The players, rows and scoring rules of a task."""

    roles: tuple[str, ...] = SCORING
    """The roles that are asked, other than the actor."""
    players: Panel = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    """Question → number of opinions that the task asks for."""
    sampling: Facts = field(default_factory=dict)
    """Requested sampling of the actor."""
    sent: Facts = field(default_factory=dict)
    """Role → model → the sets of sent parameters, with their numbers of calls."""
    dropped_settings: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
    """Role → model → setting that its server rejected → share of calls; None until the run ends."""
    budgets: Mapping[str, int] = field(default_factory=dict)
    """Column → its word budget."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Option → hash of its value."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Row → its hash, including unplayed rows; for training in order."""
    origins: Mapping[str, int] = field(default_factory=dict)
    """Origin of rows → their number; in training, of the dev rows."""
    people: int = 0
    """Number of people whom the rows name."""
    taken: int = 0
    """Number of uses of rows in training, if it differs from the number of rows."""
    prompts: str = ""
    """Hash of the prompts that a training run makes from its rows."""
    dev_rows: Mapping[str, str] = field(default_factory=dict)
    dev_prompts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """A source of conversations for training."""

    rows: int | None
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterialFacts:
    """Hashes of the models and conversations of a training run, and of the machine if the run is
    deterministic."""

    model: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    """Number formats: of the base checkpoint, and of the computation."""
    adapter: str | None = None
    teacher: Mapping[str, str] | None = None
    teacher_adapter: str | None = None
    teacher_adapters: Mapping[str, str | None] = field(default_factory=dict)
    machine: Facts | None = None
    corpora: Mapping[str, CorpusFacts] = field(default_factory=dict)
    validation: Mapping[str, CorpusFacts] = field(default_factory=dict)
    canaries: Mapping[str, CorpusFacts] = field(default_factory=dict)
    """File with a list of the made secrets in the conversations → their number and its hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The contents of `conditions.json`."""

    players: Panel
    tasks: Mapping[str, TaskFacts]
    directory: str = ""
    actor: PlayerFacts = PlayerFacts()
    engine: Facts = field(default_factory=dict)
    teacher: PlayerFacts | None = None
    teachers: Mapping[str, PlayerFacts] = field(default_factory=dict)
    """Task → its own teacher."""
    panel: Facts = field(default_factory=dict)
    """How several opinions are combined: `samples`, `combine`, `orders`."""
    servers: Mapping[str, Facts] = field(default_factory=dict)
    """`MODEL@ADDRESS` → engine, defaults and context, if known."""
    suite: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Task of the suite that is not used for training → why."""
    material: MaterialFacts | None = None

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read the conditions of the run in `folder`; None if it has not started. RunError or
        DataError for a damaged file, and for a run of an earlier version."""
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
        """Write the conditions to the run folder."""
        write_json(folder / CONDITIONS, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without fields that have their default."""
        made: dict[str, Any] = form_of(Conditions).dump_python(
            self, mode="json", exclude_defaults=True
        )
        return made

    def of_task(self, task: str) -> TaskFacts:
        """The facts of a task; empty if it is not recorded."""
        return self.tasks.get(task) or TaskFacts()


def older_file(folder: Path) -> str:
    """The file that an earlier version wrote instead of conditions.json; empty if there is none."""
    names = (name for name in OLDER if (folder / name).is_file())
    return "" if (folder / CONDITIONS).is_file() else next(names, "")


# -- in a summary ----------------------------------------------------------------------------------


def with_provenance(folder: Path, summary: Facts) -> dict[str, Any]:
    """A summary with its schema, provenance and the current time, ready to be written."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = provenance_of(folder, summary)
    return {
        SCHEMA: SUMMARY_SCHEMA,
        **summary,
        "provenance": {**origin, "dates": {**origin["dates"], "finished": now}},
    }


def prompt_in(provenance: Facts) -> str:
    """Name and hash of the model's own system prompt; empty without one."""
    return str(provenance.get("actor", {}).get("system_prompt", ""))


def provenance_of(folder: Path, summary: Facts) -> dict[str, Any]:
    """The provenance of the run in `folder`: the one in the summary if there is one, else from the
    run's files. RunError or DataError if a file is damaged."""
    written = summary.get("provenance")
    if isinstance(written, Mapping):
        for name in ("dates", "versions", "prompts", "tasks", *_PARTS):
            if not isinstance(written.get(name, {}), Mapping):
                raise damaged(f"The provenance of '{folder}' has no object as '{name}'.")
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
        **{name: known.get(name, {}) for name in _PARTS},
        "tasks": _counted(known["tasks"], material),
        "batches": _batches(read_object(folder / BATCHES)),
    }  # fmt: skip
    return {name: value for name, value in origin.items() if value not in ("", {}, None, [])}


def _batches(book: Facts) -> list[dict[str, Any]]:
    """The batches that delivered replies."""
    names = ("batch_id", "model", "base_url", "requests", "status")
    return [{name: one.get(name) for name in names} for one in book.get("batches", ())]


def _counted(tasks: Facts, material: MaterialFacts) -> dict[str, Any]:
    """The tasks, with rows and conversations replaced by their number and one hash."""
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
    """sha256 over the ids and hashes of rows, independent of their order."""
    text = json.dumps(sorted(rows.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
