"""Agreement statistics against published worked examples, and against each other's limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from soulkit.metrics import agreement

_ = None
# Krippendorff (2011), Computing Krippendorff's Alpha-Reliability, example with four observers,
# twelve units and missing data: nominal .743, interval .849.
FOUR_OBSERVERS = list(
    zip(
        (1, 2, 3, 3, 2, 1, 4, 1, 2, _, _, _),
        (1, 2, 3, 3, 2, 2, 4, 1, 2, 5, _, 3),
        (_, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, _),
        (1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, _),
        strict=True,
    )
)
# Shrout & Fleiss (1979), table 2: six targets, four judges; ICC(2,1) = .29.
SIX_TARGETS = [
    (9, 2, 5, 8), (6, 1, 3, 2), (8, 4, 6, 8), (7, 1, 2, 6), (10, 5, 6, 9), (6, 2, 4, 7),
]  # fmt: skip
# The `anxiety` data of the R package irr, raters 1 and 2 and 3 of twenty subjects; its manual gives
# kappa2(weight "squared") .297 for the first two and icc(twoway, agreement, single) .198 for all.
ANXIETY = list(
    zip(
        (3, 3, 3, 4, 5, 5, 2, 3, 5, 2, 2, 6, 1, 5, 2, 2, 1, 2, 4, 3),
        (3, 6, 4, 6, 2, 4, 2, 4, 3, 3, 2, 3, 3, 3, 2, 2, 1, 3, 3, 4),
        (2, 1, 4, 4, 3, 2, 1, 6, 1, 1, 1, 2, 3, 3, 1, 1, 3, 3, 2, 2),
        strict=True,
    )
)


def arrays(*values: list[float]) -> list[np.ndarray]:
    return [np.array(v, dtype=float) for v in values]


def test_alpha_with_missing_values_is_the_published_one():
    rated = agreement.rating_table(FOUR_OBSERVERS)
    assert agreement.alpha(rated, "nominal") == pytest.approx(0.743, abs=5e-4)
    assert agreement.alpha(rated, "interval") == pytest.approx(0.849, abs=5e-4)


def test_icc_is_the_published_one():
    assert agreement.icc(agreement.rating_table(SIX_TARGETS)) == pytest.approx(0.29, abs=5e-3)
    assert agreement.icc(agreement.rating_table(ANXIETY)) == pytest.approx(0.198, abs=5e-4)


def test_quadratic_kappa_is_the_published_one():
    first, second, _third = agreement.rating_table(ANXIETY).T
    assert agreement.kappa(first, second) == pytest.approx(0.297, abs=5e-4)


def test_quadratic_kappa_equals_the_table_form():
    a, b = arrays([1, 1, 2, 3, 3, 2, 1, 3], [1, 2, 2, 3, 1, 2, 1, 2])
    seen, product = np.zeros((3, 3)), np.zeros((3, 3))
    for x, y in zip(a, b, strict=True):
        seen[int(x) - 1, int(y) - 1] += 1 / 8
    product = np.outer(seen.sum(axis=1), seen.sum(axis=0))
    weight = np.subtract.outer(np.arange(3), np.arange(3)) ** 2
    expected = 1 - (weight * seen).sum() / (weight * product).sum()
    assert agreement.kappa(a, b) == pytest.approx(expected)


def test_spearman_and_pearson_on_a_curve():
    x, y = arrays([1, 2, 3, 4, 5], [1, 8, 27, 64, 125])
    assert agreement.spearman(x, y) == pytest.approx(1)
    assert agreement.pearson(x, y) == pytest.approx(0.9431, abs=1e-4)


@given(st.lists(st.tuples(*[st.integers(-3, 3)] * 2), min_size=3, max_size=30))
def test_ranks_and_correlations_are_those_of_the_libraries(pairs):
    a, b = np.array(pairs, dtype=float).T
    assert agreement.mean_ranks(a).tolist() == rankdata(a).tolist()
    if np.ptp(a) and np.ptp(b):
        assert agreement.spearman(a, b) == pytest.approx(spearmanr(a, b).statistic)
        assert agreement.pearson(a, b) == pytest.approx(np.corrcoef(a, b)[0, 1])


def test_partial_correlation_removes_what_both_follow():
    rng = np.random.default_rng(0)
    common = rng.normal(size=4000)
    a, b = common + rng.normal(size=4000), common + rng.normal(size=4000)
    assert agreement.spearman(a, b) == pytest.approx(0.48, abs=0.05)
    assert agreement.partial_spearman(a, b, common) == pytest.approx(0, abs=0.05)
    assert agreement.partial_spearman(a, b, np.ones(4000)) == agreement.spearman(a, b)


def test_slope_is_the_rise():
    x, y = arrays([0, 100, 200, 300], [1, 3, 5, 7])
    assert agreement.slope(x, y) == pytest.approx(0.02)
    assert agreement.slope(np.ones(4), y) is None


@pytest.mark.parametrize("rows", [[], [[1, None], [None, 2]], [[3, 3], [3, 3]]])
def test_nothing_to_agree_about_has_no_alpha(rows):
    for level in ("interval", "nominal"):
        assert agreement.alpha(agreement.rating_table(rows), level) is None


def test_a_constant_that_no_float_holds_has_no_alpha():
    assert agreement.alpha(agreement.rating_table([[0.1, 0.1]] * 7)) is None


def test_a_table_refuses_what_is_no_rating():
    with pytest.raises(ValueError):
        agreement.rating_table([[1, 2], [1]])
    with pytest.raises(ValueError):
        agreement.rating_table([[1, float("inf")]])


rating = st.one_of(st.none(), st.integers(-10, 10).map(float))
tables = st.lists(st.lists(rating, min_size=3, max_size=3), min_size=1, max_size=12)


@given(tables)
def test_alpha_stays_below_one_and_moves_with_neither_order_nor_scale(rows):
    alpha = agreement.alpha(agreement.rating_table(rows))
    turned = agreement.alpha(agreement.rating_table([row[::-1] for row in rows[::-1]]))
    moved = [[None if v is None else 3 * v + 7 for v in row] for row in rows]
    assert (alpha is None) == (turned is None)
    if alpha is not None:
        assert alpha <= 1
        assert turned == pytest.approx(alpha)
        assert agreement.alpha(agreement.rating_table(moved)) == pytest.approx(alpha)


@given(st.lists(st.integers(0, 10), min_size=3, max_size=20))
def test_raters_who_always_agree_reach_one(values):
    rows = agreement.rating_table([[v, v] for v in values])
    if len(set(values)) > 1:
        assert agreement.alpha(rows) == pytest.approx(1)
        assert agreement.icc(rows) == pytest.approx(1)
        assert agreement.kappa(*rows.T) == pytest.approx(1)
        assert agreement.exact_agreement(*rows.T) == 1
        assert agreement.mean_gap(*rows.T) == 0


def test_noise_has_an_alpha_around_zero_whose_interval_holds_it():
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 11, size=(200, 3)).astype(float)
    measured = agreement.with_interval(rows, agreement.alpha, range(200))
    assert measured.low is not None and measured.high is not None
    assert measured.low < 0 < measured.high and abs(measured.value or 0) < 0.1


def test_draws_that_all_give_the_same_are_no_interval():
    rows = agreement.rating_table([[i, i] for i in range(6)])
    measured = agreement.with_interval(rows, agreement.alpha, range(6))
    assert measured.value == pytest.approx(1) and measured.low is None and measured.high is None


def test_intervals_draw_clusters_not_rows():
    rng = np.random.default_rng(5)
    base = rng.normal(size=(20, 2))
    rows, clusters = np.repeat(base, 10, axis=0), [i // 10 for i in range(200)]
    statistic = agreement.columns(agreement.pearson)
    apart = agreement.with_interval(rows, statistic, range(200))
    together = agreement.with_interval(rows, statistic, clusters)
    assert apart.value == together.value
    assert None not in (apart.low, apart.high, together.low, together.high)
    assert together.high - together.low > 2 * (apart.high - apart.low)  # type: ignore[operator]


def test_too_few_units_have_a_value_and_no_interval():
    rows = agreement.rating_table([[1, 1], [2, 3], [4, 4]])
    measured = agreement.with_interval(rows, agreement.alpha, "abc")
    assert measured.value is not None and measured.low is None
    empty = agreement.with_interval(agreement.rating_table([]), agreement.alpha, ())
    assert empty.value is None and empty.why == "no units"
    flat = agreement.with_interval(agreement.rating_table([[1, 1]] * 9), agreement.alpha, range(9))
    assert flat.as_dict()["why"] == "the values do not vary"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.8, "reliable"),
        (0.79, "tentative"),
        (0.667, "tentative"),
        (0.5, "do not rank models by it"),
        (None, "not measurable"),
    ],
)
def test_trust_in_words(value, words):
    assert agreement.alpha_in_words(value) == words
