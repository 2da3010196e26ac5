"""The model coach: one call, one short text for the actor, never an error text in its place."""

from __future__ import annotations

import re
from collections.abc import Sequence

from soulkit.errors import UnreadableVerdict
from soulkit.judge.verdict import spoken
from soulkit.models.base import Player
from soulkit.types import Call, Feedback, Segment

MAX_COACH_WORDS = 120
CHARS_A_WORD = 20
"""Of a text without blanks the characters count."""

LEAST_DISTINCT = 0.1
"""Different texts per draft below which feedback is hardly about the draft: it is a fixed sentence
in the prompt under the name of feedback."""


def distinct_share(texts: Sequence[str]) -> float | None:
    """Different texts / texts; None without any."""
    return len(set(texts)) / len(texts) if texts else None


async def ask_coach(
    coach: Player, prompt: str, call: Call, max_words: int = MAX_COACH_WORDS
) -> Feedback:
    """Feedback written by `coach` on `prompt`; of its line breaks those between paragraphs stay.

    Raises UnreadableVerdict when the reply is empty after thinking is removed, was cut off, or is
    longer than `max_words` (a coach that rambles is usually solving the task for the actor).
    """
    completion = await coach.complete((Segment("user", prompt),), call)
    paragraphs = re.split(r"\n\s*\n", spoken(completion.text, "paper"))
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    if not text:
        raise UnreadableVerdict(f"the coach answered nothing ({completion.stop_reason})")
    if completion.stop_reason == "length":
        raise UnreadableVerdict("the coach was cut off; raise its max_tokens")
    if completion.stop_reason == "content_filter":
        raise UnreadableVerdict("a content filter held back what the coach wrote")
    if len(text.split()) > max_words or len(text) > max_words * CHARS_A_WORD:
        raise UnreadableVerdict(f"the coach wrote more than {max_words} words")
    return Feedback(text=text, author=coach.model.name)
