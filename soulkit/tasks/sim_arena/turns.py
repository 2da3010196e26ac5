"""Reading a simulated person's turn: what is said to the assistant, and whether that is all.

A turn is asked for as `Query: …`, `Response: …` or `Message: …`, or as the phrase `terminate
conversation`. What is said goes to the assistant without its tag; the phrase goes nowhere.

    "Thought: lost\\nMessage: how do i start"         → how do i start
    "Response: thanks!\\nterminate conversation"      → thanks!, and the conversation is over
    "please do not terminate conversation yet"       → said as it stands

The phrase ends a conversation where it has a line for itself. Thinking is removed, a tag counts in
any case and inside bold type, and first of all where a line begins with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from soulkit.judge.verdict import spoken

PHRASE = "terminate conversation"
_AROUND = r"(?:[^\w\n]|_){0,12}"
_END = re.compile(
    rf"^{_AROUND}terminate[ \t]{{1,8}}conversation{_AROUND}$", re.IGNORECASE | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Utterance:
    """A turn as it was read."""

    text: str
    """What everybody hears; empty for nothing."""
    ended: bool = False
    """Whether the conversation ends with it."""
    status: str = "ok"
    """`ok`, `salvaged` (readable, and not in the form asked for), `empty`."""


def read_utterance(reply: str, tags: Sequence[str]) -> Utterance:
    """What a reply says and whether it ends the conversation; `tags` are those asked for."""
    words = spoken(reply, "paper")
    message, tagged = _after_tag(words, tuple(tags))
    end = _END.search(message)
    text = (message[: end.start()] if end else message).strip()
    if not text:
        return Utterance("", end is not None, "ok" if end else "empty")
    return Utterance(text, end is not None, "ok" if tagged else "salvaged")


def _after_tag(words: str, tags: tuple[str, ...]) -> tuple[str, bool]:
    """(what comes after the first tag, whether nothing stood before it); all without a tag."""
    at_line, anywhere = _patterns(tags)
    tag = at_line.search(words) or anywhere.search(words)
    if tag is None:
        return words, False
    return words[tag.end() :].strip(), not words[: tag.start()].strip()


@cache
def _patterns(tags: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """A tag where a line begins, in any case and in bold type; and one anywhere, as asked for."""
    either = "|".join(map(re.escape, tags))
    at_line = rf"^[^\w\n]{{0,8}}(?:{either})[*_]{{0,3}}[ \t]?:[*_]{{0,3}}"
    return (
        re.compile(at_line, re.IGNORECASE | re.MULTILINE),
        re.compile(rf"\b(?:{either}):"),
    )
