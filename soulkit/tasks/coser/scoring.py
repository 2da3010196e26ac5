"""Scores of a scene: weighed flaws (`paper`), four marks and plain overlap (`reference`).

`paper`, as published: a critic lists what is wrong with a scene, dimension by dimension, each flaw
with a severity from 1 to 5; something that repeats itself may weigh up to 10. With n messages of
characters

    score of a dimension = 100 − 5 · (Σ severity − 0.3 · n), kept within 0 and 100
    value of a scene     = mean of the four / 100

so that a message may cost 0.3 and go unpunished. Thirteen messages with severities of 10, 10, 17
and 12 make 69.5, 69.5, 34.5 and 59.5, and 0.5825. Source: CoSER (Wang et al. 2025),
given-circumstance acting, and its published evaluation.

`reference`: four marks from 1 to 10, given in one verdict: mark 1 → 0.0, 5 → 44.4, 7 → 66.7,
10 → 100.0; value = mean / 100. BLEU and ROUGE-L are those of the reference implementation without
optional packages. Words are runs of letters, digits and underscores in small letters. BLEU takes
orders 1 to 4, fewer for a text that is shorter, and is 0 where any order has no match; ROUGE-L is
the F1 of the longest common subsequence. On the recorded side each message bears its speaker's
name, on the played side none does, which depresses both: `paper` compares the messages alone.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from soulkit.judge.structured import VerdictShape
from soulkit.metrics.text import common_length

TOLERANCE = 0.3
"""Severity that every message of a character is allowed."""
POINTS = 5.0
"""What a point of severity costs, of 100."""


@dataclass(frozen=True, slots=True)
class Aspect:
    """One of the four dimensions: its published name, and the kinds of flaws that belong to it."""

    title: str
    kinds: tuple[str, ...]


ASPECTS: dict[str, Aspect] = {
    "storyline_consistency": Aspect("Storyline Consistency", ("Storyline Consistency",)),
    "anthropomorphism": Aspect(
        "Anthropomorphism",
        ("Self-identity", "Emotional Depth", "Persona Coherence", "Social Interaction"),
    ),
    "character_fidelity": Aspect(
        "Character Fidelity",
        ("Character Language", "Knowledge & Background", "Personality & Behavior",
         "Relationship & Social Status"),
    ),
    "storyline_quality": Aspect(
        "Storyline Quality", ("Flow & Progression", "Logical Consistency")
    ),
}  # fmt: skip
"""Slug (the purpose of its question, the name of its metric) → dimension, in published order."""


class _Flaw(VerdictShape):
    instance: str
    type: str
    severity: int = Field(ge=1, le=5)


class _Repetition(VerdictShape):
    instance: str
    severity: int = Field(ge=1, le=10)


class Flaws(VerdictShape):
    """What a critic lists on one dimension."""

    reasoning: str
    flaws: tuple[_Flaw, ...]

    @property
    def severity(self) -> int:
        """All severities together."""
        return sum(flaw.severity for flaw in self.flaws)


class FlawsAndRepetitions(Flaws):
    """The same on a dimension that looks for repetition, too."""

    repetitions: tuple[_Repetition, ...]

    @property
    def severity(self) -> int:
        return super().severity + sum(repetition.severity for repetition in self.repetitions)


def flaw_shape(slug: str) -> type[Flaws]:
    """The verdict that is asked for on a dimension."""
    return FlawsAndRepetitions if slug == "storyline_quality" else Flaws


def flaw_score(severity: float, messages: int) -> float:
    """Severities and messages of characters → 0 to 100."""
    return max(0.0, min(100.0, 100.0 - POINTS * (severity - TOLERANCE * messages)))


def scene_value(scores: Mapping[str, float]) -> float:
    """The mean of the four dimensions' scores (0 to 100), as a share."""
    return mean_share([scores[slug] for slug in ASPECTS])


def mean_share(scores: Iterable[float]) -> float:
    """The mean of scores out of 100, as a share."""
    values = list(scores)
    return sum(values) / len(values) / 100


LOWEST, HIGHEST = 1, 10


class _Mark(VerdictShape):
    reasoning: str
    score: int = Field(ge=LOWEST, le=HIGHEST)


class Marks(VerdictShape):
    """A judge's four marks, under the published names."""

    storyline_consistency: _Mark = Field(alias="Storyline Consistency")
    character_fidelity: _Mark = Field(alias="Character Fidelity")
    anthropomorphism: _Mark = Field(alias="Anthropomorphism")
    storyline_quality: _Mark = Field(alias="Storyline Quality")

    def marks(self) -> dict[str, int]:
        """Dimension → its mark."""
        return {slug: getattr(self, slug).score for slug in ASPECTS}

    def reasons(self) -> dict[str, str]:
        """Dimension → why."""
        return {slug: getattr(self, slug).reasoning for slug in ASPECTS}


def anchored(mark: float) -> float:
    """A mark from 1 to 10 as points from 0 to 100, to one decimal."""
    return round((max(LOWEST, min(HIGHEST, mark)) - 1) * 100 / 9, 1)


MOST_ORDERS = 4


def plain_bleu(reference: str, hypothesis: str) -> float:
    """Unsmoothed BLEU of one text against another, 0 to 1; 0 where either is empty."""
    gold, words = _words(reference), _words(hypothesis)
    if not gold or not words:
        return 0.0
    orders = range(1, min(MOST_ORDERS, len(words)) + 1)
    shares = [_precision(gold, words, order) for order in orders]
    if not all(shares):
        return 0.0
    brevity = 1.0 if len(words) >= len(gold) else math.exp(1 - len(gold) / len(words))
    return brevity * math.exp(sum(map(math.log, shares)) / len(shares))


def plain_rouge_l(reference: str, hypothesis: str) -> float:
    """F1 of the longest common subsequence of words, 0 to 1; 0 where either is empty."""
    gold, words = _words(reference), _words(hypothesis)
    common = common_length(gold, words)
    if not common:
        return 0.0
    precision, recall = common / len(words), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _precision(gold: Sequence[str], words: Sequence[str], order: int) -> float:
    total = len(words) - order + 1
    counts = Counter(tuple(words[i : i + order]) for i in range(total))
    limits = Counter(tuple(gold[i : i + order]) for i in range(len(gold) - order + 1))
    return sum(min(count, limits[gram]) for gram, count in counts.items()) / total
