"""What a character says, and how much of it the others hear.

A message holds thoughts in [brackets], actions in (parentheses) and bare speech. Thoughts are
their author's alone: nobody else at the table, no judge and no environment reads them.

    "[He must not see it.] (closes the drawer) You are late."
    is heard as "(closes the drawer) You are late."

Under `paper` a bracket that is nested, runs over several lines or never closes is a thought as a
whole, and a message is one line, so that nobody can write a line for somebody else. `reference`
removes what stands in brackets on one line.
"""

from __future__ import annotations

import re

from soulkit.judge.verdict import remove_think, spoken
from soulkit.text import one_line
from soulkit.types import Protocol

_BRACKETS = re.compile(r"\[[^\]\n]*\]")
_MARKED = re.compile(
    r"<\s*((?:system|role)?)[_ ]think(?:ing)?\s*>.*?</\s*\1[_ ]think(?:ing)?\s*>", re.DOTALL
)


def audible(text: str, name: str, protocol: Protocol) -> str:
    """What everybody hears of a completion or message of `name`; empty where that is nothing."""
    if protocol == "reference":
        return without_bracketed(remove_think(text, remove_unclosed=True))
    speech = one_line(without_thoughts(_MARKED.sub("", spoken(text, "paper"))))
    while (rest := _after_label(speech, name)) is not None:
        speech = rest
    return speech


def words_out_loud(text: str, name: str) -> str:
    """What somebody without thoughts of its own (an environment) says, without its name."""
    speech = one_line(spoken(text, "paper"))
    return rest if (rest := _after_label(speech, name)) is not None else speech


def without_thoughts(text: str) -> str:
    """`text` without anything between brackets, however deep they are nested.

    One that never closes hides the rest: a thought that was cut off is still a thought.
    """
    pieces, depth = [], 0
    for piece in re.split(r"([\[\]])", text):
        if piece == "[":
            depth += 1
        elif piece == "]" and depth:
            depth -= 1
        elif not depth:
            pieces.append(piece)
    return "".join(pieces)


def without_bracketed(text: str) -> str:
    """`text` as the reference has it for other ears: brackets that close on their line and marked
    thinking removed, lines trimmed, empty ones left out."""
    bare = _BRACKETS.sub("", _MARKED.sub("", text))
    return "\n".join(line.strip() for line in bare.split("\n") if line.strip())


def with_label(text: str, name: str) -> str:
    """`text` behind its speaker's name, unless a line of it has it; nothing stays nothing."""
    marks = (f"{name}:", f"{name}\uff1a")
    if not text or any(line.strip().startswith(marks) for line in text.split("\n")):
        return text
    return f"{name}: {text}"


def _after_label(text: str, name: str) -> str | None:
    """What follows the speaker's own name and a colon at the beginning; None without them."""
    mark = re.match(rf"[*_]*{re.escape(name)}[*_]*\s*[:\uff1a][*_]*\s*", text)
    return text[mark.end() :] if mark and name else None
