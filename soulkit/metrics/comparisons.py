"""Comparisons of A and B: paired differences, gaps, learning curves, and multiple tests.

Differences are taken row by row, which removes the difficulty of the rows. The interval is that of
a mean (`intervals.estimate`). For 0/1 scores pseudo-clusters are added, because otherwise the
interval of a rare change is too short or undefined. The p-value belongs to the same statistic and
is not adjusted for other tests: p is below 0.05 exactly if the 95 % interval excludes zero. Holm's
adjustment is reported separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from soulkit.metrics.intervals import (
    ClusterStatistic,
    Estimate,
    Floats,
    Interval,
    added_variance,
    estimate,
    independent_rows,
    jackknife,
    unseen_variance,
)
from soulkit.metrics.student import CONFIDENCE, significance, t_p_value, t_quantile

N_FLIPS = 10_000
_EXACT_CLUSTERS = 13
"""Up to 2**13 = 8192 sign patterns are enumerated; with more clusters they are drawn at random."""
_SPECK = 1e-12
"""A difference below this share of the larger value counts as rounding error."""
_CHUNK = 4_000_000
"""Maximum number of random numbers in memory at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """B minus A over the keys that both scored, in the unit of the values."""

    mean_a: float | None
    mean_b: float | None
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    p: float | None
    """Two-sided, not adjusted; None if fewer than two clusters are shared."""
    n_shared: int
    n_only_a: int
    n_only_b: int
    n_clusters: int
    variance: float | None = None
    """Variance of the difference, in squared units; includes `unseen`."""
    df: float | None = None
    method: str = ""
    """`agresti-min-t` (0/1 scores), `cr2-t` or `jackknife-t`; without interval `no-spread` (p from
    sign flips), `one-cluster`, `undefined` or `nothing-scored`."""
    unseen: float = 0.0
    """The part of `variance` from pseudo-clusters (`agresti-min-t`)."""


class Signs(NamedTuple):
    """The number of tasks in which B was better, worse or equal, regardless of intervals."""

    better: int
    worse: int
    equal: int


@dataclass(frozen=True, slots=True)
class RewardGroup:
    """Scores of the drafts of one example and of their refined rollouts; index i is rollout i.

    None is an unscored draft, or a refined rollout that is unscored or does not exist.
    """

    drafts: Sequence[float | None]
    refined: Sequence[float | None]
    cluster: Hashable = None
    """The cluster that the example shares with others (its story, the same row in another step);
    None for its own cluster."""

    def __post_init__(self) -> None:
        if len(self.drafts) != len(self.refined):
            raise ValueError("drafts and refined must have the same length")


# -- differences ---------------------------------------------------------------------------------


def difference_of(a: float, b: float, size: float = 0.0) -> float:
    """b - a, or 0 if it is within rounding error of a, b or `size`. Without this, sums in another
    order could give tiny differences of one sign that look significant."""
    difference = b - a
    return difference if abs(difference) > _SPECK * max(abs(a), abs(b), size) else 0.0


def paired_difference(
    a: Mapping[Hashable, float | None],
    b: Mapping[Hashable, float | None],
    clusters: Mapping[Hashable, Hashable],
    *,
    scale: Interval | None = None,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> PairedDifference:
    """mean(b) - mean(a) over the keys that both scored.

    `clusters` maps each shared key to its cluster. Interval and p use CR2 variances and t with Bell
    and McCaffrey's degrees of freedom. If every shared value is at an end of the `scale` (default:
    0 or 1), one pseudo-cluster is added in each corner of the 2 × 2 table, as in Agresti & Min
    (2005), so an interval exists from two clusters on. Otherwise, if all differences are equal,
    there is no interval, and p comes from `sign_flip_p`. The interval is clipped to the differences
    that are possible on `scale`; this does not change p. `n_only_a` counts keys that are scored in
    A but not in B (unscored or not played).
    """
    in_a, in_b = scored_values(a), scored_values(b)
    shared = sorted(in_a.keys() & in_b.keys(), key=repr)
    size = max((abs(v) for v in (*in_a.values(), *in_b.values(), *(scale or ()))), default=0.0)
    d = [difference_of(in_a[k], in_b[k], size) for k in shared]
    groups = [clusters[k] for k in shared]
    outcome, unseen = estimate(d, groups, confidence=confidence), 0.0
    width = _yes_no_width([v for k in shared for v in (in_a[k], in_b[k])], scale)
    if width is not None and outcome.n_clusters > 1:
        unseen = unseen_variance(independent_rows(d, groups), width)
        outcome = _widened(outcome, unseen, confidence)
        scale = scale or (0.0, width)
    flips = outcome.method == "no-spread"
    low, high = _cut(outcome, scale)
    return PairedDifference(
        mean_a=_mean([in_a[k] for k in shared]),
        mean_b=_mean([in_b[k] for k in shared]),
        difference=outcome.mean,
        ci_low=low,
        ci_high=high,
        p=sign_flip_p(d, groups, seed=seed) if flips else _p_value(outcome, confidence),
        n_shared=len(shared),
        n_only_a=len(in_a.keys() - in_b.keys()),
        n_only_b=len(in_b.keys() - in_a.keys()),
        n_clusters=outcome.n_clusters,
        variance=outcome.variance,
        df=outcome.df,
        method=outcome.method,
        unseen=unseen,
    )


def _yes_no_width(values: Sequence[float], scale: Interval | None) -> float | None:
    """The width of the scale if every value is at one of its ends, else None."""
    low, high = scale or (0.0, 1.0)
    return high - low if low < high and all(v in (low, high) for v in values) else None


def _widened(outcome: Estimate, unseen: float, confidence: float) -> Estimate:
    """The estimate with `unseen` added to its variance."""
    assert outcome.mean is not None and outcome.variance is not None and outcome.df is not None
    variance = outcome.variance + unseen
    half = t_quantile(outcome.df, confidence) * math.sqrt(variance)
    return replace(
        outcome, ci_low=outcome.mean - half, ci_high=outcome.mean + half, variance=variance,
        method="agresti-min-t",
    )  # fmt: skip


def jackknife_difference(
    a: ClusterStatistic,
    b: ClusterStatistic,
    n_clusters: int,
    *,
    scale: Interval | None = None,
    confidence: float = CONFIDENCE,
) -> PairedDifference:
    """b - a for two statistics over the same clusters (batch metrics of two runs).

    Delete-one-cluster jackknife of the difference, with t at C - 1 degrees of freedom. `n_shared`
    counts clusters here. Undefined if either side is.
    """

    def difference(clusters: Sequence[int]) -> float | None:
        of_a, of_b = a(clusters), b(clusters)
        return None if of_a is None or of_b is None else difference_of(of_a, of_b)

    outcome = jackknife(difference, n_clusters, confidence=confidence)
    everything = range(n_clusters)
    low, high = _cut(outcome, scale)
    return PairedDifference(
        mean_a=a(everything) if n_clusters else None,
        mean_b=b(everything) if n_clusters else None,
        difference=outcome.mean,
        ci_low=low,
        ci_high=high,
        p=_p_value(outcome, confidence),
        n_shared=n_clusters,
        n_only_a=0,
        n_only_b=0,
        n_clusters=n_clusters,
        variance=outcome.variance,
        df=outcome.df,
        method=outcome.method,
    )


def suite_difference(
    parts: Sequence[PairedDifference],
    *,
    scale: Interval | None = None,
    confidence: float = CONFIDENCE,
) -> PairedDifference:
    """The mean of the parts' differences with equal weights.

    V = (Σ V_k + max U_k) / K², t at Welch & Satterthwaite's degrees of freedom. V_k is a part's
    variance without its `unseen` part U_k. Only the largest U_k counts, because all unseen changes
    may be in the least known part, but not in every part at once. There is no difference if a part
    has none, and no interval or p if a part has no variance or V is 0.
    """
    differences = [p.difference for p in parts if p.difference is not None]
    complete = len(differences) == len(parts) > 0
    seen = [(None if p.variance is None else p.variance - p.unseen, p.df) for p in parts]
    added = added_variance(seen) if complete else None
    unseen = max(p.unseen for p in parts) / len(parts) ** 2 if added else 0.0
    variance, df = (added[0] + unseen, added[1]) if added else (None, None)
    mean = _mean(differences) if complete else None
    outcome = Estimate(mean=mean, variance=variance, df=df)
    if mean is not None and variance and df is not None:
        half = t_quantile(df, confidence) * math.sqrt(variance)
        outcome = Estimate(
            mean=mean, ci_low=mean - half, ci_high=mean + half, variance=variance, df=df
        )
    low, high = _cut(outcome, scale)
    lacking = "nothing-scored" if mean is None else "undefined" if added is None else "no-spread"
    return PairedDifference(
        mean_a=mean_of_all(p.mean_a for p in parts),
        mean_b=mean_of_all(p.mean_b for p in parts),
        difference=mean,
        ci_low=low,
        ci_high=high,
        p=_p_value(outcome, confidence),
        n_shared=sum(p.n_shared for p in parts),
        n_only_a=sum(p.n_only_a for p in parts),
        n_only_b=sum(p.n_only_b for p in parts),
        n_clusters=sum(p.n_clusters for p in parts),
        variance=variance,
        df=df,
        method=lacking if low is None else "strata-t",
        unseen=unseen,
    )


def signs_of(parts: Iterable[PairedDifference]) -> Signs:
    """Count the differences above, below and equal to zero."""
    differences = [p.difference for p in parts if p.difference is not None]
    return Signs(
        better=sum(d > _SPECK for d in differences),
        worse=sum(d < -_SPECK for d in differences),
        equal=sum(abs(d) <= _SPECK for d in differences),
    )


def mean_of_all(values: Iterable[float | None]) -> float | None:
    """The mean; None if any value is None."""
    numbers = list(values)
    there = [value for value in numbers if value is not None]
    return _mean(there) if len(there) == len(numbers) else None


def _p_value(outcome: Estimate, confidence: float) -> float | None:
    """The p-value of the t statistic of this interval; adjusted so that rounding cannot make the
    two disagree."""
    mean, low, high = outcome.mean, outcome.ci_low, outcome.ci_high
    if mean is None or low is None or high is None or not outcome.variance or outcome.df is None:
        return None
    p = t_p_value(mean / math.sqrt(outcome.variance), outcome.df, confidence)
    level = significance(confidence)
    return min(p, math.nextafter(level, 0)) if low > 0 or high < 0 else max(p, level)


def _cut(outcome: Estimate, scale: Interval | None) -> tuple[float | None, float | None]:
    """The interval clipped to the differences that are possible on `scale`."""
    low, high = outcome.ci_low, outcome.ci_high
    if scale is None or low is None or high is None:
        return low, high
    width = scale[1] - scale[0]
    if abs(outcome.mean or 0.0) > width:  # values are off the scale
        return low, high
    return max(low, -width), min(high, width)


def sign_flip_p(
    differences: Sequence[float],
    clusters: Sequence[Hashable],
    n_flips: int = N_FLIPS,
    seed: int = 0,
) -> float:
    """Two-sided p-value of the hypothesis that differences are symmetric around zero, by cluster.

    With D_c the sum of the differences in cluster c and s_c = ±1, p is the share of sign patterns
    with |sum s_c D_c| >= |sum D_c|: all 2**C of them for C <= 13, otherwise `n_flips` random ones
    with the observed one added, (1 + hits) / (1 + n_flips). ValueError without differences.
    """
    sums = _cluster_sums(differences, clusters)
    observed = abs(float(sums.sum()))
    limit = observed - 1e-12 * max(1.0, float(np.abs(sums).sum()))  # tolerates rounding
    if limit <= 0:
        return 1.0
    if sums.size <= _EXACT_CLUSTERS:
        patterns = np.arange(2**sums.size)[:, None] >> np.arange(sums.size)
        return float(np.mean(np.abs(((patterns & 1) * 2.0 - 1) @ sums) >= limit))
    rng, hits, done = np.random.default_rng(seed), 0, 0
    step = max(1, _CHUNK // sums.size)
    while done < n_flips:
        size = min(step, n_flips - done)
        signs = rng.integers(0, 2, size=(size, sums.size), dtype=np.int8)
        hits += int(np.sum(np.abs((signs * 2.0 - 1) @ sums) >= limit))
        done += size
    return (1 + hits) / (1 + n_flips)


def _cluster_sums(values: Sequence[float], clusters: Sequence[Hashable]) -> Floats:
    """The sum of each cluster, sorted by value so that cluster names do not matter."""
    if not values or len(values) != len(clusters):
        raise ValueError("at least one value, and one cluster per value, are needed")
    by_cluster: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        by_cluster.setdefault(cluster, []).append(float(value))
    return np.array(sorted(math.fsum(members) for members in by_cluster.values()))


def holm(pvalues: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values in the given order; None (no test) stays None and is not counted.

    With p sorted upwards, adjusted_(i) = max over j <= i of min(1, (m - j) p_(j)), j from 0.
    """
    tested = sorted((p, i) for i, p in enumerate(pvalues) if p is not None)
    adjusted: list[float | None] = [None] * len(pvalues)
    running = 0.0
    for rank, (p, i) in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - rank) * p))
        adjusted[i] = running
    return adjusted


# -- gaps ----------------------------------------------------------------------------------------


def leave_one_out_gap(groups: Sequence[RewardGroup]) -> Estimate:
    """The mean advantage of refined rollouts over *other* drafts of the same example.

    Mean over pairs of r'_i - mean of r_j over j != i, with the interval of a mean over clusters.
    Its expectation is zero for useless feedback, unlike the raw pair gap if only poor drafts get
    feedback. A pair needs a scored refined rollout and another scored draft; `n` counts the scored
    refined rollouts, `n_scored` those with such a draft.
    """

    def gap(group: RewardGroup, i: int, refined: float) -> float | None:
        others = [r for j, r in enumerate(group.drafts) if j != i and r is not None]
        return difference_of(math.fsum(others) / len(others), refined) if others else None

    return _gap(groups, gap)


def pair_gap(groups: Sequence[RewardGroup]) -> Estimate:
    """Mean over pairs of r'_i - r_i (refined minus its own draft), by cluster.

    If only poor drafts get feedback, it includes regression to the mean; compare it with
    `leave_one_out_gap`.
    """

    def gap(group: RewardGroup, i: int, refined: float) -> float | None:
        draft = group.drafts[i]
        return None if draft is None else difference_of(draft, refined)

    return _gap(groups, gap)


def _gap(
    groups: Sequence[RewardGroup], gap: Callable[[RewardGroup, int, float], float | None]
) -> Estimate:
    gaps: list[float | None] = []
    owners: list[Hashable] = []
    for number, group in enumerate(groups):
        for i, refined in enumerate(group.refined):
            if refined is not None:
                gaps.append(gap(group, i, refined))
                alone = group.cluster is None
                owners.append(("group", number) if alone else ("cluster", group.cluster))
    return estimate(gaps, owners)


# -- curves --------------------------------------------------------------------------------------


def auc(steps: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Area under a curve (trapezoids) divided by its width: the mean height, in the values' unit.

    Missing points are interpolated linearly. None with fewer than two different steps.
    """
    points = sorted((s, v) for s, v in zip(steps, values, strict=True) if v is not None)
    if len({s for s, _ in points}) < 2:
        return None
    x, y = np.array(points, dtype=np.float64).T
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / (x[-1] - x[0]))


def scored_values(values: Mapping[Hashable, float | None]) -> dict[Hashable, float]:
    """The finite values."""
    return {k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
