"""How long prompts are before anything is said: words of what a row and the templates hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from soulkit.tasks.base import Task
from soulkit.types import Example

PANEL_TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "judge": ("judge", "critic"),
    "auditor": ("audit",),
}
"""Role → what the names of its templates begin with; those of a seat begin with the seat."""


def words_by_seat(task: Task, example: Example) -> list[int]:
    """Words of the first prompt of every acted seat."""
    contexts = task.previews(example).values()
    return [sum(len(segment.text.split()) for segment in context) for context in contexts]


def opening_words(task: Task, example: Example, role: str) -> float | None:
    """Words of a prompt to `role`, none of the actor's, without what was played: its mean template
    and the fields that it may see. None where the task has no template of that name."""
    seats = tuple(seat for seat, of_role in example.seats.items() if of_role == role)
    starts = PANEL_TEMPLATES.get(role, seats)
    sizes = task.prompts.sizes(*starts) if starts else {}
    if not sizes:
        return None
    reader = "judge" if role in PANEL_TEMPLATES else seats[0]
    fields, _ = task.within_budget(example.visible(reader))
    return fmean(sizes.values()) + sum(map(words_in, fields.values()))


def words_in(value: Any) -> int:
    """Words of all texts in a JSON value."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, Mapping):
        return sum(map(words_in, value.values()))
    if isinstance(value, Sequence):
        return sum(map(words_in, value))
    return 0
