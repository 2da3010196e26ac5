"""What expert and generalist gained over the base on a task, over the rows that all three scored.

The headline is what the task declares: the mean of the scores, or a number over the whole batch,
which is computed again without one cluster after the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from soulkit.eval.batch import NOTHING, LeaveOneOut, calibrated
from soulkit.eval.contrasts import HEADLINE, UNPAIRED, VALUE, Contrast, Key, TaskPair, contrast
from soulkit.eval.live_tasks import live_tasks, recorded_cells
from soulkit.eval.summary import Cell, cluster_of, metric_values
from soulkit.metrics.intervals import ClusterStatistic
from soulkit.metrics.retention import Gains, Retention, batch_gains, paired_gains, retention
from soulkit.runs.records import drafts, load_records
from soulkit.tasks.base import Task
from soulkit.types import Failure, Record, unscored


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSide:
    """One side's run on one task, read."""

    records: Sequence[Record]
    """Drafts alone."""
    cells: Mapping[str, Cell]
    live: Task | None


def read_side(folder: Path, task: str) -> MeasuredSide:
    """The run in `folder`; its task with its code where that may run."""
    records = drafts(load_records(folder / "episodes.jsonl", light=True))
    return MeasuredSide(
        records=[record for record in records if record.task == task],
        cells=recorded_cells(folder).get(task, {}), live=live_tasks(folder, [task]).get(task),
    )  # fmt: skip


def alike(sides: Sequence[MeasuredSide]) -> list[MeasuredSide]:
    """The sides with what not all of them scored counted as lost in each."""
    scored = [{_key(r) for r in side.records if r.score.scored} for side in sides]
    shared = set.intersection(*scored)
    there = [{_key(r) for r in side.records} for side in sides]
    played = set.intersection(*there)
    return [
        replace(side, records=[
            record if _key(record) in shared else _lost(record)
            for record in side.records if _key(record) in played
        ])
        for side in sides
    ]  # fmt: skip


def difference(task: str, a: MeasuredSide, b: MeasuredSide, metric: str = HEADLINE) -> Contrast:
    """B minus A in a metric; DataError where they do not both have it."""
    return contrast(
        TaskPair(task=task, a=a.records, b=b.records, live_a=a.live, live_b=b.live,
                 recorded=(a.cells, b.cells)),
        metric,
    )  # fmt: skip


def retained(
    task: str, base: MeasuredSide, expert: MeasuredSide, generalist: MeasuredSide
) -> Retention:
    """The share of the expert's gain that the generalist has in the task's headline."""
    sides = (base, expert, generalist)
    pair = TaskPair(task=task, a=base.records, b=generalist.records, live_a=base.live,
                    live_b=generalist.live, recorded=(base.cells, generalist.cells))  # fmt: skip
    metric = difference(task, base, generalist).metric
    scale = pair.scale(metric)
    if metric == VALUE:
        return retention(_of_episodes(sides, scale))
    gains = _of_batches(metric, sides, scale)
    return retention(gains, method="fieller-jackknife")


def _of_episodes(sides: Sequence[MeasuredSide], scale: tuple[float, float] | None) -> Gains | None:
    clusters: dict[Hashable, Hashable] = {
        _key(record): cluster_of(record) for side in sides for record in side.records
    }
    values: list[dict[Hashable, float | None]] = [
        {_key(record): value for record, value in metric_values(side.records, VALUE)}
        for side in sides
    ]
    base, expert, generalist = values
    return paired_gains(base, expert, generalist, clusters, scale=scale)


def _of_batches(
    metric: str, sides: Sequence[MeasuredSide], scale: tuple[float, float] | None
) -> Gains | None:  # fmt: skip
    """As `eval.contrasts` compares two of them."""
    batches = [
        LeaveOneOut(calibrated(side.live, ()), sorted(side.records, key=_key), cluster_of)
        for side in sides
        if side.live is not None
    ]
    clusters = NOTHING.union(*(batch.of_metric(metric).clusters for batch in batches))
    batches = [batch.within(clusters) for batch in batches]
    lacking = {one.missing for batch in batches if (one := batch.metrics().get(metric))}
    if len(batches) < len(sides) or len({b.n_parts for b in batches}) > 1 or len(lacking) > 1:
        return None
    shared = sum(record.score.scored for record in sides[0].records)
    base, expert, generalist = (_statistic(batch, metric) for batch in batches)
    gains = batch_gains(
        base, expert, generalist, batches[0].n_parts, n_shared=shared, scale=scale
    )  # fmt: skip
    return None if gains is None else replace(gains, n_clusters=batches[0].n_clusters)


def _statistic(batch: LeaveOneOut, metric: str) -> ClusterStatistic:
    return lambda parts: batch.value(metric, parts)


def _key(record: Record) -> Key:
    return record.step, record.example_id, record.rollout


def _lost(record: Record) -> Record:
    return replace(record, score=unscored(Failure(UNPAIRED), record.score.protocol))
