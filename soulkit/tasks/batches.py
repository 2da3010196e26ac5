"""Numbers over a batch: what tasks make their `summarise` of.

Each number counts its own units (rows, stories, conversations), which need not be episodes: a row
that is asked in five forms is one row. A row's forms share the beginning of their ids up to a dash.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from soulkit.data.rows import row_id
from soulkit.runs.records import drafts
from soulkit.tasks.guarding import finite_or_none
from soulkit.tasks.parts import UNSCORED
from soulkit.types import BatchMetric, Record

SHARE = (0.0, 1.0)
ROWS = "rows"


def mean_of(
    values: Sequence[float | None], unit: str = "episodes", scale: tuple[float, float] = SHARE
) -> BatchMetric:
    """The mean over units with a number (None: a unit without one), which lies on `scale`."""
    scored = [value for value in values if value is not None]
    return BatchMetric(
        value=sum(scored) / len(scored) if scored else None,
        n=len(values), n_scored=len(scored), unit=unit, low=scale[0], high=scale[1],
        is_mean=True,
    )  # fmt: skip


def as_batch_metrics(
    metrics: Mapping[str, Any], records: Sequence[Record]
) -> dict[str, BatchMetric]:
    """What a task's `summarise` made of `records`; plain numbers, as tasks once returned, are over
    all their episodes and have no known scale.

    What is no finite number has no value, and no unit scored.
    """
    main = drafts(records)
    scored = sum(record.score.scored for record in main)
    numbers = {
        name: metric if isinstance(metric, BatchMetric)
        else BatchMetric(value=metric, n=len(main), n_scored=scored)
        for name, metric in metrics.items()
    }  # fmt: skip
    return {name: _of_finite(one) for name, one in numbers.items()}


def _of_finite(metric: BatchMetric) -> BatchMetric:
    value = finite_or_none(metric.value)
    lost = value is None and metric.value is not None
    return replace(metric, value=value, n_scored=0 if lost else metric.n_scored)


# -- rows ----------------------------------------------------------------------------------------


def row_plays(records: Sequence[Record]) -> dict[str, list[list[Record]]]:
    """Row → its plays, each with the records of its forms, in the order in which they come."""
    plays: dict[str, dict[tuple[Any, ...], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in drafts(records):
        play = (record.kind, record.step, record.rollout)
        plays[row_id(record.example_id)][play].append(record)
    return {row: list(of_row.values()) for row, of_row in plays.items()}


def row_values(records: Sequence[Record]) -> dict[str, float | None]:
    """Row → the mean over its forms, and over its plays of which no form is unscored.

    None: there is no such play. What an order leaves unread would else lean to the other orders.
    """
    return {row: _row_value(plays) for row, plays in row_plays(records).items()}


def _row_value(plays: Sequence[Sequence[Record]]) -> float | None:
    means = []
    for play in plays:
        values = [record.score.value for record in play if record.score.value is not None]
        if len(values) == len(play):
            means.append(sum(values) / len(values))
    return sum(means) / len(means) if means else None


def row_mean(records: Sequence[Record], scale: tuple[float, float] = SHARE) -> BatchMetric:
    """The mean over rows, however many forms a row is asked in."""
    return mean_of(list(row_values(records).values()), ROWS, scale)


def macro(records: Sequence[Record], tag: str) -> BatchMetric | None:
    """The mean over the values of a tag of their rows' mean scores; it counts rows.

    None where no record has the tag. A value of the tag without a scored row is a missing part.
    """
    tagged: dict[str, list[Record]] = defaultdict(list)
    for record in drafts(records):
        if tag in record.tags:
            tagged[record.tags[tag]].append(record)
    if not tagged:
        return None
    groups = {value: row_mean(group) for value, group in sorted(tagged.items())}
    means = [group.value for group in groups.values() if group.value is not None]
    return BatchMetric(
        value=sum(means) / len(means) if means else None,
        n=sum(group.n for group in groups.values()),
        n_scored=sum(group.n_scored for group in groups.values()),
        unit=ROWS, low=SHARE[0], high=SHARE[1], over=tag,
        parts=tuple((value, "") for value in groups),
        missing=tuple((value, UNSCORED) for value, group in groups.items() if group.value is None),
    )  # fmt: skip
