"""Coaching a simulated user: what a coach is shown, what rules can say, and scripted users.

Some judges saw the real user's messages. Of what they wrote a coach gets the sentences that repeat
none of them, and the coach's text is checked for them once more before an actor reads it. The
scripts (an obvious assistant, and verdicts) are for self-checks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from soulkit.judge.leaks import LeakView
from soulkit.tasks.kit.coaching import fenced_remarks, first_safe_lesson, without_secrets
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.mirrorbench.conversations import ASSISTANT
from soulkit.types import Line, Verdict

TEXTS = Texts(__file__)
LONG_MESSAGE = 60
"""Mean words of a message above which hardly anybody at a keyboard writes."""
LEFT_OUT = "(something is left out here)"
"""What a coach reads where an assistant repeated the real user."""
LONGEST_REMARK = 4_000
"""Characters of a judge's remark that a coach hears; it was asked for two or three sentences."""
_LAYOUT = re.compile(r"^[^\S\n]*+(?:[-*#]|\d++[.)])\s|\*\*", re.MULTILINE)
_SERVICE = re.compile(
    r"\b(?:certainly|delighted|happy to help|as an ai|comprehensive|let me know if|feel free)\b",
    re.IGNORECASE,
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
    hidden = _hiding(view, view.public)
    return fenced_remarks(
        text for remark in remarks(verdicts)
        if (text := without_secrets(remark[:LONGEST_REMARK], hidden))
    )  # fmt: skip


def shown_attempt(lines: Sequence[Line], view: LeakView) -> list[Line]:
    """An attempt whose assistant knows the record, without its sentences that repeat what the real
    user wrote and the simulated one had not said until then."""
    public = view.public
    shown: list[Line] = []
    for line in lines:
        if line.seat == ASSISTANT:
            text = without_secrets(line.text, _hiding(view, public))
            complete = text == without_secrets(line.text, LeakView())
            shown.append(line if complete else Line(ASSISTANT, f"{text} {LEFT_OUT}".strip()))
        else:
            public = f"{public}\n{line.text}"
            shown.append(line)
    return shown


def _hiding(view: LeakView, public: str) -> LeakView:
    """What no sentence may repeat: the real user's words, held as strictly as a secret."""
    return LeakView(question=view.question, private=(view.reference,), public=public)


def style_lesson(texts: Sequence[str] | None, view: LeakView) -> str | None:
    """What rules can say about these messages, or in general (None); the fullest safe version."""
    seen = list(_seen(texts)) if texts is not None else []
    general: Sequence[str] = TEXTS["lessons"]
    return first_safe_lesson(((*seen, *general), seen, general), view)


def _seen(texts: Sequence[str]) -> Iterator[str]:
    remarks: Mapping[str, str] = TEXTS["remarks"]
    written = [text for text in texts if text]
    if len(written) < len(texts):
        yield remarks["silent"]
    if not written:
        return
    words = fmean(len(text.split()) for text in written)
    if words > LONG_MESSAGE:
        yield remarks["long"].format(words=words)
    if any(map(_LAYOUT.search, written)):
        yield remarks["layout"]
    if any(map(_SERVICE.search, written)):
        yield remarks["service"]
    if len(set(written)) < len(written):
        yield remarks["twice"]


def user_verdict(form: str, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: the simulated user is a person, or is none."""
    if form == "":
        return "- as scripted"
    why, yes, similar = "as scripted", "YES" if perfect else "NO", float(perfect)
    verdicts: dict[str, dict[str, Any]] = {
        "Similarity": {"reasoning": why, "score": similar},
        "LooseSimilarity": {"reasoning": why, "score": similar},
        "Preference1": {"reasoning": why, "verdict": "A" if perfect else "B"},
        "Preference2": {"reasoning": why, "verdict": "B" if perfect else "A"},
        "Rubric": {"reasoning": why, "verdict": yes},
        "Revision": {"critique": why, "explanation": why, "verdict": yes},
    }
    return json.dumps(verdicts[form]) if form in verdicts else None
