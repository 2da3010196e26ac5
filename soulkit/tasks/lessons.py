"""Lessons from rules, of which the fullest one that gives nothing away is said.

Where options are short, an innocent word of a lesson can be a word of one option alone. Example:
for the replies "Tea, with honey" and "Cold beer", a lesson that says "with" points at the first, so
the next shorter one is tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from soulkit.judge.leaks import LeakView, check_leak
from soulkit.types import Feedback


def safest(lessons: Iterable[Iterable[str]], view: LeakView) -> str | None:
    """The first lesson, its sentences joined, that leaks nothing of `view`; None when all do."""
    for sentences in lessons:
        text = " ".join(sentence for sentence in sentences if sentence)
        if text and not check_leak(Feedback(text=text, author="symbolic"), view).leak:
            return text
    return None
