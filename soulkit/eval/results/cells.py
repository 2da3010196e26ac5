"""The cells of a summary (one metric of one task each), and the means of a suite.

    task headlines ──▶ members (a group is the mean of its tasks) ──▶ axis means, suite mean

A mean of parts lists the parts it covers and the missing ones. If parts are missing, an evaluation
reports only bounds; training reports the labelled mean of the other parts. In a suite all members
have equal weight (macro average) and tasks are strata, so variances are added. If a member has no
mean, it is listed and the averages above it have only bounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, Self

from soulkit.metrics.intervals import Interval, suite_mean
from soulkit.runs.jsonl import read_value, sparse
from soulkit.tasks.kit.scoring import without_origin
from soulkit.tasks.kit.spec import Suite
from soulkit.text import join_and
from soulkit.types import Record

VALUE = "value"
"""The mean score of a task; its headline unless the task declares another."""
DEV = "dev"
"""A training run's score on held-out rows; its headline if it has a dev split."""
UNDEFINED = "undefined"
"""Reason for a scored episode without a value for a metric."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One metric of one task: mean, interval, counts and bounds."""

    mean: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    n_scored: int = 0
    n: int = 0
    n_clusters: int = 0
    """Clusters with a score; 0 if not recorded."""
    method: str = ""
    """How the interval was computed; `batch` for a batch statistic, which has none."""
    unscored: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of episodes without a value."""
    worst: float | None = None
    """The mean if all unscored or truncated episodes had the worst score; None if there are none or
    the scale is unknown."""
    best: float | None = None
    beside: bool = False
    """Whether to show it next to the headline."""
    headline: bool = False
    """Whether it is the task's headline, which tables, comparisons and suites use."""
    unit: str = ""
    """What `n` counts for a batch statistic; empty means episodes."""
    variance: float | None = None
    """Variance of the mean, in squared units; a suite's mean needs it with `df` and `scale`."""
    df: float | None = None
    scale: Interval | None = None
    """The lowest and highest value, if known."""
    events: float | None = None
    """Number of failures or successes on the scale, whichever is smaller."""
    not_applicable: str = ""
    """Why none of the played rows counts (`n` is 0); nothing is missing or failed then."""
    parts: tuple[str, ...] = ()
    """The parts that a mean over parts covers."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Part without a value → why: `no rows`, `unscored` or `undefined`. The cell then has no mean,
    or in training the mean of `parts`."""
    origin: str = ""
    """The user's file that all its rows come from."""
    name: str = ""
    """The task's name for `value` and `dev`; empty if the metric's own name is used."""

    def __post_init__(self) -> None:
        if self.scale and not self.scale[0] < self.scale[1]:
            raise ValueError(f"the scale {self.scale} has no width")

    @property
    def of_batch(self) -> bool:
        """Whether it is a batch statistic and not a mean over episodes."""
        return bool(self.unit)

    @property
    def whole(self) -> bool:
        """Whether it has a mean and no part is missing."""
        return self.mean is not None and not self.missing

    def to_json(self) -> dict[str, Any]:
        return sparse(self, ("mean", "ci_low", "ci_high", "n_scored", "n", "unscored"))

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        return read_value(cls, line, "A number of a summary")


Cells = dict[str, dict[str, Cell]]
"""Task → metric → its cell."""


def headline_name(cells: Mapping[str, Cell]) -> str:
    """The headline metric of a task; empty if it has none (imitation)."""
    return next((name for name, cell in cells.items() if cell.headline), "")


def headline(cells: Mapping[str, Cell]) -> Cell:
    """The headline cell of a task; an empty cell if it has none."""
    return cells.get(headline_name(cells), Cell())


def metric_name(metric: str, cells: Mapping[str, Cell]) -> str:
    """The display name of a metric: `value` and its breakdowns get the name that the task declares.
    `cells` are the task's cells."""
    base, slash, rest = metric.partition("/")
    return f"{cells[VALUE].name or VALUE}{slash}{rest}" if base == VALUE in cells else metric


def headline_shown(cells: Mapping[str, Cell]) -> str:
    """The display name of a task's headline; empty if it has none."""
    return headline(cells).name or headline_name(cells)


def named_with_origin(metric: str, cell: Cell) -> str:
    """The metric's name, followed by the user's file if all rows come from one."""
    says_it = not cell.origin or without_origin(metric, cell.origin) != metric
    return metric if says_it else f"{metric} of {cell.origin}"


def cluster_of(record: Record) -> str:
    """The unit of observation: the record's cluster, else its example with all rollouts."""
    return record.cluster or record.example_id


_MISSING = {"no rows": ("has", "have", "no rows"), "unscored": ("is", "are", "unscored"),
            "undefined": ("is", "are", "undefined for these rows")}  # fmt: skip
"""Why a part is missing → verb for one part, verb for several, and the text."""


def missing_parts_text(cell: Cell) -> str:
    """`NQ and PRISM have no rows`; with a mean `mean of CSQA, PRISM; NQ has no rows`; empty if no
    part is missing."""
    groups: dict[str, list[str]] = {}
    for part, why in cell.missing.items():
        groups.setdefault(why, []).append(part)
    says = [] if cell.mean is None or not groups else [f"mean of {', '.join(cell.parts)}"]
    for why, parts in groups.items():
        one, several, words = _MISSING.get(why, ("is", "are", why))
        says.append(f"{join_and(parts)} {one if len(parts) == 1 else several} {words}")
    return "; ".join(says)


# -- bounds ----------------------------------------------------------------------------------------


def possible_span(cell: Cell, scale: Interval | None) -> Interval | None:
    """Bounds of a cell's mean if all missing episodes had the worst or the best score."""
    if cell.worst is not None and cell.best is not None:
        return cell.worst, cell.best
    if cell.mean is None:
        return scale
    return (cell.mean, cell.mean) if cell.n_scored == cell.n else scale


def mean_interval(intervals: Iterable[Interval | None]) -> Interval | None:
    """The mean of the low ends and of the high ends; None if any interval is unknown."""
    ends = list(intervals)
    known_ends = [pair for pair in ends if pair is not None]
    if not ends or len(known_ends) < len(ends):
        return None
    return fmean(low for low, _ in known_ends), fmean(high for _, high in known_ends)


# -- suites ----------------------------------------------------------------------------------------


Level = Literal["task", "group", "part", "axis", "suite"]
Scales = Callable[[str], Interval | None]
"""Task → the lowest and highest possible headline; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteLine:
    """One line of a suite: a member, a task of a group, or a mean over members."""

    name: str
    level: Level
    axis: str
    cell: Cell
    members: tuple[str, ...] = ()
    """The members of a mean."""
    missing: tuple[str, ...] = ()
    """Members without a mean, or with a mean over only some of their parts."""
    not_applicable: tuple[str, ...] = ()
    """Members in `missing` that were played but whose headline applies to none of their rows."""

    @property
    def mean_over(self) -> bool:
        """Whether it is a mean over members."""
        return self.level in ("axis", "suite")

    @property
    def lacks(self) -> bool:
        """Whether results are missing. A headline that applies to none of the rows is not
        missing."""
        if self.cell.whole or self.cell.not_applicable:
            return False
        return not self.missing or set(self.missing) != set(self.not_applicable)

    @property
    def coverage(self) -> str:
        """`4 of 5`, the members with a mean; empty if the line is not a mean over members."""
        total = len(self.members)
        return f"{total - len(self.missing)} of {total}" if total else ""


def suite_lines(suite: Suite, tasks: Cells, scale_of: Scales) -> list[SuiteLine]:
    """Members in published order, each group followed by its tasks; axis means; the suite mean.

    `tasks` holds the cells of a run; `scale_of` gives the scales of tasks that the run lacks.
    """
    ends = _Ends(tasks, scale_of)
    members = {name: _member(suite, name, tasks, ends) for name in suite.members}
    lines: list[SuiteLine] = []
    for member in members.values():
        lines.append(member)
        if member.level == "group":
            lines += [_task(suite, name, member.name, tasks) for name in member.members]
    if suite.average:
        reach = {name: possible_span(line.cell, ends.of(suite.tasks_of(name))) for name, line
                 in members.items()}  # fmt: skip
        means = [*suite.axes.items(), ("all", suite.members)]
        lines += [_mean(axis, [members[name] for name in names], reach) for axis, names in means]
    return lines


@dataclass(frozen=True, slots=True)
class _Ends:
    """Scales of tasks: as recorded in the run, else as declared."""

    tasks: Cells
    declared: Scales

    def of(self, names: Iterable[str]) -> Interval | None:
        """The scale of the mean of these tasks."""
        scales = [headline(self.tasks.get(name, {})).scale or self.declared(name) for name in names]
        return mean_interval(scales)


def _task(suite: Suite, name: str, member: str, tasks: Cells) -> SuiteLine:
    level: Level = "task" if name == member else "part"
    cell = headline(tasks.get(name, {}))
    return SuiteLine(name=name, level=level, axis=suite.axis_of(member), cell=cell)


def _member(suite: Suite, name: str, tasks: Cells, ends: _Ends) -> SuiteLine:
    if name not in suite.groups:
        return _task(suite, name, name, tasks)
    parts = [_task(suite, task, name, tasks) for task in suite.tasks_of(name)]
    reach = {part.name: possible_span(part.cell, ends.of([part.name])) for part in parts}
    return SuiteLine(
        name=name, level="group", axis=suite.axis_of(name), cell=_average(parts, reach),
        members=tuple(part.name for part in parts), missing=_missing(parts),
        not_applicable=_not_applicable(parts),
    )  # fmt: skip


def _mean(
    axis: str, members: Sequence[SuiteLine], reach: Mapping[str, Interval | None]
) -> SuiteLine:
    level: Level = "suite" if axis == "all" else "axis"
    return SuiteLine(
        name=axis, level=level, axis="" if level == "suite" else axis,
        cell=_average(members, reach), members=tuple(line.name for line in members),
        missing=_missing(members), not_applicable=_not_applicable(members),
    )  # fmt: skip


def _missing(lines: Sequence[SuiteLine]) -> tuple[str, ...]:
    return tuple(line.name for line in lines if not line.cell.whole)


def _not_applicable(lines: Sequence[SuiteLine]) -> tuple[str, ...]:
    return tuple(line.name for line in lines if not line.cell.whole and not line.lacks)


def _average(lines: Sequence[SuiteLine], reach: Mapping[str, Interval | None]) -> Cell:
    """The mean over lines with equal weights; only bounds if one of them has no mean."""
    cells = [line.cell for line in lines]
    whole = not _missing(lines)
    scale = mean_interval([cell.scale for cell in cells])
    unscored: Counter[str] = Counter()
    for cell in cells:
        unscored.update(cell.unscored)
    bounds = mean_interval([reach[line.name] for line in lines])
    counted = Cell(
        n=sum(cell.n for cell in cells), n_scored=sum(cell.n_scored for cell in cells),
        n_clusters=sum(cell.n_clusters for cell in cells), scale=scale,
        unscored=dict(sorted(unscored.items())),
    )  # fmt: skip
    if whole:
        counted = _with_mean(counted, cells)
    # Truncated episodes are scored, but their member still has bounds.
    hidden = any(cell.worst is not None for cell in cells)
    incomplete = not whole or hidden or counted.n_scored < counted.n
    return replace(counted, worst=bounds[0], best=bounds[1]) if bounds and incomplete else counted


def _with_mean(counted: Cell, cells: Sequence[Cell]) -> Cell:
    together = suite_mean(cells)
    return replace(
        counted, mean=together.mean, ci_low=together.ci_low, ci_high=together.ci_high,
        variance=together.variance, df=together.df, method=together.method,
    )  # fmt: skip
