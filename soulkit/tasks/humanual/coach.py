"""Coaching whoever plays a person: what a model coach is shown, and what rules can say.

The judge has read what the person really wrote; the coach and the player have not. So of the
judge's thoughts the coach gets the sentences that repeat nothing of it, and rules speak of the
sides of a person in general.

    “Quotes ‘never again by ferry’. The anger is missing.”  →  the second sentence
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from soulkit.judge.leaks import echoes_private, echoes_reference
from soulkit.tasks.humanual.scores import AXES
from soulkit.types import Score

RUBRIC = ("stance score", "emotion score", "belief score", "value score", "goal score",
          "communication score", "length factor")  # fmt: skip
"""Words of the judge's question: whoever uses them speaks of the judge."""
WEAK = 0.5
"""A side below this deserves a lesson."""
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")

_LESSONS = {
    "stance": "Decide first whether this person is for or against, how firmly, and of what "
    "exactly; then say it of that.",
    "emotion": "Ask what this person feels here, how strongly and towards whom, and let it show.",
    "belief": "Look in the description for what this person takes people to be like, and write "
    "from there.",
    "value": "Ask which of the things at stake this person would count most, and take their side.",
    "goal": "Ask what this person wants to get done by writing at all, and do that.",
    "communication": "Look once more at how this person writes: how much, how they begin and end, "
    "how careful they are.",
}
_GENERAL = (
    "Be this person before you write: what do they make of it, what do they feel, what do they "
    "want, and how do they put things?",
    "Say one particular thing that only they would say rather than something anybody could.",
)


def judge_remarks(score: Score, original: str, public: str) -> str:
    """The first readable judge's thoughts, a line a side, without what repeats the original."""
    lines = []
    for axis, (thought, number) in thoughts(score).items():
        sentences = [
            sentence
            for sentence in _SENTENCE.split(thought)
            if not echoes_reference(sentence, original, public)
            and not echoes_private(sentence, original, public)
        ]
        lines.append(f"{axis} ({number:g}): {' '.join(sentences)}".rstrip(": "))
    return "\n".join(lines)


def thoughts(score: Score) -> dict[str, tuple[str, float]]:
    """Side → (thought, score) of the first judge that could be read; empty without one."""
    for verdict in score.verdicts:
        if verdict.purpose == "score" and verdict.said:
            sides = {axis: verdict.said[axis] for axis in AXES}
            return {
                axis: (str(side["thought"]), float(side["score"])) for axis, side in sides.items()
            }
    return {}


def person_lessons(score: Score | None) -> Iterator[tuple[str, ...]]:
    """Lessons by rules, the fullest first; without a score what holds for every text."""
    remarks = tuple(_remarks(score)) if score is not None else ()
    weak = tuple(_LESSONS[axis] for axis in _weakest(score)) if score is not None else ()
    yield (*remarks, *(weak or _GENERAL))
    yield (*remarks, *_GENERAL)
    yield _GENERAL
    yield (_GENERAL[0],)


def _remarks(score: Score) -> Iterator[str]:
    if score.status == "empty":
        yield "Nothing was written; this person writes something."
    elif score.status in ("salvaged", "truncated"):
        yield "Write <response>, the comment, </response>, and nothing around it."
    if is_short(score):
        yield "It is far too short for this person."
    elif is_long(score):
        yield "It is far too long for this person."


def is_short(score: Score) -> bool:
    """Whether a reply lost for being short."""
    factor = score.metrics.get("length_factor")
    return bool(score.verdicts) and factor is not None and factor < 1


def is_long(score: Score) -> bool:
    """Whether a reply would have lost for being long."""
    lower, both = score.metrics.get("length_factor"), score.metrics.get("two_sided_factor")
    return lower == 1 and both is not None and both < 1


def _weakest(score: Score) -> list[str]:
    """The two sides with the lowest scores, of those that are weak."""
    numbers = {axis: score.metrics.get(f"axis/{axis}") for axis in AXES}
    weak = [(number, axis) for axis, number in numbers.items()
            if number is not None and number < WEAK]  # fmt: skip
    return [axis for _, axis in sorted(weak, key=lambda pair: pair[0])[:2]]
