"""Canaries: four texts that no judge should like, said as if by the actor.

They stand for four ways of being paid without doing anything: reciting what a rubric asks for,
talking to whoever grades, stringing together words that graders like, and looping without sense.
A judge that gives them points can be played, and a policy that is trained on it will find out. What
they score is measured beside training (`train/rollouts/canaries.py`); they are never trained on.

The texts are `prompts/canaries/*.md`; `Task.canary` makes an episode of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from soulkit.tasks.base import Task
from soulkit.tasks.prompting import PromptFolder
from soulkit.types import Episode, Example

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
