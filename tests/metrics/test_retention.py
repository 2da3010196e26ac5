"""Retention: Fieller's interval by hand and by search, never at odds with the test of the gain."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
import pytest

from soulkit.metrics import retention as keep
from soulkit.metrics.comparisons import paired_difference
from soulkit.metrics.intervals import ClusterStatistic, estimate
from soulkit.metrics.student import t_quantile

Floats = Sequence[float]


def rows(values: Floats) -> dict[Hashable, float | None]:
    return dict(enumerate(values))


def gains_of(
    base: Floats, expert: Floats, generalist: Floats, clusters: Sequence[int] | None = None,
    scale: tuple[float, float] | None = None,
) -> keep.Gains:  # fmt: skip
    units: dict[Hashable, Hashable] = dict(enumerate(clusters or range(len(base))))
    made = keep.paired_gains(rows(base), rows(expert), rows(generalist), units, scale=scale)
    assert made is not None
    return made


def drawn(seed: int, n: int = 30) -> tuple[list[float], list[float], list[float]]:
    rng = np.random.default_rng(seed)
    ease = rng.normal(size=n) * 0.1
    base, expert, generalist = (ease + rng.normal(m, 0.2, n) for m in (0.3, 0.7, 0.6))
    return list(base), list(expert), list(generalist)


def test_the_ends_are_where_the_difference_can_just_be_told_from_zero() -> None:
    base, expert, generalist = drawn(1)
    clusters = [i // 2 for i in range(30)]
    outcome = keep.retention(gains_of(base, expert, generalist, clusters))
    assert outcome.ci_low is not None and outcome.ci_high is not None and outcome.ratio is not None
    for end in (outcome.ci_low, outcome.ci_high):
        along = [(g - b) - end * (e - b) for b, e, g in zip(base, expert, generalist, strict=True)]
        mean = estimate(along, clusters)
        assert mean.mean is not None and mean.variance and mean.df
        half = t_quantile(mean.df) * math.sqrt(mean.variance)
        assert abs(mean.mean) == pytest.approx(half, rel=1e-9)
    assert outcome.ci_low < outcome.ratio < outcome.ci_high
    assert outcome.ratio == pytest.approx(
        (np.mean(generalist) - np.mean(base)) / (np.mean(expert) - np.mean(base))
    )
    assert (outcome.n_shared, outcome.n_clusters, outcome.method) == (30, 15, "fieller-cr2")


@pytest.mark.parametrize("seed", range(40))
def test_a_ratio_stands_exactly_where_the_experts_gain_is_significant(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base, expert = rng.normal(0, 1, 12), rng.normal(0.6, 1, 12)
    generalist = rng.normal(0.3, 1, 12)
    outcome = keep.retention(gains_of(list(base), list(expert), list(generalist)))
    gain = paired_difference(rows(list(base)), rows(list(expert)), {i: i for i in range(12)})
    assert gain.ci_low is not None and gain.ci_high is not None
    assert (outcome.ratio is not None) == (gain.ci_low > 0)
    if outcome.ratio is None:
        assert outcome.why == (keep.LOSS if gain.ci_high < 0 else keep.NO_GAIN)


def test_zero_is_left_out_exactly_where_the_generalists_gain_is_significant() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        base, expert = rng.normal(0, 0.3, 12), rng.normal(1, 0.3, 12)
        generalist = rng.normal(0.2, 0.3, 12)
        outcome = keep.retention(gains_of(list(base), list(expert), list(generalist)))
        gain = paired_difference(
            rows(list(base)), rows(list(generalist)), {i: i for i in range(12)}
        )
        assert gain.ci_low is not None and outcome.ci_low is not None
        assert (outcome.ci_low > 0) == (gain.ci_low > 0)


@pytest.mark.parametrize("seed", range(20))
def test_right_and_wrong_answers_agree_with_the_test_of_the_gain(seed: int) -> None:
    """The same pseudo-clusters in both, also for clusters of several rows."""
    rng = np.random.default_rng(seed)
    names = rng.integers(0, 12, 30).tolist()
    base, expert, generalist = ((rng.random(30) < m).astype(float) for m in (0.4, 0.7, 0.6))
    units: dict[Hashable, Hashable] = dict(enumerate(names))
    gain = paired_difference(rows(list(base)), rows(list(expert)), units, scale=(0.0, 1.0))
    made = gains_of(list(base), list(expert), list(generalist), names, (0.0, 1.0))
    assert gain.ci_low is not None and gain.method == "agresti-min-t"
    assert (keep.retention(made).ratio is not None) == (gain.ci_low > 0)


def test_only_rows_that_all_three_scored_count() -> None:
    made = keep.paired_gains(
        {1: 0.0, 2: 0.0, 3: 0.5, 4: 1.0}, {1: 1.0, 2: 1.0, 3: None, 4: 1.0},
        {1: 1.0, 2: 0.5, 3: 1.0}, {k: k for k in range(5)},
    )  # fmt: skip
    assert made is not None
    assert (made.base, made.expert, made.generalist, made.n_shared) == (0.0, 1.0, 0.75, 2)
    assert keep.paired_gains({1: 0.0}, {2: 1.0}, {1: 1.0}, {}) is None
    assert keep.retention(None).why == keep.NOTHING


def test_models_that_agree_on_every_row_are_not_said_to_agree_for_ever() -> None:
    base, right = [0.0] * 9 + [1.0], [1.0] * 10
    outcome = keep.retention(gains_of(base, right, right, scale=(0.0, 1.0)))
    assert outcome.ratio == 1.0 and outcome.ci_low is not None and outcome.ci_high is not None
    assert outcome.ci_low < 0.8 and outcome.ci_high > 1.2
    certain = keep.retention(gains_of([0.0] * 40, [1.0] * 40, [1.0] * 40, scale=(0.0, 1.0)))
    assert certain.ratio == 1.0 and certain.ci_low is not None and 0.9 < certain.ci_low < 0.97
    scaleless = keep.retention(gains_of([0.0] * 40, [1.0] * 40, [1.0] * 40))
    assert (scaleless.ratio, scaleless.ci_low, scaleless.why) == (1.0, None, keep.NO_SPREAD)


def test_one_cluster_gives_nothing() -> None:
    outcome = keep.retention(gains_of([0.0, 0.1], [1.0, 0.9], [0.5, 0.4], [7, 7]))
    assert (outcome.ratio, outcome.why) == (None, keep.ONE_CLUSTER)


def test_a_number_over_a_batch_is_left_out_cluster_by_cluster() -> None:
    base, expert, generalist = drawn(3, 16)

    def mean_over(values: Floats) -> ClusterStatistic:
        return lambda parts: math.fsum(values[i] for i in parts) / len(parts)

    made = keep.batch_gains(
        mean_over(base), mean_over(expert), mean_over(generalist), 16, n_shared=16
    )
    # Of a mean the jackknife is the usual variance: CR2 of single rows is the same.
    paired = gains_of(base, expert, generalist)
    assert made is not None
    for name in ("expert_variance", "generalist_variance", "covariance"):
        assert getattr(made, name) == pytest.approx(getattr(paired, name), rel=1e-9)
    assert keep.batch_gains(
        mean_over(base), lambda parts: None, mean_over(base), 4, n_shared=4
    ) is None  # fmt: skip


def test_the_mean_over_tasks_adds_what_each_does_not_know() -> None:
    one = keep.Retention(ratio=0.8, ci_low=0.5, ci_high=1.2, n_shared=10, n_clusters=5)
    two = keep.Retention(ratio=0.6, ci_low=0.2, ci_high=0.9, n_shared=20, n_clusters=9)
    both = keep.macro_retention([one, two])
    assert both.ratio == pytest.approx(0.7)
    assert both.ci_low == pytest.approx(0.7 - math.hypot(0.3, 0.4) / 2)
    assert both.ci_high == pytest.approx(0.7 + math.hypot(0.4, 0.3) / 2)
    assert (both.n_shared, both.n_clusters) == (30, 14)
    lacking = keep.macro_retention([one, keep.Retention(why=keep.NO_GAIN)])
    assert (lacking.ratio, lacking.why) == (None, "1 of 2 tasks have no ratio")


@pytest.mark.parametrize("shares", [(0.1, 0.9, 0.8), (0.05, 0.97, 0.9)])
def test_right_and_wrong_answers_of_ten_clusters_are_covered(
    shares: tuple[float, float, float],
) -> None:
    rng = np.random.default_rng(5)
    truth = (shares[2] - shares[0]) / (shares[1] - shares[0])
    hits = 0
    for _ in range(300):
        base, expert, generalist = (
            [float(x) for x in rng.random(10) < share] for share in shares
        )  # fmt: skip
        outcome = keep.retention(gains_of(base, expert, generalist, scale=(0.0, 1.0)))
        hits += outcome.ci_low is None or (
            outcome.ci_high is not None and outcome.ci_low <= truth <= outcome.ci_high
        )
    assert hits / 300 >= 0.93
