"""Sotopia's seven dimensions: ranges, weights, means, verdict shapes.

Raw scores are integers, each on a range of its own; two of them (secret, social_rules) only take
away. One number comes out in two ways:

    average  = Σ raw / 7                                  −4.286 … 5.714
    weighted = Σ weight · (raw − low) / (high − low) / 6        0 … 1

`paper` pays average / 10 to every episode alike. `reference` pays a draft average / 10 and a
refined episode `weighted`, reads a missing score as the middle of its range, and lets the auditor
change a number that nobody learns from.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from soulkit.judge.coach import auditable_texts
from soulkit.judge.structured import VerdictShape
from soulkit.tasks.sotopia.actions import KINDS_WITH_TEXT, Action
from soulkit.types import Kind


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension: its range, its weight in `weighted`, and how much coaching it deserves."""

    low: int
    high: int
    weight: float
    importance: str

    def clamped(self, raw: int) -> int:
        return max(self.low, min(self.high, raw))

    def normal(self, raw: float) -> float:
        """`raw` as a share of the range; outside [0, 1] when it is outside the range."""
        return (raw - self.low) / (self.high - self.low)


DIMENSIONS: dict[str, Dimension] = {
    "believability": Dimension(0, 10, 0.5, "medium"),
    "relationship": Dimension(-5, 5, 1.0, "high"),
    "knowledge": Dimension(0, 10, 1.0, "high"),
    "secret": Dimension(-10, 0, 0.5, "medium"),
    "social_rules": Dimension(-10, 0, 0.5, "medium"),
    "financial_and_material_benefits": Dimension(-5, 5, 0.5, "medium"),
    "goal": Dimension(0, 10, 2.0, "critical"),
}
TOTAL_WEIGHT = sum(dimension.weight for dimension in DIMENSIONS.values())


def average(raw: Mapping[str, float]) -> float:
    """Plain mean of the seven raw scores."""
    return sum(raw[name] for name in DIMENSIONS) / len(DIMENSIONS)


def weighted(raw: Mapping[str, float]) -> float:
    """Weighted mean of the seven scores as shares of their ranges, 0 to 1 within them."""
    parts = (d.weight * d.normal(raw[name]) for name, d in DIMENSIONS.items())
    return sum(parts) / TOTAL_WEIGHT


# -- verdicts ------------------------------------------------------------------------------------


class _Gain(VerdictShape):
    reasoning: str
    score: int = Field(ge=0, le=10)


class _Change(VerdictShape):
    reasoning: str
    score: int = Field(ge=-5, le=5)


class _Loss(VerdictShape):
    reasoning: str
    score: int = Field(ge=-10, le=0)


class _Any(VerdictShape):
    reasoning: str
    score: int


class _Rated(VerdictShape):
    def raw(self) -> dict[str, int]:
        """Dimension → score, moved into its range."""
        return {name: d.clamped(getattr(self, name).score) for name, d in DIMENSIONS.items()}


class Ratings(_Rated):
    """A judge's seven scores, each within its range."""

    believability: _Gain
    relationship: _Change
    knowledge: _Gain
    secret: _Loss
    social_rules: _Loss
    financial_and_material_benefits: _Change
    goal: _Gain


class LooseRatings(_Rated):
    """The same under `reference`, where a score outside its range is moved to its end."""

    believability: _Any
    relationship: _Any
    knowledge: _Any
    secret: _Any
    social_rules: _Any
    financial_and_material_benefits: _Any
    goal: _Any


# -- the reference -------------------------------------------------------------------------------

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.IGNORECASE | re.DOTALL)


def audited_lines(actions: Sequence[Action]) -> list[str]:
    """The actor's arguments that the reference's auditor gets to see.

    What starts like JSON, a list or a call (`word (`) is left out, and so are leaving, silence and
    thinking in whatever case its mark is written.
    """
    spoken = (_THOUGHT.sub("", a.argument) for a in actions if a.kind in KINDS_WITH_TEXT)
    return auditable_texts(spoken, "reference")


def reference_reward(
    raw: Mapping[str, float], risk: str, *, is_train: bool, kind: Kind, thought_aloud: bool
) -> tuple[float, float]:
    """(the logged weighted share, what the learner gets) for clamped raw scores."""
    share = weighted(raw) / ({"medium": 2, "high": 4}.get(risk, 1) if is_train else 1)
    badly_formed = is_train and thought_aloud
    if kind == "refined":
        reward = 0.0 if risk in ("medium", "high") else weighted(raw)
        return share, reward / 2 if badly_formed else reward
    return share, share / 2 if badly_formed else average(raw) / 10
