"""What a judge's mean is worth once people have rated a part of what it judged.

A judge rates all episodes, people rate those of some clusters, drawn at random. The judge's mean
has little noise and an unknown bias; the mean of the people's labels has no bias and much noise. A
prediction-powered mean has the best of both: it corrects the one by the other, and is right however
wrong the judge is, because the judge's part cancels in expectation.

    θ(λ) = Ȳ_L + λ (F̄_U − F̄_L)
    V(λ) = V_L(Y − λF) + λ² V_U(F)
    λ    = Cov_L(Y, F) / (V_L(F) + V_U(F))

Y are labels, F the judge's grades, L the labelled clusters and U the others; Ȳ_L = Σ Y / n is a
mean over episodes. λ = 0 is the labels alone, λ = 1 the judge with its mean error taken off; the
formula is the λ of least variance, so a judge that knows nothing gets about 0 and one that is wrong
in the same way everywhere about 1. Angelopoulos, Bates, Fannjiang, Jordan & Zrnic (2023),
*Prediction-powered inference*; Angelopoulos, Duchi & Zrnic (2023), *PPI++: Efficient
prediction-powered inference* (the tuned λ). Variances are those of clusters (CR2: squared residual
sums, each divided by 1 − the cluster's share), quantiles Student's t at Bell–McCaffrey degrees of
freedom, those of both groups joined after Welch and Satterthwaite. λ is a slope that was fitted to
L, so V_L(Y − λF) counts a cluster's share in that slope as well, one degree of freedom goes, and
the divisor is squared (CR3): with CR2 ten labelled clusters covered the truth in 92 % of the cases.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from soulkit.metrics.agreement import Statistic
from soulkit.metrics.intervals import Floats, Interval, estimate
from soulkit.metrics.student import t_quantile

MIN_LABELLED = 10
"""Fewer labelled clusters cannot tune λ: the labels stand alone, with the interval they allow."""
_SPECK = 1e-12
_LEAST_ROOM = 0.05
"""A cluster that alone makes mean and slope is counted twenty times, not infinitely often."""


@dataclass(frozen=True, slots=True)
class ClusterSums:
    """A group of clusters: what their values sum up to, and how many those are."""

    people: Floats
    """Zeros where nobody was asked."""
    judge: Floats
    sizes: Floats

    @property
    def n(self) -> float:
        """Episodes."""
        return float(self.sizes.sum())

    def mean(self, sums: Floats) -> float:
        return float(sums.sum()) / self.n

    def covariance(self, x: Floats, y: Floats) -> float:
        """CR2 covariance of two means over the episodes; NaN for fewer than two clusters."""
        if len(self.sizes) < 2:
            return math.nan
        rest_x = x - self.sizes * self.mean(x)
        rest_y = y - self.sizes * self.mean(y)
        return float(np.sum(rest_x * rest_y / (1 - self.sizes / self.n))) / self.n**2

    def fitted_variance(self, residual: Floats, regressor: Floats) -> float:
        """Variance of the mean of `residual`, what a slope on `regressor` has left over.

        A cluster that pulls the slope towards itself has too small a rest: its square is divided
        by (1 − h)², h the cluster's share in mean and slope (CR3; without the slope, CR2 has
        1 − n_c / N).
        """
        rest = residual - self.sizes * self.mean(residual)
        moved = regressor - self.sizes * self.mean(regressor)
        pull = self.sizes / self.n + moved**2 / float(np.sum(moved**2))
        room = np.maximum(1 - pull, _LEAST_ROOM)
        return float(np.sum((rest / room) ** 2)) / self.n**2

    @property
    def df(self) -> float:
        """Bell–McCaffrey degrees of freedom of a mean, tr(M)² / tr(M²), in closed form; at least 1.

        M_cd = a_c a_d (n_c δ_cd − n_c n_d / N) with a_c = (1 − n_c / N)^−½ has tr(M) = N and
        tr(M²) = Σ n_c² + (Σ q_c)² − Σ q_c², q_c = a_c² n_c² / N.
        """
        if len(self.sizes) < 2:
            return 1.0
        parts = self.sizes**2 / (1 - self.sizes / self.n) / self.n
        below = float(np.sum(self.sizes**2) + parts.sum() ** 2 - np.sum(parts**2))
        return max(1.0, self.n**2 / below)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectedMean:
    """θ(λ) with its variance and degrees of freedom; NaN where the labels allow none."""

    value: float
    variance: float
    df: float
    power: float

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval; NaN without one."""
        if not self.variance > _SPECK**2:
            return math.nan
        return t_quantile(max(1.0, self.df)) * math.sqrt(self.variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoweredMean:
    """A mean of what people would say of everything that was judged, and what led to it.

    All in the unit of the values; an interval that the labels cannot support is None.
    """

    corrected: Statistic
    judged: Statistic
    """The judge's own mean over all episodes; its interval knows nothing of the judge's errors."""
    labelled: Statistic
    """The mean of the labels alone."""
    bias: Statistic
    """Judge minus people, over labelled episodes."""
    power: float
    """λ; 0: the judge adds nothing, and the labels stand alone."""
    clusters: int
    labelled_clusters: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        means = ("corrected", "judged", "labelled", "bias")
        written = {name: getattr(self, name).as_dict() for name in means}
        counts = {"clusters": self.clusters, "labelled_clusters": self.labelled_clusters}
        return {**written, "lambda": self.power, **counts}


def powered_mean(
    judged: Sequence[float],
    labels: Sequence[float | None],
    clusters: Sequence[Hashable],
    scale: Interval | None = None,
) -> PoweredMean:
    """The prediction-powered mean of episodes: the judge's grade of each, people's label or None.

    Clusters with any label are the labelled ones; an episode in them that nobody labelled counts in
    the judge's mean alone. `scale` is the lowest and highest value there is: nothing is reported
    outside of it. ValueError for ragged input.
    """
    if not len(judged) == len(labels) == len(clusters):
        raise ValueError("one grade, one label (or None) and one cluster per episode are needed")
    rated = [(f, y, c) for f, y, c in zip(judged, labels, clusters, strict=True) if y is not None]
    asked_clusters = {c for _, _, c in rated}
    rest = [(f, c) for f, c in zip(judged, clusters, strict=True) if c not in asked_clusters]
    of_rated, of_rest = [c for _, _, c in rated], [c for _, c in rest]
    labelled = _plain_mean([y for _, y, _ in rated], of_rated, scale)
    mean = corrected_mean(
        _summed([y for _, y, _ in rated], [f for f, _, _ in rated], of_rated),
        _summed([0.0] * len(rest), [f for f, _ in rest], of_rest),
    )
    return PoweredMean(
        corrected=_within(mean, scale, labelled) if mean.power else labelled,
        judged=_plain_mean(judged, clusters, scale),
        labelled=labelled,
        bias=_plain_mean([f - y for f, y, _ in rated], of_rated, None),
        power=mean.power,
        clusters=len(set(clusters)),
        labelled_clusters=len(asked_clusters),
    )


def corrected_mean(labelled: ClusterSums, rest: ClusterSums) -> CorrectedMean:
    """The prediction-powered mean of labelled clusters and of others that were judged alone.

    With λ = 0 it is the mean of the labels.
    """
    count = len(labelled.sizes)
    if not count:
        return CorrectedMean(value=math.nan, variance=math.nan, df=1.0, power=0.0)
    power = _power(labelled, rest)
    residual = labelled.people - power * labelled.judge
    near, df = labelled.covariance(residual, residual), labelled.df
    if not power:
        return CorrectedMean(value=labelled.mean(residual), variance=near, df=df, power=0.0)
    near = labelled.fitted_variance(residual, labelled.judge)
    beyond = power**2 * rest.covariance(rest.judge, rest.judge)
    variance = near + beyond
    spread = near**2 / max(1.0, df - 1) + beyond**2 / rest.df
    return CorrectedMean(
        value=labelled.mean(residual) + power * rest.mean(rest.judge),
        variance=variance,
        df=variance**2 / spread if spread > 0 else 1.0,
        power=power,
    )


def _power(labelled: ClusterSums, rest: ClusterSums) -> float:
    """λ of least variance; 0 where it cannot be told, or nothing is left to be predicted."""
    if len(labelled.sizes) < MIN_LABELLED or len(rest.sizes) < 2:
        return 0.0
    noise = labelled.covariance(labelled.judge, labelled.judge)
    noise += rest.covariance(rest.judge, rest.judge)
    if noise <= _SPECK:
        return 0.0
    return labelled.covariance(labelled.people, labelled.judge) / noise


def _summed(
    people: Sequence[float], grades: Sequence[float], clusters: Sequence[Hashable]
) -> ClusterSums:
    """Sums by cluster, clusters in the order of their text."""
    names = {c: i for i, c in enumerate(sorted(set(clusters), key=repr))}
    sums = np.zeros((3, len(names)))
    for y, f, cluster in zip(people, grades, clusters, strict=True):
        sums[:, names[cluster]] += (y, f, 1.0)
    return ClusterSums(sums[0], sums[1], sums[2])


def _plain_mean(
    values: Sequence[float], clusters: Sequence[Hashable], scale: Interval | None
) -> Statistic:
    """A mean over episodes with the interval of every mean."""
    if not values:
        return Statistic(value=None, why="no episodes")
    mean = estimate(values, clusters, scale=scale)
    return Statistic(
        value=mean.mean, low=mean.ci_low, high=mean.ci_high, n=len(values),
        n_clusters=mean.n_clusters, why="" if mean.ci_low is not None else mean.method,
    )  # fmt: skip


def _within(mean: CorrectedMean, scale: Interval | None, labelled: Statistic) -> Statistic:
    """A corrected mean with its interval, kept inside the scale."""
    low, high = scale or (-math.inf, math.inf)
    value = min(max(mean.value, low), high)
    ends = [min(max(mean.value + side * mean.half_width, low), high) for side in (-1, 1)]
    cell = Statistic(value=value, n=labelled.n, n_clusters=labelled.n_clusters)
    if math.isnan(mean.half_width) or not ends[0] < ends[1]:
        return replace(cell, why="no-spread")
    return replace(cell, low=ends[0], high=ends[1])
