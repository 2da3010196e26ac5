"""Rewards of whole groups of rollouts, and canaries: texts that no judge should like.

Canaries (`prompts/canaries/*.md`) are said as if by the actor: a recited rubric, words to the
judge, keywords, gibberish. What they score is measured beside training
(`train/rollouts/canaries.py`); they are never trained on.
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
    """One of the texts as an episode of one example."""

    name: str
    task: Task
    example: Example
    episode: Episode


def canary_texts() -> dict[str, str]:
    """Name → what the actor says."""
    folder = PromptFolder("canaries")
    return {name: folder.render(name) for name in CANARY_NAMES}


def canary_episodes(task: Task, examples: Iterable[Example]) -> list[Canary]:
    """Every text on every example; nothing where the task has no canary."""
    canaries: list[Canary] = []
    for example in examples:
        for name, text in canary_texts().items():
            episode = task.canary(example, text)
            if episode is not None:
                canaries.append(Canary(name, task, example, episode))
    return canaries


def fixed_examples(examples: Iterable[Example], count: int) -> Sequence[Example]:
    """The same few examples whatever the order of the rows: those with the smallest ids."""
    by_id = {example.id: example for example in examples}
    return [by_id[key] for key in sorted(by_id)[:count]]


CALL = "group_rewards"


def with_group_rewards(tasks: Mapping[str, Task], records: Iterable[Record]) -> list[Record]:
    """The records of training steps, with what their tasks make of the rollouts of each row.

    Rows and rollouts stay in their order.
    """
    rows: dict[tuple[str, int, str], list[Record]] = defaultdict(list)
    for record in records:
        rows[record.task, record.step, record.example_id].append(record)
    rewarded: list[Record] = []
    for (task, _, _), group in rows.items():
        rewarded += _rewarded(tasks[task], group)
    return rewarded


def _rewarded(task: Task, group: Sequence[Record]) -> Sequence[Record]:
    """The rollouts of a row with the rewards of their group; all unscored where the task breaks."""
    try:
        with task_code(task, CALL):
            rewarded = task.group_rewards(group)
        returned = rewarded if isinstance(rewarded, Sequence) else ()
        if [r.key for r in group] != [getattr(r, "key", None) for r in returned]:
            raise bad_return(
                task, CALL, "did not give back the records that it got, in their order"
            )
        return [replace(r, score=checked_score(task, r.score, CALL)) for r in rewarded]
    except TaskError as error:
        lost = unscored(Failure(error.reason, error.detail), task.protocol)
        return [replace(r, score=lost) if r.score.scored else r for r in group]
