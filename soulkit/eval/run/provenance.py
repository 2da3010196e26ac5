"""With what a run was measured, kept in its folder: what two runs must share to be compared.

    provenance.json   {"directory": "../..",         where it was started, seen from the folder
                       "actor":   {model, weights …}, what was measured
                       "engine":  {kind, version},    by what it was sampled
                       "players": {role: [player]},   everybody beside the actor, in whatever task
                       "panel":   {"samples", "combine", "orders"},
                       "servers": {"MODEL@ADDRESS": {"engine", "defaults", "context"}},
                       "tasks":   {task: {"roles": [...], "players": {role: [player]},
                                          "samples": {question: opinions}, "rows": {id: hash},
                                          "origins": {where from: rows},
                                          "sampling": {...},         of the actor, as asked for
                                          "sent": {role: {model: [{parameters, "calls"}]}},
                                          "dropped_settings": {role: {model: {setting: share}}},
                                          "budgets": {column: words}, "options": {name: hash}}}}

config.yaml says what was asked for, this file what it came to: the address behind a name, the
content of a script, the rows behind a path. It is written when a run starts, so that a run that was
cut short can be told from one of fewer rows. How the calls were sent (`sent`, `dropped_settings`,
`servers`) is added when the run ends. A training keeps its rows in `material.json`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from soulkit.data.rows import HUMAN, content_hash, row_id
from soulkit.errors import DataError, RunError
from soulkit.eval.results.calls import TaskCalls
from soulkit.models.api.addresses import OPENAI_URL
from soulkit.models.local.loading import adapter_folder, commit_of
from soulkit.models.local.weights import weights_hash
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players
from soulkit.models.players.settings import RoleSettings, basis_of, revision_of
from soulkit.play.plan import Work
from soulkit.runs.folder import Run, is_run, read_config
from soulkit.runs.jsonl import has_lines, read_object, write_json
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.made_rows import MADE
from soulkit.tasks.kit.spec import DRAFTED_BY
from soulkit.types import Example, Sampling

PROVENANCE = "provenance.json"
ENGINE = "engine"
"""In it: what sampled the actor, kind and version of vLLM; not there for an endpoint."""
BASIS = "weights_basis"
"""Beside the weights of a model on attached servers: `declared` where nothing shows that they
compute with them, `verified` where log-probs do. Not there for weights that soulkit loaded itself
or started a server with."""
PUBLISHED, MADE_HERE = "published", "made here"
"""Where rows are from, beside files of somebody's own."""
SAMPLING = tuple(
    one.name for one in fields(Sampling) if one.name not in ("seed", "stop", "form")
)  # fmt: skip
"""What of a Sampling is compared: the seed only keys the random streams."""
SCORING = ("judge", "auditor", "partner", "environment")
"""The roles that a score may depend on."""
CHANGING = {
    "sha256": "content", "address": "address", "weights": "weights", "revision": "revision",
    "max_tokens": "reply limit",
}  # fmt: skip
"""What of a player may change while its settings stay, and how it is called."""

JsonObject = dict[str, Any]


def provenance(
    config: RolesConfig, players: Players, work: Iterable[Work], actor: JsonObject,
    sampling: Mapping[str, Sampling],
) -> JsonObject:  # fmt: skip
    """The contents of `provenance.json`, without rows.

    `actor` is what a player of the kind `actor` is, `sampling` how the actor is sampled, by task.
    """
    return {
        "players": player_identities(config, actor, players),
        "panel": panel_facts(config),
        "tasks": {
            part.task.name: {
                "roles": sorted(part.episode_roles - {"actor"}),
                "players": player_identities(config, actor, players, part.task.name),
                "samples": dict(part.task.spec.samples),
                "sampling": sampling_facts(sampling[part.task.name]),
                "budgets": {n: c.max_words for n, c in part.task.spec.columns.items()
                            if c.max_words},
                "options": _task_options(part.task),
            }
            for part in work
        },
    }  # fmt: skip


def with_rows(record: JsonObject, work: Iterable[Work]) -> JsonObject:
    """`record` with the rows of every task: what is to be played, whether it was or not, and how
    many of these are published ones, made here, or of which file of somebody's own."""
    rows = {
        part.task.name: {
            "rows": {e.id: row_hash(e) for e in part.examples},
            "origins": dict(
                Counter({row_id(e.id): row_origin(part.task, e) for e in part.examples}.values())
            ),
        }
        for part in work
    }
    tasks = {name: {**entry, **rows[name]} for name, entry in record["tasks"].items()}
    return {**record, "tasks": tasks}


def panel_facts(config: RolesConfig) -> JsonObject:
    """How several opinions become one."""
    return {name: getattr(config.panel, name) for name in ("samples", "combine", "orders")}


def sampling_facts(sampling: Sampling) -> JsonObject:
    """The part of a Sampling that is compared."""
    return {name: value for name, value in sampling.identity().items() if name in SAMPLING}


# -- players ---------------------------------------------------------------------------------------


def player_identities(
    config: RolesConfig, actor: JsonObject, players: Players | None = None, task: str = ""
) -> dict[str, list[JsonObject]]:
    """Role → its players in `task`, or in any. No `auditor`: the judges audit, too.

    Without a `players` only what the settings say can be told of them.
    """
    table: dict[str, list[JsonObject]] = {role: [] for role in SCORING}
    samples = config.judge_samples or 1
    for role, settings in config.players_in(task) if task else config.players():
        if role in table and not (role == "auditor" and config.named(role, task) is None and task):
            table[role].append(player_identity(role, settings, samples, actor, players))
    return {role: several for role, several in table.items() if several or role != "auditor"}


def actor_identity(settings: Mapping[str, Any], model: Any = None) -> JsonObject:
    """What a player is that is the actor, from the settings of a run and the live actor."""
    who = {"model": settings.get("model"), "adapter": settings.get("adapter")}
    if "method" in settings:
        return {**who, "trained": True}
    if settings.get("kind") == "local":
        version = getattr(model, "policy_version", "")
        return {**who, **({"weights": version} if version else {}), **basis_of(model)}
    url = getattr(model, "base_url", None) or settings.get("base_url") or OPENAI_URL
    return {**who, "address": str(url).rstrip("/")}


def model_identity(settings: Mapping[str, Any], live: Any = None) -> JsonObject:
    """The model under test or in training: where a hub's stands, what tells a folder's weights.

    `live` is the loaded model (anything with a transformers model under `model`), None for a served
    one, of which only name and address can be told.
    """
    name, adapter = str(settings.get("model", "")), settings.get("adapter")
    who: JsonObject = {"model": name, **({"adapter": adapter} if adapter else {})}
    if settings.get("kind") == "api":
        return {**who, "address": actor_identity(settings, live)["address"]}
    folder = Path(name).expanduser()
    if folder.is_dir():
        who["weights"] = weights_hash(folder)
    version = getattr(live, "policy_version", "") if adapter else ""
    commit = commit_of(adapter_folder(str(adapter))) if live is not None and adapter else ""
    return {
        **who, **revision_of(live), **basis_of(live),
        **({"adapter_weights": version} if version else {}),
        **({"adapter_revision": commit} if commit else {}),
    }  # fmt: skip


def teacher_identity(settings: Mapping[str, Any], live: Any) -> JsonObject:
    """The second model of a training, as `model_identity` says it of the first; `live` is loaded,
    None for a training without one."""
    if live is None:
        return {}
    named = {
        "model": settings.get("teacher_model") or settings.get("model"),
        "adapter": settings.get("teacher_adapter"),
    }
    experts = dict(settings.get("teacher_adapters") or {})
    prints = {task: _teacher({**named, "adapter": adapter}, live)
              for task, adapter in experts.items()}  # fmt: skip
    by_task = {"teachers": prints} if prints else {}
    return {"teacher": _teacher(named, live), **by_task}


def _teacher(settings: Mapping[str, Any], live: Any) -> JsonObject:
    """A teacher holds several adapters at once, and tells the weights of none."""
    from soulkit.models.local.loading import adapter_hash

    adapter = settings.get("adapter")
    weights = {"adapter_weights": adapter_hash(adapter)} if adapter else {}
    return {**model_identity(settings, live), **weights}


def player_identity(
    role: str, settings: RoleSettings, samples: int, actor: JsonObject, players: Players | None
) -> JsonObject:
    """One player: who it is, and how it is sampled in its role."""
    kind = settings.player_kind
    live = partial(players.model, role, settings) if players else None
    who = {"kind": settings.kind, "model": settings.model, **kind.identity(settings, actor, live)}
    if not kind.is_sampled:
        return who
    return {**who, **sampling_facts(settings.sampling(role, None, samples))}


def same_player(a: JsonObject, b: JsonObject) -> bool:
    """Whether two players are one, as far as both records say. A script is what it holds and a
    checkpoint its weights where it lies, however its path was written."""
    proven = any(name in a and name in b for name in ("sha256", "path"))
    shared = (a.keys() & b.keys()) - {BASIS} - ({"model"} if proven else set())
    return all(
        _loopback_as_localhost(a[name]) == _loopback_as_localhost(b[name]) for name in shared
    )


def _loopback_as_localhost(value: Any) -> Any:
    """An address on this machine under one name; anything else as it is."""
    if not isinstance(value, str):
        return value
    return re.sub(r"^(https?://)(?:127\.0\.0\.1|\[::1\])(?=[:/]|$)", r"\1localhost", value)


def same_players(a: Sequence[JsonObject], b: Sequence[JsonObject]) -> bool:
    """Whether both are the same players, in whatever order they were named."""
    left = list(b)
    for player in a:
        twin = next((other for other in left if same_player(player, other)), None)
        if twin is None:
            return False
        left.remove(twin)
    return not left


# -- rows and tasks --------------------------------------------------------------------------------


def row_origin(task: Task, example: Example) -> str:
    """Where a row is from: `PUBLISHED` for one of a released evaluation file or an importer, else
    `MADE_HERE`, or the file that it was read from or made of."""
    if example.origin:
        return example.origin
    file = example.source.rpartition(":")[0]
    if file.startswith(MADE):
        return MADE_HERE
    named_by = str(example.fields.get("provenance") or "")
    imported = bool(task.spec.importer and named_by and example.fields.get("licence"))
    if file in task.spec.files.eval or (imported and DRAFTED_BY not in named_by):
        return PUBLISHED
    return file or "rows without a file"


def row_hash(example: Example) -> str:
    """What a row says to anybody who has a part in its score, beyond what names it.

    Bookkeeping that no seat sees, what only a coach reads and people's labels are left out.
    """
    content = {
        name: value
        for name, value in example.fields.items()
        if not name.startswith(HUMAN) and set(example.audience.get(name, ())) - {"coach"}
    }
    try:
        return content_hash(example.task, {"fields": content, "seats": dict(example.seats)})
    except DataError:  # a task may bind objects of its own, which have no canonical form
        return _hash([content, dict(example.seats)])


def _task_options(task: Task) -> dict[str, str]:
    """Option → hash of its value, the scale and, for a task that is no part of soulkit, its code.

    Hashes, since a tasks file may hold what should not be spread.
    """
    metric = task.spec.metric
    parts = {**task.spec.options, "metric": [metric.name, metric.low, metric.high]}
    hashes = {name: _hash(value) for name, value in parts.items()}
    kind = type(task)
    file = None if kind.__module__.startswith("soulkit.") else inspect.getsourcefile(kind)
    return {**hashes, **({"code": _file_hash(Path(file))} if file else {})}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _file_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


# -- in the run folder -----------------------------------------------------------------------------


def read_provenance(folder: Path) -> JsonObject:
    """What the run in `folder` recorded; empty for one that has not begun to play. RunError when
    the file is damaged."""
    record = read_object(folder / PROVENANCE)
    if (folder / PROVENANCE).is_file() and not all(
        isinstance(record.get(name), dict) for name in ("players", "tasks")
    ):
        raise RunError(
            f"'{folder / PROVENANCE}' is damaged: models and rows of the run are missing.",
            "The file was changed by hand or by another program.",
            "Restore it from where the run was copied, or start the run again with another --out.",
        )
    return record


def rescored_provenance(folder: Path, rows: Mapping[str, tuple[Task, Example]]) -> JsonObject:
    """What the run in `folder` recorded, with rows and scorers as they are now. `rows` are the
    examples by their ids. RunError for a run without a record."""
    record = read_provenance(folder)
    if not record:
        raise RunError(
            f"'{folder}' does not record its conditions: there is no {PROVENANCE} in it.",
            "It never began to play, or another version of soulkit wrote it.",
            "Evaluate again, or rescore with the version that wrote it.",
        )
    now = {task.name: _task_options(task) for task, _ in rows.values()}
    for name, entry in record["tasks"].items():
        hashes = {i: row_hash(rows[i][1]) if i in rows else old for i, old in
                  entry.get("rows", {}).items()}  # fmt: skip
        entry |= {"rows": hashes} if hashes else {}
        entry["options"] = now.get(name, entry.get("options", {}))
    return record


def write_provenance(run: Run, now: JsonObject, *, proven: bool = False) -> None:
    """Write `now`; RunError when the run was begun with other scripts, addresses, limits, rows
    or scorers. `proven`: whatever was sampled so far came from the weights that are recorded."""
    before = read_provenance(run.path)
    for what in _changes(before, now) if before else ():
        raise RunError(
            f"{run.path} was started with {what}.",
            "What is already in the folder was made with the old one, and a mean would mix them.",
            "Bring the old one back to resume, or give another folder with --out. A scorer that "
            "was mended is applied to what is there by: soul rescore",
        )
    if before and not proven and has_lines(run.episodes):
        now = _weaker(before, now)
    write_json(run.path / PROVENANCE, {**_with_calls_of(before, now), **_directory(run.path)})


CALLS = ("sent", "dropped_settings")
"""What is known of a task's calls when they have been made."""


def _with_calls_of(before: JsonObject, now: JsonObject) -> JsonObject:
    """`now` with what is known of the calls that the run has made already."""
    old = before.get("tasks", {})
    tasks = {
        task: {**{name: old[task][name] for name in CALLS if name in old.get(task, {})}, **entry}
        for task, entry in now["tasks"].items()
    }
    servers = {"servers": before["servers"]} if "servers" in before else {}
    return {**servers, **now, "tasks": tasks}


def note_calls(
    folder: Path, calls: TaskCalls, dropped: Mapping[str, Mapping[str, Any]],
    models: Iterable[Any] = (),
) -> None:  # fmt: skip
    """Add to the record of the run in `folder` how its calls were sent, which settings were
    `dropped` (task → role → model → setting → share) and what the servers of `models` (live ones,
    endpoints among them) are known to be. Does nothing for a run without a record."""
    record = read_provenance(folder)
    if not record:
        return
    for task, entry in record["tasks"].items():
        roles = calls.get(task, {})
        sent = {role: {model: one["sent"] for model, one in of_role.items()}
                for role, of_role in roles.items()}  # fmt: skip
        nothing: JsonObject = {role: {} for role in roles}
        entry["sent"] = {**entry.get("sent", {}), **sent}
        known = entry.get("dropped_settings", {})
        entry["dropped_settings"] = {**known, **nothing, **dropped.get(task, {})}
    servers = {f"{one.name}@{one.base_url}": one.server.as_dict()
               for one in models if getattr(one, "server", None) is not None}  # fmt: skip
    if servers:
        record["servers"] = {**record.get("servers", {}), **servers}
    write_json(folder / PROVENANCE, record)


def _weaker(before: Any, now: Any) -> Any:
    """`now` with the weaker basis of both records: a part of the episodes was sampled on the old
    one."""
    if isinstance(now, list):
        olds = before if isinstance(before, list) else []
        return [_weaker(old, new) for old, new in zip_longest(olds[: len(now)], now)]
    if not isinstance(now, Mapping):
        return now
    old = before if isinstance(before, Mapping) else {}
    merged = {name: _weaker(old.get(name), value) for name, value in now.items()}
    if bases := {one[BASIS] for one in (old, now) if BASIS in one}:
        merged[BASIS] = "declared" if "declared" in bases else "verified"
    return merged


def _directory(folder: Path) -> JsonObject:
    """The working folder as seen from the run: relative paths of its settings begin there."""
    try:
        return {"directory": os.path.relpath(Path.cwd(), folder.resolve())}
    except ValueError:  # on another drive
        return {}


def start_folder(folder: Path) -> Path | None:
    """Where the run in `folder` was started; None where that folder is gone, or on another drive.

    RunError when its record is damaged.
    """
    directory = read_provenance(folder).get("directory")
    place = folder.resolve() / str(directory) if directory else None
    return place.resolve() if place is not None and place.is_dir() else None


@contextmanager
def in_start_folder(path: Path) -> Iterator[None]:
    """Work where the run in `path` was started, as its relative paths mean it; stay here where the
    run was moved away from its files."""
    place = start_folder(path)
    with chdir(place) if place is not None and _has_files(place, path) else nullcontext():
        yield


def _has_files(place: Path, run: Path) -> bool:
    """Whether the files that a run names by relative paths lie in `place`, as far as it names any
    of rows and tasks."""
    settings = read_config(run) if is_run(run) else {}
    data = settings.get("data")
    named = [settings.get("tasks_file"), *(data.values() if isinstance(data, dict) else ())]
    files = [Path(str(name)) for name in named if name and not str(name).startswith("synth:")]
    relative = [file for file in files if not file.is_absolute()]
    return not relative or any((place / file).exists() for file in relative)


def _changes(before: JsonObject, now: JsonObject) -> list[str]:
    """What cannot be seen in the settings and is not as it was."""
    changes = _other_players(before["players"], now["players"])
    for task, entry in now["tasks"].items():
        if (old := before["tasks"].get(task)) is None:
            continue
        changes += _other_players(old.get("players", {}), entry.get("players", {}))
        old_rows, rows = old.get("rows", {}), entry.get("rows", {})
        changed = [i for i, digest in rows.items() if old_rows.get(i, digest) != digest]
        changes += [f"other content in {len(changed)} rows of {task}"] if changed else []
        limits = [one.get("sampling", {}).get("max_tokens") for one in (old, entry)]
        changes += [f"another reply limit of the actor in {task}"] if limits[0] != limits[1] else []
        old_options, options = old.get("options", {}), entry.get("options", {})
        changes += [
            f"another {name} of the task {task}"
            for name in sorted({*old_options, *options})
            if old_options.get(name) != options.get(name)
        ]
    return list(dict.fromkeys(changes))


def _other_players(before: JsonObject, now: JsonObject) -> list[str]:
    """What is not as it was of players with the same settings."""
    return [
        f"another {word} of the {role} '{old['model']}'"
        for role, players in now.items()
        for old, new in zip(before.get(role, ()), players, strict=False)
        for name, word in CHANGING.items()
        if name in old and name in new and old[name] != new[name]
    ]
