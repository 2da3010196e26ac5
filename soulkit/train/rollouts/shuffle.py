"""The control for feedback: everybody gets somebody else's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from soulkit.types import Feedback, Record


def swap_feedback(drafts: Sequence[Record], key: str) -> list[Feedback | None]:
    """Each draft's usable feedback handed to a draft of another example; None where there is none.

    A rotation over examples in random order: everybody gives one and takes one, unless one example
    has more feedback than all others together and some must be given twice.
    """
    usable = [i for i, d in enumerate(drafts) if d.received is not None and d.received.usable]
    by_example: dict[str, list[int]] = {}
    for i in usable:
        by_example.setdefault(drafts[i].example_id, []).append(i)
    groups = list(by_example.values())
    random.Random(key).shuffle(groups)
    ordered = [i for group in groups for i in group]
    shift = max((len(group) for group in groups), default=0)
    swapped: list[Feedback | None] = [None] * len(drafts)
    if len(groups) > 1:
        for place, i in enumerate(ordered):
            turned = ordered[(place + shift) % len(ordered) :] + ordered
            others = (k for k in turned if drafts[k].example_id != drafts[i].example_id)
            swapped[i] = drafts[next(others)].received
    return swapped


def with_swapped(drafts: Sequence[Record], key: str) -> list[Record]:
    """The drafts, each as if it had received what `swap_feedback` gives it, task by task."""
    by_task: dict[str, list[Record]] = {}
    for draft in drafts:
        by_task.setdefault(draft.task, []).append(draft)
    return [
        replace(draft, received=feedback)
        for drafts_of_task in by_task.values()
        for draft, feedback in zip(drafts_of_task, swap_feedback(drafts_of_task, key), strict=True)
    ]
