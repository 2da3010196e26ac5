"""Means with intervals: by hand, by the definitions written out naively, and what never happens.

Student's t against scipy, the tables, and the intervals that it is made for.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from soulkit.metrics import intervals as iv
from soulkit.metrics import student
from soulkit.metrics.student import t_quantile

Z = 1.959963984540054


def test_wilson_matches_the_textbook_example() -> None:
    # 8 of 10: (0.8 + 0.19207) / 1.38415 ± 1.95996 sqrt(0.016 + 0.0096036) / 1.38415
    assert iv.wilson(0.8, 10, Z) == pytest.approx((0.49016, 0.94332), abs=1e-5)


def test_wilson_touches_the_ends_exactly() -> None:
    assert iv.wilson(0, 20, Z)[0] == 0.0
    assert iv.wilson(1, 20, Z)[1] == 1.0
    assert iv.wilson(0, 20, Z)[1] == pytest.approx(0.16113, abs=1e-5)


@given(st.floats(0, 1), st.floats(0.5, 1e6), st.floats(0.1, 15))
def test_wilson_is_symmetric_and_holds_the_share(share: float, trials: float, q: float) -> None:
    low, high = iv.wilson(share, trials, q)
    other = iv.wilson(1 - share, trials, q)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    assert (low, high) == pytest.approx((1 - other[1], 1 - other[0]), abs=1e-9)


@pytest.mark.parametrize(("share", "trials"), [(0.5, 0), (1.1, 2), (-0.1, 5), (0.5, math.nan)])
def test_wilson_refuses_what_is_no_share(share: float, trials: float) -> None:
    with pytest.raises(ValueError):
        iv.wilson(share, trials, Z)


# -- the mean, its variance and its degrees of freedom -------------------------------------------


def naive(values: Sequence[float], clusters: Sequence[int]) -> tuple[float, float, float]:
    """(mean, CR2 variance, Bell–McCaffrey df) as they are defined, matrix and all."""
    x, names = np.array(values), sorted(set(clusters))
    design, owner = np.ones((len(x), 1)), np.array(clusters)
    mean = float(x.mean())
    hat = np.full((len(x), len(x)), 1 / len(x))
    meat, columns = 0.0, []
    for name in names:
        here = owner == name
        inner = np.eye(here.sum()) - hat[np.ix_(here, here)]
        values_of, vectors = np.linalg.eigh(inner)
        root = vectors @ np.diag(values_of**-0.5) @ vectors.T
        meat += float((design[here].T @ root @ (x[here] - mean)).item()) ** 2
        columns.append(((np.eye(len(x)) - hat)[:, here] @ root @ design[here]).ravel())
    kernel = np.array(columns) @ np.array(columns).T
    df = float(np.trace(kernel)) ** 2 / float((kernel**2).sum())
    return mean, meat / len(x) ** 2, df


@given(st.lists(st.integers(1, 6), min_size=2, max_size=7), st.integers(0, 10**6))
@settings(max_examples=60)
def test_variance_and_degrees_of_freedom_are_the_definitions(sizes: list[int], seed: int) -> None:
    clusters = [c for c, n in enumerate(sizes) for _ in range(n)]
    values = list(np.random.default_rng(seed).normal(5, 2, len(clusters)))
    mean, variance, df = naive(values, clusters)
    df = max(1.0, df)  # of two clusters it is one but for rounding
    estimate = iv.estimate(values, clusters)
    assert estimate.mean == pytest.approx(mean)
    assert estimate.variance == pytest.approx(variance)
    assert estimate.df == pytest.approx(df)
    half = t_quantile(df) * math.sqrt(variance)
    assert (estimate.ci_low, estimate.ci_high) == pytest.approx((mean - half, mean + half))
    assert (estimate.method, estimate.n_clusters) == ("cr2-t", len(sizes))


def test_independent_values_have_the_interval_of_the_textbook() -> None:
    # mean 2, s = 1, n = 3: 2 ± 4.30265 / sqrt(3)
    estimate = iv.estimate([1.0, 2.0, 3.0], "abc")
    assert (estimate.ci_low, estimate.ci_high) == pytest.approx(
        (2 - 2.48414, 2 + 2.48414), abs=1e-4
    )
    assert estimate.df == pytest.approx(2) and estimate.variance == pytest.approx(1 / 3)


def test_yes_or_no_by_hand() -> None:
    """Three of four, one a cluster: V = (3 · 1/16 + 9/16) / (3/4) / 16 = 1/16, effective number of
    trials 3/16 / (1/16) = 3, t at 3 degrees of freedom."""
    estimate = iv.estimate([1, 1, 0, 1], "abcd", True)
    assert estimate.variance == pytest.approx(1 / 16) and estimate.df == pytest.approx(3)
    expected = iv.wilson(0.75, 3, t_quantile(3))
    assert (estimate.ci_low, estimate.ci_high) == pytest.approx(expected)
    assert (estimate.method, estimate.scale, estimate.events) == ("wilson-t", (0.0, 1.0), 1.0)


def test_effective_trials_of_yes_or_no_are_at_most_the_rows() -> None:
    """Clusters that are more alike than chance would have it: 1 and 0 in each."""
    values, clusters = [1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2, 3, 3, 3]
    capped = iv.estimate(values, clusters, True)
    assert capped.mean is not None and capped.variance is not None and capped.df is not None
    assert capped.mean * (1 - capped.mean) / capped.variance > 9
    expected = iv.wilson(capped.mean, 9, t_quantile(capped.df))
    assert (capped.ci_low, capped.ci_high) == pytest.approx(expected)


def test_shares_of_unequal_clusters_square_the_divisor() -> None:
    values, unequal = [1.0] * 9 + [0.0], [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    mean = iv.estimate(values, unequal, True)
    # Residuals of the clusters: 4 − 3.6, 3 − 2.7, 2 − 2.7.
    expected = 0.4**2 / 0.6**2 + 0.3**2 / 0.7**2 + 0.7**2 / 0.7**2
    assert mean.variance == pytest.approx(expected / 100)
    assert iv.estimate(values, unequal).variance == pytest.approx(naive(values, unequal)[1])
    equal = [i // 5 for i in range(10)]
    assert iv.estimate(values, equal, True).variance == pytest.approx(naive(values, equal)[1])
    graded = [0.9, *values[1:]]
    judged = iv.estimate(graded, unequal, scale=(0.0, 1.0))
    assert judged.variance == pytest.approx(naive(graded, unequal)[1])


def few(failures: Sequence[int], sizes: Sequence[int]) -> bool:
    values, clusters = [], []
    for name, (wrong, size) in enumerate(zip(failures, sizes, strict=True)):
        values += [0.0] * wrong + [1.0] * (size - wrong)
        clusters += [name] * size
    mean = iv.estimate(values, clusters, True)
    return iv.few_independent_events(mean, mean.method)


def test_few_clusters_that_hold_the_failures_are_named() -> None:
    sizes = [5, 15] * 20
    assert few([5, 8, 0, 7] + [0] * 36, sizes)
    assert not few([1] * 40, sizes)  # as many failures, every cluster has its share
    assert not few([5, 0] * 20, sizes)  # a share of 0.25 is not near an end
    assert not few([5, 8, 0, 7] + [0] * 36, [10] * 40)  # CR2 covers clusters of one size
    assert not few([0] * 40, sizes)


def test_effective_trials_of_judged_scores_are_not_capped() -> None:
    values = [0.70, 0.71, 0.69, 0.72, 0.68]
    estimate = iv.estimate(values, range(5), scale=(0.0, 1.0))
    plain = iv.estimate(values, range(5))
    assert None not in (estimate.ci_low, estimate.ci_high, plain.ci_low, plain.ci_high)
    wide = estimate.ci_high - estimate.ci_low  # type: ignore[operator]
    assert wide == pytest.approx(plain.ci_high - plain.ci_low, rel=0.01)  # type: ignore[operator]
    assert plain.events is None


def test_a_scale_is_only_another_unit() -> None:
    values, clusters = [0.2, 0.9, 0.4, 1.0, 0.7], [0, 0, 1, 2, 2]
    share = iv.estimate(values, clusters, scale=(0.0, 1.0))
    points = iv.estimate([-5 + 15 * v for v in values], clusters, scale=(-5.0, 10.0))
    assert points.ci_low == pytest.approx(-5 + 15 * (share.ci_low or 0))
    assert points.ci_high == pytest.approx(-5 + 15 * (share.ci_high or 0))
    assert points.variance == pytest.approx(225 * (share.variance or 0))


def test_events_are_counted_on_the_scale() -> None:
    ends = iv.estimate([-5.0, 10.0, 10.0, 10.0], "abcd", scale=(-5.0, 10.0))
    between = iv.estimate([-5.0, 2.5, 10.0, 2.5], "abcd", scale=(-5.0, 10.0))
    assert ends.events == 1.0 and between.events == 2.0
    assert iv.estimate([0.2, 0.1], "ab", scale=(0.0, 1.0)).events == pytest.approx(0.3)


def test_without_spread_a_scale_gives_an_interval_of_as_many_trials_as_clusters() -> None:
    same = iv.estimate([1, 1, 1, 1, 1, 1], "aabbcc", True)
    assert (same.ci_low, same.ci_high) == pytest.approx(iv.wilson(1.0, 3, t_quantile(2)))
    middle = iv.estimate([0.5] * 6, "aabbcc", scale=(0.0, 1.0))
    assert (middle.ci_low, middle.ci_high) == pytest.approx(iv.wilson(0.5, 3, t_quantile(2)))
    assert same.variance == pytest.approx(((1 - (same.ci_low or 0)) / 2 / t_quantile(2)) ** 2)


def test_without_spread_and_scale_there_is_no_interval() -> None:
    nothing = iv.estimate([0.1] * 7, range(7))
    assert (nothing.ci_low, nothing.ci_high, nothing.method) == (None, None, "no-spread")
    assert (nothing.variance, nothing.n_clusters) == (0.0, 7)


@pytest.mark.parametrize("scale", [(0.0, 1.0), None, (1.0, 1.0), (2.0, 0.0)])
def test_a_scale_that_the_values_leave_is_no_scale(scale: iv.Interval | None) -> None:
    estimate = iv.estimate([0.4, 1.2, 0.9], "abc", scale=scale)
    assert (estimate.method, estimate.scale) == ("cr2-t", None)


def test_a_missing_value_is_not_a_zero() -> None:
    estimate = iv.estimate([1, None, 1, 0], "abcd", True)
    assert estimate.mean == pytest.approx(2 / 3)
    assert (estimate.n_scored, estimate.n, estimate.n_clusters) == (3, 4, 3)
    whole = iv.estimate([1, 1, 0], "abc", True)
    assert (estimate.ci_low, estimate.ci_high) == (whole.ci_low, whole.ci_high)


def test_no_number_without_data() -> None:
    nothing = iv.estimate([None, None], ["a", "b"], False)
    assert (nothing.mean, nothing.ci_low, nothing.n_scored, nothing.n) == (None, None, 0, 2)
    assert nothing.method == "nothing-scored"
    for scale in (None, (0.0, 1.0)):
        single = iv.estimate([0.4, 0.6], ["a", "a"], scale=scale)
        assert single.mean == pytest.approx(0.5) and single.df is None and single.variance is None
        assert (single.ci_low, single.ci_high, single.method) == (None, None, "one-cluster")
    with pytest.raises(ValueError, match="cluster per value"):
        iv.estimate([1.0], [])


# -- what never happens --------------------------------------------------------------------------

SCALES = st.sampled_from([(0.0, 1.0), (-5.0, 10.0), (1.0, 7.0), (-1e6, 1e-3)])
SHARES = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
TABLES = st.lists(st.tuples(SHARES, st.integers(0, 6)), min_size=1, max_size=25)


@given(TABLES, SCALES)
@settings(max_examples=300)
def test_an_interval_on_a_scale_stays_on_it_and_has_a_width(
    rows: list[tuple[float, int]], scale: iv.Interval
) -> None:
    low, high = scale
    values = [min(high, max(low, low + (high - low) * share)) for share, _ in rows]
    estimate = iv.estimate(values, [c for _, c in rows], scale=scale)
    if len({c for _, c in rows}) < 2:
        assert estimate.method == "one-cluster" and estimate.ci_low is None
        return
    assert estimate.ci_low is not None and estimate.ci_high is not None
    assert low <= estimate.ci_low < estimate.ci_high <= high
    assert estimate.mean is not None and estimate.ci_low <= estimate.mean <= estimate.ci_high
    assert estimate.variance and estimate.df is not None and estimate.df >= 1
    assert estimate.df <= estimate.n_clusters - 1 + 1e-9


@given(TABLES, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=150)
def test_neither_order_nor_names_of_clusters_change_a_bit(
    rows: list[tuple[float, int]], bounded: bool, shuffler: random.Random
) -> None:
    scale = (0.0, 1.0) if bounded else None
    shuffled = list(rows)
    shuffler.shuffle(shuffled)
    first = iv.estimate([v for v, _ in rows], [c for _, c in rows], scale=scale)
    other = iv.estimate(
        [v for v, _ in shuffled], [f"story {9 - c}" for _, c in shuffled], scale=scale
    )
    assert first == other


@given(TABLES)
@settings(max_examples=200)
def test_an_interval_without_a_scale_is_none_or_has_a_width(rows: list[tuple[float, int]]) -> None:
    estimate = iv.estimate([v for v, _ in rows], [c for _, c in rows])
    if estimate.method == "cr2-t":
        assert estimate.ci_low is not None and estimate.ci_high is not None
        assert estimate.ci_low < estimate.ci_high
    else:
        assert estimate.ci_low is None and estimate.method in ("no-spread", "one-cluster")


def test_an_interval_by_cluster_is_wider_when_clusters_agree() -> None:
    rng = np.random.default_rng(0)
    values, owners = list(np.repeat(rng.random(30), 10)), list(np.repeat(np.arange(30), 10))
    together, apart = iv.estimate(values, owners), iv.estimate(values, range(300))
    assert together.variance is not None and apart.variance is not None
    assert together.variance > 9 * apart.variance


def test_bounds_fill_in_the_scale() -> None:
    assert iv.bounds([1.0, 0.0, None, None], (0.0, 1.0)) == (0.25, 0.75)
    assert iv.bounds([None], (-5.0, 10.0)) == (-5.0, 10.0)
    with pytest.raises(ValueError):
        iv.bounds([], (0.0, 1.0))


def test_what_stands_beside_an_interval() -> None:
    assert iv.interval_remark(32) == "32 clusters"
    assert iv.interval_remark(10) == "10 clusters" and iv.interval_remark(9) == "9 clusters: few"
    assert iv.interval_remark(7, "no-spread") == "no spread in 7 clusters"
    assert iv.interval_remark(1, "one-cluster") == "1 cluster: few"
    assert iv.interval_remark(40, "wilson-t", 29.9) == "40 clusters, few events"
    assert iv.interval_remark(40, "wilson-t", 30.0) == "40 clusters"
    assert iv.interval_remark(8, "wilson-t", 0) == "8 clusters: few, few events"
    assert iv.interval_remark(0) == ""
    assert iv.interval_remark(40, "wilson-t", 20.0, few=True) == "40 clusters: few, few events"


# -- suites --------------------------------------------------------------------------------------


def part(mean: float, variance: float, df: float, scale: iv.Interval | None = None) -> iv.Estimate:
    return iv.Estimate(
        mean=mean, variance=variance, df=df, scale=scale, n_scored=10, n=12, n_clusters=5
    )


def test_a_suite_adds_variances_after_welch_and_satterthwaite() -> None:
    suite = iv.suite_mean([part(1.0, 0.04, 4), part(2.0, 0.02, 9)])
    assert suite.mean == 1.5 and suite.variance == pytest.approx(0.06 / 4)
    df = 0.06**2 / (0.04**2 / 4 + 0.02**2 / 9)
    assert suite.df == pytest.approx(df)
    half = t_quantile(df) * math.sqrt(0.015)
    assert (suite.ci_low, suite.ci_high) == pytest.approx((1.5 - half, 1.5 + half))
    assert (suite.n_scored, suite.n, suite.n_clusters, suite.method) == (20, 24, 10, "strata-t")


def test_a_suite_stays_on_the_mean_of_its_scales() -> None:
    parts = [part(0.98, 0.01, 3, (0.0, 1.0)), part(9.0, 1.0, 3, (-5.0, 10.0))]
    suite = iv.suite_mean(parts)
    assert suite.scale == (-2.5, 5.5) and suite.ci_high is not None and suite.ci_low is not None
    assert suite.ci_low < 4.99 < suite.ci_high <= 5.5
    assert iv.suite_mean([parts[0], part(1.0, 0.1, 3)]).scale is None


def test_perfect_tasks_leave_a_suite_uncertain() -> None:
    perfect = iv.estimate([1.0] * 8, range(8), True)
    suite = iv.suite_mean([perfect, perfect])
    assert suite.mean == 1.0 and suite.ci_high == 1.0
    assert suite.ci_low is not None and 0.5 < suite.ci_low < 1.0


@pytest.mark.parametrize("hits", [0, 1])
def test_many_rows_of_one_task_do_not_hide_the_few_of_another(hits: int) -> None:
    few = iv.estimate([0.0] * 6, range(6), True)
    many = iv.estimate([1.0] * hits + [0.0] * (1000 - hits), range(1000), True)
    suite = iv.suite_mean([few, many])
    assert few.ci_high is not None and suite.ci_high is not None
    # Half of what the few rows allow, and not the whole scale as soon as one of the many is right.
    assert 0.5 * few.ci_high < suite.ci_high < 0.4


def test_equal_perfect_tasks_are_worth_all_their_rows() -> None:
    suite = iv.suite_mean([iv.estimate([1.0] * 50, range(50), True)] * 4)
    assert suite.df == pytest.approx(4 * 49)
    low, _ = iv.wilson(1.0, 200, t_quantile(4 * 49))
    assert suite.ci_low == pytest.approx(low)


def test_perfect_tasks_of_two_clusters_are_worth_their_rows() -> None:
    suite = iv.suite_mean([iv.estimate([1.0] * 2, range(2), True)] * 3)
    low, _ = iv.wilson(1.0, 6, t_quantile(3))
    assert suite.df == pytest.approx(3) and suite.ci_low == pytest.approx(low)


def test_the_scale_of_a_part_weighs_what_it_may_hide() -> None:
    wide = iv.estimate([10.0] * 20, range(20), scale=(0.0, 10.0))
    narrow = iv.estimate([1.0] * 5, range(5), scale=(0.0, 1.0))
    suite = iv.suite_mean([wide, narrow])
    assert suite.ci_low is not None and suite.df is not None
    # 20 trials over ten of eleven parts of the width, 5 over one: 22 are the fewer.
    low, _ = iv.wilson(1.0, 22, t_quantile(suite.df))
    assert suite.ci_low == pytest.approx(5.5 * low)


def test_what_is_not_finite_is_unscored() -> None:
    mean = iv.estimate([math.nan, 1.0, 0.0, math.inf, 1.0], range(5), True)
    assert mean == iv.estimate([None, 1.0, 0.0, None, 1.0], range(5), True)
    assert (mean.n_scored, mean.n, mean.scale) == (3, 5, (0.0, 1.0))


def test_rounding_is_no_spread_beside_a_scale() -> None:
    mean = iv.estimate([0.0, 5.5e-17, 0.0, 1.1e-16], range(4), scale=(-5.0, 10.0))
    assert mean.ci_low is not None and mean.ci_high is not None
    assert mean.ci_high - mean.ci_low > 1


def test_a_bootstrap_whose_draws_are_nearly_all_equal_has_no_interval() -> None:
    def rarely(clusters: Sequence[int]) -> float:
        return 0.0 if len(set(clusters)) < 12 else 1.0

    assert iv.cluster_bootstrap(rarely, 30) is None


def test_a_suite_with_a_hole_has_no_mean_and_one_without_a_variance_no_interval() -> None:
    whole, unscored = part(0.5, 0.01, 3), iv.Estimate(n=4, method="nothing-scored")
    assert iv.suite_mean([whole, unscored]).mean is None
    assert iv.suite_mean([]).mean is None
    alone = iv.Estimate(mean=0.7, n_scored=3, n=3, n_clusters=1, method="one-cluster")
    suite = iv.suite_mean([whole, alone])
    assert (suite.mean, suite.ci_low, suite.method) == (0.6, None, "undefined")


def test_a_suite_of_equal_values_without_scale_has_no_interval() -> None:
    flat = iv.estimate([3.0, 3.0], "ab")
    suite = iv.suite_mean([flat, flat])
    assert (suite.ci_low, suite.method, suite.df) == (None, "no-spread", 1.0)


# -- statistics over a batch ---------------------------------------------------------------------


def test_the_jackknife_of_a_mean_is_that_of_the_textbook() -> None:
    values = [1.0, 4.0, 2.0, 8.0]
    outcome = iv.jackknife(
        lambda clusters_left: sum(values[i] for i in clusters_left) / len(clusters_left), 4
    )
    plain = iv.estimate(values, range(4))
    assert outcome.mean == plain.mean and outcome.df == 3
    assert outcome.variance == pytest.approx(plain.variance)
    assert (outcome.ci_low, outcome.ci_high) == pytest.approx((plain.ci_low, plain.ci_high))
    assert (outcome.method, outcome.n_clusters) == ("jackknife-t", 4)


def test_the_jackknife_stays_on_a_scale() -> None:
    values = [1.0, 1.0, 1.0, 0.0]
    outcome = iv.jackknife(
        lambda clusters_left: sum(values[i] for i in clusters_left) / len(clusters_left),
        4,
        scale=(0.0, 1.0),
    )
    assert outcome.ci_low is not None and outcome.ci_high is not None
    assert 0 < outcome.ci_low < 0.75 < outcome.ci_high < 1
    flat = iv.jackknife(lambda clusters_left: 1.0, 4, scale=(0.0, 1.0))
    assert (flat.ci_low, flat.ci_high) == pytest.approx(iv.wilson(1.0, 4, t_quantile(3)))
    assert iv.jackknife(lambda clusters_left: 0.1 * 3, 4).method == "no-spread"


def test_the_jackknife_says_what_it_lacks() -> None:
    assert iv.jackknife(lambda clusters_left: 1.0, 0).method == "nothing-scored"
    assert iv.jackknife(lambda clusters_left: math.nan, 3).mean is None
    single = iv.jackknife(lambda clusters_left: 0.5, 1)
    assert (single.mean, single.ci_low, single.method) == (0.5, None, "one-cluster")
    fragile = iv.jackknife(lambda clusters_left: 0.5 if 2 in clusters_left else None, 3)
    assert (fragile.mean, fragile.ci_low, fragile.method) == (0.5, None, "undefined")


def test_the_bootstrap_draws_whole_clusters_from_a_fixed_stream() -> None:
    values = list(np.random.default_rng(1).random(20))

    def mean(chosen: Sequence[int]) -> float:
        return float(np.mean([values[i] for i in chosen]))

    first = iv.cluster_bootstrap(mean, 20)
    assert first == iv.cluster_bootstrap(mean, 20) and first != iv.cluster_bootstrap(
        mean, 20, seed=1
    )
    assert first is not None and first[0] < mean(range(20)) < first[1]
    narrow = iv.cluster_bootstrap(mean, 20, confidence=0.5)
    assert narrow is not None and first[0] < narrow[0] < narrow[1] < first[1]


def test_the_bootstrap_gives_none_where_it_would_be_a_guess() -> None:
    assert iv.cluster_bootstrap(lambda chosen: float(chosen[0]), 4) is None
    assert iv.cluster_bootstrap(lambda chosen: float(chosen[0]), 5) is not None
    assert iv.cluster_bootstrap(lambda chosen: 0.3, 9) is None
    undefined = iv.cluster_bootstrap(lambda c: float(sum(c)) if c[0] > 1 else None, 9)
    assert undefined is None  # two draws of nine have no value


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=12))
def test_a_jackknife_interval_never_has_zero_width(values: list[float]) -> None:
    outcome = iv.jackknife(
        lambda clusters_left: math.fsum(values[i] for i in clusters_left) / len(clusters_left),
        len(values),
    )
    assume(outcome.method == "jackknife-t")
    assert outcome.ci_low is not None and outcome.ci_high is not None
    assert outcome.ci_low < outcome.ci_high


@pytest.mark.parametrize(
    ("numbers", "shown", "text"),
    [
        ((1.0, 0.012, 1.0), iv.number, "1.000 [0.012, 1.000]"),
        ((-0.3, -0.41, -0.1), iv.number, "\u22120.300 [\u22120.410, \u22120.100]"),
        ((0.21, 0.15, 0.27), iv.signed, "+0.210 [+0.150, +0.270]"),
        ((0.0, -0.1, 0.1), iv.signed, "0.000 [\u22120.100, +0.100]"),
        ((0.83, 0.71, 0.96), iv.percent, "83% [71%, 96%]"),
        ((0.7, None, None), iv.number, "0.700"),
        ((0.7, 0.6, None), iv.number, "0.700"),
        ((None, None, None), iv.signed, "\u2013"),
        ((-1e-9, -0.5, 1e-9), iv.number, "0.000 [\u22120.500, 0.000]"),
        ((float("nan"), 0.1, 0.2), iv.percent, "\u2013 [10%, 20%]"),
    ],
)
def test_a_mean_and_its_interval_have_one_form(
    numbers: tuple[float | None, ...], shown: Any, text: str
) -> None:
    assert iv.estimate_text(*numbers, shown) == text


@pytest.mark.parametrize(
    ("df", "confidence", "expected"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.30265), (10, 0.95, 2.22814), (30, 0.99, 2.74999),
     (1000, 0.95, 1.96234), (10**6, 0.95, 1.95997), (10**9, 0.95, 1.95997)],
)  # fmt: skip
def test_t_quantile_matches_the_tables(df: int, confidence: float, expected: float) -> None:
    assert student.t_quantile(df, confidence) == pytest.approx(expected, rel=3e-6)


@given(st.integers(1, 5000), st.floats(0.05, 0.999))
def test_quantiles_at_whole_degrees_of_freedom_are_scipys(df: int, confidence: float) -> None:
    expected = stats.t.ppf((1 + confidence) / 2, df)
    assert student.t_quantile(df, confidence) == pytest.approx(expected, rel=1e-8)


@given(st.floats(1, 3000), st.floats(1e-6, 1e5))
def test_tails_are_scipys(df: float, t: float) -> None:
    assert student.t_tail(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-8, abs=1e-280)


def test_between_whole_degrees_of_freedom_the_quantile_is_a_line_above_the_curve() -> None:
    middle = student.t_quantile(2.25)
    ends = student.t_quantile(2), student.t_quantile(3)
    assert middle == pytest.approx(0.75 * ends[0] + 0.25 * ends[1])
    assert middle > stats.t.ppf(0.975, 2.25)


@given(st.floats(1, 200), st.floats(0.5, 0.999))
def test_the_p_value_turns_where_the_interval_does(df: float, confidence: float) -> None:
    line = student.t_quantile(df, confidence)
    level = student.significance(confidence)
    assert student.t_p_value(line, df, confidence) == pytest.approx(level, rel=1e-9)
    assert student.t_p_value(-1.001 * line, df, confidence) < level
    assert student.t_p_value(0.999 * line, df, confidence) > level


def test_extremes_are_numbers() -> None:
    assert student.t_tail(0, 3) == 1.0 and student.t_tail(1e250, 3) == 0.0
    assert student.t_p_value(0, 3.5) == 1.0
    assert student.significance(0.95) == 0.05


@pytest.mark.parametrize("df", [0, 0.99, float("nan")])
def test_less_than_one_degree_of_freedom_is_refused(df: float) -> None:
    with pytest.raises(ValueError, match="degree of freedom"):
        student.t_quantile(df)
    with pytest.raises(ValueError, match="degree of freedom"):
        student.t_tail(1.0, df)


@pytest.mark.parametrize("confidence", [0, 1, -0.5])
def test_a_confidence_lies_between_nothing_and_certainty(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        student.t_quantile(3, confidence)
