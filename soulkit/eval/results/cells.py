"""The cell of a summary: one number of one task, with what has to be known beside it.

A number that is a mean of parts names those that it is over and those that are missing. In an
evaluation it has no mean then, only the bounds that it could have; in training the mean of the
others stands, and is labelled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Self

from soulkit.metrics.intervals import Interval
from soulkit.runs.jsonl import read_value, sparse
from soulkit.tasks.kit.scoring import without_origin
from soulkit.text import join_and
from soulkit.types import Record

VALUE = "value"
"""The mean score of a task, its headline unless it declares another."""
DEV = "dev"
"""A training run's score on the rows it held out, its headline where it has one."""
UNDEFINED = "undefined"
"""Why a scored episode has no number under one of its metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One metric of one task: a mean, and what has to be known beside it."""

    mean: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    n_scored: int = 0
    n: int = 0
    n_clusters: int = 0
    """Of what was scored; 0: not recorded."""
    method: str = ""
    """How the interval was made; `batch` for a number over the whole batch, which has none."""
    unscored: Mapping[str, int] = field(default_factory=dict)
    """Reason → episodes without a number."""
    worst: float | None = None
    """The mean if all unscored or truncated were worst; None: complete, or no known scale."""
    best: float | None = None
    beside: bool = False
    """Whether it belongs beside the headline."""
    headline: bool = False
    """Whether it is the number of its task that tables, comparisons and suites speak of."""
    unit: str = ""
    """What `n` counts, of a number over the whole batch; empty: episodes."""
    variance: float | None = None
    """Of the mean, in the unit squared; with `df` and `scale` what a suite's mean needs."""
    df: float | None = None
    scale: Interval | None = None
    """The lowest and the highest value, where they are sure."""
    events: float | None = None
    """Failures or successes on the scale, whichever are fewer."""
    not_applicable: str = ""
    """Why no row counts (`n` is 0), where rows were played; nothing is missing or failed then."""
    parts: tuple[str, ...] = ()
    """Of a mean over parts: those that it is over."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Part without a number → why: `no rows`, `unscored` or `undefined`. There is no mean then, or
    in training the mean of `parts`."""
    origin: str = ""
    """The person's own file that all its rows come from."""
    name: str = ""
    """What the task calls it, of `value` and `dev`; empty where the metric's own name says it."""

    @property
    def of_batch(self) -> bool:
        """Whether it is no mean over episodes, but was computed over the batch as a whole."""
        return bool(self.unit)

    @property
    def whole(self) -> bool:
        """Whether it has a mean, and of all its parts."""
        return self.mean is not None and not self.missing

    def to_json(self) -> dict[str, Any]:
        return sparse(self, ("mean", "ci_low", "ci_high", "n_scored", "n", "unscored"))

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        return read_value(cls, line, "A number of a summary")


Cells = dict[str, dict[str, Cell]]
"""Task → metric → its cell."""


def headline_name(cells: Mapping[str, Cell]) -> str:
    """The metric that is the headline of a task; empty where the task has none (imitation)."""
    return next((name for name, cell in cells.items() if cell.headline), "")


def headline(cells: Mapping[str, Cell]) -> Cell:
    """The headline cell of a task, of all its cells by name; an empty one where it has none."""
    return cells.get(headline_name(cells), Cell())


def metric_name(metric: str, cells: Mapping[str, Cell]) -> str:
    """A metric as readers know it: `value` and its break-downs have the name that the task
    declares. `cells` are those of the task."""
    base, slash, rest = metric.partition("/")
    return f"{cells[VALUE].name or VALUE}{slash}{rest}" if base == VALUE in cells else metric


def headline_shown(cells: Mapping[str, Cell]) -> str:
    """The name of a task's headline for readers; empty where it has none."""
    return headline(cells).name or headline_name(cells)


def named_with_origin(metric: str, cell: Cell) -> str:
    """The name of a number; over rows of a person's own it names their file, once."""
    says_it = not cell.origin or without_origin(metric, cell.origin) != metric
    return metric if says_it else f"{metric} of {cell.origin}"


def cluster_of(record: Record) -> str:
    """What counts as one observation: the record's cluster, else its example with all rollouts."""
    return record.cluster or record.example_id


_MISSING = {"no rows": ("has", "have", "no rows"), "unscored": ("is", "are", "unscored"),
            "undefined": ("is", "are", "undefined in these rows")}  # fmt: skip
"""Why a part is missing → how that is said of one part, and of several."""


def missing_parts_text(cell: Cell) -> str:
    """`NQ and PRISM have no rows`; with a mean `mean of CSQA, PRISM; NQ has no rows`; empty for a
    number of which no part is missing."""
    groups: dict[str, list[str]] = {}
    for part, why in cell.missing.items():
        groups.setdefault(why, []).append(part)
    says = [] if cell.mean is None or not groups else [f"mean of {', '.join(cell.parts)}"]
    for why, parts in groups.items():
        one, several, words = _MISSING.get(why, ("is", "are", why))
        says.append(f"{join_and(parts)} {one if len(parts) == 1 else several} {words}")
    return "; ".join(says)


# -- where a mean could lie ------------------------------------------------------------------------


def possible_span(cell: Cell, scale: Interval | None) -> Interval | None:
    """Where the mean of a cell would lie if what is missing had the worst or the best score."""
    if cell.worst is not None and cell.best is not None:
        return cell.worst, cell.best
    if cell.mean is None:
        return scale
    return (cell.mean, cell.mean) if cell.n_scored == cell.n else scale


def mean_interval(intervals: Iterable[Interval | None]) -> Interval | None:
    """Low ends and high ends averaged; None where one of them is not known."""
    ends = list(intervals)
    known_ends = [pair for pair in ends if pair is not None]
    if not ends or len(known_ends) < len(ends):
        return None
    return fmean(low for low, _ in known_ends), fmean(high for _, high in known_ends)
