"""Humanual's numbers: six sides of a person, how long a text is beside another, shared words.

    value = clip(mean of the six · length factor, 0, 1)

    length factor = 1                                  the person wrote fewer than 20 words
                  = min(1, words / (0.3 · theirs))      else

Words are runs of letters, digits and underscores, in lower case. The published factor knows no
text that is too long; the two-sided one beside it falls as soon as a text has more than 1 / 0.3
times the words (of twenty at least) of the person's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from pydantic import Field

from soulkit.judge.structured import VerdictShape

AXES = ("stance", "emotion", "belief", "value", "goal", "communication")
"""The sides of a person that a judge compares, in the order of its answer."""
FEWEST_WORDS, LEAST_SHARE = 20, 0.3
"""A text of fewer words may be answered by one of any length; of others so much is asked for."""
_WORD = re.compile(r"\w+")


# -- verdicts ------------------------------------------------------------------------------------


class _Side(VerdictShape):
    thought: str
    score: float = Field(ge=0, le=1)


class _AnySide(VerdictShape):
    thought: str
    score: float


class SixSides(VerdictShape):
    """A judge's six scores, each from 0 to 1."""

    stance: _Side
    emotion: _Side
    belief: _Side
    value: _Side
    goal: _Side
    communication: _Side


class LooseSixSides(VerdictShape):
    """The same under `reference`, where a score may be any number."""

    stance: _AnySide
    emotion: _AnySide
    belief: _AnySide
    value: _AnySide
    goal: _AnySide
    communication: _AnySide


class Coverage(VerdictShape):
    """What the reference's second judge says of a refined reply: one number."""

    key_points: str
    thought: str
    score: float


# -- arithmetic ----------------------------------------------------------------------------------


def clip_share(number: float) -> float:
    """`number`, moved into [0, 1]; NaN comes out as 1, so no reader may let it through."""
    return max(0.0, min(1.0, number))


def sides_mean(scores: Mapping[str, float]) -> float:
    """Plain mean of the six scores."""
    return sum(scores[axis] for axis in AXES) / len(AXES)


def word_tokens(text: str | None) -> list[str]:
    """The words that lengths and F1 count."""
    return _WORD.findall((text or "").lower())


def length_factor(
    generated: str | None, reference: str | None, min_ref_tokens: int = FEWEST_WORDS,
    target_ratio: float = LEAST_SHARE,
) -> float:  # fmt: skip
    """What a text keeps of its score for its length, in [0, 1]; only short ones lose any."""
    length, measure = len(word_tokens(generated)), len(word_tokens(reference))
    if measure < min_ref_tokens or not measure:
        return 1.0
    return min(1.0, length / (target_ratio * measure))


def two_sided_factor(generated: str | None, reference: str | None) -> float:
    """The same in [0, 1], where long texts lose as well."""
    length, measure = len(word_tokens(generated)), len(word_tokens(reference))
    most = max(measure, FEWEST_WORDS) / LEAST_SHARE
    return min(length_factor(generated, reference), most / length if length else 1.0)


def lexical_f1(generated: str | None, reference: str | None) -> float:
    """F1 of the words of both, in [0, 1], repeated words counted; 0 when either has none."""
    words, measure = Counter(word_tokens(generated)), Counter(word_tokens(reference))
    shared = (words & measure).total()
    if not shared:
        return 0.0
    precision, recall = shared / words.total(), shared / measure.total()
    return 2 * precision * recall / (precision + recall)
