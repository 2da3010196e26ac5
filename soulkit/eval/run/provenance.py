"""Contents of conditions.json: the players, rows and scoring rules of a run.

It is written when a run starts, so that an interrupted run can be told from a run with fewer rows.
The parameters of calls (`sent`, `dropped_settings`, `servers`) are added when the run ends.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from soulkit.data.rows import HUMAN, content_hash, row_id
from soulkit.errors import DataError, RunError
from soulkit.eval.results.warnings import TaskCalls
from soulkit.models.api.addresses import OPENAI_URL
from soulkit.models.local.loading import adapter_folder, adapter_hash
from soulkit.models.local.weights import commit_of, weights_hash
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players
from soulkit.models.players.settings import RoleSettings, basis_of, revision_of
from soulkit.play.plan import Work
from soulkit.runs.conditions import (
    CONDITIONS,
    SCORING,
    Conditions,
    Panel,
    PlayerFacts,
    TaskFacts,
)
from soulkit.runs.folder import Run, is_run, read_config
from soulkit.runs.jsonl import has_lines
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.made_rows import MADE
from soulkit.tasks.kit.spec import DRAFTED_BY
from soulkit.types import Example, Sampling

PUBLISHED, MADE_HERE = "published", "made here"
"""Origins of rows that do not come from a user's own file."""
SAMPLING = tuple(
    one.name for one in fields(Sampling) if one.name not in ("seed", "stop", "form")
)  # fmt: skip
"""The compared fields of a Sampling; the seed only selects the random streams."""
CHANGING = {
    "sha256": "different content", "address": "a different address",
    "weights": "different weights", "revision": "a different revision",
    "max_tokens": "a different reply limit",
}  # fmt: skip
"""Facts of a player that can change although its settings stay the same → their names in errors."""
PLAYED = ("dialogue", "options", "orders")
"""Keys of a task without code that change its episodes, besides prompts."""


def played_conditions(
    config: RolesConfig, players: Players, work: Iterable[Work], actor: PlayerFacts,
    sampling: Mapping[str, Sampling],
) -> Conditions:  # fmt: skip
    """The conditions of a run with its players, without rows.

    `actor` describes players of the kind `actor`; `sampling` is the actor's sampling by task.
    """
    tasks = {
        part.task.name: TaskFacts(
            roles=tuple(sorted(part.episode_roles - {"actor"})),
            players=player_facts(config, actor, players, part.task.name),
            samples=dict(part.task.spec.samples),
            sampling=sampling_facts(sampling[part.task.name]),
            budgets={n: c.max_words for n, c in part.task.spec.columns.items() if c.max_words},
            options=_task_options(part.task),
        )
        for part in work
    }
    return Conditions(
        players=player_facts(config, actor, players), tasks=tasks, panel=panel_facts(config)
    )


def with_rows(conditions: Conditions, work: Iterable[Work]) -> Conditions:
    """`conditions` with all rows to play of every task, and their number by origin (published, made
    here, or a user's own file)."""
    tasks = dict(conditions.tasks)
    for part in work:
        origins = {row_id(e.id): row_origin(part.task, e) for e in part.examples}
        people = {str(e.fields.get(part.task.spec.person) or "") for e in part.examples} - {""}
        tasks[part.task.name] = replace(
            tasks[part.task.name],
            rows=row_hashes(part.examples),
            origins=dict(Counter(origins.values())),
            people=len(people),
        )
    return replace(conditions, tasks=tasks)


def panel_facts(config: RolesConfig) -> dict[str, Any]:
    """How several opinions are combined."""
    return {name: getattr(config.panel, name) for name in ("samples", "combine", "orders")}


def sampling_facts(sampling: Sampling) -> dict[str, Any]:
    """The compared fields of a Sampling."""
    return {name: value for name, value in sampling.identity().items() if name in SAMPLING}


# -- players ---------------------------------------------------------------------------------------


def player_facts(
    config: RolesConfig, actor: PlayerFacts, players: Players | None = None, task: str = ""
) -> Panel:
    """Role → its players in `task`, or by default those for all tasks. Without `auditor` the judges
    also audit.

    Without `players`, the facts come from the settings alone.
    """
    table: dict[str, tuple[PlayerFacts, ...]] = dict.fromkeys(SCORING, ())
    samples = config.judge_samples or 1
    for role, settings in config.players_in(task) if task else config.players():
        if role in table and not (role == "auditor" and config.named(role, task) is None and task):
            table[role] += (player_of(role, settings, samples, actor, players),)
    return {role: several for role, several in table.items() if several or role != "auditor"}


def actor_facts(settings: Mapping[str, Any], model: Any = None) -> PlayerFacts:
    """Facts about the actor, from the settings of a run and the live model."""
    who = PlayerFacts(model=str(settings.get("model") or ""), adapter=settings.get("adapter"))
    if "method" in settings:
        return replace(who, trained=True)
    if settings.get("kind") == "local":
        return replace(who, weights=getattr(model, "policy_version", ""), **basis_of(model))
    if (kind := settings.get("actor_kind", "endpoint")) != "endpoint":
        player = RoleSettings(kind=kind, model=who.model)
        live = None if model is None else lambda: model
        return replace(who, kind=kind, **player.player_kind.identity(player, {}, live))
    url = getattr(model, "base_url", None) or settings.get("base_url") or OPENAI_URL
    return replace(who, address=str(url).rstrip("/"))


def model_facts(settings: Mapping[str, Any], live: Any = None) -> PlayerFacts:
    """Facts about the model under test or in training: Hub commit, or hash of a folder's weights.

    `live` is the loaded model (anything with a transformers model under `model`). For an API model
    it is None, and only name and address are known.
    """
    name, adapter = str(settings.get("model", "")), settings.get("adapter")
    who = PlayerFacts(model=name, adapter=adapter or None)
    if settings.get("kind") == "api":
        return actor_facts(settings, live)
    folder = Path(name).expanduser()
    if folder.is_dir():
        who = replace(who, weights=weights_hash(folder))
    if adapter:
        commit = commit_of(adapter_folder(str(adapter))) if live is not None else None
        version = getattr(live, "policy_version", "")
        who = replace(who, adapter_weights=version, adapter_revision=commit or "")
    return replace(who, **revision_of(live), **basis_of(live))


def with_teachers(conditions: Conditions, settings: Mapping[str, Any], live: Any) -> Conditions:
    """`conditions` with the `model_facts` of a training run's teacher. `live` is the loaded
    teacher, None if there is none."""
    if live is None:
        return conditions
    model = settings.get("teacher_model") or settings.get("model")
    adapters = dict(settings.get("teacher_adapters") or {})

    def teacher(adapter: str | None) -> PlayerFacts:
        """Facts of one teacher; a model with several adapters reports no adapter weights."""
        weights = adapter_hash(adapter) if adapter else ""
        who = model_facts({"model": model, "adapter": adapter}, live)
        return replace(who, adapter_weights=weights)

    return replace(
        conditions,
        teacher=teacher(settings.get("teacher_adapter")),
        teachers={task: teacher(adapter) for task, adapter in adapters.items()},
    )


def player_of(
    role: str, settings: RoleSettings, samples: int, actor: PlayerFacts, players: Players | None
) -> PlayerFacts:
    """Facts about one player: its identity, and its sampling in its role."""
    kind = settings.player_kind
    live = partial(players.model, role, settings) if players else None
    who = {"model": settings.model, **kind.identity(settings, actor.known(), live)}
    sampling = settings.sampling(role, None, samples) if kind.is_sampled else None
    return PlayerFacts(
        kind=settings.kind, **who, sampling=sampling_facts(sampling) if sampling else {}
    )


def same_players(a: Sequence[PlayerFacts], b: Sequence[PlayerFacts]) -> bool:
    """Whether both are the same players, in any order."""
    left = list(b)
    for player in a:
        twin = next((other for other in left if player.same_as(other)), None)
        if twin is None:
            return False
        left.remove(twin)
    return not left


# -- rows and tasks --------------------------------------------------------------------------------


def row_origin(task: Task, example: Example) -> str:
    """The origin of a row: `PUBLISHED` for released evaluation files and importers, `MADE_HERE` for
    generated rows, else the file it was read or made from."""
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
    """Hash of the parts of a row that can affect its score.

    Fields that no seat sees, fields for the coach only and people's labels are left out.
    """
    content = {
        name: value
        for name, value in example.fields.items()
        if not name.startswith(HUMAN) and set(example.audience.get(name, ())) - {"coach"}
    }
    try:
        return content_hash(example.task, {"fields": content, "seats": dict(example.seats)})
    except DataError:  # a task may add objects that have no canonical form
        return _hash([content, dict(example.seats)])


def row_hashes(examples: Iterable[Example]) -> dict[str, str]:
    """Row → its hash, in the order of `examples`."""
    return {example.id: row_hash(example) for example in examples}


def _task_options(task: Task) -> dict[str, str]:
    """Option → hash of its value; also hashes of the scale, of the user's own code, and of the
    prompts of a task without code (`prompt 'NAME'`).

    Values are hashed because a tasks file may contain private data.
    """
    metric, declaration = task.spec.metric, task.spec.declaration
    parts = {**task.spec.options, "metric": [metric.name, metric.low, metric.high]}
    parts |= declaration.scoring if declaration is not None else {}
    hashes = {name: _hash(value) for name, value in parts.items()}
    if declaration is not None:
        texts = task.prompts.hashes(*task.templates)
        hashes |= {f"prompt '{name}'": digest for name, digest in texts.items()}
    kind = type(task)
    file = None if kind.__module__.startswith("soulkit.") else inspect.getsourcefile(kind)
    files = [*([Path(file)] if file else []), *task.code_files]
    code = b"".join(one.read_bytes() for one in files)
    return {**hashes, **({"code": hashlib.sha256(code).hexdigest()[:16]} if files else {})}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- in the run folder -----------------------------------------------------------------------------


def rescored_conditions(
    folder: Path, rows: Mapping[str, tuple[Task, Example]], scorer: Mapping[str, str] | None = None
) -> Conditions:
    """The conditions of the run in `folder`, with current rows and scorers. `rows` are the examples
    by id, `scorer` the hash of a scorer for all tasks. RunError for a run without conditions, and
    for tasks that would play their rows in another way."""
    conditions = Conditions.read(folder)
    if conditions is None:
        raise RunError(
            f"'{folder}' has no {CONDITIONS}, the record of its conditions.",
            "The run stopped before it played any episode.",
            "Evaluate again.",
        )
    by_user = dict.fromkeys(("scorer",) if scorer else (), ", ".join((scorer or {}).values()))
    now = {task.name: {**_task_options(task), **by_user} for task, _ in rows.values()}
    for name, options in now.items():
        old = conditions.of_task(name).options
        played = [
            key
            for key in sorted({*old, *options})
            if old.get(key) != options.get(key)
            and (key in PLAYED or key.startswith("prompt '"))
            and key != "prompt 'judge'"
        ]
        if played:
            raise RunError(
                f"The episodes of '{folder}' were played with a different {played[0]} of the task "
                f"'{name}'.",
                "Rescoring can change the scorer and the judge, not what the models read.",
                "Undo this change in the tasks file, or evaluate again.",
            )
    tasks = {
        name: replace(
            facts,
            rows={i: row_hash(rows[i][1]) if i in rows else old for i, old in facts.rows.items()},
            options=now.get(name, facts.options),
        )
        for name, facts in conditions.tasks.items()
    }
    return replace(conditions, tasks=tasks)


def write_conditions(run: Run, now: Conditions, *, proven: bool = False) -> None:
    """Write `now`. RunError if the run was started with different scripts, addresses, limits, rows
    or scorers, or has episodes but no conditions. `proven`: all samples so far are known to come
    from the recorded weights."""
    before = Conditions.read(run.path)
    if before is None and has_lines(run.episodes):
        raise RunError(
            f"{run.path} contains episodes but no {CONDITIONS}.",
            "Without it soul cannot check that the players and rows are still the same.",
            "Restore the file, or choose another folder with --out.",
        )
    for what in _changes(before, now) if before else ():
        raise RunError(
            f"{run.path} was started with {what}.",
            "A mean over old and new episodes would mix both.",
            "Undo the change to resume, or choose another folder with --out. To apply a changed "
            "scorer to the recorded episodes, use soul rescore.",
        )
    if before and not proven and has_lines(run.episodes):
        now = _with_weaker_basis(before, now)
    if before:
        now = _with_calls_of(before, now)
    replace(now, directory=_directory(run.path)).write(run.path)


def _with_calls_of(before: Conditions, now: Conditions) -> Conditions:
    tasks = {
        task: replace(
            facts,
            sent=facts.sent or before.of_task(task).sent,
            dropped_settings=before.of_task(task).dropped_settings
            if facts.dropped_settings is None
            else facts.dropped_settings,
        )
        for task, facts in now.tasks.items()
    }
    return replace(now, servers=now.servers or before.servers, tasks=tasks)


def note_calls(
    folder: Path, calls: TaskCalls, dropped: Mapping[str, Mapping[str, Any]],
    models: Iterable[Any] = (),
) -> None:  # fmt: skip
    """Add to the conditions of the run in `folder` the sent parameters of its calls, the `dropped`
    settings (task → role → model → setting → share) and the known facts about the servers of the
    live `models`. Does nothing for a run without conditions."""
    conditions = Conditions.read(folder)
    if conditions is None:
        return
    tasks = dict(conditions.tasks)
    for task, facts in conditions.tasks.items():
        roles = calls.get(task, {})
        sent = {role: {model: one["sent"] for model, one in of_role.items()}
                for role, of_role in roles.items()}  # fmt: skip
        refused = {**(facts.dropped_settings or {}), **{role: {} for role in roles},
                   **dropped.get(task, {})}  # fmt: skip
        tasks[task] = replace(facts, sent={**facts.sent, **sent}, dropped_settings=refused)
    servers = {f"{one.name}@{one.base_url}": one.server.as_dict()
               for one in models if getattr(one, "server", None) is not None}  # fmt: skip
    replace(conditions, tasks=tasks, servers={**conditions.servers, **servers}).write(folder)


def _with_weaker_basis(before: Conditions, now: Conditions) -> Conditions:
    """`now` with the weaker weights basis of both, because some episodes were sampled on the old
    one."""
    tasks = {
        name: replace(facts, players=_weaker(before.of_task(name).players, facts.players))
        for name, facts in now.tasks.items()
    }
    actor = _weaker_of_two(before.actor, now.actor)
    return replace(now, actor=actor, players=_weaker(before.players, now.players), tasks=tasks)


def _weaker(before: Panel, now: Panel) -> Panel:
    return {
        role: tuple(
            _weaker_of_two(old, new)
            for old, new in zip_longest(
                before.get(role, ())[: len(several)], several, fillvalue=PlayerFacts()
            )
        )
        for role, several in now.items()
    }


def _weaker_of_two(old: PlayerFacts, new: PlayerFacts) -> PlayerFacts:
    bases = {old.weights_basis, new.weights_basis} - {""}
    return replace(new, weights_basis="declared" if "declared" in bases else "".join(bases))


def _directory(folder: Path) -> str:
    """The working folder relative to the run folder; relative paths in settings start there."""
    try:
        return os.path.relpath(Path.cwd(), folder.resolve())
    except ValueError:  # on another drive
        return ""


def start_folder(folder: Path) -> Path | None:
    """The folder where the run in `folder` was started; None if it is gone or on another drive.

    RunError if the conditions are damaged.
    """
    conditions = Conditions.read(folder)
    place = folder.resolve() / conditions.directory if conditions and conditions.directory else None
    return place.resolve() if place is not None and place.is_dir() else None


@contextmanager
def in_start_folder(path: Path) -> Iterator[None]:
    """Context that changes to the folder where the run in `path` was started, so that its relative
    paths work. Stays here if the run was moved away from its files."""
    place = start_folder(path)
    with chdir(place) if place is not None and _has_files(place, path) else nullcontext():
        yield


def _has_files(place: Path, run: Path) -> bool:
    """Whether any file that the run names by a relative path (rows, tasks) exists in `place`, or
    whether it names none."""
    settings = read_config(run) if is_run(run) else {}
    data = settings.get("data")
    named = [settings.get("tasks_file"), *(data.values() if isinstance(data, dict) else ())]
    files = [Path(str(name)) for name in named if name and not str(name).startswith("synth:")]
    relative = [file for file in files if not file.is_absolute()]
    return not relative or any((place / file).exists() for file in relative)


def _changes(before: Conditions, now: Conditions) -> list[str]:
    """Changes since the start of the run that its settings do not show."""
    changes = _other_players(before.players, now.players)
    for task, new in now.tasks.items():
        old = before.of_task(task)
        if not old.options:  # a training run records its rows before its players
            continue
        changes += _other_players(old.players, new.players)
        changed = [i for i, digest in new.rows.items() if old.rows.get(i, digest) != digest]
        changes += [f"different content in {len(changed)} rows of {task}"] if changed else []
        limits = [one.sampling.get("max_tokens") for one in (old, new)]
        changes += (
            [f"a different reply limit for the actor in {task}"] if limits[0] != limits[1] else []
        )
        changes += [
            f"a different {name if name.startswith('prompt ') else repr(name)} for the task {task}"
            for name in sorted({*old.options, *new.options})
            if old.options.get(name) != new.options.get(name)
        ]
    return list(dict.fromkeys(changes))


def _other_players(before: Panel, now: Panel) -> list[str]:
    pairs = [
        (role, old.model, old.known(), new.known())
        for role, players in now.items()
        for old, new in zip(before.get(role, ()), players, strict=False)
    ]
    return [
        f"{word} for the {role} '{model}'"
        for role, model, old, new in pairs
        for name, word in CHANGING.items()
        if name in old and name in new and old[name] != new[name]
    ]
