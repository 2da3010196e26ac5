"""Feedback without leaks: the judge's remarks that a coach may read, and rule-based lessons.

A judge often knows more than the actor: the partner's secret, or the person's real reply. The coach
therefore gets only the judge's sentences that repeat none of this (`without_secrets`):

    “It is Omar's rent that decides it. Maya never asked why he hesitates.”  →  the second sentence

Rules look at the actor's own texts. With short options, a harmless word in a lesson may occur in
only one option, so `first_safe_lesson` picks the most complete lesson that leaks nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soulkit.judge.leaks import LeakView, check_leak, echoes_private, echoes_reference, tokens
from soulkit.judge.verdict import fence
from soulkit.types import Feedback, Score


def first_safe_lesson(lessons: Iterable[Iterable[str]], view: LeakView) -> str | None:
    """The first lesson (its sentences joined) that leaks nothing in `view`; None if all of them
    leak."""
    for sentences in lessons:
        text = " ".join(sentence for sentence in sentences if sentence)
        if text and not check_leak(Feedback(text=text, author="symbolic"), view).leak:
            return text
    return None


# -- judges' remarks -------------------------------------------------------------------------------


def first_verdict(score: Score, purpose: str) -> Mapping[str, Any]:
    """The fields of the first readable verdict on `purpose`; {} if there is none."""
    verdicts = (v.said for v in score.verdicts if v.purpose == purpose and v.said)
    return next(verdicts, {})


def judged_dimensions(score: Score) -> tuple[str, ...]:
    """The dimensions that the judges rated: the parts of their verdicts, or the purposes of the
    questions if no verdict has parts.

    A part counts if its value in the verdict is an object, such as score and reasons.
    """
    readable = [verdict for verdict in score.verdicts if verdict.said]
    parts = [name for v in readable for name, part in v.said.items() if isinstance(part, Mapping)]
    return tuple(dict.fromkeys(parts or [verdict.purpose for verdict in readable]))


def without_secrets(text: str, view: LeakView, *, ends: str = ".!?") -> str:
    """The sentences in a judge's text that repeat no secret in `view` (see `repeats_secret`).

    Sentences end at one of `ends` or at a line break.
    """
    sentences = re.split(rf"(?<=[{ends}])\s+|\n+", text)
    return " ".join(s for s in sentences if s.strip() and not repeats_secret(s, view))


def remarks_without_secrets(
    remarks: Iterable[tuple[str, str]], view: LeakView, *, ends: str = ".!?"
) -> str:
    """Judges' remarks (title, text) for a coach's template: fenced, one line each, without the
    sentences that repeat a secret in `view`."""
    safe = ((title, without_secrets(text, view, ends=ends)) for title, text in remarks)
    return fenced_remarks(f"{title}: {text}" for title, text in safe if text)


def fenced_remarks(lines: Iterable[str]) -> str:
    """Remarks for a coach's template, without duplicates; empty if there are none."""
    text = "\n".join(dict.fromkeys(lines))
    return fence(text, "remarks") if text else ""


def repeats_secret(sentence: str, view: LeakView) -> bool:
    """Whether a sentence repeats a private text, or what the real person said."""
    public = f"{view.question}\n{view.public}"
    references = [text for text in (view.reference, *view.reference_parts) if text]
    return any(echoes_private(sentence, text, public) for text in view.secrets) or any(
        echoes_reference(sentence, text, public) for text in references
    )


# -- rules about the actor's texts -----------------------------------------------------------------


def repeated_texts(texts: Sequence[str]) -> list[int]:
    """Indices of the texts that occur more than once, ignoring case, punctuation and endings."""
    keys = [" ".join(tokens(text)) for text in texts]
    return [place for place, key in enumerate(keys) if key and keys.count(key) > 1]


def longest_text(texts: Sequence[str]) -> tuple[int, int]:
    """(index, words) of the text with the most words; (-1, 0) if there is none."""
    counts = [len(text.split()) for text in texts]
    most = max(counts, default=0)
    return (counts.index(most), most) if most else (-1, 0)
