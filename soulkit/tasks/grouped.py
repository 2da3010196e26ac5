"""Rewards that exist only once all rollouts of a row are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from soulkit.errors import TaskError
from soulkit.tasks.base import Task
from soulkit.tasks.guarding import checked_score, returned, task_code
from soulkit.types import Failure, Record, unscored

CALL = "group_rewards"


def with_group_rewards(tasks: Mapping[str, Task], records: Iterable[Record]) -> list[Record]:
    """The records of training steps, row by row with what their tasks make of the group.

    Rows stay in the order in which they first come, and their rollouts in theirs. A row waits for
    its own rollouts, never for those of another.
    """
    rows: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
    for record in records:
        rows[record.task, record.step, record.example_id].append(record)
    rewarded: list[Record] = []
    for (task, _, _), group in rows.items():
        rewarded += _rewarded(tasks[task], group)
    return rewarded


def _rewarded(task: Task, group: Sequence[Record]) -> Sequence[Record]:
    """What a task makes of the rollouts of a row; unscored, all of them, where its code breaks."""
    try:
        with task_code(task, CALL):
            rewarded = task.group_rewards(group)
        many = rewarded if isinstance(rewarded, Sequence) else ()
        if [r.key for r in group] != [getattr(r, "key", None) for r in many]:
            raise returned(task, CALL, "did not give back the records that it got, in their order")
        return [replace(r, score=checked_score(task, r.score, CALL)) for r in rewarded]
    except TaskError as error:
        lost = unscored(Failure(error.reason, error.detail), task.protocol)
        return [replace(r, score=lost) if r.score.scored else r for r in group]
