"""Prediction-powered means: correct a judge's mean with human labels of some episodes.

A judge rates all episodes; people rate those of some clusters, drawn at random. The judge's mean
has little noise but an unknown bias; the mean of the labels has no bias but much noise. A
prediction-powered mean combines both. It is unbiased even if the judge is wrong, because the
judge's part cancels in expectation.

    θ(λ) = Ȳ_L + λ (F̄_U − F̄_L)
    V(λ) = V_L(Y − λF) + λ² V_U(F)
    λ    = Cov_L(Y, F) / (V_L(F) + V_U(F))

Y are labels, F the judge's grades, L the labelled clusters, U the others; Ȳ_L = Σ Y / n is a mean
over episodes. λ = 0 uses only the labels, λ = 1 subtracts the judge's mean error; the formula gives
the λ of least variance. Angelopoulos, Bates, Fannjiang, Jordan & Zrnic (2023), *Prediction-powered
inference*; Angelopoulos, Duchi & Zrnic (2023), *PPI++: Efficient prediction-powered inference*
(tuned λ). Variances are by cluster (CR2), quantiles Student's t at Bell–McCaffrey degrees of
freedom, combined after Welch and Satterthwaite. Because λ is a slope fitted to L, V_L(Y − λF) uses
CR3, includes each cluster's share in the slope and loses one degree of freedom: with CR2, ten
labelled clusters covered the truth in only 92 % of cases.
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
"""Minimum number of labelled clusters to tune λ; with fewer, only the labels are used."""
_SPECK = 1e-12
_LEAST_ROOM = 0.05
"""Minimum divisor for a cluster that dominates mean and slope."""


@dataclass(frozen=True, slots=True)
class ClusterSums:
    """A group of clusters: the sums and the number of their values."""

    people: Floats
    """Zero for unlabelled clusters."""
    judge: Floats
    sizes: Floats

    @property
    def n(self) -> float:
        """Number of episodes."""
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
        """Variance of the mean of `residual`, the residual of a fitted slope on `regressor`.

        A cluster that influences the slope has too small a residual, so its square is divided by
        (1 − h)², where h is the cluster's share in mean and slope (CR3; CR2 without a slope uses
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
    """θ(λ) with its variance and degrees of freedom; NaN if the labels do not suffice."""

    value: float
    variance: float
    df: float
    power: float

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % interval; NaN if there is none."""
        if not self.variance > _SPECK**2:
            return math.nan
        return t_quantile(max(1.0, self.df)) * math.sqrt(self.variance)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoweredMean:
    """An estimate of people's mean rating of all judged episodes, with its inputs.

    All numbers are in the unit of the values; an interval that the labels cannot support is None.
    """

    corrected: Statistic
    judged: Statistic
    """The judge's own mean over all episodes; its interval does not include the judge's errors."""
    labelled: Statistic
    """The mean of the labels alone."""
    bias: Statistic
    """Judge minus people, over labelled episodes."""
    power: float
    """λ; 0 means that only the labels are used."""
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
    """The prediction-powered mean of episodes, from the judge's grade and people's label (or None)
    of each.

    A cluster with any label is labelled; its unlabelled episodes count only in the judge's mean.
    Results are clipped to `scale`, the lowest and highest possible value. ValueError for input of
    different lengths.
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
    """The prediction-powered mean from labelled clusters and clusters with only judge grades.

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
    """λ of least variance; 0 if it cannot be estimated, or there are too few unlabelled
    clusters."""
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
    """Sums by cluster, clusters sorted by their repr."""
    names = {c: i for i, c in enumerate(sorted(set(clusters), key=repr))}
    sums = np.zeros((3, len(names)))
    for y, f, cluster in zip(people, grades, clusters, strict=True):
        sums[:, names[cluster]] += (y, f, 1.0)
    return ClusterSums(sums[0], sums[1], sums[2])


def _plain_mean(
    values: Sequence[float], clusters: Sequence[Hashable], scale: Interval | None
) -> Statistic:
    """A mean over episodes with the interval of `estimate`."""
    if not values:
        return Statistic(value=None, why="no episodes")
    mean = estimate(values, clusters, scale=scale)
    return Statistic(
        value=mean.mean, low=mean.ci_low, high=mean.ci_high, n=len(values),
        n_clusters=mean.n_clusters, why="" if mean.ci_low is not None else mean.method,
    )  # fmt: skip


def _within(mean: CorrectedMean, scale: Interval | None, labelled: Statistic) -> Statistic:
    """A corrected mean with its interval, clipped to the scale."""
    low, high = scale or (-math.inf, math.inf)
    value = min(max(mean.value, low), high)
    ends = [min(max(mean.value + side * mean.half_width, low), high) for side in (-1, 1)]
    cell = Statistic(value=value, n=labelled.n, n_clusters=labelled.n_clusters)
    if math.isnan(mean.half_width) or not ends[0] < ends[1]:
        return replace(cell, why="no-spread")
    return replace(cell, low=ends[0], high=ends[1])
