"""Default rows and players, taken from each expert's training run.

    no --data        the rows that the expert was trained on: config.yaml of its run has their
                     source, conditions.json their ids
    no --held-out    the dev rows of that run, else whole clusters of the training rows
    no player        the player that the expert was trained with

The generalist is never trained on held-out rows. The choice is printed, recorded in OUT/rows.json
and repeated in the report.
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
from soulkit.eval.run.provenance import row_hashes
from soulkit.models.players.settings import TaskPlayers
from soulkit.play.default_players import DECLARED_ROLES
from soulkit.play.plan import Work
from soulkit.play.settings import chosen_rows
from soulkit.runs.conditions import CONDITIONS, Conditions, TaskFacts
from soulkit.runs.folder import CONFIG, is_run, read_environment
from soulkit.runs.jsonl import read_object, write_json
from soulkit.tasks.kit.loading import NoRows
from soulkit.tasks.kit.made_rows import MADE
from soulkit.text import counted
from soulkit.trust import refuse_foreign, run_settings
from soulkit.types import Example

ROWS = "rows.json"
HELD_OUT_SHARE = 0.2
"""Share of clusters to hold out if no held-out rows are named."""
LEAST_HELD_OUT = 2
"""Minimum number of held-out clusters (but at most half of all): one cluster gives no interval."""
SHOWN = 3
"""Number of clusters named in a line; rows.json names all."""


def with_rows_and_players(
    config: DistillConfig, experts: Sequence[Expert], *, trust: bool = False
) -> tuple[Expert, ...]:
    """The experts, with default rows and players where `config` names none.

    DataError or RunError, naming the expert, if its recorded rows are missing or have changed;
    TrustError for a run of unknown origin, unless `trust`.
    """
    return tuple(_with_material(config, expert, trust) for expert in experts)


def note_rows(out: Path, experts: Sequence[Expert]) -> None:
    """Write OUT/rows.json; RunError if the distillation was started with other rows."""
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
    before = read_object(path)
    for task in sorted({*before, *now}):
        if _ids(before.get(task)) != _ids(now.get(task)):
            raise RunError(
                f"The rows of '{task}' have changed since '{out}' was started.",
                "Samples and measurements of different rows cannot be mixed.",
                f"Restore the old rows (their ids are in {path}), or use another --out.",
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
    try:
        return load_work(sample_config(config, expert))[0].examples
    except NoRows as error:
        if recorded is not None:
            raise
        why = f"{expert.name} is not in a training run that records its rows. {error.why}"
        raise NoRows(error.what, why, error.way_out) from error


def _run_of(expert: Expert) -> Path | None:
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
    task = examples[0].task
    aside = frozenset[str]() if config.held_out_source(task) else _clusters_aside(examples)
    return ExpertRows(
        source=source, clusters=tuple(sorted(aside)),
        train=tuple(dict.fromkeys(e.id for e in examples if _cluster(e) not in aside)),
        held_out=tuple(sorted({e.id for e in examples if _cluster(e) in aside})),
    )  # fmt: skip


def _clusters_aside(examples: Sequence[Example]) -> frozenset[str]:
    """Clusters to hold out, chosen by hash; none if there is only one."""
    clusters = sorted({_cluster(e) for e in examples}, key=lambda key: share_of("held out", key))
    wanted = max(LEAST_HELD_OUT, math.ceil(HELD_OUT_SHARE * len(clusters)))
    return frozenset(clusters[: min(wanted, len(clusters) // 2)])


def _cluster(example: Example) -> str:
    return example.cluster or example.id


# -- the rows that a run records -------------------------------------------------------------------


def _own_rows(
    config: DistillConfig, expert: Expert, run: Path, settings: Mapping[str, Any]
) -> ExpertRows:
    """The rows of the expert's run, checked against the recorded hashes."""
    from soulkit.train.state.fingerprint import prompts_hash

    task, recorded = expert.task, _recorded(run, expert.task)
    source, part = _found(config, expert, run, settings, {**recorded.rows, **recorded.dev_rows})
    found = {row.id: row for row in part.examples}
    pool = [found[id] for id in recorded.rows]
    same = prompts_hash(part.task, pool) == recorded.prompts
    changed = f"the prompts of {task} have changed since its expert was trained in {run}"
    chosen = sorted(chosen_rows(pool, config, task), key=lambda e: e.id)
    chosen = first_rows(chosen, config.limit, lambda e: e.id)
    rows = _split(config, source, chosen)
    if recorded.dev_rows and not config.held_out_source(task):
        rows = replace(
            rows, train=tuple(e.id for e in chosen), dev=True,
            held_out=tuple(sorted(recorded.dev_rows)),
            clusters=tuple(sorted({_cluster(found[id]) for id in recorded.dev_rows})),
        )  # fmt: skip
    return replace(rows, run=str(run), remarks=() if same else (changed,))


def _recorded(run: Path, task: str) -> TaskFacts:
    """The recorded rows of a task; RunError if there are none."""
    conditions = Conditions.read(run)
    facts = conditions.of_task(task) if conditions else TaskFacts()
    if not facts.rows:
        raise RunError(
            f"'{run / CONDITIONS}' lists no rows for {task}.",
            "This file should list the rows that the expert was trained on.",
            f"Restore the file, or name the rows with --data {task}=ROWS (and --held-out).",
        )
    return facts


def _found(
    config: DistillConfig, expert: Expert, run: Path, settings: Mapping[str, Any],
    recorded: Mapping[str, str],
) -> tuple[str | None, Work]:  # fmt: skip
    errors = list[DataError]()
    named, seed = _source(settings, expert.task), settings.get("seed", 0)
    if named is not None and named.startswith(MADE) and seed != config.seed:
        named = named if "@" in named else f"{named}@{seed}"
    for source in _places(named, run):
        reading = sample_config(config, replace(expert, rows=ExpertRows(source=source, train=())))
        try:
            part = load_work(reading)[0]
        except UserError as error:
            errors.append(_unread(expert, run, source, error))
            continue
        now = row_hashes(part.examples)
        same = sum(now.get(id) == digest for id, digest in recorded.items())
        if same == len(recorded):
            return source, part
        errors.insert(0, _changed(expert, run, source, settings, (same, len(recorded))))
    raise errors[0]


def _places(source: str | None, run: Path) -> Iterator[str | None]:
    """Candidate paths of a run's rows: from the working folder, then from the run's parents."""
    yield source
    if source is not None and not Path(source).is_absolute():
        yield from (str(above / source) for above in run.resolve().parents
                    if (above / source).exists())  # fmt: skip


def _unread(expert: Expert, run: Path, source: str | None, error: UserError) -> DataError:
    where = "the pulled training files" if source is None else f"'{source}'"
    return DataError(
        f"The training rows of {expert.name}, the expert for {expert.task}, cannot be read: "
        f"{error.what}",
        f"Its run '{run}' was trained on {where}. {error.why}",
        f"Restore them, or name other rows with --data {expert.task}=ROWS",
    )


def _changed(
    expert: Expert, run: Path, source: str | None, settings: Mapping[str, Any],
    counts: tuple[int, int],
) -> DataError:  # fmt: skip
    where = "The pulled training files" if source is None else f"'{source}'"
    options = json.dumps(settings.get("option") or {})
    return DataError(
        f"{where} gives only {counts[0]} of the {counts[1]} rows that the {expert.task} expert "
        f"{expert.name} was trained on.",
        f"The file has changed, or this distillation has different settings from '{run}': protocol "
        f"{settings.get('protocol')}, options {options}.",
        f"Restore the old rows, use the same --protocol and --option, or name other rows with "
        f"--data {expert.task}=ROWS",
    )


# -- players ---------------------------------------------------------------------------------------


def _players(config: DistillConfig, task: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Role → the recorded player, for roles that the command does not name."""
    alone = (settings.get("task_players") or {}).get(task) or {}
    found = {role: alone.get(role) or settings.get(role) for role in DECLARED_ROLES}
    open_roles = [role for role in DECLARED_ROLES if not config.named(role, task)]
    if config.named("judge", task):  # the judge is also the auditor
        open_roles = [role for role in open_roles if role != "auditor"]
    return {role: found[role] for role in open_roles if found[role]}


def _with_players(expert: Expert, players: Mapping[str, Any], part: Work) -> Expert:
    seats = {role: who for role, who in players.items() if role in part.roles}
    if not seats:
        return expert
    try:
        filled = TaskPlayers.model_validate(seats)
    except ValidationError as error:
        raise RunError(
            f"The players in '{(_run_of(expert) or Path()) / CONFIG}' cannot be read.",
            " ".join(str(error).split())[:200],
            f"Restore the file, or name the players, for example --judge {expert.task}=MODEL.",
        ) from error
    return replace(expert, players=filled)


# -- printed lines ---------------------------------------------------------------------------------


def rows_and_players_words(config: DistillConfig, experts: Sequence[Expert]) -> list[str]:
    """Lines that name the default rows and players."""
    lines = [line for one in experts if one.rows for line in _words(config, one, one.rows)]
    return lines + [_players_words(one.task, one.players) for one in experts if one.players]


def _players_words(task: str, players: TaskPlayers) -> str:
    panels = {role: players.named(role) for role in DECLARED_ROLES if players.named(role)}
    named = [
        f"{role} {one.written()}"
        for role, several in panels.items()
        for one in (several if isinstance(several, tuple) else (several,))
    ]
    return f"players of {task}, as in its expert's training: {', '.join(named)}"


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
    hint = f"choose others with --held-out {task}=ROWS"
    if not rows.held_out:
        yield f"no rows of {task} are held out, because all are in one cluster; {hint}"
        return
    names = ", ".join(rows.clusters[:SHOWN]) + (", …" if len(rows.clusters) > SHOWN else "")
    held = f"{counted(len(rows.held_out), 'row')} in {counted(len(rows.clusters), 'cluster')}"
    yield f"held out of {task}: {held} ({names}); {_seen(expert, rows)}; {hint}"


def _seen(expert: Expert, rows: ExpertRows) -> str:
    if rows.dev:
        best = expert.folder is not None and expert.folder.name == WEIGHTS[0]
        chosen = ", although its best checkpoint was selected on them" if best else ""
        return f"the dev rows of its expert, which was not trained on them{chosen}"
    may = "was" if rows.run else "may have been"
    return (
        f"the generalist is not trained on them, but the expert {may}, so its gain may be "
        "overstated and retention understated"
    )
