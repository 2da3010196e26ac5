"""Rows and players that the command does not name, taken from each expert's own training run.

    no --data        the rows that the expert was trained on: config.yaml of its run says where they
                     come from, material.json holds their hash
    no --held-out    the dev rows of that run, else whole clusters of the training rows
    no player        the one that the expert was trained with

Held-out rows are never learned by the generalist. What was chosen is printed, noted in
OUT/rows.json and repeated in the report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from soulkit.data.rows import first_rows, share_of
from soulkit.distill.config import DistillConfig
from soulkit.distill.experts import WEIGHTS, Expert, ExpertRows
from soulkit.distill.sample import sample_config
from soulkit.errors import DataError, RunError, UserError
from soulkit.eval.config import load_work
from soulkit.models.players.settings import TaskPlayers
from soulkit.play.default_players import DECLARED_ROLES
from soulkit.play.plan import Work
from soulkit.play.settings import OWN_OPTIONS, chosen_rows
from soulkit.runs.folder import CONFIG, is_run, read_environment
from soulkit.runs.jsonl import write_json
from soulkit.runs.provenance import MATERIAL
from soulkit.tasks.kit.loading import NoRows
from soulkit.tasks.kit.made_rows import MADE
from soulkit.tasks.kit.registry import load_registry
from soulkit.text import counted
from soulkit.train.config import TrainConfig
from soulkit.train.setup.data import recorded_training_data
from soulkit.trust import refuse_foreign, run_settings
from soulkit.types import Example

ROWS = "rows.json"
HELD_OUT_SHARE = 0.2
"""Share of the clusters that is set aside, where no rows are named to measure on."""
LEAST_HELD_OUT = 2
"""Clusters that are set aside at least, but never more than half of them: one cluster has no
interval."""
SHOWN = 3
"""Clusters that a line names; rows.json names all."""
_ROW_SETTINGS = (
    "limit", "where", "example", "seed", "protocol", "option", "rows_per_task", "dev_share",
    "dev_limit", "dev_by", *OWN_OPTIONS,
)  # fmt: skip
"""Settings of a training that decide which rows it draws, beside their source."""


def with_rows_and_players(
    config: DistillConfig, experts: Sequence[Expert], *, trust: bool = False
) -> tuple[Expert, ...]:
    """The experts with rows and players for what `config` leaves open.

    DataError or RunError, by name, where the recorded rows of an expert are missing or have
    changed; TrustError where its run is not known to be the user's own, unless `trust`.
    """
    return tuple(_with_material(config, expert, trust) for expert in experts)


def note_rows(out: Path, experts: Sequence[Expert]) -> None:
    """Write OUT/rows.json; RunError where the distillation was started with other rows."""
    now = {
        one.task: {
            "source": one.rows.source, "run": one.rows.run, "training": list(one.rows.train),
            "held_out": list(one.rows.held_out), "clusters": list(one.rows.clusters),
        }
        for one in experts if one.rows is not None
    }  # fmt: skip
    path = out / ROWS
    if not path.exists():
        if now:
            write_json(path, now)
        return
    before = _read(path)
    for task in sorted({*before, *now}):
        if _ids(before.get(task)) != _ids(now.get(task)):
            raise RunError(
                f"The rows of '{task}' are not those that '{out}' was started with.",
                "Samples and measurements of two sets of rows cannot be mixed.",
                f"Bring the old rows back (their ids are in {path}), or give another --out.",
            )


def _ids(entry: Mapping[str, Any] | None) -> tuple[Any, Any]:
    return ((entry or {}).get("training"), (entry or {}).get("held_out"))


# -- one expert ------------------------------------------------------------------------------------


def _with_material(config: DistillConfig, expert: Expert, trust: bool) -> Expert:
    task, run = expert.task, _run_of(expert)
    settings, own = run_settings(run) if run is not None else ({}, True)
    recorded = run if task in (settings.get("tasks") or {}) else None
    players = _players(config, task, settings) if recorded is not None else {}
    source = _source(settings, task)
    used = {} if config.rows_source(task) else {"data": {task: source}}
    if recorded is not None and not own and not trust:
        refuse_foreign(recorded / CONFIG, {**used, **players})
    if recorded is not None and used:
        rows = _own_rows(config, expert, recorded, settings)
        expert = replace(expert, rows=replace(rows, foreign=not own))
    elif not config.held_out_source(task):
        examples = _named_rows(config, expert, recorded)
        expert = replace(expert, rows=_split(config, config.rows_source(task), examples))
    if not players:
        return expert
    return _with_players(expert, players, load_work(sample_config(config, expert))[0])


def _named_rows(config: DistillConfig, expert: Expert, recorded: Path | None) -> Sequence[Example]:
    """The rows of --data, else the pulled ones."""
    try:
        return load_work(sample_config(config, expert))[0].examples
    except NoRows as error:
        if recorded is not None:
            raise
        why = f"{expert.name} lies in no training run that records its rows. {error.why}"
        raise NoRows(error.what, why, error.way_out) from error


def _run_of(expert: Expert) -> Path | None:
    """The training run in whose folder the weights lie."""
    if expert.folder is None:
        return None
    places = (expert.folder, expert.folder.resolve())
    runs = (above for place in places for above in (place, *place.parents) if is_run(above))
    run = next(runs, None)
    if run is None or not str(read_environment(run).get("command", "")).startswith("train"):
        return None
    return run


def _source(settings: Mapping[str, Any], task: str) -> str | None:
    data = settings.get("data") or {}
    return data.get(task) or data.get("*")


def _split(config: DistillConfig, source: str | None, examples: Sequence[Example]) -> ExpertRows:
    """The rows with some set aside, unless --held-out names others."""
    task = examples[0].task
    aside = frozenset[str]() if config.held_out_source(task) else _clusters_aside(examples)
    return ExpertRows(
        source=source, clusters=tuple(sorted(aside)),
        train=tuple(dict.fromkeys(e.id for e in examples if _cluster(e) not in aside)),
        held_out=tuple(sorted({e.id for e in examples if _cluster(e) in aside})),
    )  # fmt: skip


def _clusters_aside(examples: Sequence[Example]) -> frozenset[str]:
    """Whole clusters, by hash of each one's key; none of a single one."""
    clusters = sorted({_cluster(e) for e in examples}, key=lambda key: share_of("held out", key))
    wanted = max(LEAST_HELD_OUT, math.ceil(HELD_OUT_SHARE * len(clusters)))
    return frozenset(clusters[: min(wanted, len(clusters) // 2)])


def _cluster(example: Example) -> str:
    return example.cluster or example.id


# -- the rows that a run records -------------------------------------------------------------------


def _own_rows(
    config: DistillConfig, expert: Expert, run: Path, settings: Mapping[str, Any]
) -> ExpertRows:
    """The rows of the expert's run, checked against the hash that it keeps of them."""
    task, (source, pool, dev, remarks) = expert.task, _drawn(config, expert, run, settings)
    if source is not None and source.startswith(MADE) and settings.get("seed", 0) != config.seed:
        name, _, seed = source.partition("@")
        source = f"{name}@{seed or settings.get('seed', 0)}"
    chosen = sorted(chosen_rows({e.id: e for e in pool}.values(), config, task), key=lambda e: e.id)
    chosen = first_rows(chosen, config.limit, lambda e: e.id)
    rows = _split(config, source, chosen)
    if dev and not config.held_out_source(task):
        rows = replace(
            rows, train=tuple(e.id for e in chosen), dev=True,
            held_out=tuple(sorted({e.id for e in dev})),
            clusters=tuple(sorted({_cluster(e) for e in dev})),
        )  # fmt: skip
    rows = replace(rows, run=str(run), remarks=remarks)
    every = replace(rows, train=(*rows.train, *rows.held_out))
    found = load_work(sample_config(config, replace(expert, rows=every)))[0].examples
    if len(found) != len(every.train):
        raise DataError(
            f"This distillation reads {len(found)} of the {len(every.train)} rows of '{task}' that "
            f"the expert in '{run}' was trained on.",
            f"Its run has other settings: protocol {settings.get('protocol')}, options "
            f"{json.dumps(settings.get('option') or {})}.",
            f"Give the same --protocol and --option, or name rows: --data {task}=WHERE",
        )
    return rows


def _drawn(
    config: DistillConfig, expert: Expert, run: Path, settings: Mapping[str, Any]
) -> tuple[str | None, list[Example], list[Example], tuple[str, ...]]:
    """(source, training rows, dev rows, remarks): drawn again as the run drew them."""
    from soulkit.train.state.fingerprint import pool_print

    task, kept = expert.task, _hashes(run, expert.task)
    drawing = _drawing(config, expert, run, settings)
    unread, changed = list[UserError](), list[UserError]()
    for source in _places(_source(settings, task), run):
        data = {} if source is None else {task: source}
        try:
            material = recorded_training_data(drawing.model_copy(update={"data": data}))
        except UserError as error:
            unread.append(_unread(expert, run, source, error))
            continue
        drawn = {"training": pool_print(material.pool), "dev": pool_print(material.dev)}
        entries = [(kept.get(k, {}).get(task, {}), now.get(task, {})) for k, now in drawn.items()]
        if any(_rows_of(old) != _rows_of(new) for old, new in entries):
            changed.append(_changed(expert, run, source, entries))
            continue
        other = any(old != new for old, new in entries)
        words = f"the prompts of {task} have changed since its expert was trained in {run}"
        pool, dev = ([e for _, e in rows] for rows in (material.pool, material.dev))
        return source, pool, dev, (words,) if other else ()
    raise (changed or unread)[0]


def _hashes(run: Path, task: str) -> dict[str, Any]:
    """What material.json says of the rows of a task; RunError where that is nothing."""
    path = run / MATERIAL
    kept = _read(path)
    training = kept.get("training")
    if not isinstance(training, dict) or not isinstance(training.get(task), dict):
        raise _unreadable(path, ValueError(f"it holds no hash of the rows of {task}"))
    return {"training": training, "dev": kept.get("dev") or {}}


def _drawing(
    config: DistillConfig, expert: Expert, run: Path, settings: Mapping[str, Any]
) -> TrainConfig:
    """The settings of the run that decide which rows of the task it draws."""
    task = expert.task
    measured = settings.get("eval_task") or [task]
    split = (settings.get("eval_every") or settings.get("probe_every")) and task in measured
    kept = {name: settings[name] for name in _ROW_SETTINGS if name in settings}
    registry = load_registry(*([Path(config.tasks_file)] if config.tasks_file else []))
    options = registry.spec(task).options
    kept |= {name: None for name in OWN_OPTIONS if name not in options}
    kept["option"] = {k: v for k, v in (settings.get("option") or {}).items() if k in options}
    kept |= {} if split else {"dev_by": ()}
    try:
        return TrainConfig.model_validate({
            **kept, "method": "grpo", "tasks": {task: settings["tasks"][task]},
            "tasks_file": config.tasks_file, "eval_every": 1 if split else None,
        })  # fmt: skip
    except ValidationError as error:
        raise _unreadable(run / CONFIG, error) from error


def _places(source: str | None, run: Path) -> Iterator[str | None]:
    """Where a run's rows may lie: a relative path is looked for in this folder, then in those above
    the run, since a run does not record from which folder it was started."""
    yield source
    if source is None or source.startswith(MADE) or Path(source).is_absolute():
        return
    for above in run.resolve().parents:
        if (above / source).exists():
            yield str(above / source)


def _rows_of(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    return entry.get("rows", 0), entry.get("ids", "")


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(loaded, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    return loaded


def _unreadable(path: Path, error: Exception) -> RunError:
    return RunError(
        f"'{path}' cannot be read ({' '.join(str(error).split())[:200]}).",
        "It says which rows belong to this run.",
        "Bring the file back, or name the rows yourself with --data TASK=WHERE (and --held-out).",
    )


def _unread(expert: Expert, run: Path, source: str | None, error: UserError) -> DataError:
    where = "the pulled training files" if source is None else f"'{source}'"
    return DataError(
        f"The training rows of the expert of {expert.task}, {expert.name}, cannot be read: "
        f"{error.what}",
        f"Its run '{run}' was trained on {where}. {error.why}",
        f"Bring them back, or name rows yourself: --data {expert.task}=WHERE",
    )


def _changed(
    expert: Expert, run: Path, source: str | None,
    entries: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> DataError:  # fmt: skip
    where = "The pulled training files" if source is None else f"'{source}'"
    before, now = (sum(pair[side].get("rows", 0) for pair in entries) for side in (0, 1))
    what = f"held {before} rows and now gives {now}" if before != now else "holds other rows now"
    return DataError(
        f"{where} has changed since the expert of {expert.task}, {expert.name}, was trained: it "
        f"{what}.",
        f"The hash in '{run / MATERIAL}' does not fit, so these are not the rows it learned.",
        f"Bring the old rows back, or name rows yourself: --data {expert.task}=WHERE",
    )


# -- players ---------------------------------------------------------------------------------------


def _players(config: DistillConfig, task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Role → the recorded player, for the roles that the command leaves open."""
    alone = (settings.get("task_players") or {}).get(task) or {}
    found = {role: alone.get(role) or settings.get(role) for role in DECLARED_ROLES}
    open_roles = [role for role in DECLARED_ROLES if not config.named(role, task)]
    if config.named("judge", task):  # who also audits
        open_roles = [role for role in open_roles if role != "auditor"]
    return {role: found[role] for role in open_roles if found[role]}


def _with_players(expert: Expert, players: Mapping[str, Any], part: Work) -> Expert:
    """The expert with the recorded players of the roles that its rows ask for."""
    seats = {role: who for role, who in players.items() if role in part.roles}
    if not seats:
        return expert
    try:
        filled = TaskPlayers.model_validate(seats)
    except ValidationError as error:
        raise _unreadable((_run_of(expert) or Path()) / CONFIG, error) from error
    return replace(expert, players=filled)


# -- in words --------------------------------------------------------------------------------------


def rows_and_players_words(config: DistillConfig, experts: Sequence[Expert]) -> list[str]:
    """What is learned from, measured on and played with, where the command did not name it."""
    lines = [line for one in experts if one.rows for line in _words(config, one, one.rows)]
    return lines + [_players_words(one.task, one.players) for one in experts if one.players]


def _players_words(task: str, players: TaskPlayers) -> str:
    panels = {role: players.named(role) for role in DECLARED_ROLES if players.named(role)}
    named = [
        f"{role} {one.written()}"
        for role, several in panels.items()
        for one in (several if isinstance(several, tuple) else (several,))
    ]
    return f"players of {task}, as its expert was trained: {', '.join(named)}"


def _words(config: DistillConfig, expert: Expert, rows: ExpertRows) -> Iterator[str]:
    task = expert.task
    if rows.run:
        every = len(rows.train) + (0 if rows.dev else len(rows.held_out))
        of = f"{len(rows.train)} of " if every > len(rows.train) else ""
        source = rows.source or "pulled training files"
        yield (
            f"training rows of {task}: {of}{counted(every, 'row')} that its expert was trained on "
            f"({source}, from {rows.run})"
        )
    yield from rows.remarks
    if config.held_out_source(task):
        return
    hint = f"to measure on others: --held-out {task}=WHERE"
    if not rows.held_out:
        yield f"no rows of {task} are held out: all of them are one cluster; {hint}"
        return
    names = ", ".join(rows.clusters[:SHOWN]) + (", …" if len(rows.clusters) > SHOWN else "")
    held = f"{counted(len(rows.held_out), 'row')} in {counted(len(rows.clusters), 'cluster')}"
    yield f"held out of {task}: {held} ({names}); {_seen(expert, rows)}; {hint}"


def _seen(expert: Expert, rows: ExpertRows) -> str:
    if rows.dev:
        best = expert.folder is not None and expert.folder.name == WEIGHTS[0]
        chosen = ", but its best weights were chosen by them" if best else ""
        return f"the dev rows of its expert, which was not trained on them{chosen}"
    may = "was" if rows.run else "may have been"
    return (
        f"the generalist does not learn them, but the expert {may} trained on them, so that its "
        "gain may be overstated and retention understated"
    )
