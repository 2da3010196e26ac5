"""What a judge's mean is worth once people have rated a part of what it judged.

A judge rates all episodes, people rate those of some clusters, drawn at random. The judge's mean
has little noise and an unknown bias; the mean of the people's labels has no bias and much noise. A
prediction-powered mean has the best of both: it corrects the one by the other, and is right however
wrong the judge is, because the judge's part cancels in expectation.

    θ(λ) = Ȳ_L + λ (F̄_U − F̄_L)
    V(λ) = V_L(Y − λF) · (C_L − 1)/(C_L − 2) + λ² V_U(F)
    λ    = Cov_L(Y, F) / (V_L(F) + V_U(F))

Y are labels, F the judge's grades, L the labelled clusters and U the others; Ȳ_L = Σ Y / n is a
mean over episodes. λ = 0 is the labels alone, λ = 1 the judge with its mean error taken off; the
formula is the λ of least variance, so a judge that knows nothing gets about 0 and one that is wrong
in the same way everywhere about 1. Angelopoulos, Bates, Fannjiang, Jordan & Zrnic (2023),
*Prediction-powered inference*; Angelopoulos, Duchi & Zrnic (2023), *PPI++: Efficient
prediction-powered inference* (the tuned λ). Variances are those of clusters (CR2: squared residual
sums of clusters, each divided by 1 − its share), quantiles Student's t at Bell–McCaffrey degrees of
freedom, those of both groups joined after Welch and Satterthwaite, one less in L for the tuned λ,
which the factor beside V_L is for as well: a slope that fits its own data leaves too little rest.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from soulkit.metrics.agreement import Measured
from soulkit.metrics.statistics import Floats, Interval, t_quantile

MIN_LABELLED = 5
"""Fewer labelled clusters cannot tune λ: the labels stand alone, with the interval they allow."""
_SPECK = 1e-12


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

    @property
    def df(self) -> float:
        """Bell–McCaffrey degrees of freedom of a mean, tr(M)² / tr(M²), in closed form; at least 1.

        M_cd = a_c a_d (n_c δ_cd − n_c n_d / N) with a_c = (1 − n_c / N)^−½ has tr(M) = N and
        tr(M²) = Σ n_c² + (Σ q_c)² − Σ q_c², q_c = a_c² n_c² / N.
        """
        parts = self.sizes**2 / (1 - self.sizes / self.n) / self.n
        below = float(np.sum(self.sizes**2) + parts.sum() ** 2 - np.sum(parts**2))
        return max(1.0, self.n**2 / below)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoweredMean:
    """A mean of what people would say of everything that was judged, and what led to it.

    All in the unit of the values; an interval that the labels cannot support is None, with why.
    """

    corrected: Measured
    judged: Measured
    """The judge's own mean over all episodes; its interval knows nothing of the judge's errors."""
    labelled: Measured
    """The mean of the labels alone."""
    bias: Measured
    """Judge minus people, over labelled episodes."""
    power: float
    """λ; 0: the judge adds nothing."""
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
    names = {c: i for i, c in enumerate(sorted(set(clusters), key=repr))}
    of = np.array([names[c] for c in clusters], dtype=np.intp)
    grades = np.array(judged, dtype=np.float64)
    has_label = np.array([label is not None for label in labels], dtype=bool)
    people = np.array([0.0 if label is None else label for label in labels], dtype=np.float64)
    asked_clusters = np.zeros(len(names), dtype=bool)
    asked_clusters[of[has_label]] = True
    rest = ~asked_clusters[of]
    return powered_mean_of_sums(
        _summed(people, grades, of, has_label),
        _summed(people, grades, of, rest),
        _summed(people, grades, of, np.ones(len(of), dtype=bool)),
        scale,
    )


def _summed(people: Floats, grades: Floats, of: Any, chosen: Any) -> ClusterSums:
    """The clusters of the chosen episodes."""
    _, places = np.unique(of[chosen], return_inverse=True)
    count = int(places.max()) + 1 if places.size else 0
    sizes = np.bincount(places, minlength=count).astype(np.float64)
    sums = [np.bincount(places, values[chosen], minlength=count) for values in (people, grades)]
    return ClusterSums(sums[0], sums[1], sizes)


def powered_mean_of_sums(
    labelled: ClusterSums, rest: ClusterSums, every: ClusterSums, scale: Interval | None = None
) -> PoweredMean:
    """`powered_mean` from the sums of labelled clusters, of the others, and of all judged ones."""
    power = _power(labelled, rest)
    wide = None if scale is None else (scale[0] - scale[1], scale[1] - scale[0])
    return PoweredMean(
        corrected=_corrected(labelled, rest, power, scale),
        judged=_plain_mean(every, every.judge, scale),
        labelled=_plain_mean(labelled, labelled.people, scale),
        bias=_plain_mean(labelled, labelled.judge - labelled.people, wide),
        power=power,
        clusters=len(every.sizes),
        labelled_clusters=len(labelled.sizes),
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


def _corrected(
    labelled: ClusterSums, rest: ClusterSums, power: float, scale: Interval | None
) -> Measured:
    if power == 0:
        return _plain_mean(labelled, labelled.people, scale)
    residual = labelled.people - power * labelled.judge
    mean = labelled.mean(residual) + power * rest.mean(rest.judge)
    count = len(labelled.sizes)
    near = labelled.covariance(residual, residual) * (count - 1) / (count - 2)
    rest_part = power**2 * rest.covariance(rest.judge, rest.judge)
    variance = near + rest_part
    if variance <= _SPECK**2:
        return _within(mean, None, scale, int(labelled.n), f"no spread in {count} clusters")
    df = variance**2 / (near**2 / max(1.0, labelled.df - 1) + rest_part**2 / rest.df)
    return _within(mean, _t(df) * math.sqrt(variance), scale, int(labelled.n), "")


def _plain_mean(group: ClusterSums, sums: Floats, scale: Interval | None) -> Measured:
    """A mean over episodes with its CR2-t interval."""
    if not len(group.sizes):
        return Measured(value=None, why="no episodes")
    mean, n = group.mean(sums), int(group.n)
    if len(group.sizes) < 2:
        return _within(mean, None, scale, n, "one cluster")
    variance = group.covariance(sums, sums)
    if variance <= _SPECK**2:
        return _within(mean, None, scale, n, f"no spread in {len(group.sizes)} clusters")
    return _within(mean, _t(group.df) * math.sqrt(variance), scale, n, "")


def _within(mean: float, half: float | None, scale: Interval | None, n: int, why: str) -> Measured:
    """A mean ± half a width, kept inside the scale."""
    low, high = scale or (-math.inf, math.inf)
    value = min(max(mean, low), high)
    if half is None:
        return Measured(value=value, n=n, why=why)
    ends = min(max(mean - half, low), high), min(max(mean + half, low), high)
    if ends[0] == ends[1]:
        return Measured(value=value, n=n, why="the labels cannot be of this scale")
    return Measured(value=value, low=ends[0], high=ends[1], n=n)


def _t(df: float) -> float:
    """Student's t quantile at real degrees of freedom: a line between those of the integers."""
    whole = max(1, math.floor(df))
    share = min(max(df - whole, 0.0), 1.0)
    return (1 - share) * _whole_t(whole) + share * _whole_t(whole + 1)


@lru_cache(maxsize=1024)
def _whole_t(df: int) -> float:
    return t_quantile(df)
