"""Differences between two runs, with intervals: in one metric of a task, and in means over a suite.

Only episodes that both runs scored count, so a run cannot win by leaving hard episodes unscored.
In a suite, tasks are strata and all members have equal weight; the variances of their differences
are added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from soulkit.errors import DataError, did_you_mean
from soulkit.eval.results.batch_statistics import NOTHING, Clusters, LeaveOneOut, calibrated
from soulkit.eval.results.summary import DEV, Cell, cluster_of, headline_name, metric_values
from soulkit.metrics.comparisons import (
    PairedDifference,
    jackknife_difference,
    mean_of_all,
    paired_difference,
    signs_of,
    suite_difference,
)
from soulkit.metrics.intervals import Interval
from soulkit.runs.records import drafts
from soulkit.tasks.kit.scoring import Kept, of_one_origin, of_origin, origins_of, shared_parts
from soulkit.tasks.kit.spec import Suite
from soulkit.types import ControlRecord, Failure, Record, unscored

if TYPE_CHECKING:
    from soulkit.tasks.kit.base import Task


HEADLINE = "headline"
"""Stands for the headline metric that the task declares."""
VALUE = "value"
UNPAIRED = "unpaired"
"""Unscored reason for an episode that only the other run failed to score."""
EpisodeKey = tuple[int, str, int]
"""Step, example and rollout. Two episodes with the same key form a pair."""
Batch = tuple["Task | None", Sequence[Record], Sequence[ControlRecord]]
"""Inputs of a batch statistic of one run: the task with its code, episodes, controls."""


def episode_key(record: Record) -> EpisodeKey:
    return record.step, record.example_id, record.rollout


def lost_in_all(sides: Sequence[Sequence[Record]]) -> list[list[Record]]:
    """The episodes that every side played. An episode without a score on one side becomes unscored
    on all sides."""
    played = set.intersection(*({episode_key(r) for r in side} for side in sides))
    scored = set.intersection(*({episode_key(r) for r in side if r.score.scored} for side in sides))
    return [
        [r if episode_key(r) in scored
         else replace(r, score=unscored(Failure(UNPAIRED), r.score.protocol))
         for r in side if episode_key(r) in played]
        for side in sides
    ]  # fmt: skip


def shared_batches(sides: Sequence[Batch]) -> list[LeaveOneOut]:
    """For each side whose task code is available: the batch of the episodes that all sides played
    (see `lost_in_all`)."""
    episodes = lost_in_all([drafts(records) for _, records, _ in sides])
    return [
        LeaveOneOut(calibrated(live, controls), sorted(side, key=episode_key), cluster_of)
        for (live, _, controls), side in zip(sides, episodes, strict=True)
        if live is not None
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPair:
    """The recorded results of two runs on one task, with episodes of every kind."""

    task: str
    a: Sequence[Record]
    b: Sequence[Record]
    live_a: Task | None = None
    """The task as A played it; None if its code may not run here."""
    live_b: Task | None = None
    declared_name: str = ""
    """The task's declared name for its mean score, for unfinished runs without a summary."""
    recorded: tuple[Mapping[str, Cell], Mapping[str, Cell]] = ({}, {})
    """The cells of both summaries. They hold the scales, so the task code is not needed."""
    held_out: tuple[Sequence[Record], Sequence[Record]] | None = None
    """The newest held-out episodes of two training runs with a dev split: their headline."""
    controls: tuple[Sequence[ControlRecord], Sequence[ControlRecord]] = ((), ())
    """The judged controls of both runs; empty unless they may be compared."""

    @property
    def headline(self) -> str:
        """The headline metric that the task declares; `value` if unknown."""
        declared = self.live_a or self.live_b
        return (declared.headline_metric if declared else "") or VALUE

    @property
    def value_name(self) -> str:
        """The task's name for its mean score; `value` if unknown, or if another of its metrics has
        that name."""
        recorded = [cells[VALUE].name for cells in self.recorded if VALUE in cells]
        known = {VALUE, self.headline, *(m for r in (*self.a, *self.b) for m in r.score.metrics)}
        known |= {name for cells in self.recorded for name in cells}
        return next(
            (name for name in (*recorded, self.declared_name) if name and name not in known), VALUE
        )

    def shown(self, metric: str) -> str:
        """The display name of a metric."""
        base, slash, rest = metric.partition("/")
        return f"{self.value_name}{slash}{rest}" if base == VALUE else metric

    def asked(self, metric: str) -> str:
        """The internal name of a metric: users may write the task's own name for `value`."""
        base, rest = self.value_name, metric.removeprefix(self.value_name)
        meant = base != VALUE and metric.startswith(base) and rest[:1] in ("", "/")
        known = metric in _recorded_names(self) or any(metric in cells for cells in self.recorded)
        return f"{VALUE}{rest}" if meant and not known else metric

    def needs_code(self, metric: str) -> bool:
        """Whether the records lack `metric`. It may then be a batch statistic, which only the
        task's code can compute."""
        if metric in ("", HEADLINE):
            return {headline_name(cells) for cells in self.recorded} != {VALUE}
        return not _divided(self.asked(metric), self)[0]

    def scale(self, metric: str) -> Interval | None:
        """The lowest and highest value of a metric; None if unknown."""
        declared = self.live_a or self.live_b
        if declared is None:
            base = metric.partition("/")[0]
            named = VALUE if base in ("", HEADLINE, VALUE, DEV) else metric
            return next((c[named].scale for c in self.recorded if named in c), None)
        terms = declared.spec.metric
        if (named := self.headline if metric in ("", HEADLINE) else metric) in terms.scales:
            return terms.scales[named]
        if metric.partition("/")[0] in ("", HEADLINE, VALUE, DEV, terms.headline):
            return terms.low, terms.high
        return terms.scales.get(metric)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """B minus A in one metric of one task."""

    metric: str
    paired: PairedDifference
    n_a: int
    """Episodes of A that the metric applies to, scored or not."""
    n_b: int
    over: tuple[str, ...] = ()
    """The shared parts that a mean is taken over, if one run lacks some parts."""


def contrast(pair: TaskPair, metric: str = HEADLINE) -> Contrast:
    """The difference between two runs in `metric`.

    DataError if a run lacks the metric (suggesting the nearest name) or could not compute its
    headline.
    """
    if pair.held_out is not None and metric in ("", HEADLINE, DEV):
        scores = replace(pair, a=pair.held_out[0], b=pair.held_out[1], held_out=None)
        return replace(contrast(scores), metric=DEV)
    name = pair.headline if metric in ("", HEADLINE) else pair.asked(metric)
    if any(cells[name].not_applicable for cells in pair.recorded if name in cells):
        raise _undefined_headline(name, pair)
    if name in _batch_names(pair):
        return _of_batches(pair, name)
    if name == pair.headline and name != VALUE:
        if any(headline_name(cells) == name for cells in pair.recorded):
            raise _undefined_headline(name, pair)
        name = VALUE  # of runs that have no summary yet
    base, label = _divided(name, pair)
    if not base:
        raise unknown_metric(name, [pair])
    return _of_episodes(pair, name, base, label)


def _undefined_headline(name: str, pair: TaskPair) -> DataError:
    """The error for a headline that a run could not compute."""
    means = [cells[name].mean if name in cells else None for cells in pair.recorded]
    lone = " and ".join(run for run, mean in zip("AB", means, strict=True) if mean is None)
    whys = dict.fromkeys(cells[name].not_applicable for cells in pair.recorded if name in cells)
    if why := "; ".join(filter(None, whys)):
        return DataError(
            f"The metric '{pair.shown(name)}' of the task '{pair.task}' does not apply in {lone}: "
            f"{why}.",
            "No row of that run counts for this metric.",
            f"Compare a metric that these rows have, such as --metric '{_instead(name, pair)}', or "
            "evaluate other rows.",
        )
    return DataError(
        f"The headline '{name}' of the task '{pair.task}' is undefined in {lone or 'A or B'}.",
        "The data to compute it is missing, and the mean over episodes is a different number.",
        f"Compare a metric that both runs have, for example --metric '{_instead(name, pair)}'.",
    )


def _instead(name: str, pair: TaskPair) -> str:
    """A metric that both runs have, to suggest in place of the headline `name`."""
    shared = {episode_key(r) for r in drafts(pair.a)} & {episode_key(r) for r in drafts(pair.b)}
    origins = origins_of([r for r in pair.a if episode_key(r) in shared])
    divided = len(origins) > 1 and "" not in origins
    return pair.shown(of_one_origin(name, origins[0])) if divided else pair.value_name


def metric_names(pair: TaskPair) -> list[str]:
    """Display names of all metrics that can be compared on a task."""
    records = [*pair.a, *pair.b]
    tags = {f"{VALUE}/{tag}={value}" for r in records for tag, value in r.tags.items()}
    origins = origins_of(records)
    tags |= {of_one_origin(VALUE, one) for one in origins if one and len(origins) > 1}
    kinds = {f"{VALUE}/kind={r.kind}" for r in records if r.kind != "draft"}
    names = [*_recorded_names(pair), *_batch_names(pair), *sorted(tags | kinds)]
    return [pair.shown(name) for name in names]


def unknown_metric(name: str, pairs: Sequence[TaskPair]) -> DataError:
    """The error for a metric that none of the tasks has; it suggests the nearest name."""
    tasks = [pair.task for pair in pairs]
    whose = f"the task '{tasks[0]}'" if len(tasks) == 1 else f"any of {', '.join(tasks)}"
    names = sorted({known for pair in pairs for known in metric_names(pair)})
    hint = did_you_mean(name, names)
    if hint.startswith("Did"):
        hint += (
            f" Known metrics, without breakdowns: {', '.join(n for n in names if '=' not in n)}."
        )
    return DataError(
        f"The two runs do not share a metric '{name}' for {whose}.",
        "A comparison needs a metric that the episodes of both runs recorded, or one that the "
        "task computes over a batch.",
        hint,
    )


def _recorded_names(pair: TaskPair) -> list[str]:
    return [VALUE, *sorted({m for r in (*pair.a, *pair.b) for m in r.score.metrics} - {VALUE})]


def _batch_names(pair: TaskPair) -> list[str]:
    both = zip((pair.live_a, pair.live_b), (pair.a, pair.b), pair.controls, strict=True)
    sides = [
        {} if live is None else calibrated(live, controls)(drafts(records))
        for live, records, controls in both
    ]
    return sorted(sides[0].keys() & sides[1].keys())


# -- means over episodes -----------------------------------------------------------------------


def _divided(name: str, pair: TaskPair) -> tuple[str, str]:
    """(metric, breakdown) of a name such as `value/order=2`; two empty strings if unknown."""
    recorded = _recorded_names(pair)
    if name in recorded:
        return name, ""
    for base in sorted(recorded, key=len, reverse=True):
        label = name.removeprefix(f"{base}/")
        if label not in ("", name) and any(_group((*pair.a, *pair.b), label)):
            return base, label
    return "", ""


def _group(records: Sequence[Record], label: str) -> list[Record]:
    tag, _, value = label.partition("=")
    if tag == "kind":
        return [r for r in records if r.kind == value]
    if tag == "origin" and not any(tag in r.tags for r in records):
        return of_origin(drafts(records), value)
    return [r for r in drafts(records) if not label or r.tags.get(tag) == value]


def _of_episodes(pair: TaskPair, name: str, base: str, label: str) -> Contrast:
    sides = [_group(side, label) for side in (pair.a, pair.b)]
    shared = {episode_key(r) for r in sides[0]} & {episode_key(r) for r in sides[1]}
    if (
        len({r.origin for r in sides[0] if episode_key(r) in shared}) > 1
    ):  # never averaged: see `summary`
        sides = [of_origin(side, "") for side in sides]
    values_a, values_b = (metric_values(side, base) for side in sides)
    records = [r for r, _ in (*values_a, *values_b)]
    clusters: dict[Hashable, Hashable] = {episode_key(r): cluster_of(r) for r in records}
    paired = paired_difference(
        {episode_key(r): v for r, v in values_a}, {episode_key(r): v for r, v in values_b},
        clusters, scale=pair.scale(name),
    )  # fmt: skip
    return Contrast(metric=name, paired=paired, n_a=len(values_a), n_b=len(values_b))


# -- numbers over a batch ----------------------------------------------------------------------


def _of_batches(pair: TaskPair, name: str) -> Contrast:
    """The batch statistic of both runs over the same episodes; one that either run failed to score
    is left out of both."""
    sides = [drafts(side) for side in (pair.a, pair.b)]
    scored = [{episode_key(r) for r in side if r.score.scored} for side in sides]
    in_both = scored[0] & scored[1]
    controls = _in_both(pair.controls)
    batches = shared_batches([
        (pair.live_a, sides[0], controls[0]), (pair.live_b, sides[1], controls[1])
    ])  # fmt: skip
    kept = shared_parts(name, [batch.metrics() for batch in batches])
    recorded = any(name in cells for cells in pair.recorded)
    if recorded and name in kept and not kept[name]:
        raise _undefined_headline(name, pair)
    paired = replace(
        _jackknifed(name, batches, kept, pair.scale(name)), n_shared=len(in_both),
        n_only_a=len(scored[0] - in_both), n_only_b=len(scored[1] - in_both),
    )  # fmt: skip
    return Contrast(metric=name, paired=paired, n_a=len(sides[0]), n_b=len(sides[1]),
                    over=_over(name, batches, kept))  # fmt: skip


def _over(name: str, batches: Sequence[LeaveOneOut], kept: Kept) -> tuple[str, ...]:
    """The parts that a mean is compared over; empty if it is compared over all."""
    lacking = any(batch.metrics()[name].missing for batch in batches if name in kept)
    return tuple(kept[name]) if lacking else ()


def _in_both(
    sides: tuple[Sequence[ControlRecord], Sequence[ControlRecord]],
) -> list[list[ControlRecord]]:
    """The controls of both runs; one that either run failed to score becomes unscored in both."""
    a, b = ({c.key for c in side if c.score.scored} for side in sides)
    return [
        [c if c.key in a & b else replace(c, score=unscored(Failure(UNPAIRED), c.score.protocol))
         for c in side]
        for side in sides
    ]  # fmt: skip


def _jackknifed(
    name: str, batches: Sequence[LeaveOneOut], kept: Kept, scale: Interval | None
) -> PairedDifference:
    """Leave-one-cluster-out jackknife of the difference. For a mean over parts with disjoint
    clusters: the mean of the parts' differences."""
    parts = list(kept.get(name, {}).values())
    clusters = [_clusters(part, batches) for part in parts]
    if parts and len(NOTHING.union(*clusters)) == sum(map(len, clusters)):
        strata = [_jackknifed(part, batches, kept, scale) for part in parts]
        return suite_difference(strata, scale=scale)
    a, b = (batch.within(_clusters(name, batches)) for batch in batches)
    paired = jackknife_difference(
        partial(a.value_over, name, kept), partial(b.value_over, name, kept), a.n_parts,
        scale=scale,
    )  # fmt: skip
    return replace(paired, n_clusters=a.n_clusters)


def _clusters(name: str, batches: Sequence[LeaveOneOut]) -> Clusters:
    return NOTHING.union(*(batch.of_metric(name).clusters for batch in batches))


ALL_MEMBERS = "all"
MeanLevel = Literal["group", "axis", "suite"]
TaskSpan = Callable[[str], float | None]
"""Task → highest minus lowest value; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDifference:
    """B minus A over a group of tasks, an axis or a whole suite."""

    name: str
    level: MeanLevel
    members: int
    missing: tuple[str, ...]
    """Members without a difference; if there are any, there is no mean."""
    paired: PairedDifference
    better: int
    """Members whose difference is above zero, whatever its interval."""
    worse: int
    equal: int
    worst: float | None = None
    """The difference if missing members had lost as much as their scale allows; None if none is
    missing."""
    best: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; the fields of `paired` are inlined."""
        line = {name: value for name, value in asdict(self).items() if name != "paired"}
        return {**line, "missing": list(self.missing), **asdict(self.paired)}


def suite_differences(
    suite: Suite, tasks: Mapping[str, PairedDifference], span: TaskSpan
) -> list[MeanDifference]:
    """The means of a suite: its groups, its axes, and last the mean over all members."""
    made: list[MeanDifference] = []
    parts = {member: tasks.get(member) for member in suite.members}
    for member in suite.groups:
        group = _mean_difference(
            "group", member, {n: tasks.get(n) for n in suite.tasks_of(member)}, span
        )
        parts[member] = group.paired
        made.append(group)

    def width(member: str) -> float | None:
        return mean_of_all([span(name) for name in suite.tasks_of(member)])

    for axis, names in suite.axes.items():
        made.append(_mean_difference("axis", axis, {n: parts[n] for n in names}, width))
    return [*made, _mean_difference("suite", ALL_MEMBERS, parts, width)]


def _mean_difference(
    level: MeanLevel, name: str, parts: Mapping[str, PairedDifference | None], width: TaskSpan
) -> MeanDifference:
    there = {n: p for n, p in parts.items() if p is not None and p.difference is not None}
    missing = tuple(n for n in parts if n not in there)
    reach = None if missing else mean_of_all([width(n) for n in parts])
    paired = suite_difference(list(there.values()), scale=None if reach is None else (0.0, reach))
    if missing:
        paired = replace(
            paired, mean_a=None, mean_b=None, difference=None, ci_low=None, ci_high=None, p=None,
            variance=None, df=None, method="nothing-scored", unseen=0.0,
        )  # fmt: skip
    worst, best = _mean_bounds(list(there.values()), [width(n) for n in missing])
    return MeanDifference(
        name=name, level=level, members=len(parts), missing=missing, paired=paired,
        worst=worst, best=best, **signs_of(there.values())._asdict(),
    )  # fmt: skip


def _mean_bounds(
    there: Sequence[PairedDifference], widths: Sequence[float | None]
) -> tuple[float | None, float | None]:
    """The mean if all missing members were at the low or the high end of their scales."""
    reach = [width for width in widths if width is not None]
    if not widths or len(reach) < len(widths):
        return None, None
    count, total = len(there) + len(widths), math.fsum(p.difference or 0.0 for p in there)
    return (total - math.fsum(reach)) / count, (total + math.fsum(reach)) / count
