"""Rewards that exist only once all rollouts of a row are there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from soulkit.tasks.base import Task
from soulkit.types import Record


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
        rewarded += _checked(group, tasks[task].group_rewards(group))
    return rewarded


def _checked(group: Sequence[Record], rewarded: Sequence[Record]) -> Sequence[Record]:
    """What a task gave back; ValueError where it lost or changed a rollout."""
    if [r.key for r in group] != [r.key for r in rewarded]:
        raise ValueError("group_rewards must give back the records that it got, in their order")
    return rewarded
