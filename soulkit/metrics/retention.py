"""Retention: the share of the experts' gain that a generalist keeps.

    retention = (generalist − base) / (expert − base), all three on the same rows

A ratio of two correlated means with Fieller's (1954) interval: all ρ for which the mean of
(generalist − base) − ρ (expert − base) is not significantly different from zero, with CR2
variances, clusters as units and t at Bell & McCaffrey's degrees of freedom. It is bounded exactly
if the expert's gain is significant, and excludes zero if the generalist's is. If the expert's gain
is not significantly above zero, there is no ratio, because the divisor may be zero.

`benchmarks/coverage.py` simulates its coverage: at least .93 from ten clusters on.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from soulkit.metrics.comparisons import difference_of, scored_values
from soulkit.metrics.intervals import (
    ClusterStatistic,
    Interval,
    estimate,
    independent_rows,
    unseen_variance,
)
from soulkit.metrics.student import CONFIDENCE, t_quantile

Values = Mapping[Hashable, float | None]
NO_GAIN = "the expert's gain is not significantly above zero"
LOSS = "the expert is worse than the base"
ONE_CLUSTER = "all rows are in one cluster"
NOTHING = "no row is scored for all three models"
NO_SPREAD = "clusters do not vary, and the metric has no known scale"
NO_NUMBER = "the metric is undefined without one of the clusters"
_SPECK = 1e-12
"""A variance below this share of its parts counts as rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Gains of two models over a third on the same clusters, with their variances and
    covariance."""

    base: float
    expert: float
    generalist: float
    """Means over the rows that all three scored, in the unit of the metric."""
    expert_variance: float
    """Variance of the mean gain, in squared units."""
    generalist_variance: float
    covariance: float
    df: float
    n_shared: int
    n_clusters: int
    scale: Interval | None = None
    at_ends: bool = False
    """Whether every score is at an end of the scale (right or wrong)."""
    expert_rows: float | None = None
    """Effective number of independent rows of 0/1 gains; None for n_clusters."""
    generalist_rows: float | None = None

    @property
    def of_expert(self) -> float:
        return difference_of(self.base, self.expert)

    @property
    def of_generalist(self) -> float:
        return difference_of(self.base, self.generalist)

    def along(self, ratio: float) -> float:
        """The variance of (generalist's gain − ratio · expert's); 0 if within rounding."""
        parts = (self.generalist_variance, -2 * ratio * self.covariance,
                 ratio**2 * self.expert_variance)  # fmt: skip
        variance = math.fsum(parts)
        return variance if variance > _SPECK * max(map(abs, parts)) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The share of the expert's gain that the generalist keeps; 1 is all of it."""

    ratio: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    n_shared: int = 0
    """Rows that all three scored."""
    n_clusters: int = 0
    method: str = ""
    """`fieller-cr2`, `fieller-jackknife`, or `mover` for a mean over tasks; `no-spread` without an
    interval; empty without a ratio."""
    why: str = ""
    """Why there is no ratio, or no interval."""


# -- from scores to gains --------------------------------------------------------------------------


def paired_gains(
    base: Values, expert: Values, generalist: Values, clusters: Mapping[Hashable, Hashable], *,
    scale: Interval | None = None,
) -> Gains | None:  # fmt: skip
    """The gains over the keys that all three scored; None if there is none.

    `clusters` maps each key to its cluster. Cov(g, e) = (V(g + e) − V(g) − V(e)) / 2, each V the
    CR2 variance of a mean."""
    sides = [scored_values(side) for side in (base, expert, generalist)]
    keys = sorted(sides[0].keys() & sides[1].keys() & sides[2].keys(), key=repr)
    if not keys:
        return None
    b, e, g = ([side[key] for key in keys] for side in sides)
    units = [clusters[key] for key in keys]
    of_e = [difference_of(x, y) for x, y in zip(b, e, strict=True)]
    of_g = [difference_of(x, y) for x, y in zip(b, g, strict=True)]
    both = [x + y for x, y in zip(of_e, of_g, strict=True)]
    in_e, in_g, in_both = (estimate(values, units) for values in (of_e, of_g, both))
    v_e, v_g, v_both = (part.variance or 0.0 for part in (in_e, in_g, in_both))
    at_ends = scale is not None and all(v in scale for v in (*b, *e, *g))
    worth = [independent_rows(gain, units) if at_ends else None for gain in (of_e, of_g)]
    return Gains(
        base=_mean(b), expert=_mean(e), generalist=_mean(g), expert_variance=v_e,
        generalist_variance=v_g, covariance=(v_both - v_e - v_g) / 2, df=in_e.df or 1.0,
        n_shared=len(keys), n_clusters=in_e.n_clusters, scale=scale,
        at_ends=at_ends, expert_rows=worth[0], generalist_rows=worth[1],
    )  # fmt: skip


def batch_gains(
    base: ClusterStatistic, expert: ClusterStatistic, generalist: ClusterStatistic,
    n_clusters: int, *, n_shared: int, scale: Interval | None = None,
) -> Gains | None:  # fmt: skip
    """The gains in a batch statistic, by delete-one-cluster jackknife; None if it is undefined.
    Cov = (C − 1)/C Σ (g_(c) − ḡ)(e_(c) − ē); C − 1 degrees of freedom."""
    everything = list(range(n_clusters))
    without = [everything[:c] + everything[c + 1 :] for c in everything]
    whole = [side(everything) for side in (base, expert, generalist)] if n_clusters else [None]
    less = [[side(part) for side in (base, expert, generalist)] for part in without]
    numbers = [[v for v in line if v is not None and math.isfinite(v)] for line in (whole, *less)]
    if any(len(line) < 3 for line in numbers):
        return None
    b, e, g = numbers[0]
    of_e, of_g = ([line[i] - line[0] for line in numbers[1:]] for i in (1, 2))
    factor = (n_clusters - 1) / n_clusters
    return Gains(
        base=b, expert=e, generalist=g, expert_variance=factor * _cross(of_e, of_e),
        generalist_variance=factor * _cross(of_g, of_g), covariance=factor * _cross(of_g, of_e),
        df=max(1.0, n_clusters - 1.0), n_shared=n_shared, n_clusters=n_clusters, scale=scale,
    )  # fmt: skip


def _cross(x: Sequence[float], y: Sequence[float]) -> float:
    a, b = _mean(x), _mean(y)
    return math.fsum((p - a) * (q - b) for p, q in zip(x, y, strict=True))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# -- from gains to the ratio -----------------------------------------------------------------------


def retention(
    gains: Gains | None, *, method: str = "fieller-cr2", confidence: float = CONFIDENCE
) -> Retention:
    """Generalist's gain / expert's gain with Fieller's interval, or the reason if there is none."""
    if gains is None:
        return Retention(why=NOTHING if method == "fieller-cr2" else NO_NUMBER)
    counted = Retention(n_shared=gains.n_shared, n_clusters=gains.n_clusters)
    if gains.n_clusters < 2:
        return replace(counted, why=ONE_CLUSTER)
    wary = _wary(gains)
    half = t_quantile(gains.df, confidence) * math.sqrt(wary.expert_variance)
    if gains.of_expert - half <= 0:
        return replace(counted, why=LOSS if gains.of_expert + half < 0 else NO_GAIN)
    ratio = gains.of_generalist / gains.of_expert
    if not wary.along(ratio):
        return replace(counted, ratio=ratio, method="no-spread", why=NO_SPREAD)
    low, high = fieller(wary, confidence)
    return replace(counted, ratio=ratio, ci_low=low, ci_high=high, method=method)


def fieller(gains: Gains, confidence: float = CONFIDENCE) -> Interval:
    """All ρ with (g − ρe)² <= t² (V_g − 2ρ Cov + ρ² V_e), for a significant gain e.

    The roots of aρ² − 2bρ + c with a = e² − t²V_e > 0, b = ge − t²Cov, c = g² − t²V_g.
    """
    t2 = t_quantile(gains.df, confidence) ** 2
    e, g = gains.of_expert, gains.of_generalist
    a, b = e * e - t2 * gains.expert_variance, g * e - t2 * gains.covariance
    c = g * g - t2 * gains.generalist_variance
    root = math.sqrt(max(0.0, b * b - a * c))
    return (b - root) / a, (b + root) / a


def _wary(gains: Gains) -> Gains:
    """The gains with the variance of pseudo-clusters in the corners of the scale, as in
    `paired_difference` (compare Agresti & Min 2005 on paired shares).

    For right-or-wrong scores, a few clusters on which two models agree by chance would give a zero
    variance; without pseudo-clusters the interval covered .85 at ten clusters. Graded scores need
    them only if they have no spread at all.
    """
    ratio = gains.of_generalist / gains.of_expert if gains.of_expert else 0.0
    if gains.scale is None or not (gains.at_ends or not gains.along(ratio)):
        return gains
    width = gains.scale[1] - gains.scale[0]
    of_e = unseen_variance(gains.expert_rows or gains.n_clusters, width)
    of_g = unseen_variance(gains.generalist_rows or gains.n_clusters, width)
    # Over the corners, two gains over the same base share half of their mean square.
    return replace(
        gains, expert_variance=gains.expert_variance + of_e,
        generalist_variance=gains.generalist_variance + of_g,
        covariance=gains.covariance + math.sqrt(of_e * of_g) / 2,
    )  # fmt: skip


def macro_retention(parts: Sequence[Retention]) -> Retention:
    """The unweighted mean of several tasks' retentions.

    Its ends are √Σ(r_k − l_k)² / K below it and √Σ(u_k − r_k)² / K above it (Zou & Donner 2008),
    because tasks are independent strata and Fieller's intervals are not symmetric. There is no mean
    if a task has no ratio, and no interval if one has none.
    """
    counted = Retention(
        n_shared=sum(p.n_shared for p in parts), n_clusters=sum(p.n_clusters for p in parts)
    )
    ratios = [p.ratio for p in parts if p.ratio is not None]
    if not parts or len(ratios) < len(parts):
        lacking = f"{len(parts) - len(ratios)} of {len(parts)} tasks have no ratio"
        return replace(counted, why=lacking)
    mean = _mean(ratios)
    below = [r - p.ci_low for r, p in zip(ratios, parts, strict=True) if p.ci_low is not None]
    above = [p.ci_high - r for r, p in zip(ratios, parts, strict=True) if p.ci_high is not None]
    if len(below) < len(parts) or len(above) < len(parts):
        return replace(counted, ratio=mean, why="a task has no interval")
    low, high = mean - math.hypot(*below) / len(parts), mean + math.hypot(*above) / len(parts)
    return replace(counted, ratio=mean, ci_low=low, ci_high=high, method="mover")
