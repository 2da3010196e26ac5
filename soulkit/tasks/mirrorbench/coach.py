"""Coaching a simulated user: what a coach is shown, what rules can say, and scripted users.

Some judges saw the real user's messages. Of what they wrote a coach gets the sentences that repeat
none of them, and the coach's text is checked for them once more before an actor reads it. The
scripts (an obvious assistant, and verdicts) are for self-checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from soulkit.judge.leaks import LeakView, echoes_private
from soulkit.judge.quoting import fence
from soulkit.tasks.kit.coaching import first_safe_lesson
from soulkit.tasks.mirrorbench.conversations import ASSISTANT
from soulkit.types import Line, Verdict

LONG_MESSAGE = 60
"""Mean words of a message above which hardly anybody at a keyboard writes."""
LEFT_OUT = "(something is left out here)"
"""What a coach reads where an assistant repeated the real user."""
LONGEST_REMARK = 4_000
"""Characters of a judge's remark that a coach hears; it was asked for two or three sentences."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_LAYOUT = re.compile(r"^[^\S\n]*+(?:[-*#]|\d++[.)])\s|\*\*", re.MULTILINE)
_SERVICE = re.compile(
    r"\b(?:certainly|delighted|happy to help|as an ai|comprehensive|let me know if|feel free)\b",
    re.IGNORECASE,
)
_GENERAL = (
    "Write as somebody types who wants something: say what you are after, leave the rest unsaid,",
    "and answer the assistant's questions with as few words as they need.",
)


def remarks(verdicts: Sequence[Verdict]) -> list[str]:
    """What judges wrote about the simulated user, each remark once."""
    texts = [
        str(verdict.said[name])
        for verdict in verdicts
        for name in ("reasoning", "explanation")
        if name in verdict.said and not verdict.purpose.startswith("pairwise")
    ]
    return list(dict.fromkeys(texts))


def notes(verdicts: Sequence[Verdict], view: LeakView) -> str:
    """The judges' remarks for a coach, fenced, without sentences that repeat the real user."""
    texts = [_without_echoes(remark[:LONGEST_REMARK], view) for remark in remarks(verdicts)]
    lines = [text for text in texts if text]
    return fence("\n".join(lines), "remarks") if lines else ""


def shown_attempt(lines: Sequence[Line], view: LeakView) -> list[Line]:
    """An attempt whose assistant knows the record, without its sentences that repeat what the real
    user wrote and the simulated one had not said until then."""
    public = view.public
    shown: list[Line] = []
    for line in lines:
        if line.seat == ASSISTANT:
            text = _without_echoes(line.text, replace(view, public=public))
            whole = text.split() == line.text.split()
            shown.append(line if whole else Line(ASSISTANT, f"{text} {LEFT_OUT}".strip()))
        else:
            public = f"{public}\n{line.text}"
            shown.append(line)
    return shown


def _without_echoes(text: str, view: LeakView) -> str:
    """The sentences of a text that repeat nothing of the real user's."""
    public = f"{view.question}\n{view.public}"
    return " ".join(
        sentence for sentence in _SENTENCE.split(text)
        if sentence and not echoes_private(sentence, view.reference, public)
    )  # fmt: skip


def lesson(texts: Sequence[str] | None, view: LeakView) -> str | None:
    """What rules can say about these messages, or in general (None); the fullest safe version."""
    seen = list(_seen(texts)) if texts is not None else []
    return first_safe_lesson(((*seen, *_GENERAL), seen, _GENERAL), view)


def _seen(texts: Sequence[str]) -> Iterator[str]:
    written = [text for text in texts if text]
    if len(written) < len(texts):
        yield "In some turns you wrote nothing at all: a person would have answered."
    if not written:
        return
    words = fmean(len(text.split()) for text in written)
    if words > LONG_MESSAGE:
        yield f"Your messages run to {words:.0f} words; hardly anybody types that much."
    if any(map(_LAYOUT.search, written)):
        yield "Leave out lists, headings and bold type."
    if any(map(_SERVICE.search, written)):
        yield "You talk like the assistant; the one who asks has no service to offer."
    if len(set(written)) < len(written):
        yield "Do not send the same message twice."


HELPFUL = (
    "Certainly! I would be delighted to provide a comprehensive overview of my request:\n\n"
    "1. **Context**: my goal as a user.\n2. **Details**: all relevant aspects.\n\n"
    "Please let me know if you need any further clarification!"
)


def user_verdict(form: str, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: the simulated user is a person, or is none."""
    why, yes = "as scripted", "YES" if perfect else "NO"
    wins = {"Preference1": "A", "Preference2": "B"}
    loses = {"Preference1": "B", "Preference2": "A"}
    if form == "":
        return "- as scripted"
    if form in ("Similarity", "LooseSimilarity"):
        return json.dumps({"reasoning": why, "score": 1.0 if perfect else 0.0})
    if form in wins:
        return json.dumps({"reasoning": why, "verdict": (wins if perfect else loses)[form]})
    if form == "Rubric":
        return json.dumps({"reasoning": why, "verdict": yes})
    if form == "Revision":
        return json.dumps({"critique": why, "explanation": why, "verdict": yes})
    return None
