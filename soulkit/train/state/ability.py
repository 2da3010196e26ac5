"""What a training cost elsewhere: general ability before and after, and the difference of the two.

The difference is taken row by row over what both scored, with a paired interval. A loss whose
interval leaves zero out is named a regression; without that nothing can be told from chance.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from soulkit.eval.summary import Cell
from soulkit.metrics.comparisons import PairedDifference, paired_difference
from soulkit.metrics.intervals import (
    Interval,
    estimate,
    estimate_text,
    interval_remark,
    number,
    signed,
)
from soulkit.tasks.base import Task
from soulkit.train.state.named import finite, members, text, whole
from soulkit.types import Record

UNMEASURED = "its weights were never measured, and have moved on"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbilityTotals:
    """Of a whole run, over the rows of all tasks that stand for general ability."""

    before: Cell = field(default_factory=Cell)
    after: Cell = field(default_factory=Cell)
    difference: float | None = None
    """After minus before, over the rows that both scored."""
    ci_low: float | None = None
    ci_high: float | None = None
    p: float | None = None
    n_shared: int = 0
    n_clusters: int = 0
    method: str = ""

    @property
    def regression(self) -> bool:
        """Whether ability was lost, more surely than chance allows."""
        return self.ci_high is not None and self.ci_high < 0

    def to_json(self) -> dict[str, Any]:
        line = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**line, "before": self.before.to_json(), "after": self.after.to_json()}

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        line = members(value)
        if not line:
            return None
        return cls(
            before=Cell.from_json(members(line.get("before"))),
            after=Cell.from_json(members(line.get("after"))),
            **{name: finite(line.get(name)) for name in ("difference", "ci_low", "ci_high", "p")},
            n_shared=whole(line.get("n_shared")),
            n_clusters=whole(line.get("n_clusters")),
            method=text(line.get("method")),
        )

    def words(self) -> str:
        """`0.525 to 0.400 (40/40, 40/40 scored), −0.125 [−0.231, −0.019], 40 clusters`."""
        numbers = " to ".join(number(cell.mean) for cell in (self.before, self.after))
        scored = ", ".join(f"{cell.n_scored}/{cell.n}" for cell in (self.before, self.after))
        parts = [f"{numbers} ({scored} scored)"]
        if self.difference is not None:
            parts.append(estimate_text(self.difference, self.ci_low, self.ci_high, signed))
            parts.append(interval_remark(self.n_clusters, self.method))
        return ", ".join(filter(None, parts))

    def remarks(self) -> list[str]:
        """What is said aloud when the run ends."""
        if not self.before.n:
            return [f"general ability has no number from before the training: {UNMEASURED}"]
        if self.regression:
            return [f"general ability was lost in this training: {self.words()}"]
        return []


def ability_totals(
    before: Sequence[Record], after: Sequence[Record], tasks: Sequence[Task]
) -> AbilityTotals:
    """The two means and their difference; what was not measured is an empty cell."""
    scale = _scale(tasks)
    paired = _difference(before, after, scale)
    return AbilityTotals(
        before=_cell(before, scale),
        after=_cell(after, scale),
        difference=paired.difference,
        ci_low=paired.ci_low,
        ci_high=paired.ci_high,
        p=paired.p,
        n_shared=paired.n_shared,
        n_clusters=paired.n_clusters,
        method=paired.method,
    )


def _scale(tasks: Sequence[Task]) -> Interval | None:
    """The scale that all tasks share; None where they have several."""
    scales = {(task.spec.metric.low, task.spec.metric.high) for task in tasks}
    return scales.pop() if len(scales) == 1 else None


def _cell(records: Sequence[Record], scale: Interval | None) -> Cell:
    if not records:
        return Cell()
    values = [record.score.value for record in records]
    mean = asdict(estimate(values, [record.cluster for record in records], scale=scale))
    unscored: dict[str, int] = {}
    for record in records:
        if record.score.value is None:
            unscored[record.score.reason] = unscored.get(record.score.reason, 0) + 1
    return Cell(**mean, unscored=unscored)


def _difference(
    before: Sequence[Record], after: Sequence[Record], scale: Interval | None
) -> PairedDifference:
    a, b = (_values(one) for one in (before, after))
    clusters: Mapping[Hashable, Hashable] = {
        record.example_id: record.cluster for record in (*before, *after)
    }
    return paired_difference(a, b, clusters, scale=scale)


def _values(records: Sequence[Record]) -> dict[Hashable, float | None]:
    return {record.example_id: record.score.value for record in records}
