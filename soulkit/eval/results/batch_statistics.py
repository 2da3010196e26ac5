"""Statistics of a whole batch with jackknife intervals, and means over parts of a batch.

A bootstrap would draw some texts twice, which lowers diversity, so the jackknife leaves out one
cluster at a time. Clusters that do not affect a statistic are ignored. A mean over parts is
computed like a suite mean (variances are added); if parts share clusters, the jackknife of the mean
accounts for their covariance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isclose
from random import Random
from typing import Any

from soulkit.eval.results.cells import (
    UNDEFINED,
    Cell,
    cluster_of,
    mean_interval,
    missing_parts_text,
    possible_span,
)
from soulkit.eval.results.warnings import TRUNCATED
from soulkit.metrics.intervals import (
    Interval,
    jackknife,
    overlapping_mean,
    suite_mean,
)
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.scoring import NO_ROWS, Kept, value_over, without_origin, without_origins
from soulkit.tasks.kit.user_code import as_mapping, or_default
from soulkit.types import (
    BatchMetric,
    ControlRecord,
    Episode,
    Example,
    Failure,
    Record,
    unscored,
)

Summariser = Callable[[Sequence[Record]], Mapping[str, BatchMetric]]
"""Computes a task's statistics over a batch."""
MAX_PARTS = 200
"""Maximum number of jackknife parts; more clusters are distributed over the parts at random."""
Clusters = frozenset[str]
NOTHING: Clusters = frozenset()


@dataclass
class LeaveOneOut:
    """A summariser applied to a batch with one part left out at a time; results are cached."""

    summarise: Summariser
    records: Sequence[Record]
    cluster_of: Callable[[Record], str]
    clusters: frozenset[str] = field(init=False)
    """Clusters with a score."""
    _parts: list[Clusters] = field(init=False)
    _metrics: dict[Clusters, Mapping[str, BatchMetric]] = field(default_factory=dict, init=False)
    _within: dict[Clusters, LeaveOneOut] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.clusters = frozenset(self.cluster_of(r) for r in self.records if r.score.scored)
        clusters = sorted(self.clusters)
        if len(clusters) > MAX_PARTS:
            Random(len(clusters)).shuffle(clusters)
        self._parts = [
            frozenset(clusters[i::MAX_PARTS]) for i in range(min(len(clusters), MAX_PARTS))
        ]

    @property
    def n_parts(self) -> int:
        """Number of jackknife parts."""
        return len(self._parts)

    @property
    def n_clusters(self) -> int:
        """Number of clusters with a score."""
        return len(self.clusters)

    def metrics(self, without: Clusters = NOTHING) -> Mapping[str, BatchMetric]:
        """All statistics of the batch without some clusters."""
        if without not in self._metrics:
            self._metrics[without] = self.summarise(
                [r for r in self.records if self.cluster_of(r) not in without]
            )
        return self._metrics[without]

    def of_metric(self, name: str) -> LeaveOneOut:
        """The batch limited to the clusters that affect the metric.

        The other clusters would look like clusters without variation.
        """
        whole = self._told(name)
        members = (lot for lot in self._lots() if self._told(name, lot) != whole)
        clusters = NOTHING.union(*members)
        if not clusters or clusters == self.clusters:
            return self
        return self.within(clusters).of_metric(name)

    def within(self, clusters: Clusters) -> LeaveOneOut:
        """The batch limited to these clusters."""
        if clusters == self.clusters:
            return self
        if clusters not in self._within:
            members = [r for r in self.records if self.cluster_of(r) in clusters]
            self._within[clusters] = LeaveOneOut(self.summarise, members, self.cluster_of)
        return self._within[clusters]

    def with_tag(self, tag: str, value: str) -> LeaveOneOut:
        """The records with this value of a tag."""
        members = [r for r in self.records if r.tags.get(tag) == value]
        return LeaveOneOut(self.summarise, members, self.cluster_of)

    def of_origin(self, origin: str) -> LeaveOneOut:
        """The records whose rows come from this user's file."""
        members = [r for r in self.records if r.origin == origin]
        return LeaveOneOut(self.summarise, members, self.cluster_of)

    def value(self, metric: str, parts: Sequence[int]) -> float | None:
        """`metric` over the jackknife parts with these numbers: all of them, or all but one. None
        for a mean that would cover fewer of the task's parts than it does in the whole batch."""
        computed = self.metrics(self._left_out(parts)).get(metric)
        whole = self.metrics().get(metric)
        if computed is None or whole is None:
            return None
        same = (computed.parts, computed.missing) == (whole.parts, whole.missing)
        return computed.value if same else None

    def value_over(self, metric: str, kept: Kept, parts: Sequence[int]) -> float | None:
        """`value` for a mean over only the parts in `kept`."""
        if metric not in kept:
            return self.value(metric, parts)
        return value_over(metric, self.metrics(self._left_out(parts)), kept)

    def varies(self, metric: str) -> bool:
        """Whether leaving out some part changes the metric."""
        everything = list(range(self.n_parts))
        whole = self.value(metric, everything)
        less = (self.value(metric, everything[:i] + everything[i + 1 :]) for i in everything)
        return whole is None or any(v is None or not isclose(v, whole) for v in less)

    def _left_out(self, parts: Sequence[int]) -> Clusters:
        left_out = set(range(self.n_parts)) - set(parts)
        if len(left_out) > 1:
            raise ValueError("a jackknife leaves out one part at a time")
        return self._parts[left_out.pop()] if left_out else NOTHING

    def _lots(self) -> list[Clusters]:
        """Single clusters or, if there are many, clusters with equal tags, which usually all affect
        a metric or all do not."""
        if self.n_clusters <= MAX_PARTS:
            return self._parts
        tags: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for record in self.records:
            tags[self.cluster_of(record)] |= set(record.tags.items())
        alike: dict[tuple[tuple[str, str], ...], set[str]] = defaultdict(set)
        for cluster in self.clusters:
            alike[tuple(sorted(tags[cluster]))].add(cluster)
        together = [c for kind in sorted(alike) for c in sorted(alike[kind])]
        if 1 < len(alike) <= MAX_PARTS:
            return [frozenset(members) for members in alike.values()]
        size = 1 + len(together) // MAX_PARTS
        starts = range(0, len(together) if len(alike) > 1 else 0, size)
        return [frozenset(together[i : i + size]) for i in starts]

    def _told(self, name: str, without: Clusters = NOTHING) -> tuple[object, ...] | None:
        metric = self.metrics(without).get(name)
        return None if metric is None else (metric.n_scored, metric.value, metric.missing)


def calibrated(task: Task, controls: Sequence[ControlRecord]) -> Summariser:
    """The task's batch statistics, including those that use the batch's controls, if it has any.

    The jackknife leaves out a control together with its cluster.
    """
    # Sorted, so that sums do not depend on the order in which judges answered.
    controls = sorted((c for c in controls if c.task == task.name), key=lambda c: c.key)
    if not controls:
        return task.batch_metrics

    def summariser(records: Sequence[Record]) -> dict[str, BatchMetric]:
        clusters = {record.cluster or record.example_id for record in records}
        there = [c for c in controls if (c.cluster or c.example_id) in clusters]
        nothing: dict[str, BatchMetric] = {}

        def calibration() -> dict[str, BatchMetric]:
            return dict(as_mapping(task, "calibrate", task.calibrate(records, there)))

        numbers = or_default(task, "calibrate", calibration, nothing)
        beside = {name: replace(number, beside=True) for name, number in numbers.items()}
        return {**task.batch_metrics(records), **beside}

    return summariser


def summary_terms(
    tasks: Iterable[Task], controls: Sequence[ControlRecord] = ()
) -> dict[str, Any]:  # fmt: skip
    """Keyword arguments of `summarise` for these tasks."""
    every = list(tasks)
    return {
        "batch": {task.name: calibrated(task, controls) for task in every},
        "headlines": {task.name: task.headline_metric for task in every if task.headline_metric},
        "scale": task_scales(every),
        "beside": {task.name: task.spec.metric.beside for task in every},
        "names": {task.name: task.spec.metric.name for task in every},
        "categories": {task.name for task in every if isinstance(task, ChoiceTask)},
    }


def parts_remark(task: Task, examples: Sequence[Example], *, dev: bool = False) -> str:
    """The parts of a task's headline that have no rows, and the consequence; empty if none is
    missing. For `dev` rows the mean of the other parts is used."""
    if not task.spec.metric.parts or not examples:
        return ""
    lost = unscored(Failure("not played"), task.protocol)
    records = [
        Record(key=e.id, task=task.name, example_id=e.id, rollout=0, kind="draft", score=lost,
               episode=Episode(example_id=e.id, task=task.name), cluster=e.cluster, tags=e.tags,
               origin=e.origin)
        for e in examples
    ]  # fmt: skip
    batch = without_origins(records) if dev else records
    mean = task.batch_metrics(batch).get(task.headline_metric)
    if mean is None:
        return ""
    missing = {part: why for part, why in mean.missing if why == NO_ROWS}
    if not missing:
        return ""
    there = tuple(label for label, _ in mean.parts if label not in missing)
    words = missing_parts_text(Cell(mean=0.0 if dev else None, parts=there, missing=missing))
    if dev:
        return f"dev score of {task.name}: {words}"
    return f"{task.name}: {words}, so the headline has bounds but no mean"


def task_scales(tasks: Iterable[Task]) -> dict[str, tuple[float, float]]:
    """Task or task/metric → lowest and highest value."""
    scales: dict[str, tuple[float, float]] = {}
    for task in tasks:
        metric = task.spec.metric
        scales[task.name] = (metric.low, metric.high)
        scales |= {f"{task.name}/{name}": ends for name, ends in metric.scales.items()}
    return scales


def batch_cells(
    records: Sequence[Record], summariser: Summariser, *, incomplete: bool = False
) -> dict[str, Cell]:
    """Metric → cell of each of a task's batch statistics.

    With `incomplete`, a mean with missing parts is the mean of the other parts.
    """
    batch = _Batch(LeaveOneOut(summariser, records, cluster_of), incomplete)
    return {name: batch.cell(name) for name in batch.rows.metrics()}


@dataclass(frozen=True, slots=True)
class _Part:
    cell: Cell
    rows: LeaveOneOut
    name: str


@dataclass
class _Batch:
    """A batch with a cache of its cells."""

    rows: LeaveOneOut
    incomplete: bool
    certain: Mapping[str, BatchMetric] = field(init=False)
    _cells: dict[str, Cell] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.certain = _certain_metrics(self.rows)

    def cell(self, name: str) -> Cell:
        """The cell of a metric, with the interval from its clusters or parts."""
        if name not in self._cells:
            self._cells[name] = self._cell(name, self.rows.metrics()[name])
        return self._cells[name]

    def _cell(self, name: str, metric: BatchMetric) -> Cell:
        if (whole := without_origin(name, metric.origin)) != name:
            # One of several origins: the statistic of a batch with only its rows.
            own = _Batch(self.rows.of_origin(metric.origin), self.incomplete)
            return replace(own.cell(whole), beside=True)
        alone = self.alone(name)
        return self._of_parts(name, metric, alone) if metric.parts else alone

    def alone(self, name: str) -> Cell:
        """The cell of a metric with a jackknife interval, ignoring its parts."""
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
        """The cell of a mean over parts; if one is missing, it has no mean."""
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
    """The statistics with truncated episodes treated as unscored, because their true score is
    unknown."""
    cut = [record.score.status == TRUNCATED for record in batch.records]
    if not any(cut):
        return batch.metrics()
    return batch.summarise([
        replace(record, score=replace(record.score, value=None, status="unscored"))
        if hidden else record
        for record, hidden in zip(batch.records, cut, strict=True)
    ])  # fmt: skip


def _bounds(certain: BatchMetric | None, scale: Interval | None) -> Interval | None:
    """The metric if all missing units had the worst or best score; its whole scale if it is not a
    mean over units. None if nothing is missing, or without a scale."""
    if scale is None or (certain is not None and certain.n == certain.n_scored):
        return None
    if certain is None or not certain.is_mean or certain.value is None:
        return scale
    total, missing = certain.value * certain.n_scored, certain.n - certain.n_scored
    return (total + missing * scale[0]) / certain.n, (total + missing * scale[1]) / certain.n
