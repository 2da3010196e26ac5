"""Prediction-powered means: the formula, recomputed naively, and what must hold for every judge."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
