"""The published score: flaws by dimension, weighed by severity, with a tolerance for length.

A critic lists what is wrong with a scene, dimension by dimension, each flaw with a severity from 1
to 5; something that repeats itself may weigh up to 10. With n messages of characters

    score of a dimension = 100 − 5 · (Σ severity − 0.3 · n), kept within 0 and 100
    value of a scene     = mean of the four / 100

so that a message may cost 0.3 and go unpunished. Thirteen messages with severities of 10, 10, 17
and 12 make 69.5, 69.5, 34.5 and 59.5, and 0.5825.

Source: CoSER (Wang et al. 2025), given-circumstance acting, and its published evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import Field

from soulkit.judge.structured import VerdictShape

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
        return super().severity + sum(one.severity for one in self.repetitions)


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
