"""What a run's tasks come to as a suite: its members, groups, axes, and the mean of all.

    task headlines ──▶ members (a group is the mean of its tasks) ──▶ axis means, suite mean

Every member counts alike (macro), tasks are strata: variances are added, never pooled. A member
without a mean, or with a mean of which parts are missing, is named. Then there is no average above
it, only the bounds it could have: the member on the two ends of its scale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from soulkit.eval.results.cells import Cell, Cells, headline, mean_interval, possible_span
from soulkit.metrics.intervals import Interval, suite_mean
from soulkit.tasks.kit.spec import Suite

Level = Literal["task", "group", "part", "axis", "suite"]
Scales = Callable[[str], Interval | None]
"""The lowest and highest headline that a task can have; None where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteLine:
    """One line of a suite: a member, a task of a group, or a mean over members."""

    name: str
    level: Level
    axis: str
    cell: Cell
    members: tuple[str, ...] = ()
    """Of a mean: what it is over."""
    missing: tuple[str, ...] = ()
    """Those of them that have no mean, or one over a part of what it should be over."""
    not_applicable: tuple[str, ...] = ()
    """Those of `missing` that were played, and whose headlines apply to none of their rows."""

    @property
    def mean_over(self) -> bool:
        """Whether it is a mean over members."""
        return self.level in ("axis", "suite")

    @property
    def lacks(self) -> bool:
        """Whether something is missing: there is no mean, and not only because headlines apply to
        none of the rows."""
        if self.cell.whole or self.cell.not_applicable:
            return False
        return not self.missing or set(self.missing) != set(self.not_applicable)

    @property
    def coverage(self) -> str:
        """`4 of 5 members`; empty for what is no mean over any."""
        total = len(self.members)
        return f"{total - len(self.missing)} of {total}" if total else ""


def suite_lines(suite: Suite, tasks: Cells, scale_of: Scales) -> list[SuiteLine]:
    """Members in published order, each group followed by its tasks; axis means; the suite mean.

    `tasks` holds the cells of a run, `scale_of` tells the scales of the tasks that it lacks.
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
    """The scale of a task: as its run recorded it, else as it is declared."""

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
    """The mean over lines, each counting alike; without a mean where one of them has none."""
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
    # A truncated episode is scored, and its member has bounds all the same.
    hidden = any(cell.worst is not None for cell in cells)
    incomplete = not whole or hidden or counted.n_scored < counted.n
    return replace(counted, worst=bounds[0], best=bounds[1]) if bounds and incomplete else counted


def _with_mean(counted: Cell, cells: Sequence[Cell]) -> Cell:
    """`counted` with the mean of `cells`, and its interval where theirs are known."""
    together = suite_mean(cells)
    return replace(
        counted, mean=together.mean, ci_low=together.ci_low, ci_high=together.ci_high,
        variance=together.variance, df=together.df, method=together.method,
    )  # fmt: skip
