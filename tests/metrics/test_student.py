"""Student's t against scipy, the tables, and the intervals that it is made for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from soulkit.metrics import student


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
