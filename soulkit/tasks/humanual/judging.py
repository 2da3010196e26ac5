"""Humanual's metrics, and feedback from a verdict: six aspects of a person, lengths, shared words.

    value = clip(mean of the six · length factor, 0, 1)
    length factor = 1 if the person wrote fewer than 20 words
                  = min(1, words / (0.3 · theirs)) otherwise

The published factor does not penalise long texts; the two-sided one decreases once a text has more
than 1 / 0.3 times the person's words (at least twenty).

The judge has read the person's text; the coach has not, and gets only the verdict's sentences that
repeat nothing from it: “Quotes ‘never again by ferry’. The anger is missing.” → the second.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from soulkit.judge.leaks import echoes_private, echoes_reference
from soulkit.judge.structured import VerdictShape, dimension_shape, rated_part
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import Score

TEXTS = Texts(__file__)

AXES = ("stance", "emotion", "belief", "value", "goal", "communication")
"""The aspects of a person that a judge compares, in the order of its answer."""
FEWEST_WORDS, LEAST_SHARE = 20, 0.3
"""The reply to a shorter text may have any length; other replies need this share of its words."""
_WORD = re.compile(r"\w+")


# -- verdicts ------------------------------------------------------------------------------------


SixSides = dimension_shape(
    "SixSides", "A judge's six scores, each from 0 to 1.",
    dict.fromkeys(AXES, rated_part("_Side", float, "thought", (0, 1))),
)  # fmt: skip
LooseSixSides = dimension_shape(
    "LooseSixSides", "The same under `reference`, where a score may be any number.",
    dict.fromkeys(AXES, rated_part("_AnySide", float, "thought")),
)  # fmt: skip


class Coverage(VerdictShape):
    """What the reference's second judge says of a refined reply: one number."""

    key_points: str
    thought: str
    score: float


# -- arithmetic ----------------------------------------------------------------------------------


def clip_share(number: float) -> float:
    """`number` clipped to [0, 1]; NaN becomes 1, so readers must reject it."""
    return max(0.0, min(1.0, number))


def sides_mean(scores: Mapping[str, float]) -> float:
    """The mean of the six scores."""
    return sum(scores[axis] for axis in AXES) / len(AXES)


def word_tokens(text: str | None) -> list[str]:
    """The words of a text, as counted for lengths and F1."""
    return _WORD.findall((text or "").lower())


def length_factor(
    generated: str | None, reference: str | None, min_ref_tokens: int = FEWEST_WORDS,
    target_ratio: float = LEAST_SHARE,
) -> float:  # fmt: skip
    """The length factor, in [0, 1]; it reduces only the score of short texts."""
    length, measure = len(word_tokens(generated)), len(word_tokens(reference))
    if measure < min_ref_tokens or not measure:
        return 1.0
    return min(1.0, length / (target_ratio * measure))


def two_sided_factor(generated: str | None, reference: str | None) -> float:
    """The length factor, in [0, 1], that also reduces the score of long texts."""
    length, measure = len(word_tokens(generated)), len(word_tokens(reference))
    most = max(measure, FEWEST_WORDS) / LEAST_SHARE
    return min(length_factor(generated, reference), most / length if length else 1.0)


def lexical_f1(generated: str | None, reference: str | None) -> float:
    """F1 of the words of both texts, in [0, 1], counting repetitions; 0 if either has none."""
    words, measure = Counter(word_tokens(generated)), Counter(word_tokens(reference))
    shared = (words & measure).total()
    if not shared:
        return 0.0
    precision, recall = shared / words.total(), shared / measure.total()
    return 2 * precision * recall / (precision + recall)


RUBRIC = ("stance score", "emotion score", "belief score", "value score", "goal score",
          "communication score", "length factor")  # fmt: skip
"""Terms of the judge's question: feedback that uses them is about the judge."""
WEAK = 0.5
"""An aspect with a lower score gets a lesson."""
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")


def judge_remarks(score: Score, original: str, public: str) -> str:
    """The first readable judge's thoughts, one line per aspect, without quotations of the
    original."""
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
    """Aspect → (thought, score) of the first readable judge; empty without one."""
    for verdict in score.verdicts:
        if verdict.purpose == "score" and verdict.said:
            sides = {axis: verdict.said[axis] for axis in AXES}
            return {
                axis: (str(side["thought"]), float(side["score"])) for axis, side in sides.items()
            }
    return {}


def person_lessons(score: Score | None) -> Iterator[tuple[str, ...]]:
    """Rule-based lessons, the most complete first; without a score, general ones."""
    remarks = tuple(_remarks(score)) if score is not None else ()
    weak = tuple(TEXTS["lessons"][axis] for axis in _weakest(score)) if score is not None else ()
    yield (*remarks, *(weak or TEXTS["general_lessons"]))
    yield (*remarks, *TEXTS["general_lessons"])
    yield TEXTS["general_lessons"]
    yield (TEXTS["general_lessons"][0],)


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
    """Whether the score of a reply was reduced because it is short."""
    factor = score.metrics.get("length_factor")
    return bool(score.verdicts) and factor is not None and factor < 1


def is_long(score: Score) -> bool:
    """Whether the two-sided factor would have reduced the score of a long reply."""
    lower, both = score.metrics.get("length_factor"), score.metrics.get("two_sided_factor")
    return lower == 1 and both is not None and both < 1


def _weakest(score: Score) -> list[str]:
    numbers = {axis: score.metrics.get(f"axis/{axis}") for axis in AXES}
    weak = [(number, axis) for axis, number in numbers.items()
            if number is not None and number < WEAK]  # fmt: skip
    return [axis for _, axis in sorted(weak, key=lambda pair: pair[0])[:2]]
