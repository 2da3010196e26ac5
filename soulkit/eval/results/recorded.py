"""Recorded runs: their tasks with today's code, and scoring their episodes and controls again.

    record ──▶ task.score(row, recorded episode) ──▶ the record with its score of now, or a miss
    control ─▶ task.control(name, row, recorded episode) ──▶ the same

Nothing is played: what the actor said stays as it is. Built-in tasks and those of installed
packages are always at hand. The tasks file that a run names is code: it is imported only for a
run whose settings are known to be the user's own (trust.py), or when the user trusts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
from soulkit.play.engine import ControlJob, ask_control
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

MISS = "replay_miss"
"""Why an episode or control is unscored whose judge was never asked this question."""
UNKNOWN = "unknown_control"
"""Why a control is unscored that the task does not have any more."""


class UnrecordedModel(UnavailableModel):
    """Takes the place of a model that leaves nothing in a ledger; to ask it is a miss."""

    def __init__(self, name: str) -> None:
        super().__init__(name, lambda call: ReplayMiss(
            f"The scorer asks '{name}' (role {call.role}, example {call.example_id}), whose "
            "replies no ledger holds.",
            "Rescoring makes no call, and only what a server answered is recorded.",
            "Evaluate the model again.",
        ))  # fmt: skip


def from_ledger(ledger: Ledger) -> Serve:
    """Players that sat behind vLLM servers, as their replies in `ledger` have them: to ask for
    another one is a miss. Without its tokenizer such a model is absent."""

    def serve(who: RoleSettings) -> ChatModel:
        try:
            return unstarted_player(who, ledger)
        except ModelLoadError:
            return UnrecordedModel(who.model)

    return serve


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run as rescoring needs it."""

    path: Path
    command: str
    """The command that played it, such as `eval api`."""
    settings: Mapping[str, Any]
    """Its `config.yaml`."""
    sealed: bool
    """Whether those are known to be the user's own: only then are the new folder's."""
    rows: Mapping[str, tuple[Task, Example]]
    """Example id → the row, and the task as its code is now."""
    records: Sequence[Record]
    controls: Sequence[ControlRecord] = ()
    ledger: Path | None
    cast: Callable[[Ledger], Cast]
    """The players, asking that ledger; called inside the event loop."""
    sampling: Callable[[Task], Sampling] | None
    """How the actor is sampled in a task; None leaves it as the cast says."""
    summary: Callable[[Sequence[Record], float, float | None, Sequence[ControlRecord]], Summary]
    """The contents of `summary.json` for records, seconds, cost and controls."""
    config: RolesConfig
    """The settings, read."""
    seed: int
    actor: Callable[[], ChatModel]
    """Loads or reaches the model under test, for where it judges itself."""
    load: Callable[[str], ChatModel]
    """Loads another checkpoint."""
    grouped: bool = False
    """Whether rewards of a row depend on each other, as those of training do."""


def regrouped(recorded: RecordedRun, records: Sequence[Record]) -> list[Record]:
    """The records, in their order, with what their rewards owe to the others of their rows."""
    if not recorded.grouped:
        return list(records)
    tasks = {task.name: task for task, _ in recorded.rows.values()}
    by_key = {record.key: record for record in with_group_rewards(tasks, records)}
    return [by_key[record.key] for record in records]


async def score_again(
    recorded: RecordedRun, record: Record, cast: Cast
) -> tuple[Record, ReplayMiss | None]:
    """The record with its score of now, and the question that has no answer, if there is one.

    Such an episode is unscored; one that was unscored before keeps its reason.
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
    """The record with what follows from the task's code: score, break-downs, gold."""
    task, example = recorded.rows[record.example_id]
    return replace(
        record, score=score, tags=example.tags, cluster=example.cluster,
        origin=example.origin,
        gold=or_default(task, "gold_text", lambda: task.gold_text(example), ""),
    )  # fmt: skip


# -- controls --------------------------------------------------------------------------------------


def recorded_drafts(recorded: RecordedRun) -> list[tuple[ControlRecord, Record | None]]:
    """Every control with the draft that it is about, or would be if it were one of drafts."""
    by_key = {record.key: record for record in recorded.records}
    keys = [record_key(0, c.example_id, c.rollout, "draft") for c in recorded.controls]
    return [(c, by_key.get(key)) for c, key in zip(recorded.controls, keys, strict=True)]


async def score_control_again(
    recorded: RecordedRun, control: ControlRecord, draft: Record | None, cast: Cast
) -> tuple[ControlRecord, ReplayMiss | None]:
    """The control with its score of now, and the question that has no answer, if there is one.

    It is about the draft as it was recorded, whatever that scores; one that failed has none.
    """
    task, example = recorded.rows[control.example_id]
    declared = next((one for one in task.controls if one.name == control.name), None)
    if declared is None:
        gone = Failure(UNKNOWN, f"{task.name} has no control '{control.name}' now")
        return replace(control, score=unscored(gone, task.protocol)), None
    job = ControlJob(task, declared, example, control.rollout)
    episode = None if draft is None or draft.episode.failure else draft.episode
    try:
        return await ask_control(job, episode, _cast_of_task(recorded, task, cast)), None
    except ReplayMiss as miss:
        lost = unscored(Failure(MISS, miss.what), task.protocol)
        return replace(control, score=lost if control.score.scored else control.score), miss


def recorded_tasks(folder: Path, names: Iterable[str], *, trust: bool = False) -> dict[str, Task]:
    """Name → task, for those of `names` whose code can be had; RunError for a damaged folder."""
    settings, sealed = run_settings(folder) if (folder / CONFIG).is_file() else ({}, False)
    protocol: Protocol = "reference" if settings.get("protocol") == "reference" else "paper"
    registry = _registry_of_run(folder, settings, trust=trust, sealed=sealed)
    # Options may name files, and a stranger's run is to name none here.
    recorded = settings.get("option") if trust or sealed else None
    options = dict(recorded) if isinstance(recorded, Mapping) else {}
    live: dict[str, Task] = {}
    for name in names:
        try:
            live[name] = registry.task(name, protocol, options=options)
        except UserError:  # of another version, or not to be imported: its episodes are still there
            continue
    return live


def recorded_cells(folder: Path) -> Cells:
    """Task → metric → its cell, as the summary of a run has them; none of an unfinished run, nor
    of a damaged summary: the episodes say all that is needed."""
    try:
        return recorded_summary(folder).tasks
    except UserError:
        return {}


def summary_steps(folder: Path) -> int:
    """Over how many of its last steps the summary of a training is; 0 where it does not say."""
    try:
        steps = summary_line(folder).get("summary_steps")
    except UserError:
        return 0
    return steps if isinstance(steps, int) and steps > 0 else 0


def _registry_of_run(
    folder: Path, settings: Mapping[str, Any], *, trust: bool, sealed: bool
) -> Registry:  # fmt: skip
    named = settings.get("tasks_file")
    if not named:
        return load_registry()
    file = (start_folder(folder) or Path()) / str(named)
    if not trust and (not sealed or inside_runs({"tasks_file": file})):
        return load_registry()
    try:
        return load_registry(file)
    except UserError:
        return load_registry()
