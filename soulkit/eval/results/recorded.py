"""Recorded runs: load their tasks with the current code, and score episodes and controls again.

    record ──▶ task.score(row, recorded episode) ──▶ the record with its new score, or a miss
    control ─▶ task.control(name, row, recorded episode) ──▶ the same

Nothing is played; the actor's replies do not change. Built-in tasks and tasks of installed packages
are always available. The tasks file of a run is code: it is imported only if the run's settings are
known to be the user's own (trust.py), or if the user trusts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from soulkit.errors import ModelLoadError, UserError
from soulkit.eval.results.summary import Cells, Summary, recorded_summary, summary_line
from soulkit.eval.run.provenance import start_folder
from soulkit.models.base import Cast, ChatModel
from soulkit.models.ledger.ledger import Ledger, ReplayMiss
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Serve
from soulkit.models.players.settings import RoleSettings
from soulkit.models.stand_ins import UnavailableModel
from soulkit.models.vllm.manager import unstarted_player
from soulkit.play.engine import ControlJob, ask_control, gather
from soulkit.reporting import Bar
from soulkit.runs.folder import CONFIG
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.registry import Registry, load_registry
from soulkit.tasks.kit.rewards import with_group_rewards
from soulkit.tasks.kit.user_code import or_default
from soulkit.trust import inside_runs, run_settings
from soulkit.types import (
    ControlRecord,
    Example,
    Failure,
    Protocol,
    Record,
    Sampling,
    Score,
    record_key,
    unscored,
)

T = TypeVar("T")
MISS = "replay_miss"
"""Unscored reason: no recorded judge reply to this question."""
UNKNOWN = "unknown_control"
"""Unscored reason: the task no longer has this control."""


class UnrecordedModel(UnavailableModel):
    """Stands in for a model whose replies are not in any ledger; asking it is a replay miss."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda call: ReplayMiss(
            f"The scorer asks '{name}' (role {call.role}, example {call.example_id}), but no "
            "ledger has its replies.",
            "Rescoring makes no calls, and ledgers record only replies from servers.",
            "Evaluate the model again.",
        ))  # fmt: skip


def from_ledger(ledger: Ledger) -> Serve:
    """Replay players of vLLM servers from `ledger`; a question that is not recorded is a miss. A
    model whose tokenizer is unavailable becomes an `UnrecordedModel`."""

    def serve(who: RoleSettings) -> ChatModel:
        try:
            return unstarted_player(who, ledger)
        except ModelLoadError:
            return UnrecordedModel(who.model)

    return serve


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """Everything that rescoring needs of a run."""

    path: Path
    command: str
    """The command that played it, such as `eval api`."""
    settings: Mapping[str, Any]
    """Its `config.yaml`."""
    sealed: bool
    """Whether the settings are known to be the user's own; the new folder inherits this."""
    rows: Mapping[str, tuple[Task, Example]]
    """Example id → the task with its current code, and the row."""
    records: Sequence[Record]
    controls: Sequence[ControlRecord] = ()
    ledger: Path | None
    cast: Callable[[Ledger], Cast]
    """Makes the players that read from a ledger; called inside the event loop."""
    sampling: Callable[[Task], Sampling] | None
    """The actor's sampling in a task; None keeps the cast's."""
    summary: Callable[[Sequence[Record], float, float | None, Sequence[ControlRecord]], Summary]
    """Makes `summary.json` from records, seconds, cost and controls."""
    config: RolesConfig
    """The validated settings."""
    seed: int
    actor: Callable[[], ChatModel]
    """Loads or connects to the model under test, needed if it also judges."""
    load: Callable[[str], ChatModel]
    """Loads another checkpoint."""
    grouped: bool = False
    """Whether rewards depend on the other rollouts of a row, as in training."""
    scorer: Mapping[str, str] = field(default_factory=dict)
    """A user's function that scores instead of the tasks → the hash of its name and file."""


def regrouped(recorded: RecordedRun, records: Sequence[Record]) -> list[Record]:
    """The records in order, with group-dependent rewards recomputed."""
    if not recorded.grouped:
        return list(records)
    tasks = {task.name: task for task, _ in recorded.rows.values()}
    by_key = {record.key: record for record in with_group_rewards(tasks, records)}
    return [by_key[record.key] for record in records]


async def score_again(
    recorded: RecordedRun, record: Record, cast: Cast
) -> tuple[Record, ReplayMiss | None]:
    """The record with its new score, and the question without a recorded answer, if any. A miss
    makes the episode unscored; an episode that was already unscored keeps its reason.
    """
    task, example = recorded.rows[record.example_id]
    episode, table = replace(record.episode, step=record.step), _cast_of_task(recorded, task, cast)
    try:
        return _with_score(recorded, record, await task.judged(example, episode, table)), None
    except ReplayMiss as miss:
        lost = unscored(Failure(MISS, miss.what), record.score.protocol)
        score = lost if record.score.scored else record.score
        return _with_score(recorded, record, score), miss


def _cast_of_task(recorded: RecordedRun, task: Task, players: Cast) -> Cast:
    table = players.in_task(task.name)
    if recorded.sampling is None:
        return table
    return replace(table, actor=replace(table.actor, sampling=recorded.sampling(task)))


def _with_score(recorded: RecordedRun, record: Record, score: Score) -> Record:
    """The record with everything that the task code determines: score, tags, gold."""
    task, example = recorded.rows[record.example_id]
    return replace(
        record, score=score, tags=example.tags, cluster=example.cluster,
        origin=example.origin,
        gold=or_default(task, "gold_text", lambda: task.gold_text(example), ""),
    )  # fmt: skip


async def score_all(
    recorded: RecordedRun, cast: Cast, at_once: int = 1, bar: Bar | None = None
) -> tuple[list[tuple[Record, ReplayMiss | None]], list[tuple[ControlRecord, ReplayMiss | None]]]:
    """Every episode and every control with its new score and its miss, in order."""
    turn = asyncio.Semaphore(at_once)

    async def in_turn(scoring: Coroutine[Any, Any, T]) -> T:
        async with turn:
            made = await scoring
            await asyncio.sleep(0)  # lets the other opinions on the same question be recorded
        if bar is not None:
            bar.advance()
        return made

    return (
        await gather(in_turn(score_again(recorded, one, cast)) for one in recorded.records),
        await gather(in_turn(score_control_again(recorded, control, draft, cast))
                     for control, draft in recorded_drafts(recorded)),
    )  # fmt: skip


# -- controls --------------------------------------------------------------------------------------


def recorded_drafts(recorded: RecordedRun) -> list[tuple[ControlRecord, Record | None]]:
    """Every control with the draft of its example and rollout, if there is one."""
    by_key = {record.key: record for record in recorded.records}
    keys = [record_key(0, c.example_id, c.rollout, "draft") for c in recorded.controls]
    return [(c, by_key.get(key)) for c, key in zip(recorded.controls, keys, strict=True)]


async def score_control_again(
    recorded: RecordedRun, control: ControlRecord, draft: Record | None, cast: Cast
) -> tuple[ControlRecord, ReplayMiss | None]:
    """The control with its new score, and the question without a recorded answer, if any. The
    control gets the recorded draft, or none if the draft failed.
    """
    task, example = recorded.rows[control.example_id]
    declared = next((one for one in task.controls if one.name == control.name), None)
    if declared is None:
        gone = Failure(UNKNOWN, f"{task.name} no longer has a control '{control.name}'")
        return replace(control, score=unscored(gone, task.protocol)), None
    job = ControlJob(task, declared, example, control.rollout)
    episode = None if draft is None or draft.episode.failure else draft.episode
    try:
        return await ask_control(job, episode, _cast_of_task(recorded, task, cast)), None
    except ReplayMiss as miss:
        lost = unscored(Failure(MISS, miss.what), task.protocol)
        return replace(control, score=lost if control.score.scored else control.score), miss


def recorded_tasks(folder: Path, names: Iterable[str], *, trust: bool = False) -> dict[str, Task]:
    """Name → task, for tasks in `names` whose code is available; RunError for a damaged folder."""
    settings, sealed = run_settings(folder) if (folder / CONFIG).is_file() else ({}, False)
    protocol: Protocol = "reference" if settings.get("protocol") == "reference" else "paper"
    registry = _registry_of_run(folder, settings, trust=trust, sealed=sealed)
    # Options may name files; ignore those of an untrusted run.
    recorded = settings.get("option") if trust or sealed else None
    options = dict(recorded) if isinstance(recorded, Mapping) else {}
    live: dict[str, Task] = {}
    for name in names:
        try:
            live[name] = registry.task(name, protocol, options=options)
        except UserError:  # unknown here or not importable; the episodes can still be used
            continue
    return live


def recorded_cells(folder: Path) -> Cells:
    """Task → metric → cell, from the summary of a run. Empty if the run is unfinished or the
    summary is damaged: callers then use the episodes."""
    try:
        return recorded_summary(folder).tasks
    except UserError:
        return {}


def summary_steps(folder: Path) -> int:
    """The number of last steps that the summary of a training run covers; 0 if not recorded."""
    try:
        steps = summary_line(folder).get("summary_steps")
    except UserError:
        return 0
    return steps if isinstance(steps, int) and steps > 0 else 0


def _registry_of_run(
    folder: Path, settings: Mapping[str, Any], *, trust: bool, sealed: bool
) -> Registry:  # fmt: skip
    named = settings.get("tasks_file")
    file = (start_folder(folder) or Path()) / str(named)
    usable = named and (trust or (sealed and not inside_runs({"tasks_file": file})))
    try:
        return load_registry(*([file] if usable else []))
    except UserError:
        return load_registry()
