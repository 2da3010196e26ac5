"""Statistics against hand-computed numbers, published tables and their own definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.metrics import statistics as s


def test_wilson_matches_the_textbook_example() -> None:
    # 8 of 10: (0.8 + 0.19207) / 1.38415 ± 1.95996 sqrt(0.016 + 0.0096036) / 1.38415
    low, high = s.wilson(8, 10)
    assert low == pytest.approx(0.49016, abs=1e-5)
    assert high == pytest.approx(0.94332, abs=1e-5)


def test_wilson_touches_the_ends_exactly() -> None:
    assert s.wilson(0, 20)[0] == 0.0
    assert s.wilson(20, 20)[1] == 1.0
    assert s.wilson(0, 20)[1] == pytest.approx(0.16113, abs=1e-5)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_symmetric_and_holds_the_proportion(kn: tuple[int, int]) -> None:
    k, n = kn
    low, high = s.wilson(k, n)
    other = s.wilson(n - k, n)
    assert 0 <= low <= k / n <= high <= 1
    assert (low, high) == pytest.approx((1 - other[1], 1 - other[0]))


@pytest.mark.parametrize(("k", "n"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_refuses_what_is_no_proportion(k: int, n: int) -> None:
    with pytest.raises(ValueError):
        s.wilson(k, n)


@pytest.mark.parametrize(
    ("df", "confidence", "expected"),
    [(1, 0.95, 12.7062), (2, 0.95, 4.30265), (10, 0.95, 2.22814), (30, 0.99, 2.74999),
     (1000, 0.95, 1.96234), (10**6, 0.95, 1.95996)],
)  # fmt: skip
def test_t_quantile_matches_the_tables(df: int, confidence: float, expected: float) -> None:
    assert s.t_quantile(df, confidence) == pytest.approx(expected, rel=2e-4)


def test_mean_interval_by_hand() -> None:
    # mean 2, s = 1, n = 3: 2 ± 4.30265 / sqrt(3)
    low, high = s.mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-3)
    narrow = s.mean_interval([1.0, 2.0, 3.0], kind="normal")
    assert narrow[0] == pytest.approx(2 - 1.959964 / math.sqrt(3))


def test_bootstrap_is_deterministic_and_blind_to_row_order() -> None:
    rng = np.random.default_rng(1)
    values, clusters = list(rng.random(60)), [f"c{i % 20}" for i in range(60)]
    first = s.cluster_bootstrap(values, clusters)
    order = rng.permutation(60)
    again = s.cluster_bootstrap([values[i] for i in order], [clusters[i] for i in order])
    assert first == again
    assert s.cluster_bootstrap(values, clusters, seed=1) != first


def test_bootstrap_by_cluster_is_wider_when_clusters_agree() -> None:
    rng = np.random.default_rng(0)
    story = rng.random(30)
    values, owners = list(np.repeat(story, 10)), list(np.repeat(np.arange(30), 10))
    low, high = s.cluster_bootstrap(values, owners)
    alone = s.cluster_bootstrap(values, list(range(300)))
    assert high - low > 2.5 * (alone[1] - alone[0])


def test_bootstrap_general_statistic_agrees_with_the_fast_mean() -> None:
    values, clusters = [0.1, 0.9, 0.4, 0.5, 0.2, 0.8], [1, 1, 2, 3, 3, 3]
    slow = s.cluster_bootstrap(values, clusters, lambda x: float(x.mean()), n_resamples=500)
    assert slow == pytest.approx(s.cluster_bootstrap(values, clusters, n_resamples=500))


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, hits = np.random.default_rng(3), 0
    for _ in range(200):
        centre = rng.normal(size=40)
        values = (centre[:, None] + 0.5 * rng.normal(size=(40, 3))).ravel()
        low, high = s.cluster_bootstrap(list(values), list(np.repeat(np.arange(40), 3)), None, 400)
        hits += low <= 0 <= high
    assert 0.88 <= hits / 200 <= 0.985


def test_estimate_chooses_its_method() -> None:
    assert s.estimate([1, 0, 1, None], list("abcd"), True).method == "wilson"
    assert s.estimate([1, 0, 1, 1], list("aabb"), True).method == "cluster-bootstrap"
    assert s.estimate([0.5, 0.2], list("ab"), False).method == "cluster-bootstrap"
    same = s.estimate([1, 1, 1, 1], list("aabb"), True)
    assert same.method == "wilson-clusters"
    assert (same.ci_low, same.ci_high) == pytest.approx(s.wilson(2, 2))


def test_a_missing_value_is_not_a_zero() -> None:
    estimate = s.estimate([1, None, 1, 0], list("abcd"), True)
    assert estimate.mean == pytest.approx(2 / 3)
    assert (estimate.n_scored, estimate.n) == (3, 4)
    assert (estimate.ci_low, estimate.ci_high) == s.wilson(2, 3)


def test_an_unscored_second_rollout_still_leaves_wilson() -> None:
    assert s.estimate([1, None, 0], ["a", "a", "b"], True).method == "wilson"


def test_no_number_without_data() -> None:
    nothing = s.estimate([None, None], ["a", "b"], False)
    assert (nothing.mean, nothing.ci_low, nothing.n_scored, nothing.n) == (None, None, 0, 2)
    single = s.estimate([0.4, 0.6], ["a", "a"], False)
    assert single.mean == pytest.approx(0.5)
    assert (single.ci_low, single.ci_high, single.method) == (None, None, "one-cluster")


def test_bounds_fill_in_the_scale() -> None:
    assert s.bounds([1.0, 0.0, None, None], (0.0, 1.0)) == (0.25, 0.75)
    assert s.bounds([None], (-5.0, 10.0)) == (-5.0, 10.0)
    with pytest.raises(ValueError):
        s.bounds([], (0.0, 1.0))


def test_paired_difference_uses_shared_scored_keys_only() -> None:
    a = {1: 0.0, 2: 0.5, 3: None, 4: 1.0, 5: 0.2}
    b = {1: 1.0, 2: 1.0, 3: 1.0, 4: None}
    paired = s.paired_difference(a, b, {k: k for k in range(1, 6)})
    assert (paired.n_shared, paired.n_only_a, paired.n_only_b) == (2, 2, 1)
    assert paired.difference == pytest.approx(0.75)
    assert (paired.mean_a, paired.mean_b) == (0.25, 1.0)
    assert paired.p == 0.5  # 2 of the 4 sign patterns are as far from zero


def test_paired_difference_without_enough_clusters_gives_no_p() -> None:
    paired = s.paired_difference({1: 0.0, 2: 0.0}, {1: 1.0, 2: 1.0}, {1: "x", 2: "x"})
    assert (paired.difference, paired.p, paired.ci_low) == (1.0, None, None)
    empty = s.paired_difference({1: 0.0}, {2: 1.0}, {})
    assert (empty.difference, empty.p, empty.n_shared) == (None, None, 0)


def test_sign_flip_p_equals_enumeration() -> None:
    d = [0.3, -0.1, 0.5, 0.2, 0.0]
    patterns = itertools.product([1, -1], repeat=len(d))
    hits = [abs(sum(f * x for f, x in zip(p, d, strict=True))) >= 0.9 - 1e-9 for p in patterns]
    assert s.sign_flip_p(d, range(5)) == sum(hits) / len(hits)


def test_sign_flip_p_flips_clusters_whole() -> None:
    assert s.sign_flip_p([1.0] * 40, [0] * 20 + [1] * 20) == 0.5


def test_sign_flip_p_by_chance_is_near_the_normal_approximation() -> None:
    rng = np.random.default_rng(5)
    d = rng.normal(0.2, 1, 200)
    z = d.sum() / math.sqrt((d**2).sum())
    expected = math.erfc(abs(z) / math.sqrt(2))
    assert s.sign_flip_p(list(d), range(200)) == pytest.approx(expected, abs=0.01)
    assert s.sign_flip_p([1.0] * 50, range(50)) == 1 / 10_001


def test_holm_by_hand() -> None:
    assert s.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert s.holm([0.6, None, 0.7]) == [1.0, None, 1.0]
    assert s.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=50)
def test_holm_never_makes_a_p_smaller(pvalues: list[float]) -> None:
    for raw, adjusted in zip(pvalues, s.holm(pvalues), strict=True):
        assert adjusted is not None
        assert raw <= adjusted <= 1


def test_auc_is_a_mean_height() -> None:
    assert s.auc([0, 1, 3], [0.0, 1.0, 1.0]) == pytest.approx(2.5 / 3)
    assert s.auc([3, 0, 1], [1.0, 0.0, 1.0]) == pytest.approx(2.5 / 3)
    assert s.auc([0, 1, 2], [0.5, None, 0.5]) == 0.5
    assert s.auc([4], [1.0]) is None


def test_leave_one_out_gap_by_hand() -> None:
    groups = [
        s.RewardGroup([0.0, 1.0, 0.5], [1.0, None, 0.5]),  # 1 - 0.75, 0.5 - 0.5
        s.RewardGroup([0.0, None], [1.0, 1.0]),  # no other draft; 1 - 0
    ]
    gap = s.leave_one_out_gap(groups)
    assert gap.mean == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert (gap.n_scored, gap.n) == (3, 4)
    pair = s.pair_gap(groups)
    assert pair.mean == pytest.approx((1.0 + 0.0 + 1.0) / 3)


def test_useless_feedback_gives_a_zero_leave_one_out_gap_but_not_a_zero_pair_gap() -> None:
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(400):
        drafts = list(rng.random(8))
        # Feedback goes to poor drafts only, and does nothing: the second try is another draw.
        refined = [float(rng.random()) if r < 0.5 else None for r in drafts]
        groups.append(s.RewardGroup(drafts, refined))
    loo, pair = s.leave_one_out_gap(groups), s.pair_gap(groups)
    assert loo.ci_low is not None and loo.ci_high is not None
    assert loo.ci_low < 0 < loo.ci_high
    assert pair.mean is not None and pair.mean > 0.2


def test_reward_groups_must_be_aligned() -> None:
    with pytest.raises(ValueError):
        s.RewardGroup([0.0], [0.0, 1.0])
