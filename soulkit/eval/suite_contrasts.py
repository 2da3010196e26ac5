"""The difference of two runs over a suite: by member, by axis and over all.

    tasks, paired ──▶ members (a group is the mean of its tasks) ──▶ axis means, suite mean

Tasks are strata and every member counts alike, so the variances of their differences are added. A
member that one of the runs lacks is named, and then there is no mean above it, only the bounds that
it leaves: the member on either end of its scale. How many members are better and worse stands
beside every mean, because one large gain can hide many small losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from soulkit.metrics.comparisons import PairedDifference, suite_difference
from soulkit.tasks.suites import Suite

ALL = "all"
MeanLevel = Literal["group", "axis", "suite"]
Span = Callable[[str], float | None]
"""Task → highest minus lowest value; None where nobody can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDifference:
    """B minus A over a group of tasks, an axis or a whole suite."""

    name: str
    level: MeanLevel
    members: int
    missing: tuple[str, ...]
    """Members without a difference: while there are any there is no mean."""
    paired: PairedDifference
    better: int
    """Members whose difference is above zero, whatever its interval."""
    worse: int
    equal: int
    worst: float | None = None
    """The difference if what is missing had lost as much as its scale allows; None: complete."""
    best: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `paired` is laid out flat."""
        line = {name: value for name, value in asdict(self).items() if name != "paired"}
        return {**line, "missing": list(self.missing), **asdict(self.paired)}


def suite_differences(
    suite: Suite, tasks: Mapping[str, PairedDifference], span: Span
) -> list[MeanDifference]:
    """The means of a suite: its groups, its axes, and last the mean over all members."""
    made: list[MeanDifference] = []
    parts = {member: tasks.get(member) for member in suite.members}
    for member in suite.groups:
        group = _mean("group", member, {n: tasks.get(n) for n in suite.tasks_of(member)}, span)
        parts[member] = group.paired
        made.append(group)

    def width(member: str) -> float | None:
        return _mean_of([span(name) for name in suite.tasks_of(member)])

    for axis, names in suite.axes.items():
        made.append(_mean("axis", axis, {n: parts[n] for n in names}, width))
    return [*made, _mean("suite", ALL, parts, width)]


def _mean(
    level: MeanLevel, name: str, parts: Mapping[str, PairedDifference | None], width: Span
) -> MeanDifference:
    there = {n: p for n, p in parts.items() if p is not None and p.difference is not None}
    missing = tuple(n for n in parts if n not in there)
    whole = not missing
    reach = _mean_of([width(n) for n in parts]) if whole else None
    outcome = suite_difference(
        list(there.values()), scale=None if reach is None else (0.0, reach)
    )  # fmt: skip
    paired = PairedDifference(
        mean_a=_mean_of([p.mean_a for p in there.values()]) if whole else None,
        mean_b=_mean_of([p.mean_b for p in there.values()]) if whole else None,
        difference=outcome.difference if whole else None,
        ci_low=outcome.ci_low if whole else None,
        ci_high=outcome.ci_high if whole else None,
        p=outcome.p if whole else None,
        n_shared=sum(p.n_shared for p in there.values()),
        n_only_a=sum(p.n_only_a for p in there.values()),
        n_only_b=sum(p.n_only_b for p in there.values()),
        n_clusters=outcome.n_clusters,
        variance=outcome.variance if whole else None,
        df=outcome.df if whole else None,
        method=outcome.method if whole else "nothing-scored",
        unseen=outcome.unseen if whole else 0.0,
    )
    worst, best = _bounds(list(there.values()), [width(n) for n in missing])
    return MeanDifference(
        name=name, level=level, members=len(parts), missing=missing, paired=paired,
        better=outcome.better, worse=outcome.worse, equal=outcome.equal, worst=worst, best=best,
    )  # fmt: skip


def _bounds(
    there: Sequence[PairedDifference], widths: Sequence[float | None]
) -> tuple[float | None, float | None]:
    """Where the mean could lie if those that are missing were on either end of their scales."""
    reach = [width for width in widths if width is not None]
    if not widths or len(reach) < len(widths):
        return None, None
    count, total = len(there) + len(widths), math.fsum(p.difference or 0.0 for p in there)
    return (total - math.fsum(reach)) / count, (total + math.fsum(reach)) / count


def _mean_of(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers and len(numbers) == len(values) else None
