"""The reference implementation's score: four marks from 1 to 10, given in one verdict.

mark 1 → 0.0, 5 → 44.4, 7 → 66.7, 10 → 100.0        value = mean / 100
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from soulkit.judge.structured import VerdictShape
from soulkit.tasks.coser.flaws import ASPECTS, mean_share

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


def anchored_value(points: Mapping[str, float]) -> float:
    """The mean of the four dimensions' points, as a share."""
    return mean_share(points[slug] for slug in ASPECTS)
