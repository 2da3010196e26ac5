"""Numbers that exist only over a batch, on a batch less one cluster after the other.

Their interval is a jackknife: a bootstrap would draw one text twice, and two equal texts have no
diversity.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from soulkit.tasks.base import Task
from soulkit.tasks.guarding import as_mapping, attempt
from soulkit.types import BatchMetric, ControlRecord, Record

Summariser = Callable[[Sequence[Record]], Mapping[str, BatchMetric]]
"""What a task computes over its whole batch."""
PARTS = 200
"""So many parts are left out in turn at most; more clusters than that share them, by lot."""


@dataclass
class LeaveOneOut:
    """A summariser on a batch less one part after the other, each asked for once."""

    summarise: Summariser
    records: Sequence[Record]
    cluster_of: Callable[[Record], str]
    n_parts: int = field(init=False)
    n_clusters: int = field(init=False)
    _parts: dict[str, int] = field(init=False)
    """Cluster → the part it is left out with; nothing changes without one that has no score."""
    _metrics: dict[int | None, Mapping[str, BatchMetric]] = field(default_factory=dict, init=False)
    _groups: dict[tuple[tuple[str, str], ...], LeaveOneOut] = field(
        default_factory=dict, init=False
    )

    def __post_init__(self) -> None:
        scored = (record for record in self.records if record.score.scored)
        clusters = sorted({self.cluster_of(record) for record in scored})
        if len(clusters) > PARTS:
            Random(len(clusters)).shuffle(clusters)
        self._parts = {cluster: i % PARTS for i, cluster in enumerate(clusters)}
        self.n_clusters = len(clusters)
        self.n_parts = min(len(clusters), PARTS)

    def metrics(self, without: int | None = None) -> Mapping[str, BatchMetric]:
        """Everything the summariser says of the batch, or of the batch less part `without`."""
        if without not in self._metrics:
            self._metrics[without] = self.summarise(
                [r for r in self.records if without is None or self._part_of(r) != without]
            )
        return self._metrics[without]

    def of_group(self, metric: str) -> LeaveOneOut:
        """The part of the batch that `metric` is about: clusters of other groups would pass for
        ones that agree with each other."""
        computed = self.metrics().get(metric)
        group = () if computed is None else computed.group
        if not group:
            return self
        if group not in self._groups:
            members = [r for r in self.records if set(group) <= set(r.tags.items())]
            self._groups[group] = LeaveOneOut(self.summarise, members, self.cluster_of)
        return self._groups[group]

    def _part_of(self, record: Record) -> int | None:
        return self._parts.get(self.cluster_of(record))

    def value(self, metric: str, parts: Sequence[int]) -> float | None:
        """`metric` over the parts of these numbers: all of them, or all but one."""
        left_out = set(range(self.n_parts)) - set(parts)
        if len(left_out) > 1:
            raise ValueError("a jackknife leaves out one part at a time")
        computed = self.metrics(next(iter(left_out), None)).get(metric)
        return None if computed is None else computed.value


def calibrated(task: Task, controls: Sequence[ControlRecord]) -> Summariser:
    """The task's numbers over a batch, with those that the controls of the batch have a part in.

    A control belongs to its cluster: without any record of that, it is left out as well. Where
    there is no control at all there is no such number.
    """
    # In an order of their own: sums would else depend on which judge was the first to answer.
    controls = sorted((c for c in controls if c.task == task.name), key=lambda c: c.key)
    if not controls:
        return task.batch_metrics

    def summariser(records: Sequence[Record]) -> dict[str, BatchMetric]:
        clusters = {record.cluster or record.example_id for record in records}
        there = [c for c in controls if (c.cluster or c.example_id) in clusters]
        nothing: dict[str, BatchMetric] = {}
        numbers = attempt(task, "calibrate", lambda: _calibration(task, records, there), nothing)
        beside = {name: replace(number, beside=True) for name, number in numbers.items()}
        return {**task.batch_metrics(records), **beside}

    return summariser


def _calibration(
    task: Task, records: Sequence[Record], controls: Sequence[ControlRecord]
) -> dict[str, BatchMetric]:
    return dict(as_mapping(task, "calibrate", task.calibrate(records, controls)))


def summary_terms(
    tasks: Iterable[Task], controls: Sequence[ControlRecord] = ()
) -> dict[str, Any]:  # fmt: skip
    """What `summarise` has to be told of these tasks, as its keyword arguments."""
    every = list(tasks)
    return {
        "batch": {task.name: calibrated(task, controls) for task in every},
        "headlines": {task.name: task.headline_metric for task in every if task.headline_metric},
        "scale": task_scales(every),
        "beside": {task.name: task.spec.metric.beside for task in every},
        "names": {task.name: task.spec.metric.name for task in every},
    }


def task_scales(tasks: Iterable[Task]) -> dict[str, tuple[float, float]]:
    """Task, and task/metric, → lowest and highest value."""
    scales: dict[str, tuple[float, float]] = {}
    for task in tasks:
        metric = task.spec.metric
        scales[task.name] = (metric.low, metric.high)
        scales |= {f"{task.name}/{name}": ends for name, ends in metric.scales.items()}
    return scales
