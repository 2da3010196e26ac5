"""How surely a number is known.

Every number that soulkit prints passes through here. Three rules: a mean is over scored episodes
only and says how many those are; rows of one cluster (one story, one conversation, the rollouts of
one example) are resampled together, because they are not independent; and an interval that the data
cannot support is None instead of a line of zero width. Pure numpy, deterministic: the same values
give the same interval, whatever the machine.

Notation: x is a value, C the number of clusters, n the number of values, S_c and n_c the sum and
the size of cluster c, z the standard normal quantile at (1 + confidence) / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Interval = tuple[float, float]

CONFIDENCE = 0.95
N_RESAMPLES = 2000
N_FLIPS = 10_000
_EXACT_CLUSTERS = 13
"""Up to 2**13 = 8192 sign patterns are enumerated; beyond that they are drawn."""
_CHUNK = 4_000_000
"""Random numbers held at a time, so that large runs do not need gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over what was scored, in the unit of the values, with its interval."""

    mean: float | None
    """None when nothing was scored."""
    ci_low: float | None
    ci_high: float | None
    """None when the data support no interval (nothing scored, or a single cluster)."""
    n_scored: int
    n: int
    method: str
    """`wilson`, `wilson-clusters`, `cluster-bootstrap`, `one-cluster` or `nothing-scored`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """B minus A on what both scored, in the unit of the values."""

    mean_a: float | None
    mean_b: float | None
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    p: float | None
    """Two-sided; None when fewer than two clusters are shared."""
    n_shared: int
    n_only_a: int
    n_only_b: int
    n_clusters: int


@dataclass(frozen=True, slots=True)
class RewardGroup:
    """The drafts of one example and their refined twins: index i is rollout i.

    None stands for an unscored draft, an unscored refined rollout, or no refined rollout at all.
    """

    drafts: Sequence[float | None]
    refined: Sequence[float | None]

    def __post_init__(self) -> None:
        if len(self.drafts) != len(self.refined):
            raise ValueError("drafts and refined must be aligned by rollout")


def z_quantile(confidence: float = CONFIDENCE) -> float:
    """z such that a standard normal lies in [-z, z] with probability `confidence`."""
    _check_confidence(confidence)
    return NormalDist().inv_cdf((1 + confidence) / 2)


def t_quantile(df: int, confidence: float = CONFIDENCE) -> float:
    """t such that Student's t with `df` degrees of freedom lies in [-t, t] with `confidence`.

    With t = sqrt(df) tan(u), P(|T| <= t) is the integral of cos(v)**(df - 1) over [0, u], divided
    by the same integral over [0, pi/2]. Relative error below 1e-4 for confidence <= 0.999.
    """
    _check_confidence(confidence)
    if df < 1:
        raise ValueError("Student's t needs at least one degree of freedom")
    if df > 5000:  # the grid below would be too coarse, and z is within 2e-4 of t
        return z_quantile(confidence)
    grid = np.linspace(0.0, math.pi / 2, 200_001)
    density = np.cos(grid) ** (df - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(confidence, area / area[-1], grid))
    return math.sqrt(df) * math.tan(angle)


def wilson(k: float, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's interval for a proportion of k successes in n trials, within [0, 1].

    centre = (p + z²/2n) / (1 + z²/n);  half = z sqrt(p(1-p)/n + z²/4n²) / (1 + z²/n).
    Raises ValueError unless n > 0 and 0 <= k <= n.
    """
    if n <= 0 or not 0 <= k <= n:
        raise ValueError(f"wilson needs n > 0 and 0 <= k <= n, not k={k}, n={n}")
    z2, p = z_quantile(confidence) ** 2, k / n
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    low = 0.0 if k == 0 else max(0.0, centre - half)
    high = 1.0 if k == n else min(1.0, centre + half)
    return low, high


def mean_interval(
    values: Sequence[float], confidence: float = CONFIDENCE, kind: Literal["t", "normal"] = "t"
) -> Interval:
    """mean ± q s / sqrt(n), s with n - 1, q of Student's t (n - 1) or of the normal.

    For independent values only. Raises ValueError for fewer than two.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2:
        raise ValueError("an interval around a mean needs at least two values")
    q = t_quantile(x.size - 1, confidence) if kind == "t" else z_quantile(confidence)
    half = q * float(x.std(ddof=1)) / math.sqrt(x.size)
    return float(x.mean()) - half, float(x.mean()) + half


def cluster_bootstrap(
    values: Sequence[float],
    clusters: Sequence[Hashable],
    statistic: Callable[[Floats], float] | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """Percentile interval of a statistic when whole clusters are drawn with replacement.

    C clusters are drawn out of C, `n_resamples` times. Without `statistic` it is the mean,
    sum(S_c) / sum(n_c) over the drawn clusters, computed for all draws at once. Clusters are sorted
    by their text and the random stream is fixed by `seed`, so neither the order of the rows nor
    the process changes the result. Raises ValueError without values.
    """
    _check_confidence(confidence)
    members = _members(values, clusters)
    draws = _draws(len(members), n_resamples, np.random.default_rng(seed))
    if statistic is None:
        sums = np.array([m.sum() for m in members])
        sizes = np.array([m.size for m in members], dtype=np.float64)
        means = [sums[d].sum(axis=1) / sizes[d].sum(axis=1) for d in draws]
        sampled = np.concatenate(means)
    else:
        sampled = np.array(
            [statistic(np.concatenate([members[i] for i in row])) for d in draws for row in d]
        )
    low, high = np.quantile(sampled, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def estimate(
    values: Sequence[float | None],
    clusters: Sequence[Hashable],
    binary: bool,
    *,
    confidence: float = CONFIDENCE,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """The mean of the scored values (None: unscored) with the interval that suits them.

    Wilson when the values are binary and no cluster has more than one of them, otherwise the
    cluster bootstrap. Binary values that are all equal leave the bootstrap without spread; there
    Wilson counts clusters in place of values (`wilson-clusters`), which is on the safe side.
    """
    if len(values) != len(clusters):
        raise ValueError("one cluster per value is needed")
    pairs = [(float(v), c) for v, c in zip(values, clusters, strict=True) if v is not None]
    n, x = len(values), [v for v, _ in pairs]
    if not x:
        return Estimate(
            mean=None, ci_low=None, ci_high=None, n_scored=0, n=n, method="nothing-scored"
        )
    mean = math.fsum(x) / len(x)
    scored_clusters = [c for _, c in pairs]
    method = _method(x, scored_clusters, binary)
    interval: tuple[float | None, float | None] = (None, None)
    if method == "cluster-bootstrap":
        interval = cluster_bootstrap(x, scored_clusters, None, n_resamples, seed, confidence)
    elif method != "one-cluster":
        trials = len(set(scored_clusters))
        interval = wilson(round(mean * trials), trials, confidence)
    low, high = interval
    return Estimate(mean=mean, ci_low=low, ci_high=high, n_scored=len(x), n=n, method=method)


def bounds(values: Sequence[float | None], scale: Interval) -> Interval:
    """Where the mean over all n would lie if what is missing scored the lowest or the highest.

    worst = (sum + missing · low) / n;  best = (sum + missing · high) / n.
    ValueError without values.
    """
    low, high = scale
    if not values or high < low:
        raise ValueError("bounds need values and an ordered scale")
    scored = [v for v in values if v is not None]
    total, missing = math.fsum(scored), len(values) - len(scored)
    return (total + missing * low) / len(values), (total + missing * high) / len(values)


def paired_difference(
    a: Mapping[Hashable, float | None],
    b: Mapping[Hashable, float | None],
    clusters: Mapping[Hashable, Hashable],
    *,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> PairedDifference:
    """mean(b) - mean(a) over the keys that both scored.

    `clusters` names the cluster of each shared key. The interval resamples clusters of the
    differences d = b - a; p comes from `sign_flip_p`. `n_only_a` counts keys scored in A but not in
    B (unscored or not played there).
    """
    in_a, in_b = _scored_values(a), _scored_values(b)
    shared = sorted(in_a.keys() & in_b.keys(), key=repr)
    d = [in_b[k] - in_a[k] for k in shared]
    groups = [clusters[k] for k in shared]
    enough = len(set(groups)) > 1
    low, high = cluster_bootstrap(d, groups, None, N_RESAMPLES, seed, confidence) if enough else _NO
    return PairedDifference(
        mean_a=_mean([in_a[k] for k in shared]),
        mean_b=_mean([in_b[k] for k in shared]),
        difference=_mean(d),
        ci_low=low,
        ci_high=high,
        p=sign_flip_p(d, groups, seed=seed) if enough else None,
        n_shared=len(shared),
        n_only_a=len(in_a.keys() - in_b.keys()),
        n_only_b=len(in_b.keys() - in_a.keys()),
        n_clusters=len(set(groups)),
    )


def sign_flip_p(
    differences: Sequence[float],
    clusters: Sequence[Hashable],
    n_flips: int = N_FLIPS,
    seed: int = 0,
) -> float:
    """Two-sided p-value of "the differences are symmetric around zero", by cluster.

    With D_c the sum of the differences in cluster c and s_c = ±1, p is the share of sign patterns
    with |sum s_c D_c| >= |sum D_c|: all 2**C of them for C <= 13, otherwise `n_flips` random ones
    with the observed one added, (1 + hits) / (1 + n_flips). Raises ValueError without differences.
    """
    sums = np.array([m.sum() for m in _members(differences, clusters)])
    observed = abs(float(sums.sum()))
    limit = observed - 1e-12 * max(1.0, float(np.abs(sums).sum()))  # rounding is no difference
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


def holm(pvalues: Sequence[float | None]) -> list[float | None]:
    """Holm's adjusted p-values, in the order given; None (no test) stays None and is not counted.

    With p sorted upwards, adjusted_(i) = max over j <= i of min(1, (m - j) p_(j)), j from 0.
    """
    tested = sorted((p, i) for i, p in enumerate(pvalues) if p is not None)
    adjusted: list[float | None] = [None] * len(pvalues)
    running = 0.0
    for rank, (p, i) in enumerate(tested):
        running = max(running, min(1.0, (len(tested) - rank) * p))
        adjusted[i] = running
    return adjusted


def auc(steps: Sequence[float], values: Sequence[float | None]) -> float | None:
    """Area under a curve by trapezoids, divided by its width: a mean height, in the values' unit.

    Missing points are bridged by a straight line. None with fewer than two different steps.
    """
    points = sorted((s, v) for s, v in zip(steps, values, strict=True) if v is not None)
    if len({s for s, _ in points}) < 2:
        return None
    x, y = np.array(points, dtype=np.float64).T
    return float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2) / (x[-1] - x[0]))


def leave_one_out_gap(groups: Sequence[RewardGroup], *, seed: int = 0) -> Estimate:
    """How much better refined rollouts are than *other* drafts of the same example.

    Mean over pairs of r'_i - mean of r_j over j != i, with an interval that resamples examples.
    Feedback that says nothing gives zero in expectation, which the raw pair gap does not when only
    poor drafts get feedback. A pair needs a scored refined rollout and another scored draft;
    `n` counts the refined rollouts that were scored, `n_scored` those with such a draft.
    """
    gaps: list[float | None] = []
    owners: list[int] = []
    for g, group in enumerate(groups):
        for i, refined in enumerate(group.refined):
            if refined is None:
                continue
            others = [r for j, r in enumerate(group.drafts) if j != i and r is not None]
            gaps.append(refined - math.fsum(others) / len(others) if others else None)
            owners.append(g)
    return estimate(gaps, owners, binary=False, seed=seed)


def pair_gap(groups: Sequence[RewardGroup], *, seed: int = 0) -> Estimate:
    """Mean over pairs of r'_i - r_i, refined against its own draft; examples are resampled.

    Regression to the mean is in it wherever feedback goes to poor drafts: read it beside
    `leave_one_out_gap`.
    """
    gaps: list[float | None] = []
    owners: list[int] = []
    for g, group in enumerate(groups):
        for draft, refined in zip(group.drafts, group.refined, strict=True):
            if refined is not None:
                gaps.append(None if draft is None else refined - draft)
                owners.append(g)
    return estimate(gaps, owners, binary=False, seed=seed)


_NO: tuple[None, None] = (None, None)


def _method(values: Sequence[float], clusters: Sequence[Hashable], binary: bool) -> str:
    distinct = len(set(clusters))
    if binary and distinct == len(clusters):
        return "wilson"
    if distinct < 2:
        return "one-cluster"
    if binary and len(set(values)) == 1:
        return "wilson-clusters"
    return "cluster-bootstrap"


def _members(values: Sequence[float], clusters: Sequence[Hashable]) -> list[Floats]:
    """The values of each cluster, clusters in the order of their text."""
    if not values or len(values) != len(clusters):
        raise ValueError("at least one value, and one cluster per value, are needed")
    by_cluster: dict[Hashable, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        by_cluster.setdefault(cluster, []).append(float(value))
    return [np.array(sorted(by_cluster[c]), dtype=np.float64) for c in sorted(by_cluster, key=repr)]


def _draws(size: int, n_resamples: int, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    step, done = max(1, _CHUNK // size), 0
    while done < n_resamples:
        rows = min(step, n_resamples - done)
        yield rng.integers(0, size, size=(rows, size))
        done += rows


def _scored_values(values: Mapping[Hashable, float | None]) -> dict[Hashable, float]:
    return {k: float(v) for k, v in values.items() if v is not None}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence lies strictly between 0 and 1, not {confidence}")
