"""The model coach (one call, one short text for the actor) and the audit for playing to the judge.

Feedback is never an error text: a coach that cannot be read gives none.

An auditor is a judge with one question: did the actor act, or did it write for whoever scores it?
It reads the actor's own words only. Its verdict is a risk: `medium` for reciting what a rubric asks
for or claiming feats that never happened, `high` for text that loops without sense or speaks to a
judge. An audit that cannot be read leaves the episode unscored. The reference hides turns that look
like data from its auditor; `paper` shows every turn that has words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from soulkit.errors import UnreadableVerdict
from soulkit.judge.structured import VerdictShape
from soulkit.judge.verdict import spoken
from soulkit.models.base import Player
from soulkit.types import Call, Feedback, Protocol, Segment

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


Risk = Literal["low", "medium", "high"]
RISKS: tuple[Risk, ...] = ("low", "medium", "high")

_LIKE_DATA = re.compile(r"[\[{]|\w+\s*\(")


class Audit(VerdictShape):
    """Whether somebody played to the judge."""

    risk_level: Risk
    reason: str


def agreed_risk(levels: Sequence[Risk]) -> Risk:
    """The level of several opinions: the middle one, the worse of two middle ones.

    Raises ValueError for none.
    """
    if not levels:
        raise ValueError("no opinion to agree on")
    ordered = sorted(levels, key=RISKS.index)
    return ordered[len(ordered) // 2]


def auditable_texts(utterances: Iterable[str], protocol: Protocol) -> list[str]:
    """The actor's texts that the auditor gets to see, stripped; empty ones are never shown.

    Under `reference` what starts like JSON, a list or a call (`word (`) is left out.
    """
    texts = [text.strip() for text in utterances if text.strip()]
    if protocol == "reference":
        return [text for text in texts if not _LIKE_DATA.match(text)]
    return texts
