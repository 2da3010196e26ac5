"""What a character says, and how much of it the others hear.

A message holds thoughts in [brackets], actions in (parentheses) and bare speech. Thoughts are
their author's alone: nobody else at the table, no judge and no environment reads them.

    "[He must not see it.] (closes the drawer) You are late."
    is heard as "(closes the drawer) You are late."

Under `paper` a bracket that is nested, runs over several lines or never closes is a thought as a
whole, thinking between marks likewise, and a message is one line, so that nobody can write a line
for somebody else. `reference` removes what stands in brackets on one line, and marked thinking that
closes.

All readers take time in proportion to the text, whatever it opens and never closes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from soulkit.judge.verdict import remove_think, spoken
from soulkit.text import one_line
from soulkit.types import Protocol

_OPENING = re.compile(r"<\s*((?:system|role)?)[_ ]think(?:ing)?\s*>")
_ANY_OPENING = re.compile(_OPENING.pattern, re.IGNORECASE)
_CLOSINGS = {
    kind: re.compile(rf"</\s*{kind}[_ ]think(?:ing)?\s*>") for kind in ("", "system", "role")
}
_ANY_CLOSINGS = {kind: re.compile(c.pattern, re.IGNORECASE) for kind, c in _CLOSINGS.items()}


def audible(text: str, name: str, protocol: Protocol) -> str:
    """What everybody hears of a completion or message of `name`; empty where that is nothing."""
    if protocol == "reference":
        return without_bracketed(remove_think(text, remove_unclosed=True))
    return _without_labels(one_line(without_thoughts(without_marked(spoken(text, "paper")))), name)


def words_out_loud(text: str, name: str) -> str:
    """What somebody without thoughts of its own (an environment) says, without its name."""
    speech = one_line(spoken(text, "paper"))
    mark = _label(name).match(speech) if name else None
    return speech[mark.end() :] if mark else speech


def without_thoughts(text: str) -> str:
    """`text` without anything between brackets, however deep they are nested.

    One that never closes hides the rest: a thought that was cut off is still a thought.
    """
    return "".join(piece for piece, depth in _by_depth(text) if not depth)


def bracketed(text: str) -> str:
    """What stands between brackets in `text`, a thought a line."""
    thoughts = (piece.strip() for piece, depth in _by_depth(text) if depth)
    return "\n".join(thought for thought in thoughts if thought)


def _by_depth(text: str) -> Iterator[tuple[str, int]]:
    """(piece, how many brackets are open around it); a bracket that closes nothing is a piece."""
    depth = 0
    for piece in re.split(r"([\[\]])", text):
        if piece == "[":
            depth += 1
        elif piece == "]" and depth:
            depth -= 1
        else:
            yield piece, depth


def without_bracketed(text: str) -> str:
    """`text` as the reference has it for other ears: brackets that close on their line and marked
    thinking removed, lines trimmed, empty ones left out."""
    lines = (_unbracketed(line).strip() for line in without_closed(text).split("\n") if line)
    return "\n".join(line for line in lines if line)


def _unbracketed(line: str) -> str:
    """A line without what stands between a bracket and the next one that closes."""
    pieces, place = [], 0
    while (start := line.find("[", place)) >= 0 and (end := line.find("]", start)) >= 0:
        pieces.append(line[place:start])
        place = end + 1
    return "".join([*pieces, line[place:]])


def without_closed(text: str) -> str:
    """`text` without thinking between marks, as far as it closes, in the published writing."""
    return "".join(_unmarked(text, _OPENING, _CLOSINGS, hide_rest=False))


def without_marked(text: str) -> str:
    """`text` without thinking between marks, in any case of letters; one that never closes hides
    the rest, as a bracket does."""
    return "".join(_unmarked(text, _ANY_OPENING, _ANY_CLOSINGS, hide_rest=True))


def _unmarked(
    text: str, opening: re.Pattern[str], closings: Mapping[str, re.Pattern[str]], hide_rest: bool
) -> Iterator[str]:
    """The pieces of `text` outside marks; a kind that closes nowhere is looked for once."""
    place, endless = 0, set[str]()
    for mark in opening.finditer(text):
        kind = mark[1].lower()
        if mark.start() < place or kind in endless:
            continue
        closing = closings[kind].search(text, mark.end())
        if closing is not None or hide_rest:
            yield text[place : mark.start()]
            place = len(text) if closing is None else closing.end()
        else:
            endless.add(kind)
    yield text[place:]


def with_label(text: str, name: str) -> str:
    """`text` behind its speaker's name, unless a line of it has it; nothing stays nothing."""
    marks = (f"{name}:", f"{name}\uff1a")
    if not text or any(line.strip().startswith(marks) for line in text.split("\n")):
        return text
    return f"{name}: {text}"


def _without_labels(speech: str, name: str) -> str:
    """What follows the speaker's own name and a colon, however often they stand there."""
    place, label = 0, _label(name)
    while name and (mark := label.match(speech, place)):
        place = mark.end()
    return speech[place:]


def _label(name: str) -> re.Pattern[str]:
    """A speaker's name in front of its words."""
    return re.compile(rf"[*_]*{re.escape(name)}[*_]*\s*[:\uff1a][*_]*\s*")
