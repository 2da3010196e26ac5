"""The cells of numbers over a whole batch, and of means over parts of it.

A number varies with its own clusters alone: those without which it would be another. A mean over
parts is a suite mean of them (variances added), for parts of other rows; where parts share
clusters, the jackknife of the mean knows how they go together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from soulkit.eval.batch import LeaveOneOut, Summariser
from soulkit.eval.cells import (
    UNDEFINED,
    Cell,
    cluster_of,
    mean_interval,
    possible_span,
)
from soulkit.eval.remarks import TRUNCATED
from soulkit.metrics.intervals import (
    Interval,
    jackknife,
    overlapping_mean,
    suite_mean,
)
from soulkit.tasks.parts import without_origin
from soulkit.types import BatchMetric, Record


def batch_cells(
    records: Sequence[Record], summariser: Summariser, *, incomplete: bool = False
) -> dict[str, Cell]:
    """What a task computes over its whole batch, by name.

    `incomplete`: a mean of which parts are missing is that of the others.
    """
    batch = _Batch(LeaveOneOut(summariser, records, cluster_of), incomplete)
    return {name: batch.cell(name) for name in batch.rows.metrics()}


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a mean: its cell, and the rows that it is about."""

    cell: Cell
    rows: LeaveOneOut
    name: str


@dataclass
class _Batch:
    """A batch, and the cells of its numbers that were made so far."""

    rows: LeaveOneOut
    incomplete: bool
    certain: Mapping[str, BatchMetric] = field(init=False)
    _cells: dict[str, Cell] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.certain = _certain_metrics(self.rows)

    def cell(self, name: str) -> Cell:
        """The cell of a number, with the interval of its own clusters, or of its parts."""
        if name not in self._cells:
            self._cells[name] = self._cell(name, self.rows.metrics()[name])
        return self._cells[name]

    def _cell(self, name: str, metric: BatchMetric) -> Cell:
        if (whole := without_origin(name, metric.origin)) != name:
            # One of several origins: what a batch of its rows alone says.
            own = _Batch(self.rows.of_origin(metric.origin), self.incomplete)
            return replace(own.cell(whole), beside=True)
        alone = self.alone(name)
        return self._of_parts(name, metric, alone) if metric.parts else alone

    def alone(self, name: str) -> Cell:
        """The cell of a number whose parts nobody asks for, with a jackknife interval."""
        metric = self.rows.metrics()[name]
        scale = None if metric.low is None or metric.high is None else (metric.low, metric.high)
        group = self.rows.of_metric(name)
        around = jackknife(partial(group.value, name), group.n_parts, scale=scale)
        missing = metric.n - metric.n_scored
        worst, best = _bounds(self.certain.get(name), scale) or (None, None)
        return Cell(
            mean=metric.value, ci_low=around.ci_low, ci_high=around.ci_high, n=metric.n,
            n_scored=metric.n_scored, method=around.method, variance=around.variance, df=around.df,
            n_clusters=group.n_clusters if metric.n else 0, unit=metric.unit, scale=scale,
            worst=worst, best=best, beside=metric.beside,
            not_applicable=metric.not_applicable if self.rows.records and not metric.n else "",
            unscored={UNDEFINED: missing} if missing else {}, origin=metric.origin,
        )  # fmt: skip

    # -- means over parts -------------------------------------------------------------------------

    def _of_parts(self, name: str, metric: BatchMetric, alone: Cell) -> Cell:
        """The cell of a mean over parts; without a mean where one is missing."""
        parts = {label: self._part(name, metric, label, inner, alone)
                 for label, inner in metric.parts}  # fmt: skip
        missing = dict(metric.missing)
        there = {label: part for label, part in parts.items() if label not in missing}
        cell = replace(alone, parts=tuple(there), missing=missing, worst=None, best=None)
        bounds = mean_interval([possible_span(p.cell, p.cell.scale) for p in parts.values()])
        if bounds and (missing or any(p.cell.worst is not None for p in parts.values())):
            cell = replace(cell, worst=bounds[0], best=bounds[1])
        if missing and not (self.incomplete and there):
            return replace(
                cell, mean=None, ci_low=None, ci_high=None, variance=None, df=None, method=""
            )
        return _with_interval(cell, list(there.values()))

    def _part(
        self, name: str, metric: BatchMetric, label: str, inner: str, alone: Cell
    ) -> _Part:  # fmt: skip
        if metric.over:
            of_value = _Batch(self.rows.with_tag(metric.over, label), self.incomplete)
            return _Part(of_value.alone(name), of_value.rows.of_metric(name), name)
        if inner in self.rows.metrics():
            return _Part(self.cell(inner), self.rows.of_metric(inner), inner)
        return _Part(Cell(scale=alone.scale), self.rows.within(frozenset()), inner)


def _with_interval(cell: Cell, parts: Sequence[_Part]) -> Cell:
    """`cell` with the interval of a mean over these parts."""
    strata = [part.cell for part in parts]
    clusters = [part.rows.clusters for part in parts]
    if len(frozenset().union(*clusters)) == sum(map(len, clusters)):
        around = suite_mean(strata)
    else:
        constant = [part.cell for part in parts if not part.rows.varies(part.name)]
        around = overlapping_mean(cell, strata, constant)
    return replace(
        cell, ci_low=around.ci_low, ci_high=around.ci_high, variance=around.variance,
        df=around.df, method=around.method,
    )  # fmt: skip


# -- bounds ----------------------------------------------------------------------------------------


def _certain_metrics(batch: LeaveOneOut) -> Mapping[str, BatchMetric]:
    """The same numbers without what truncated replies came to: nobody knows what they hid."""
    cut = [record.score.status == TRUNCATED for record in batch.records]
    if not any(cut):
        return batch.metrics()
    return batch.summarise([
        replace(record, score=replace(record.score, value=None, status="unscored"))
        if hidden else record
        for record, hidden in zip(batch.records, cut, strict=True)
    ])  # fmt: skip


def _bounds(certain: BatchMetric | None, scale: Interval | None) -> Interval | None:
    """Where a number could lie if what is missing were worst or best: a mean over units as any
    mean, another anywhere on its scale; None where nothing is missing, or without a scale."""
    if scale is None or (certain is not None and certain.n == certain.n_scored):
        return None
    if certain is None or not certain.is_mean or certain.value is None:
        return scale
    total, missing = certain.value * certain.n_scored, certain.n - certain.n_scored
    return (total + missing * scale[0]) / certain.n, (total + missing * scale[1]) / certain.n
