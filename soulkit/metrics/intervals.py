"""Means with confidence intervals.

All intervals that soulkit prints are computed here. A mean covers only scored episodes and reports
their number. Rows of one cluster (a story, a conversation, the rollouts of one example) are not
independent and count as one observation. A result that the data cannot support is None: there is no
interval from fewer than two clusters, none of zero width, and none beyond the scale. Results are
deterministic and do not depend on the order of rows or the names of clusters.

Notation: x a value, N their number, C the number of clusters, S_c and n_c the sum and the size of
cluster c, h_c = n_c / N, μ the mean, t a quantile of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from soulkit.metrics.student import CONFIDENCE, significance, t_quantile

Floats = NDArray[np.float64]
Interval = tuple[float, float]
ClusterStatistic = Callable[[Sequence[int]], float | None]
"""Indices of clusters (from 0, possibly repeated) → a statistic of their rows."""

FEW_CLUSTERS = 10
"""Intervals from fewer clusters are marked, because their width is uncertain."""
FEW_EVENTS = 30
"""With fewer failures or successes, an interval on a scale may cover .91 instead of .95."""
UNSEEN = 4.0
"""Pseudo-clusters added to paired 0/1 scores, one in each corner of the 2 × 2 table of outcomes.
The two corners where the sides disagree add 1 each to Σ d². Agresti & Min (2005) add half as much,
but then a change in 2 % of 100 rows is covered in only .87 of the samples."""
FEW_INDEPENDENT = 15
"""With fewer independent failures or successes in clusters of different sizes, an interval near an
end of the scale is marked as having few clusters."""
_NEAR = 0.2
"""Maximum distance from 0 or 1 of a share that counts as near an end."""
RESAMPLES = 1000
MIN_CLUSTERS = 5
"""Minimum number of clusters for a bootstrap interval."""
_MOST_UNDEFINED = 0.1
_SAME = 1e-9
"""Draws that differ by less count as equal."""
_SPECK = 1e-12
"""Spread below this share of the largest value counts as rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over scored values, in their unit, with its interval."""

    mean: float | None = None
    """None if nothing was scored."""
    ci_low: float | None = None
    ci_high: float | None = None
    """None if the data support no interval; `method` gives the reason."""
    n_scored: int = 0
    n: int = 0
    n_clusters: int = 0
    """Number of clusters with a scored value."""
    variance: float | None = None
    """Variance of the mean, in squared units; without spread on a known scale, the variance that
    corresponds to the interval."""
    df: float | None = None
    """Degrees of freedom of `variance`."""
    scale: Interval | None = None
    """Lowest and highest possible value; None if unknown or unbounded."""
    events: float | None = None
    """Number of failures or successes on the scale, whichever is smaller; a score of 0.8 counts as
    0.8 successes."""
    method: str = ""
    """`wilson-t`, `cr2-t`, `strata-t`, `jackknife-t`; without interval `no-spread`, `one-cluster`,
    `undefined` (a part has no variance) or `nothing-scored`."""


class Stratum(Protocol):
    """The fields of a part that a suite mean needs, as in `Estimate` and the cells of a summary."""

    @property
    def mean(self) -> float | None: ...
    @property
    def variance(self) -> float | None: ...
    @property
    def df(self) -> float | None: ...
    @property
    def scale(self) -> Interval | None: ...
    @property
    def n_scored(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def n_clusters(self) -> int: ...


# -- means ---------------------------------------------------------------------------------------


def estimate(
    values: Sequence[float | None],
    clusters: Sequence[Hashable],
    binary: bool = False,
    *,
    scale: Interval | None = None,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """The mean of the scored values (None, NaN and infinite are unscored) with an interval.

    V is the CR2 variance Σ (S_c − n_c μ)² / (1 − h_c) / N² with the degrees of freedom of Bell &
    McCaffrey (2002), as recommended by Imbens & Kolesár (2016). If every score is at an end of the
    scale and clusters differ in size, the divisor (1 − h_c) is squared (CR3), because CR2 is too
    small there, especially for shares near 0 or 1. With a known `scale` (`binary`: 0 to 1) the
    interval is Wilson's with the effective number of trials μ(1 − μ)/V and t in place of z
    (`wilson-t`; compare Korn & Graubard 1998). The number of trials is at most N if every score is
    at an end of the scale, and C if there is no spread. Otherwise the interval is μ ± t √V
    (`cr2-t`), or none without spread. A value off the scale makes the scale unknown. ValueError
    unless there is one cluster per value.
    """
    if len(values) != len(clusters):
        raise ValueError("one cluster per value is needed")
    finite = (None if v is None or not math.isfinite(v) else float(v) for v in values)
    pairs = [(v, c) for v, c in zip(finite, clusters, strict=True) if v is not None]
    if not pairs:
        return Estimate(n=len(values), scale=scale, method="nothing-scored")
    x = [v for v, _ in pairs]
    limits = _scale_of(x, (0.0, 1.0) if binary and scale is None else scale)
    ends = limits is not None and all(v in limits for v in x)
    moments = _moments(pairs, limits, yes_no=ends)
    shape = _Shape(
        moments.mean, moments.variance, moments.df, moments.n_clusters, limits,
        most=len(x) if ends else None,
    )  # fmt: skip
    low, high, variance, method = _interval(shape, confidence, "cr2-t")
    return Estimate(
        mean=moments.mean, ci_low=low, ci_high=high, n_scored=len(x), n=len(values),
        n_clusters=moments.n_clusters, variance=variance,
        df=moments.df if moments.n_clusters > 1 else None, scale=limits,
        events=_events(x, limits), method=method,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Moments:
    mean: float
    variance: float
    df: float
    n_clusters: int


def _moments(
    pairs: Sequence[tuple[float, Hashable]], scale: Interval | None = None, *, yes_no: bool = False
) -> _Moments:
    """Mean, CR2 variance (0 if within rounding) and Bell–McCaffrey degrees of freedom. The variance
    is CR3 for `yes_no` scores in clusters of different sizes.

    df = tr(M)² / tr(M²) with M_cd = a_c a_d (n_c δ_cd − n_c n_d / N), a_c = (1 − h_c)^−½. The trace
    is N, and with g_c = n_c² / (1 − h_c) tr(M²) = Σ n_c² + ((Σ g_c)² − Σ g_c²) / N². Sums are exact
    (fsum), so the order of rows and clusters does not change a bit.
    """
    by_cluster: dict[Hashable, list[float]] = {}
    for value, cluster in pairs:
        by_cluster.setdefault(cluster, []).append(value)
    total, mean = len(pairs), math.fsum(v for v, _ in pairs) / len(pairs)
    if len(by_cluster) < 2:
        return _Moments(mean, 0.0, 1.0, len(by_cluster))
    parts = [(math.fsum(members), len(members)) for members in by_cluster.values()]
    power = 2 if yes_no and len({n for _, n in parts}) > 1 else 1
    squares = [(s - n * mean) ** 2 / (1 - n / total) ** power for s, n in parts]
    variance = math.fsum(squares) / total**2
    if math.sqrt(variance) <= _SPECK * max(map(abs, (*(v for v, _ in pairs), *(scale or ())))):
        variance = 0.0
    pulls = [n * n / (1 - n / total) for _, n in parts]
    cross = (math.fsum(pulls) ** 2 - math.fsum(g * g for g in pulls)) / total**2
    df = total**2 / (math.fsum(n * n for _, n in parts) + cross)
    return _Moments(mean, variance, max(1.0, df), len(by_cluster))


def _scale_of(values: Sequence[float], scale: Interval | None) -> Interval | None:
    """The scale, or None if it is empty or a value is off it."""
    if scale is None or not scale[0] < scale[1]:
        return None
    return scale if scale[0] <= min(values) and max(values) <= scale[1] else None


def _events(values: Sequence[float], scale: Interval | None) -> float | None:
    if scale is None:
        return None
    successes = math.fsum((v - scale[0]) / (scale[1] - scale[0]) for v in values)
    return min(successes, len(values) - successes)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The inputs of an interval."""

    mean: float
    variance: float
    df: float
    n_clusters: int
    scale: Interval | None
    most: int | None = None
    """Maximum effective number of trials."""
    least: float = 0.0
    """Minimum effective number of trials, used if there is no spread; 0 means no minimum, and the
    number of clusters without spread."""


def _interval(
    shape: _Shape, confidence: float, method: str
) -> tuple[float | None, float | None, float | None, str]:
    """(low, high, variance, method)."""
    if shape.n_clusters < 2:
        return None, None, None, "one-cluster"
    t = t_quantile(shape.df, confidence)
    if shape.scale is not None:
        low, high = _on_scale(shape, shape.scale, t)
        # A share of 0 or 1 is not certain: use the variance that corresponds to its interval, so
        # that it counts in a suite's mean.
        variance = shape.variance or ((high - low) / (2 * t)) ** 2
        return low, high, variance, "wilson-t" if method == "cr2-t" else method
    if shape.variance == 0:
        return None, None, 0.0, "no-spread"
    half = t * math.sqrt(shape.variance)
    return shape.mean - half, shape.mean + half, shape.variance, method


def _on_scale(shape: _Shape, scale: Interval, t: float) -> Interval:
    bottom, width = scale[0], scale[1] - scale[0]
    share = min(1.0, max(0.0, (shape.mean - bottom) / width))
    variance = shape.variance / width**2
    trials = shape.least or float(shape.n_clusters)
    if variance > 0 and 0 < share < 1:
        trials = max(shape.least, share * (1 - share) / variance)
        trials = trials if shape.most is None else min(trials, shape.most)
    low, high = wilson(share, trials, t)
    return (
        max(scale[0], min(shape.mean, bottom + width * low)),
        min(scale[1], max(shape.mean, bottom + width * high)),
    )


def wilson(share: float, trials: float, quantile: float) -> Interval:
    """Wilson's interval in [0, 1] for a share observed in `trials` trials (may be fractional).

    centre = (p + q²/2n) / (1 + q²/n);  half = q √(p(1 − p)/n + q²/4n²) / (1 + q²/n).
    ValueError unless trials > 0 and 0 <= share <= 1.
    """
    if not trials > 0 or not 0 <= share <= 1:
        raise ValueError(f"invalid share or number of trials: {share}, {trials}")
    ratio = quantile**2 / trials
    centre = (share + ratio / 2) / (1 + ratio)
    half = math.sqrt(ratio * (share * (1 - share) + ratio / 4)) / (1 + ratio)
    low = 0.0 if share == 0 else max(0.0, centre - half)
    high = 1.0 if share == 1 else min(1.0, centre + half)
    return low, high


def upper_tail(hits: int, n: int, chance: float) -> float:
    """P(at least `hits` of `n`) for a binomial; uses logarithms to support thousands of rows."""
    if hits <= 0 or chance >= 1:
        return 1.0
    if chance <= 0:
        return 0.0
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        + k * math.log(chance) + (n - k) * math.log1p(-chance)
        for k in range(hits, n + 1)
    ]  # fmt: skip
    return min(1.0, sum(math.exp(value) for value in logs))


def exact_interval(hits: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """The Clopper–Pearson interval of a share of independent trials; [0, 1] without trials."""

    def least(events: int, chance: float) -> float:
        """The share at which at least `events` have this chance."""
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if upper_tail(events, n, middle) < chance else (low, middle)
        return high

    tail = (1 - confidence) / 2
    return least(hits, tail) if hits else 0.0, least(hits + 1, 1 - tail) if hits < n else 1.0


def bounds(values: Sequence[float | None], scale: Interval) -> Interval:
    """Bounds of the mean over all n values if the missing ones had the lowest or highest score.

    worst = (sum + missing · low) / n;  best = (sum + missing · high) / n.
    ValueError without values.
    """
    low, high = scale
    if not values or high < low:
        raise ValueError("bounds need values and an ordered scale")
    scored = [v for v in values if v is not None]
    total, missing = math.fsum(scored), len(values) - len(scored)
    return (total + missing * low) / len(values), (total + missing * high) / len(values)


DASH = "\u2013"
"""Shown in place of a missing number."""


def number(value: object, digits: int = 3) -> str:
    """A number as text, with a true minus sign; a dash if there is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return DASH
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "\u2212")  # no minus zero


def signed(value: object, digits: int = 3) -> str:
    """A difference as text, with a plus sign if it is above zero."""
    text = number(value, digits)
    above = isinstance(value, int | float) and value > 0 and text != DASH
    return f"+{text}" if above else text


def percent(value: object) -> str:
    """`83%`; a dash if there is no number."""
    text = number(100 * value if isinstance(value, int | float) else None, 0)
    return text if text == DASH else f"{text}%"


def estimate_text(
    mean: object, low: object, high: object, shown: Callable[[object], str] = number
) -> str:
    """`0.831 [0.790, 0.865]`, a mean with its interval, or only the mean if there is no interval.
    `shown` formats each number."""
    ends = [shown(low), shown(high)]
    return shown(mean) if DASH in ends else f"{shown(mean)} [{', '.join(ends)}]"


def interval_remark(
    n_clusters: int, method: str = "", events: float | None = None, *, few: bool = False
) -> str:
    """The remark on an interval, or on its absence: `32 clusters`, `7 clusters: few`, `40 clusters,
    few events`, `no spread in 7 clusters`; empty if the number is unknown. `few` marks any number
    of clusters as few (see `few_independent_events`)."""
    if n_clusters < 1:
        return ""
    clusters = f"{n_clusters} cluster{'s' * (n_clusters != 1)}"
    if method == "no-spread":
        return f"no spread in {clusters}"
    clusters += ": few" if few or n_clusters < FEW_CLUSTERS else ""
    return f"{clusters}, few events" if events is not None and events < FEW_EVENTS else clusters


def few_independent_events(part: Stratum, method: str) -> bool:
    """Whether the interval of a share near 0 or 1 may be too short because few clusters contain its
    failures (or successes).

    True if clusters differ in size and the scores correspond to fewer than fifteen independent
    failures (or successes): μ(1 − μ)/V trials times the smaller share. Such intervals may cover
    only .86 to .93."""
    if method != "wilson-t" or part.mean is None or part.df is None or part.scale is None:
        return False
    low, width = part.scale[0], part.scale[1] - part.scale[0]
    rarer = min(part.mean - low, low + width - part.mean) / width
    if not part.variance or not 0 < rarer < _NEAR or part.df >= part.n_clusters - 1 - _SAME:
        return False
    trials = min(part.n_scored, rarer * (1 - rarer) * width**2 / part.variance)
    return trials * rarer < FEW_INDEPENDENT


# -- pairs of 0/1 scores -------------------------------------------------------------------------


def independent_rows(differences: Sequence[float], clusters: Sequence[Hashable]) -> float:
    """The effective number of independent rows of paired 0/1 differences, at most N.

    N over the design effect (N/C + k D) / (1 + k). D is the observed design effect, V_CR2 · N /
    variance of the differences, at least 1. N/C, one row per cluster, is the most conservative
    value and is weighted like one cluster. k = (Σ q_c)² / Σ q_c² is the number of clusters behind
    D; q_c is the sum of d² in cluster c. Without any difference the result is C; with one row per
    cluster it is about C."""
    pairs, total = list(zip(differences, clusters, strict=True)), len(differences)
    parts: dict[Hashable, list[float]] = {}
    for d, cluster in pairs:
        parts.setdefault(cluster, []).append(d * d)
    squares = [math.fsum(part) for part in parts.values()]
    whole = math.fsum(squares)
    if not whole:
        return float(len(parts))
    moments, cautious = _moments(pairs), total / len(parts)
    spread = whole / total - moments.mean**2
    alike = spread <= _SPECK * whole / total
    observed = cautious if alike else max(1.0, moments.variance * total / spread)
    seen = whole**2 / math.fsum(q * q for q in squares)
    return total * (1 + seen) / (cautious + seen * observed)


def unseen_variance(rows: float, width: float) -> float:
    """The variance that pseudo-clusters add to a mean difference of paired 0/1 scores, for a scale
    of this `width` and `rows` effective rows. Over the four corners the mean square of a difference
    is 1/2."""
    return UNSEEN / 2 * (width / rows) ** 2


# -- means of means ------------------------------------------------------------------------------


def suite_mean(parts: Sequence[Stratum], *, confidence: float = CONFIDENCE) -> Estimate:
    """The unweighted mean of the parts' means (tasks as strata).

    V = Σ V_k / K²; df after Welch & Satterthwaite, (Σ V_k)² / Σ (V_k² / df_k). The scale is the
    mean of the parts' scales; on it the interval is Wilson's with t, as for one task, with at least
    `_least_trials` trials. There is no mean if a part has none, and no interval if a part has no
    variance.
    """
    counted = Estimate(
        n_scored=sum(p.n_scored for p in parts), n=sum(p.n for p in parts),
        n_clusters=sum(p.n_clusters for p in parts), method="nothing-scored",
    )  # fmt: skip
    means = [p.mean for p in parts if p.mean is not None]
    if not parts or len(means) < len(parts):
        return counted
    mean, scale = math.fsum(means) / len(means), _mean_scale([p.scale for p in parts])
    added = added_variance([(p.variance, p.df) for p in parts])
    if added is None:
        return replace(counted, mean=mean, scale=scale, method="undefined")
    least = _least_trials(parts, confidence) if scale is not None else 0.0
    shape = _Shape(mean, *added, counted.n_clusters, scale, least=least)
    low, high, variance, method = _interval(shape, confidence, "strata-t")
    return replace(
        counted, mean=mean, ci_low=low, ci_high=high, variance=variance, df=added[1], scale=scale,
        method=method,
    )  # fmt: skip


def overlapping_mean(
    whole: Stratum, parts: Sequence[Stratum], constant: Sequence[Stratum],
    *, confidence: float = CONFIDENCE,
) -> Estimate:  # fmt: skip
    """The unweighted mean of parts that share clusters; `whole` is its jackknife.

    V = V_whole + Σ V_k / K² over the `constant` parts. No cluster changes these, so the jackknife
    does not see them, and they count with the variance that corresponds to their intervals. On a
    scale the effective number of trials is at least the smallest of the parts, because
    (Σ w_k √(μ_k(1 − μ_k)/n_k))² <= μ(1 − μ) / min n_k for any dependence of the parts.
    """
    counted = Estimate(
        mean=whole.mean, n_scored=whole.n_scored, n=whole.n, n_clusters=whole.n_clusters,
        scale=whole.scale, method="undefined",
    )  # fmt: skip
    if whole.mean is None or whole.variance is None or whole.df is None:
        return counted
    if any(part.variance is None for part in parts):
        return counted
    seen = 0.0 if len(constant) == len(parts) else whole.variance
    unseen = math.fsum(part.variance or 0.0 for part in constant) / len(parts) ** 2
    known = whole.scale is not None and all(part.scale is not None for part in parts)
    least = min(_part_trials(part, confidence) for part in parts) if known else 0.0
    shape = _Shape(
        whole.mean, seen + unseen, whole.df, whole.n_clusters, whole.scale, least=least
    )  # fmt: skip
    low, high, variance, method = _interval(shape, confidence, "jackknife-t")
    return replace(counted, ci_low=low, ci_high=high, variance=variance, df=whole.df, method=method)


def _least_trials(parts: Sequence[Stratum], confidence: float) -> float:
    """The minimum effective number of trials of a mean of parts on known scales.

    Part k has n_k = μ_k(1 − μ_k)/V_k trials, or at an end of its scale the trials that its interval
    was made with. With its share w_k of the scales' widths, min n_k / w_k is a lower bound, because
    Σ w_k² μ_k(1 − μ_k)/n_k <= max (w_k/n_k) · μ(1 − μ). If all parts are at their ends, it is the
    exact number. Without this bound, a part at an end of its scale would make μ(1 − μ)/V nearly 0
    and the interval as wide as the scale, or many rows of one part would hide the few of another.
    """
    widths = [scale[1] - scale[0] for scale in (p.scale for p in parts) if scale is not None]
    trials = [_part_trials(part, confidence) for part in parts]
    whole = math.fsum(widths)
    return min(n * whole / width for n, width in zip(trials, widths, strict=True))


def _part_trials(part: Stratum, confidence: float) -> float:
    """The effective number of trials of a part; 0 if unknown."""
    if part.mean is None or not part.variance or part.df is None or part.scale is None:
        return 0.0
    low, width = part.scale[0], part.scale[1] - part.scale[0]
    share, variance = (part.mean - low) / width, part.variance / width**2
    if 0 < share < 1:
        return share * (1 - share) / variance
    # Wilson's interval of n trials at an end is t²/(n + t²) wide, and 2t√V of it is the variance.
    t = t_quantile(max(1.0, part.df), confidence)
    reach = 2 * t * math.sqrt(variance)
    return t**2 * (1 - reach) / reach if reach < 1 else 0.0


def added_variance(
    parts: Sequence[tuple[float | None, float | None]],
) -> tuple[float, float] | None:
    """(variance, df) of the mean of independent parts, from (variance, df) of each; None if any
    part has none."""
    pairs = [(v, df) for v, df in parts if v is not None and df is not None]
    if not pairs or len(pairs) < len(parts):
        return None
    total = math.fsum(v for v, _ in pairs)
    weight = math.fsum(v * v / df for v, df in pairs)
    df = total**2 / weight if weight > 0 else min(df for _, df in pairs)
    return total / len(pairs) ** 2, max(1.0, df)


def _mean_scale(scales: Sequence[Interval | None]) -> Interval | None:
    ends = [scale for scale in scales if scale is not None]
    if len(ends) < len(scales):
        return None
    return (
        math.fsum(low for low, _ in ends) / len(ends),
        math.fsum(high for _, high in ends) / len(ends),
    )


# -- batch statistics ----------------------------------------------------------------------------


def jackknife(
    statistic: ClusterStatistic,
    n_clusters: int,
    *,
    scale: Interval | None = None,
    confidence: float = CONFIDENCE,
) -> Estimate:
    """A statistic of all clusters with a delete-one-cluster jackknife interval.

    V = (C − 1)/C Σ (θ_(c) − mean θ_(·))², θ_(c) without cluster c; t at C − 1 degrees of freedom,
    on a known `scale` in Wilson's form. For statistics that change smoothly without a cluster
    (means, ratios, F1, pairwise diversity), not for medians. n counts clusters here. No interval if
    the statistic is undefined without one of them. Efron & Stein (1981).
    """
    everything = list(range(n_clusters))
    value = finite_value(statistic(everything)) if n_clusters else None
    if value is None:
        return Estimate(n=n_clusters, n_clusters=n_clusters, method="nothing-scored")
    counts = {"n_scored": n_clusters, "n": n_clusters, "n_clusters": n_clusters}
    limits = _scale_of([value], scale)
    if n_clusters < 2:
        return Estimate(mean=value, scale=limits, **counts, method="one-cluster")
    less = [finite_value(statistic(everything[:c] + everything[c + 1 :])) for c in everything]
    rest = [v for v in less if v is not None]
    if len(rest) < n_clusters:
        return Estimate(mean=value, scale=limits, **counts, method="undefined")
    centre = math.fsum(rest) / n_clusters
    spread = math.fsum((v - centre) ** 2 for v in rest) * (n_clusters - 1) / n_clusters
    size = max(abs(v) for v in [value, *rest])
    spread = 0.0 if math.sqrt(spread) <= _SPECK * size else spread
    shape = _Shape(value, spread, n_clusters - 1.0, n_clusters, limits)
    low, high, variance, method = _interval(shape, confidence, "jackknife-t")
    return Estimate(
        mean=value, ci_low=low, ci_high=high, variance=variance, df=n_clusters - 1.0,
        scale=limits, **counts, method=method,
    )  # fmt: skip


def finite_value(value: float | None) -> float | None:
    """The value, or None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def cluster_bootstrap(
    statistic: ClusterStatistic,
    n_clusters: int,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Percentile bootstrap interval over clusters, for statistics without a formula (alpha, rank
    correlations).

    Too narrow in small samples: for means it covers .80 to .93 instead of .95 at 5 to 20 clusters
    (`benchmarks/coverage.py`), so means do not use it. None for fewer than MIN_CLUSTERS clusters,
    if more than a tenth of the draws have no value, or if nearly all draws are equal. The random
    stream is fixed by `seed`."""
    if n_clusters < MIN_CLUSTERS:
        return None
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, n_clusters, size=(resamples, n_clusters))
    values = [v for v in (finite_value(statistic(row.tolist())) for row in drawn) if v is not None]
    if len(values) < (1 - _MOST_UNDEFINED) * resamples or np.ptp(values) < _SAME:
        return None
    outside = significance(confidence) / 2
    low, high = np.quantile(values, [outside, 1 - outside])
    return (float(low), float(high)) if high - low >= _SAME else None
