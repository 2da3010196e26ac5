"""Differences, gaps and many tests at once: by hand, by enumeration, and never at odds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.metrics import comparisons as co
from soulkit.metrics.intervals import Estimate, estimate, independent_rows
from soulkit.metrics.student import t_quantile


def paired(
    d: list[float], clusters: list[int] | None = None, **more: object
) -> co.PairedDifference:
    a: dict[Hashable, float | None] = dict.fromkeys(range(len(d)), 0.0)
    names = dict(enumerate(clusters if clusters is not None else range(len(d))))
    return co.paired_difference(a, dict(enumerate(d)), names, **more)  # type: ignore[arg-type]


def test_paired_difference_uses_shared_scored_keys_only() -> None:
    a = {1: 0.0, 2: 0.5, 3: None, 4: 1.0, 5: 0.2}
    b = {1: 1.0, 2: 1.0, 3: 1.0, 4: None}
    outcome = co.paired_difference(a, b, {k: k for k in range(1, 6)})
    assert (outcome.n_shared, outcome.n_only_a, outcome.n_only_b) == (2, 2, 1)
    assert outcome.difference == pytest.approx(0.75)
    assert (outcome.mean_a, outcome.mean_b) == (0.25, 1.0)
    # d = 1, 0.5: V = 1/16, t = 0.75 / 0.25 = 3 at one degree of freedom.
    assert outcome.p == pytest.approx(1 - 2 / math.pi * math.atan(3))
    assert outcome.method == "cr2-t"


def test_paired_difference_without_enough_clusters_gives_no_p() -> None:
    outcome = co.paired_difference({1: 0.0, 2: 0.0}, {1: 1.0, 2: 1.0}, {1: "x", 2: "x"})
    assert (outcome.difference, outcome.p, outcome.ci_low) == (1.0, None, None)
    empty = co.paired_difference({1: 0.0}, {2: 1.0}, {})
    assert (empty.difference, empty.p, empty.n_shared) == (None, None, 0)
    assert (outcome.method, empty.method) == ("one-cluster", "nothing-scored")


def test_equal_differences_have_no_interval_and_a_p_from_sign_flips() -> None:
    outcome = paired([0.1] * 10)
    assert (outcome.ci_low, outcome.ci_high, outcome.method) == (None, None, "no-spread")
    assert outcome.p == 2 / 2**10 and outcome.n_clusters == 10
    assert paired([0.0] * 10).p == 1.0


@given(
    st.lists(st.tuples(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), st.integers(0, 8)),
             min_size=2, max_size=30),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=300)
def test_p_and_interval_never_contradict_each_other(
    rows: list[tuple[float, int]], on_scale: bool
) -> None:
    scale = (0.0, 1.0) if on_scale else None
    outcome = paired([d for d, _ in rows], [c for _, c in rows], scale=scale)
    if outcome.ci_low is None or outcome.ci_high is None:
        assert outcome.method in ("no-spread", "one-cluster")
        return
    assert outcome.p is not None and outcome.ci_low < outcome.ci_high
    assert (outcome.p < 0.05) == (outcome.ci_low > 0 or outcome.ci_high < 0)
    if on_scale:
        assert -1 <= outcome.ci_low <= outcome.ci_high <= 1


def test_p_turns_at_the_end_of_the_interval() -> None:
    d = [0.3, 0.1, 0.5, 0.2, 0.4]
    whole = estimate(d, range(5))
    assert whole.ci_low is not None
    shifts = (whole.ci_low - 1e-9, whole.ci_low + 1e-9)
    ps = [paired([x - shift for x in d]).p for shift in shifts]
    assert ps[0] is not None and ps[1] is not None and ps[0] < 0.05 <= ps[1]


def test_the_other_direction_is_the_mirror() -> None:
    d, clusters = [0.3, -0.1, 0.5, 0.2, 0.0], [0, 0, 1, 2, 3]
    one, other = paired(d, clusters), paired([-x for x in d], clusters)
    assert one.p == other.p and one.ci_low == pytest.approx(-(other.ci_high or 0.0))


def test_sign_flip_p_equals_enumeration() -> None:
    d = [0.3, -0.1, 0.5, 0.2, 0.0]
    patterns = itertools.product([1, -1], repeat=len(d))
    hits = [abs(sum(f * x for f, x in zip(p, d, strict=True))) >= 0.9 - 1e-9 for p in patterns]
    assert co.sign_flip_p(d, range(5)) == sum(hits) / len(hits)


def test_sign_flip_p_flips_clusters_whole() -> None:
    assert co.sign_flip_p([1.0] * 40, [0] * 20 + [1] * 20) == 0.5


def test_sign_flip_p_by_chance_is_near_the_normal_approximation() -> None:
    rng = np.random.default_rng(5)
    d = rng.normal(0.2, 1, 200)
    z = d.sum() / math.sqrt((d**2).sum())
    expected = math.erfc(abs(z) / math.sqrt(2))
    assert co.sign_flip_p(list(d), range(200)) == pytest.approx(expected, abs=0.01)
    assert co.sign_flip_p([1.0] * 50, range(50)) == 1 / 10_001


def test_names_of_clusters_do_not_change_a_drawn_p() -> None:
    d = list(np.random.default_rng(2).normal(0.3, 1, 30))
    assert co.sign_flip_p(d, range(30)) == co.sign_flip_p(d, [f"c{99 - i}" for i in range(30)])


def test_holm_by_hand() -> None:
    assert co.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert co.holm([0.6, None, 0.7]) == [1.0, None, 1.0]
    assert co.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=50)
def test_holm_never_makes_a_p_smaller(pvalues: list[float]) -> None:
    for raw, adjusted in zip(pvalues, co.holm(pvalues), strict=True):
        assert adjusted is not None
        assert raw <= adjusted <= 1


# -- answers that are right or wrong -------------------------------------------------------------


def answers(
    repaired: int, broken: int, alike: int, clusters: Sequence[int] | None = None, **more: object
) -> co.PairedDifference:
    """Of rows that B repairs, breaks, and leaves as they were."""
    pairs = [(0.0, 1.0)] * repaired + [(1.0, 0.0)] * broken + [(1.0, 1.0)] * alike
    a, b = ({i: pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
    names = dict(enumerate(clusters or range(len(pairs))))
    return co.paired_difference(a, b, names, **more)  # type: ignore[arg-type]


def holds(outcome: co.PairedDifference, truth: float) -> bool:
    assert outcome.ci_low is not None and outcome.ci_high is not None and outcome.p is not None
    assert (outcome.p < 0.05) == (outcome.ci_low > 0 or outcome.ci_high < 0)
    assert -1 <= outcome.ci_low < outcome.ci_high <= 1
    return outcome.ci_low <= truth <= outcome.ci_high


@pytest.mark.parametrize("rows", [20, 50, 100])
def test_a_rare_repair_is_covered(rows: int) -> None:
    """The exact coverage, over every number of repaired rows that there can be."""
    outcomes = [answers(k, 0, rows - k) for k in range(rows // 2)]
    for chance in (0.01, 0.02, 0.03, 0.05, 0.1):
        covered = math.fsum(
            math.comb(rows, k) * chance**k * (1 - chance) ** (rows - k)
            for k, outcome in enumerate(outcomes)
            if holds(outcome, chance)
        )
        assert covered >= 0.93, chance


@pytest.mark.parametrize(("rows", "changed"), [(10, 0.1), (10, 0.8), (30, 0.05), (30, 0.3)])
def test_equal_models_seldom_differ(rows: int, changed: float) -> None:
    held = math.fsum(
        math.comb(rows, k) * changed**k * (1 - changed) ** (rows - k)
        * math.fsum(math.comb(k, up) / 2**k for up in range(k + 1)
                    if holds(answers(up, k - up, rows - k), 0.0))
        for k in range(rows + 1)
    )  # fmt: skip
    assert held >= 0.93


def test_right_and_wrong_answers_by_hand() -> None:
    outcome = answers(3, 0, 97)
    # V = 0.03 · 0.97 / 99. Three of the clusters changed, with a design effect of 100/99 beside 1.
    worth = 100 * 4 / (1 + 3 * 100 / 99)
    assert outcome.unseen == pytest.approx(2 / worth**2)
    variance = 0.03 * 0.97 / 99 + 2 / worth**2
    half = t_quantile(99) * math.sqrt(variance)
    assert outcome.variance == pytest.approx(variance) and outcome.method == "agresti-min-t"
    assert (outcome.ci_low, outcome.ci_high) == pytest.approx((0.03 - half, 0.03 + half))


@pytest.mark.parametrize(
    ("change", "clusters"),
    [((0, 0, 8), None), ((8, 0, 0), None), ((0, 8, 0), None), ((0, 0, 2), None),
     ((3, 0, 5), [0, 0, 0, 1, 1, 1, 1, 1])],
)  # fmt: skip
def test_right_and_wrong_answers_always_have_an_interval(
    change: tuple[int, int, int], clusters: list[int] | None
) -> None:
    outcome = answers(*change, clusters)
    assert outcome.difference is not None and holds(outcome, outcome.difference)
    points = answers(*change, clusters, scale=(0.0, 1.0))
    assert points == outcome
    assert answers(change[1], change[0], change[2], clusters).p == outcome.p


def test_the_scale_of_right_and_wrong_is_only_another_unit() -> None:
    one = answers(2, 1, 17)
    a = {i: -5.0 if i < 2 else 10.0 for i in range(20)}
    b = {i: -5.0 if i == 2 else 10.0 for i in range(20)}
    other = co.paired_difference(a, b, {i: i for i in range(20)}, scale=(-5.0, 10.0))
    assert other.p == pytest.approx(one.p) and other.ci_low == pytest.approx(15 * (one.ci_low or 0))


@pytest.mark.parametrize(
    ("last", "scale"), [((0.5, 0.5), None), ((0.0, 1 / 3), (0.0, 1.0)), ((1.0, 1.0), (0.0, 10.0))]
)
def test_grades_show_their_spread_themselves(
    last: tuple[float, float], scale: tuple[float, float] | None
) -> None:
    """Also whole points of a wider scale, and means of several rollouts."""
    pairs = [(0.0, 1.0)] * 3 + [(1.0, 1.0)] * 6 + [last]
    a, b = ({i: pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
    outcome = co.paired_difference(a, b, {i: i for i in range(10)}, scale=scale)
    plain = estimate([b[i] - a[i] for i in range(10)], range(10))
    assert (outcome.method, outcome.unseen) == ("cr2-t", 0.0)
    assert outcome.variance == pytest.approx(plain.variance)


def test_rows_of_one_cluster_are_worth_as_many_as_they_show() -> None:
    clusters = [i // 5 for i in range(100)]
    nothing = independent_rows([0.0] * 100, clusters)
    whole = independent_rows([1.0] * 50 + [0.0] * 50, clusters)
    apart = independent_rows([float(i % 5 == 0) for i in range(100)], clusters)
    assert nothing == 20 and whole == pytest.approx(20, rel=0.1)
    # One change in every cluster: twenty clusters say that rows are independent, one that not.
    assert apart == pytest.approx(100 * 21 / (5 + 20))
    assert 20 < independent_rows([1.0] + [0.0] * 99, clusters) < 100 / 2


def test_a_suite_adds_the_changes_that_one_task_may_hide() -> None:
    parts = [answers(3, 1, 46), answers(1, 0, 19), answers(0, 0, 30)]
    suite = co.suite_difference(parts)
    seen = math.fsum((p.variance or 0.0) - p.unseen for p in parts)
    assert suite.unseen == pytest.approx(max(p.unseen for p in parts) / 9)
    assert suite.variance == pytest.approx(seen / 9 + suite.unseen)
    alike = co.suite_difference([answers(0, 0, 30), answers(0, 0, 60)])
    assert (alike.difference, alike.p) == (0.0, 1.0) and alike.ci_low is not None


# -- suites and batches --------------------------------------------------------------------------


def test_a_suites_difference_adds_variances_and_counts_signs() -> None:
    parts = [paired([0.3, 0.1, 0.5]), paired([-0.2, 0.1, -0.3, 0.1]), paired([0.0, 0.1, -0.1])]
    suite = co.suite_difference(parts)
    variances, dfs = [p.variance or 0 for p in parts], [p.df or 0 for p in parts]
    assert suite.difference == pytest.approx((0.3 - 0.075 + 0.0) / 3)
    assert suite.variance == pytest.approx(sum(variances) / 9)
    df = sum(variances) ** 2 / sum(v * v / d for v, d in zip(variances, dfs, strict=True))
    assert suite.df == pytest.approx(df)
    half = t_quantile(df) * math.sqrt(sum(variances) / 9)
    assert suite.ci_low == pytest.approx(0.075 - half)
    assert (*co.signs_of(parts), suite.n_clusters) == (1, 1, 1, 10)
    assert suite.p is not None and suite.p > 0.05 and suite.method == "strata-t"


def test_a_suites_difference_is_sure_where_its_p_says_so() -> None:
    suite = co.suite_difference([paired([0.3, 0.31, 0.32]), paired([0.2, 0.22, 0.21, 0.2])])
    assert suite.p is not None and suite.p < 0.05 and (suite.ci_low or -1) > 0
    cut = co.suite_difference([paired([0.9, -0.1]), paired([-0.4, 0.8])], scale=(0.0, 1.0))
    assert (cut.ci_low, cut.ci_high) == (-1.0, 1.0)


def test_a_suite_with_a_hole_has_no_difference() -> None:
    whole, flat = paired([0.3, 0.1]), paired([0.1, 0.1])
    empty, alone = paired([]), paired([0.2, 0.4], [0, 0])
    assert co.suite_difference([whole, empty]).difference is None
    assert co.suite_difference([]).method == "nothing-scored"
    lacking = co.suite_difference([whole, alone])
    assert (lacking.difference, lacking.ci_low, lacking.p) == (pytest.approx(0.25), None, None)
    assert lacking.method == "undefined" and co.suite_difference([flat]).method == "no-spread"
    mixed = co.suite_difference([whole, flat])
    assert mixed.ci_low is not None and mixed.df == whole.df


def test_the_jackknife_of_a_difference_of_means_is_the_paired_one() -> None:
    a, b = [0.1, 0.4, 0.2, 0.9], [0.3, 0.5, 0.6, 0.7]

    def mean(values: list[float]) -> co.ClusterStatistic:
        return lambda clusters_left: sum(values[i] for i in clusters_left) / len(clusters_left)

    outcome = co.jackknife_difference(mean(a), mean(b), 4)
    plain = paired([y - x for x, y in zip(a, b, strict=True)])
    assert outcome.difference == pytest.approx(plain.difference)
    assert outcome.p == pytest.approx(plain.p) and outcome.ci_low == pytest.approx(plain.ci_low)
    assert (outcome.mean_a, outcome.mean_b) == pytest.approx((0.4, 0.525))
    assert (outcome.n_shared, outcome.method) == (4, "jackknife-t")


def test_a_batch_metric_that_one_side_lacks_has_no_difference() -> None:
    outcome = co.jackknife_difference(lambda clusters_left: None, lambda clusters_left: 0.5, 3)
    assert (outcome.difference, outcome.p, outcome.mean_b) == (None, None, 0.5)
    assert (
        co.jackknife_difference(lambda clusters_left: 1.0, lambda clusters_left: 0.5, 0).mean_a
        is None
    )


# -- gaps and curves -----------------------------------------------------------------------------


def test_auc_is_a_mean_height() -> None:
    assert co.auc([0, 1, 3], [0.0, 1.0, 1.0]) == pytest.approx(2.5 / 3)
    assert co.auc([3, 0, 1], [1.0, 0.0, 1.0]) == pytest.approx(2.5 / 3)
    assert co.auc([0, 1, 2], [0.5, None, 0.5]) == 0.5
    assert co.auc([4], [1.0]) is None


def test_leave_one_out_gap_by_hand() -> None:
    groups = [
        co.RewardGroup([0.0, 1.0, 0.5], [1.0, None, 0.5]),  # 1 - 0.75, 0.5 - 0.5
        co.RewardGroup([0.0, None], [1.0, 1.0]),  # no other draft; 1 - 0
    ]
    gap = co.leave_one_out_gap(groups)
    assert gap.mean == pytest.approx((0.25 + 0.0 + 1.0) / 3)
    assert (gap.n_scored, gap.n, gap.n_clusters) == (3, 4, 2)
    pair = co.pair_gap(groups)
    assert pair.mean == pytest.approx((1.0 + 0.0 + 1.0) / 3)


def test_groups_of_one_story_are_one_cluster_of_a_gap() -> None:
    def gap(names: list[str | None]) -> Estimate:
        groups = [co.RewardGroup([0.0, 0.1 * i], [0.5, None], n) for i, n in enumerate(names)]
        return co.leave_one_out_gap(groups)

    assert gap(["a", "a", "b", "b"]).n_clusters == 2
    assert gap([None, None, None, None]).n_clusters == 4
    alone = gap(["a", "a", "a", "a"])
    assert (alone.n_clusters, alone.ci_low) == (1, None) and alone.mean is not None


def test_useless_feedback_gives_a_zero_leave_one_out_gap_but_not_a_zero_pair_gap() -> None:
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(400):
        drafts = list(rng.random(8))
        # Feedback goes to poor drafts only, and does nothing: the second try is another draw.
        refined = [float(rng.random()) if r < 0.5 else None for r in drafts]
        groups.append(co.RewardGroup(drafts, refined))
    loo, pair = co.leave_one_out_gap(groups), co.pair_gap(groups)
    assert loo.ci_low is not None and loo.ci_high is not None
    assert loo.ci_low < 0 < loo.ci_high
    assert pair.mean is not None and pair.mean > 0.2


def test_reward_groups_must_be_aligned() -> None:
    with pytest.raises(ValueError):
        co.RewardGroup([0.0], [0.0, 1.0])


def test_grades_that_were_added_up_in_another_order_are_equal() -> None:
    a = {i: (0.1 + 0.2 + 0.3) / 3 if i % 4 else 0.5 for i in range(20)}
    b = {i: (0.3 + 0.2 + 0.1) / 3 if i % 4 else 0.5 for i in range(20)}
    assert a != b
    paired = co.paired_difference(a, b, {i: i for i in range(20)})
    assert (paired.difference, paired.p, paired.method) == (0.0, 1.0, "no-spread")
    assert co.signs_of([paired]) == (0, 0, 1)


def test_values_off_the_scale_keep_the_interval_that_they_have() -> None:
    a, b = ({i: side + 0.1 * side * i for i in range(9)} for side in (0.0, 1.0))
    paired = co.paired_difference(a, {i: 3 * v for i, v in b.items()}, {i: i for i in range(9)},
                                  scale=(0.0, 1.0))  # fmt: skip
    assert paired.ci_low is not None and paired.ci_high is not None
    assert paired.difference is not None
    assert 1 < paired.ci_low < paired.difference < paired.ci_high
