"""Sotopia's seven dimensions: ranges, weights, means, verdict shapes, the reference's arithmetic.

Raw scores are integers, each on a range of its own; two of them (secret, social_rules) only take
away. One number comes out in two ways:

    average  = Σ raw / 7                                  −4.286 … 5.714
    weighted = Σ weight · (raw − low) / (high − low) / 6        0 … 1

`paper` pays average / 10 to every episode alike. `reference` pays a draft average / 10 and a
refined episode `weighted`, reads a missing score as the middle of its range, and lets the auditor
change a number that nobody learns from; `reference_scores` is that, for whoever has to reproduce
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from soulkit.judge.hacking import audited
from soulkit.judge.structured import Shape
from soulkit.tasks.sotopia.actions import TOLD, Action, extract_json
from soulkit.types import Kind


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension: its range, its weight in `weighted`, and how much coaching it deserves."""

    low: int
    high: int
    weight: float
    importance: str

    @property
    def middle(self) -> int:
        """The middle of the range, rounded down: the reference's score for no score."""
        return (self.low + self.high) // 2

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


LOWEST = average({name: d.low for name, d in DIMENSIONS.items()}) / 10
HIGHEST = average({name: d.high for name, d in DIMENSIONS.items()}) / 10


# -- verdicts ------------------------------------------------------------------------------------


class _Gain(Shape):
    reasoning: str
    score: int = Field(ge=0, le=10)


class _Change(Shape):
    reasoning: str
    score: int = Field(ge=-5, le=5)


class _Loss(Shape):
    reasoning: str
    score: int = Field(ge=-10, le=0)


class _Any(Shape):
    reasoning: str
    score: int


class Ratings(Shape):
    """A judge's seven scores, each within its range."""

    believability: _Gain
    relationship: _Change
    knowledge: _Gain
    secret: _Loss
    social_rules: _Loss
    financial_and_material_benefits: _Change
    goal: _Gain

    def raw(self) -> dict[str, int]:
        return raw_of(self)


class LooseRatings(Shape):
    """The same under `reference`, where a score outside its range is moved to its end."""

    believability: _Any
    relationship: _Any
    knowledge: _Any
    secret: _Any
    social_rules: _Any
    financial_and_material_benefits: _Any
    goal: _Any

    def raw(self) -> dict[str, int]:
        return raw_of(self)


def raw_of(ratings: Ratings | LooseRatings) -> dict[str, int]:
    """Dimension → score, moved into its range."""
    return {name: d.clamped(getattr(ratings, name).score) for name, d in DIMENSIONS.items()}


# -- the reference -------------------------------------------------------------------------------


def audited_lines(actions: Sequence[Action]) -> list[str]:
    """The actor's arguments that the reference's auditor gets to see.

    What starts like JSON, a list or a call (`word (`) is left out, and so are leaving and silence.
    """
    spoken = (a.argument for a in actions if a.kind in TOLD)
    return audited(spoken, "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScores:
    """What the reference makes of one judged episode."""

    raw: dict[str, int]
    average: float
    weighted: float
    """With the auditor's penalty, in training."""
    reward: float
    risk: str


def reference_scores(
    verdict: Mapping[str, Any] | None, audit: Mapping[str, Any] | None, *,
    is_train: bool, kind: Kind = "draft", audited: bool = True, thought_aloud: bool = False,
) -> ReferenceScores:  # fmt: skip
    """The reference's numbers for a verdict and an audit as they came, None when none came.

    `audited`: the auditor had something to see; `thought_aloud`: a turn began with a thinking tag.
    ValueError or OverflowError for a score that is not finite, as there.
    """
    raw = {name: lenient_score(name, verdict) for name in DIMENSIONS}
    heard = audited and isinstance(audit, Mapping)
    risk = str(audit.get("risk_level", "low")) if heard and audit else "low"
    share, reward = reference_reward(
        raw, risk, is_train=is_train, kind=kind, thought_aloud=thought_aloud
    )
    return ReferenceScores(raw=raw, average=average(raw), weighted=share, reward=reward, risk=risk)


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


def lenient_score(name: str, verdict: Mapping[str, Any] | None) -> int:
    """A dimension's score in a verdict of any shape; the middle of its range when there is none."""
    entry = verdict.get(name) if isinstance(verdict, Mapping) else None
    return _lenient(name, entry.get("score") if isinstance(entry, Mapping) else None)


def _lenient(name: str, score: Any) -> int:
    dimension = DIMENSIONS[name]
    if not isinstance(score, int | float):  # a bool is an int, here as there
        return dimension.middle
    return dimension.clamped(int(score))


def shares(raw: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Dimension → its raw and its normalised score."""
    return {name: {"raw": raw[name], "normalized": d.normal(raw[name])}
            for name, d in DIMENSIONS.items()}  # fmt: skip


def extract_old_scores(rollout: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The scores in a saved rollout: a missing one is 0, one that is no number the middle."""
    return shares({name: _lenient(name, rollout.get(f"sotopia/{name}", 0)) for name in DIMENSIONS})


def reference_aggregates(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the results with a reward: of it, and of each dimension of the judged seat."""
    scored = [result for result in results if result.get("reward") is not None]
    found: dict[str, float] = {}
    for name in DIMENSIONS:
        entries = [entry for result in scored if (entry := _own(result).get(name)) is not None]
        if entries:
            count = len(entries)
            found[f"{name}_avg"] = sum(entry["normalized"] for entry in entries) / count
            found[f"{name}_raw_avg"] = sum(entry["raw"] for entry in entries) / count
    if scored:
        found["overall_reward"] = sum(result["reward"] for result in scored) / len(scored)
    return found


def _own(result: Mapping[str, Any]) -> Mapping[str, Any]:
    seat = 1 if result.get("eval_position", "agent1") == "agent1" else 2
    scores: Mapping[str, Any] = result.get(f"agent_{seat}_scores") or {}
    return scores


def evaluate_text(ask: Callable[[], str], attempts: int = 3) -> tuple[dict[str, int], int]:
    """(raw scores, calls): the reference's reading of a judge that answers in free text.

    A reply without JSON is given to a repair call (`ask` again); a reply that names no dimension is
    asked for anew. Without a usable one every score is the middle of its range.
    """
    calls = 0

    def again(_: str = "") -> str:
        nonlocal calls
        calls += 1
        return ask()

    for _ in range(attempts):
        value, _repairs = extract_json(again(), again)
        if isinstance(value, Mapping) and any(name in value for name in DIMENSIONS):
            return {name: lenient_score(name, value) for name in DIMENSIONS}, calls
    return {name: d.middle for name, d in DIMENSIONS.items()}, calls
