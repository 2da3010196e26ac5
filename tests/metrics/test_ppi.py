"""Prediction-powered means: the formula, recomputed naively, and what must hold for every judge.

Agreement statistics against published worked examples, and against each other's limits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import rankdata, spearmanr

from soulkit.metrics import agreement
from soulkit.metrics.ppi import PoweredMean, powered_mean
from soulkit.metrics.student import t_quantile

Row = tuple[float, float | None, str]
"""Judge's grade, people's label, cluster."""


def draw(
    clusters: int, labelled: int, seed: int, bias: float = 2.0, noise: float = 0.7
) -> list[Row]:
    rng = random.Random(seed)
    rows: list[Row] = []
    for c in range(clusters):
        level = rng.gauss(5, 1)
        for _ in range(rng.randint(1, 5)):
            truth = level + rng.gauss(0, 1)
            grade = truth + bias + rng.gauss(0, noise)
            rows.append((grade, truth if c < labelled else None, f"c{c}"))
    return rows


def powered(rows: Sequence[Row], scale: tuple[float, float] | None = None) -> PoweredMean:
    grades, labels, clusters = zip(*rows, strict=True)
    return powered_mean(grades, labels, clusters, scale)


def covariance(x: Sequence[float], y: Sequence[float], clusters: Sequence[str]) -> float:
    """CR2 of two means, with whole matrices: residuals times the inverse root of I − H."""
    total, n = 0.0, len(x)
    mean_x, mean_y = sum(x) / n, sum(y) / n
    for c in set(clusters):
        inside = [i for i in range(n) if clusters[i] == c]
        matrix = np.eye(len(inside)) - np.full((len(inside), len(inside)), 1 / n)
        values, vectors = np.linalg.eigh(matrix)
        root = vectors @ np.diag(values**-0.5) @ vectors.T
        ones = np.ones(len(inside))
        total += (ones @ root @ [x[i] - mean_x for i in inside]) * (
            ones @ root @ [y[i] - mean_y for i in inside]
        )
    return float(total / n**2)


def bell_mccaffrey(clusters: Sequence[str]) -> float:
    sizes = np.array([list(clusters).count(c) for c in sorted(set(clusters))], dtype=float)
    n = sizes.sum()
    a = (1 - sizes / n) ** -0.5
    matrix = np.outer(a, a) * (np.diag(sizes) - np.outer(sizes, sizes) / n)
    return float(np.trace(matrix) ** 2 / np.trace(matrix @ matrix))


@pytest.mark.parametrize("seed", range(5))
def test_the_formula_step_by_step(seed: int) -> None:
    rows = draw(40, 12, seed)
    y = [label for _, label, _ in rows if label is not None]
    f = [grade for grade, label, _ in rows if label is not None]
    of = [c for _, label, c in rows if label is not None]
    u = [grade for grade, label, _ in rows if label is None]
    of_u = [c for _, label, c in rows if label is None]
    power = covariance(y, f, of) / (covariance(f, f, of) + covariance(u, u, of_u))
    value = sum(y) / len(y) + power * (sum(u) / len(u) - sum(f) / len(f))
    rest = [a - power * b for a, b in zip(y, f, strict=True)]
    near, mean_rest, mean_f = 0.0, sum(rest) / len(rest), sum(f) / len(f)
    inside = {c: [i for i, name in enumerate(of) if name == c] for c in of}
    moved = {c: sum(f[i] - mean_f for i in places) for c, places in inside.items()}
    for c, places in inside.items():
        pull = len(places) / len(of) + moved[c] ** 2 / sum(x**2 for x in moved.values())
        near += (sum(rest[i] - mean_rest for i in places) / (1 - pull)) ** 2 / len(of) ** 2
    beyond = power**2 * covariance(u, u, of_u)
    df = (near + beyond) ** 2 / (
        near**2 / (bell_mccaffrey(of) - 1) + beyond**2 / bell_mccaffrey(of_u)
    )
    mean = powered(rows)
    assert mean.power == pytest.approx(power)
    assert mean.corrected.value == pytest.approx(value)
    half = t_quantile(df) * math.sqrt(near + beyond)
    assert mean.corrected.low == pytest.approx(value - half)
    assert mean.corrected.high == pytest.approx(value + half)
    assert mean.labelled.value == pytest.approx(sum(y) / len(y))
    assert mean.bias.value == pytest.approx(sum(f) / len(f) - sum(y) / len(y))
    grades = [grade for grade, _, _ in rows]
    assert mean.judged.value == pytest.approx(sum(grades) / len(grades))
    assert (mean.clusters, mean.labelled_clusters) == (40, 12)
    assert mean.corrected.n == len(y)


@given(st.integers(0, 1000), st.floats(-5, 5), st.floats(0.2, 3))
def test_no_linear_error_of_a_judge_moves_the_mean(seed: int, shift: float, slope: float) -> None:
    rows = draw(30, 10, seed)
    bent = [(slope * grade + shift, label, c) for grade, label, c in rows]
    one, two = powered(rows), powered(bent)
    assert two.corrected.value == pytest.approx(one.corrected.value)
    assert two.corrected.low == pytest.approx(one.corrected.low)
    assert two.power == pytest.approx(one.power / slope)


@given(st.integers(0, 1000), st.integers(2, 15))
def test_order_and_names_of_clusters_do_not_matter(seed: int, labelled: int) -> None:
    rows = draw(20, labelled, seed)
    shuffled = random.Random(seed).sample(rows, len(rows))
    renamed = [(grade, label, c[::-1] + "x") for grade, label, c in shuffled]
    one, two = powered(rows).as_dict(), powered(renamed).as_dict()
    for name in ("corrected", "judged", "labelled", "bias"):
        for end in ("value", "ci_low", "ci_high"):
            assert one[name][end] == pytest.approx(two[name][end])


@given(st.integers(0, 300), st.integers(1, 16), st.floats(-10, 10))
def test_nothing_is_reported_outside_the_scale(seed: int, labelled: int, bias: float) -> None:
    scale = (3.0, 6.0)
    rows: list[Row] = [
        (min(max(f, 3), 6), None if y is None else min(max(y, 3), 6), c)
        for f, y, c in draw(20, labelled, seed, bias)
    ]
    mean = powered(rows, scale)
    for cell in (mean.corrected, mean.judged, mean.labelled):
        assert cell.value is not None and 3 <= cell.value <= 6
        if cell.low is not None and cell.high is not None:
            assert 3 <= cell.low < cell.high <= 6
        else:
            assert cell.why


def test_a_judge_that_knows_nothing_adds_nothing() -> None:
    rows = [(7.0, label, c) for _, label, c in draw(30, 10, 1)]
    mean = powered(rows)
    assert mean.power == 0 and mean.corrected == mean.labelled
    assert mean.judged.low is None and mean.judged.why == "no-spread"


def test_a_good_judge_narrows_the_interval() -> None:
    mean = powered(draw(400, 30, 2, bias=3.0, noise=0.2))
    widths = [cell.high - cell.low for cell in (mean.corrected, mean.labelled)]  # type: ignore[operator]
    assert widths[0] < 0.4 * widths[1] and mean.power == pytest.approx(1, abs=0.15)
    assert mean.bias.value == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("labelled", [1, 9, 10])
def test_few_labelled_clusters_stand_alone(labelled: int) -> None:
    mean = powered(draw(30, labelled, 3))
    assert (mean.power != 0) == (labelled >= 10)
    assert (mean.corrected.low is None) == (labelled == 1)


def test_where_everything_is_labelled_there_is_nothing_to_predict() -> None:
    for rest in (0, 1):
        mean = powered(draw(20 + rest, 20, 4))
        assert mean.power == 0 and mean.corrected == mean.labelled


def test_no_interval_has_no_width() -> None:
    exact: list[Row] = [(float(i % 4), float(i % 4), f"l{i}") for i in range(12)]
    mean = powered([*exact, *((2.0, None, f"u{i}") for i in range(12))])
    assert mean.power == pytest.approx(1) and mean.corrected.value == pytest.approx(2)
    assert (mean.corrected.low, mean.corrected.why) == (None, "no-spread")
    low: list[Row] = [(0.4 + 0.1 * (i % 2), 0.9 + 0.1 * (i % 2), f"l{i}") for i in range(12)]
    high: list[Row] = [(1.0 - 0.01 * (i % 2), None, f"u{i}") for i in range(40)]
    assert powered([*low, *high]).corrected.low > 1  # type: ignore[operator]
    beyond = powered([*low, *high], (0.0, 1.0)).corrected
    assert (beyond.value, beyond.low, beyond.high, beyond.why) == (1, None, None, "no-spread")


def test_an_episode_nobody_labelled_counts_for_the_judge_alone() -> None:
    rows = draw(20, 10, 5)
    place = next(i for i, row in enumerate(rows) if row[2] == "c0")
    holed = [(f, None if i == place else y, c) for i, (f, y, c) in enumerate(rows)]
    if sum(row[2] == "c0" for row in rows) == 1:
        holed.append((9.0, 4.0, "c0"))
    mean, without = powered(holed), powered([row for i, row in enumerate(holed) if i != place])
    assert mean.corrected.value == pytest.approx(without.corrected.value)
    assert mean.judged.n == without.judged.n + 1


def test_ragged_input_is_refused() -> None:
    with pytest.raises(ValueError, match="one grade"):
        powered_mean([1.0], [None, 2.0], ["a"])


def test_without_labels_there_is_only_the_judge() -> None:
    mean = powered([(float(i % 3), None, str(i)) for i in range(9)])
    assert mean.corrected.value is None and mean.bias.value is None and mean.judged.value == 1


def test_the_truth_is_covered_whatever_the_judge_does() -> None:
    """The whole table is that of benchmarks/ppi_coverage.py; this is its smoke."""
    hits = 0
    for seed in range(300):
        mean = powered(draw(120, 30, seed, bias=2.5))
        assert mean.corrected.low is not None and mean.corrected.high is not None
        hits += mean.corrected.low <= 5 <= mean.corrected.high
    assert 0.91 <= hits / 300 <= 0.99


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
