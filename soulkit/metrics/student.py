"""Student's t: quantiles for intervals, and p-values that agree with them.

Degrees of freedom are real numbers, as for clustered means (Bell & McCaffrey 2002). Quantiles are
exact at whole numbers and interpolated linearly between them, which is slightly conservative for
very few clusters. The module uses plain arithmetic, so that the command line does not need scipy.
"""

from __future__ import annotations

import math
from functools import lru_cache

CONFIDENCE = 0.95
_MOST = 1_000_000
"""Maximum degrees of freedom; beyond this, t is practically normal."""
_TERMS = 20_000
_ENOUGH = 1e-14
_ROUNDS = 200
_TINY, _VAST = 1e-300, 1e300


def t_quantile(df: float, confidence: float = CONFIDENCE) -> float:
    """t such that Student's t with `df` degrees of freedom lies in [-t, t] with `confidence`.

    Exact to 1e-10 at whole `df`, linear between them. ValueError for `df` below 1 or a confidence
    that is not strictly between 0 and 1.
    """
    level = significance(confidence)
    _check_df(df)
    below = math.floor(min(df, _MOST))
    share = min(df, _MOST) - below
    low = _exact_quantile(below, level)
    return low + share * (_exact_quantile(below + 1, level) - low) if share else low


def t_p_value(statistic: float, df: float, confidence: float = CONFIDENCE) -> float:
    """Two-sided p-value of a t statistic, consistent with `t_quantile`.

    The statistic is multiplied by exact quantile / `t_quantile` at `confidence` (1 for whole `df`),
    so p is below 1 - confidence exactly if an interval made with `t_quantile` excludes zero.
    """
    line = t_quantile(df, confidence)
    exact = _exact_quantile(min(df, _MOST), significance(confidence))
    return t_tail(abs(statistic) * exact / line, df)


def t_tail(t: float, df: float) -> float:
    """P(|T| > t) = I_x(df / 2, 1 / 2) with x = df / (df + t²), for t >= 0 and real df >= 1.

    I is the regularised incomplete beta function; relative error about 1e-12.
    """
    _check_df(df)
    df, square = min(df, _MOST), min(t * t, _VAST)
    if square == 0:  # also if the square underflows
        return 1.0
    a, b, x, y = df / 2, 0.5, df / (df + square), square / (df + square)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(scale + a * math.log(x) + b * math.log(y))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, y) / b


def significance(confidence: float) -> float:
    """1 - confidence without rounding error (0.05, not 0.05000000000000004)."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be strictly between 0 and 1, not {confidence}")
    return round(1 - confidence, 12)


@lru_cache(maxsize=8192)
def _exact_quantile(df: float, level: float) -> float:
    """t with t_tail(t, df) = level, found by regula falsi (Illinois variant)."""
    low, high = 0.0, 2.0
    while t_tail(high, df) > level:
        low, high = high, 2 * high
    above, below, side = t_tail(low, df) - level, t_tail(high, df) - level, 0
    for _ in range(_ROUNDS):
        t = high - below * (high - low) / (below - above)
        rest = t_tail(t, df) - level
        if abs(rest) <= _ENOUGH * level or high - low <= _ENOUGH * high:
            break
        if rest > 0:
            low, above, below, side = t, rest, below / 2 if side > 0 else below, 1
        else:
            high, below, above, side = t, rest, above / 2 if side < 0 else above, -1
    return t


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 over 1 + d_1 / (1 + d_2 / (1 + …)), the continued fraction of the incomplete beta function
    (Abramowitz & Stegun 26.5.8), evaluated from the front by Lentz's method."""
    value, above, below = 1.0, 1.0, 0.0
    for step in range(1, _TERMS):
        m = step // 2
        if step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        below = 1 / _not_zero(1 + term * below)
        above = _not_zero(1 + term / above)
        value *= above * below
        if abs(above * below - 1) < _ENOUGH:
            break
    return 1 / value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def _check_df(df: float) -> None:
    if not df >= 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, not {df}")
