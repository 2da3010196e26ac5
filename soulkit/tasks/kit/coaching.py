"""Feedback that gives nothing away: what a coach may read of a judge's words, and rules' lessons.

A judge often knows more than the player: the other seat's secret, or what a person really wrote. A
coach gets the sentences of the judge that repeat nothing of it (`without_secrets`):

    “It is Omar's rent that decides it. Maya never asked why he hesitates.”  →  the second sentence

Rules look at the player's own texts. Where options are short, an innocent word of a lesson can be a
word of one option alone, so the fullest lesson that leaks nothing is given (`first_safe_lesson`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from soulkit.judge.leaks import LeakView, check_leak, echoes_private, echoes_reference, tokens
from soulkit.judge.verdict import fence
from soulkit.types import Feedback, Score


def first_safe_lesson(lessons: Iterable[Iterable[str]], view: LeakView) -> str | None:
    """The first lesson, its sentences joined, that leaks nothing of `view`; None when all do."""
    for sentences in lessons:
        text = " ".join(sentence for sentence in sentences if sentence)
        if text and not check_leak(Feedback(text=text, author="symbolic"), view).leak:
            return text
    return None


# -- what judges wrote -----------------------------------------------------------------------------


def first_verdict(score: Score, purpose: str) -> Mapping[str, Any]:
    """The fields of the first readable verdict on `purpose`; empty without one."""
    verdicts = (v.said for v in score.verdicts if v.purpose == purpose and v.said)
    return next(verdicts, {})


def judged_dimensions(score: Score) -> tuple[str, ...]:
    """What the judges gave an opinion on: the rated parts of their verdicts, else the questions.

    A part is rated where a verdict holds an object under its name, score and reasons for instance.
    """
    readable = [verdict for verdict in score.verdicts if verdict.said]
    parts = [name for v in readable for name, part in v.said.items() if isinstance(part, Mapping)]
    return tuple(dict.fromkeys(parts or [verdict.purpose for verdict in readable]))


def without_secrets(text: str, view: LeakView, *, ends: str = ".!?") -> str:
    """The sentences of a judge's text that repeat nothing of `view`.

    Of a view count its private texts, its reference, the reference's parts, and what is public.
    Sentences stop at one of `ends` or at a line break.
    """
    sentences = re.split(rf"(?<=[{ends}])\s+|\n+", text)
    return " ".join(s for s in sentences if s.strip() and not repeats_secret(s, view))


def remarks_without_secrets(
    remarks: Iterable[tuple[str, str]], view: LeakView, *, ends: str = ".!?"
) -> str:
    """What judges wrote, by title, as a coach's template shows it: fenced, a line each, without
    what repeats something of `view`."""
    safe = ((title, without_secrets(text, view, ends=ends)) for title, text in remarks)
    return fenced_remarks(f"{title}: {text}" for title, text in safe if text)


def fenced_remarks(lines: Iterable[str]) -> str:
    """Remarks as a coach's template shows them: each once; empty without any."""
    text = "\n".join(dict.fromkeys(lines))
    return fence(text, "remarks") if text else ""


def repeats_secret(sentence: str, view: LeakView) -> bool:
    """Whether a sentence repeats a private text, or what a human said in the actor's place."""
    public = f"{view.question}\n{view.public}"
    references = [text for text in (view.reference, *view.reference_parts) if text]
    return any(echoes_private(sentence, text, public) for text in view.secrets) or any(
        echoes_reference(sentence, text, public) for text in references
    )


# -- rules about the player's texts ----------------------------------------------------------------


def repeated_texts(texts: Sequence[str]) -> list[int]:
    """The places of the texts that stand there more than once; case, marks and endings aside."""
    keys = [" ".join(tokens(text)) for text in texts]
    return [place for place, key in enumerate(keys) if key and keys.count(key) > 1]


def longest_text(texts: Sequence[str]) -> tuple[int, int]:
    """(place, words) of the text with the most words; (-1, 0) where there is none."""
    counts = [len(text.split()) for text in texts]
    most = max(counts, default=0)
    return (counts.index(most), most) if most else (-1, 0)
