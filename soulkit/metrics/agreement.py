"""Agreement of raters, and biases of judges (length, position).

Units are rows (episodes) and raters are columns; `None` is a missing opinion, and nothing is
imputed. A statistic that the data cannot support is None, with a reason. Units of one cluster (the
rollouts of one example) are not independent: means have the usual interval of a mean, slopes a
jackknife over clusters, and statistics without a cluster formula (alpha, kappa, correlations) a
percentile bootstrap over clusters, which is too narrow for few clusters.

Notation: m_u values of unit u, n the number of pairable values (those of units with m_u > 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from soulkit.metrics.intervals import ClusterStatistic, Floats, cluster_bootstrap, jackknife

Indices = NDArray[np.intp]
Level = Literal["interval", "nominal"]
Rating = float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """A statistic with its 95 % interval; if there is no value, `why` gives the reason."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    """Number of units."""
    n_clusters: int = 0
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `why` only if it is not empty."""
        values = {
            "value": self.value, "ci_low": self.low, "ci_high": self.high, "n": self.n,
            "n_clusters": self.n_clusters,
        }  # fmt: skip
        return {**values, "why": self.why} if self.why else values


# -- tables of ratings ---------------------------------------------------------------------------


def rating_table(ratings: Sequence[Sequence[Rating]]) -> Floats:
    """Units × raters, NaN for missing ratings; ValueError for ragged rows or infinities."""
    if not ratings:
        return np.empty((0, 0))
    width = len(ratings[0])
    if any(len(row) != width for row in ratings):
        raise ValueError("every unit needs one value (or None) per rater")
    array = np.array([[np.nan if v is None else float(v) for v in row] for row in ratings])
    if np.isinf(array).any():
        raise ValueError("ratings must be finite")
    return array.reshape(len(ratings), width)


def alpha(ratings: Floats, level: Level = "interval") -> float | None:
    """Krippendorff's alpha, 1 − D_o / D_e, for any number of raters and missing values.

    interval: D_o = Σ_u Σ_{i≠j} (x_ui − x_uj)² / (m_u − 1) / n, D_e the mean of (x − x')² over all
    pairs of pairable values; nominal: 0/1 differences. None if no unit has two values, or all
    values are equal. Krippendorff (2011), *Computing Krippendorff's Alpha-Reliability*."""
    if ratings.size == 0:
        return None
    pairable = ratings[(~np.isnan(ratings)).sum(axis=1) > 1]
    if not len(pairable):
        return None
    observed, expected = _DISAGREEMENT[level](pairable)
    return None if expected <= 0 else 1 - observed / expected


def _interval(pairable: Floats) -> tuple[float, float]:
    shifted = pairable - np.nanmean(pairable)
    count = (~np.isnan(shifted)).sum(axis=1)
    total, square = np.nansum(shifted, axis=1), np.nansum(shifted**2, axis=1)
    n = int(count.sum())
    within = float(np.sum(2 * (count * square - total**2) / (count - 1))) / n
    whole = 2 * (n * float(square.sum()) - float(total.sum()) ** 2) / (n * (n - 1))
    equal = bool(np.ptp(pairable[~np.isnan(pairable)]) == 0)  # ignores rounding errors
    return within, 0.0 if equal else whole


def _nominal(pairable: Floats) -> tuple[float, float]:
    values = np.unique(pairable[~np.isnan(pairable)])
    counts = np.stack([(pairable == v).sum(axis=1) for v in values], axis=1).astype(np.float64)
    size, sums = counts.sum(axis=1), counts.sum(axis=0)
    n = float(size.sum())
    within = float(np.sum((size**2 - (counts**2).sum(axis=1)) / (size - 1))) / n
    return within, float(n**2 - (sums**2).sum()) / (n * (n - 1))


_DISAGREEMENT: dict[Level, Callable[[Floats], tuple[float, float]]] = {
    "interval": _interval,
    "nominal": _nominal,
}


def icc(ratings: Floats) -> float | None:
    """ICC(2,1): two-way random effects, absolute agreement, one rater.

    (MS_units − MS_error) / (MS_units + (k − 1) MS_error + k (MS_raters − MS_error) / n) over the
    units that all k raters rated. None for fewer than two such units or raters, or no spread.
    Shrout & Fleiss (1979), *Intraclass correlations: uses in assessing rater reliability*.
    """
    whole = ratings[~np.isnan(ratings).any(axis=1)] if ratings.size else ratings
    if whole.ndim != 2 or whole.shape[0] < 2 or whole.shape[1] < 2 or np.ptp(whole) == 0:
        return None
    n, k = whole.shape
    centred = whole - whole.mean()
    rows, columns = centred.mean(axis=1), centred.mean(axis=0)
    units = k * float(np.sum(rows**2)) / (n - 1)
    raters = n * float(np.sum(columns**2)) / (k - 1)
    rest = centred - rows[:, None] - columns[None, :]
    error = float(np.sum(rest**2)) / ((n - 1) * (k - 1))
    below = units + (k - 1) * error + k * (raters - error) / n
    return None if below <= 0 else (units - error) / below


# -- pairs of raters -----------------------------------------------------------------------------


def kappa(a: Floats, b: Floats) -> float | None:
    """Quadratic-weighted kappa: 1 − Σ (a − b)² / Σ over independent pairs of (a − b)².

    Equal to Cohen's table form with weights (i − j)². None without spread on both sides.
    Cohen (1968), *Weighted kappa*.
    """
    if not a.size:
        return None
    # E (a − b')² over independent pairs, from moments; values are shifted to avoid cancellation.
    a, b = a - a.mean(), b - a.mean()
    chance = float(np.mean(a**2) + np.mean(b**2) - 2 * a.mean() * b.mean())
    return None if chance <= 1e-12 else 1 - float(np.mean((a - b) ** 2)) / chance


def pearson(a: Floats, b: Floats) -> float | None:
    """Pearson's r; None for fewer than three pairs or a constant side."""
    if a.size < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    a, b = a - a.mean(), b - b.mean()
    return max(-1.0, min(1.0, float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))))


def mean_ranks(values: Floats) -> Floats:
    """Ranks starting at 1; ties get their mean rank."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    mean: Floats = np.cumsum(count) - (count - 1) / 2
    return mean[place]


def spearman(a: Floats, b: Floats) -> float | None:
    """Spearman's rho, ties at their mean rank; None for fewer than three or a constant side."""
    return pearson(mean_ranks(a), mean_ranks(b))


def partial_spearman(a: Floats, b: Floats, held: Floats) -> float | None:
    """Rank correlation of `a` and `b` with the ranks of `held` partialled out of both.

    For a constant `held`, the plain correlation. Also None if `held` fully explains one side.
    """
    a, b, held = mean_ranks(a), mean_ranks(b), mean_ranks(held)
    plain = pearson(a, b)
    if plain is None or np.ptp(held) == 0:
        return plain
    with_a, with_b = pearson(a, held), pearson(b, held)
    assert with_a is not None and with_b is not None
    below = (1 - with_a**2) * (1 - with_b**2)
    return None if below <= 1e-12 else float((plain - with_a * with_b) / np.sqrt(below))


def slope(x: Floats, y: Floats) -> float | None:
    """Least-squares slope of `y` on `x`; None for a constant `x` or fewer than three points."""
    if x.size < 3 or np.ptp(x) == 0:
        return None
    moved = x - x.mean()
    return float(np.sum(moved * (y - y.mean())) / np.sum(moved**2))


def mean_gap(a: Floats, b: Floats) -> float | None:
    """Mean |a − b|, in the unit of the values."""
    return float(np.mean(np.abs(a - b))) if a.size else None


def exact_agreement(a: Floats, b: Floats) -> float | None:
    """Share of pairs that are equal."""
    return float(np.mean(a == b)) if a.size else None


# -- statistics with intervals -------------------------------------------------------------------


def with_interval(
    rows: Floats,
    statistic: Callable[[Floats], float | None],
    clusters: Sequence[Hashable],
    *,
    lacking: str = "the values do not vary",
    smooth: bool = False,
    seed: int = 0,
) -> Statistic:
    """`statistic` of `rows` (one per unit) with an interval that respects clusters of rows.

    `smooth` statistics (slopes, ratios of sums) use the jackknife, others the percentile bootstrap
    of `intervals.cluster_bootstrap`, with its limitations. `lacking` is the reason given if the
    statistic is None. ValueError unless there is one cluster per row.
    """
    if len(rows) != len(clusters):
        raise ValueError("one cluster per unit is needed")
    value = statistic(rows) if len(rows) else None
    if value is None:
        return Statistic(value=None, n=len(rows), why=lacking if len(rows) else "no units")
    members = _members(clusters)

    def of_clusters(chosen: Sequence[int]) -> float | None:
        return statistic(rows[np.concatenate([members[i] for i in chosen])])

    low, high = _ends(of_clusters, len(members), smooth, seed)
    return Statistic(value=value, low=low, high=high, n=len(rows), n_clusters=len(members))


def _ends(
    statistic: ClusterStatistic, n_clusters: int, smooth: bool, seed: int
) -> tuple[float | None, float | None]:
    if smooth:
        outcome = jackknife(statistic, n_clusters)
        return outcome.ci_low, outcome.ci_high
    return cluster_bootstrap(statistic, n_clusters, seed=seed) or (None, None)


def _members(clusters: Sequence[Hashable]) -> list[Indices]:
    """Row numbers of each cluster, clusters sorted by their repr."""
    places: dict[Hashable, list[int]] = {}
    for place, cluster in enumerate(clusters):
        places.setdefault(cluster, []).append(place)
    return [np.array(places[c], dtype=np.intp) for c in sorted(places, key=repr)]


def columns(
    statistic: Callable[..., float | None],
) -> Callable[[Floats], float | None]:
    """Turn a statistic of two or three arrays into a statistic of a table with these columns."""
    return lambda rows: statistic(*rows.T)


# -- words ---------------------------------------------------------------------------------------

RELIABLE, TENTATIVE = 0.8, 0.667
"""Thresholds of alpha for reliable and tentative conclusions: Krippendorff (2004), *Content
Analysis*, ch. 11."""


def alpha_in_words(value: float | None) -> str:
    """The conclusions that an alpha allows, as text."""
    if value is None:
        return "not measurable"
    if value >= RELIABLE:
        return "reliable"
    return "tentative" if value >= TENTATIVE else "do not rank models by it"
