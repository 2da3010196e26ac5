"""Rewards of groups of rollouts, and canaries: texts that no judge should score well.

The actor of a canary (`prompts/canaries/*.md`) recites the rubric, addresses the judge, lists
keywords or writes gibberish. Training measures what judges give them
(`train/rollouts/canaries.py`) and never trains on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from soulkit.errors import TaskError
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.prompting import PromptFolder
from soulkit.tasks.kit.user_code import bad_return, checked_score, task_code
from soulkit.types import Episode, Example, Failure, Record, unscored

CANARY_NAMES = ("rubric_recital", "to_the_judge", "keywords", "gibberish")


@dataclass(frozen=True, slots=True)
class Canary:
    """A canary text as an episode of one example."""

    name: str
    task: Task
    example: Example
    episode: Episode


def canary_texts() -> dict[str, str]:
    """Canary name → the actor's text."""
    folder = PromptFolder("canaries")
    return {name: folder.render(name) for name in CANARY_NAMES}


def canary_episodes(task: Task, examples: Iterable[Example]) -> list[Canary]:
    """One episode per example and canary text; none for a task without canaries."""
    canaries: list[Canary] = []
    for example in examples:
        for name, text in canary_texts().items():
            episode = task.canary(example, text)
            if episode is not None:
                canaries.append(Canary(name, task, example, episode))
    return canaries


def fixed_examples(examples: Iterable[Example], count: int) -> Sequence[Example]:
    """The `count` examples with the smallest ids, so that the order of the rows does not matter."""
    by_id = {example.id: example for example in examples}
    return [by_id[key] for key in sorted(by_id)[:count]]


CALL = "group_rewards"


def with_group_rewards(tasks: Mapping[str, Task], records: Iterable[Record]) -> list[Record]:
    """The records of training steps, rewarded by `Task.group_rewards` row by row.

    Order of rows and rollouts is kept.
    """
    rows: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
    for record in records:
        rows[record.task, record.step, record.example_id].append(record)
    rewarded: list[Record] = []
    for (task, _, _), group in rows.items():
        rewarded += _rewarded(tasks[task], group)
    return rewarded


def _rewarded(task: Task, group: Sequence[Record]) -> Sequence[Record]:
    """The rewarded rollouts of one row; all of them unscored if the task's code raises."""
    try:
        with task_code(task, CALL):
            rewarded = task.group_rewards(group)
        returned = rewarded if isinstance(rewarded, Sequence) else ()
        if [r.key for r in group] != [getattr(r, "key", None) for r in returned]:
            raise bad_return(
                task, CALL, "did not return the records that it was given, in the same order"
            )
        return [replace(r, score=checked_score(task, r.score, CALL)) for r in rewarded]
    except TaskError as error:
        lost = unscored(Failure(error.reason, error.detail), task.protocol)
        return [replace(r, score=lost) if r.score.scored else r for r in group]
