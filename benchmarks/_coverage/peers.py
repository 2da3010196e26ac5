"""Confidence intervals of other tools for the same simulated data.

* scipy: `scipy.stats.bootstrap` over pairs (cluster sum, cluster size), 999 resamples, percentile
  and BCa.
* inspect_ai: the standard error of its metric `stderr(cluster=…)`, by its documented formula
  (Miller 2024, *Adding error bars to evals*, appendix A, times C / (C − 1)), and ± 1.96 of it.
* lm-eval: the standard error of a mean that lm-evaluation-harness prints, s / √n, which treats all
  rows as independent, and ± 1.96 of it.

The last two are implemented here from their formulas, because the packages are whole frameworks.
"""

from __future__ import annotations

import warnings
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from _coverage.draws import Draws, Floats

RESAMPLES = 999
NUMBERS_AT_ONCE = 8_000_000
Ends = tuple[Floats, Floats]

Z = NormalDist().inv_cdf(0.975)


def ratio(sums: Floats, sizes: Floats, axis: int = -1) -> Floats:
    """The mean of all rows, from the sums and sizes of clusters."""
    return sums.sum(axis=axis) / sizes.sum(axis=axis)


def intervals(draws: Draws, resamples: int = RESAMPLES) -> dict[str, Ends]:
    """Tool → (low, high) for every simulation."""
    sums, sizes = draws.sums, draws.sizes
    return {
        **_bootstraps(sums, sizes, resamples),
        "inspect_ai clustered": _around(ratio(sums, sizes), _clustered(sums, sizes)),
        "lm-eval": _around(ratio(sums, sizes), _independent(draws)),
    }


def _bootstraps(sums: Floats, sizes: Floats, resamples: int) -> dict[str, Ends]:
    simulations, clusters = sums.shape
    step = max(1, NUMBERS_AT_ONCE // (resamples * clusters))
    parts: dict[str, list[Ends]] = {"scipy percentile": [], "scipy BCa": []}
    for start in range(0, simulations, step):
        data = (sums[start : start + step], sizes[start : start + step])
        rng = np.random.default_rng(start)
        first = _scipy(data, "percentile", n_resamples=resamples, rng=rng)
        again = _scipy(data, "BCa", n_resamples=0, bootstrap_result=first)
        for name, result in (("scipy percentile", first), ("scipy BCa", again)):
            parts[name].append((result.confidence_interval.low, result.confidence_interval.high))
    return {
        name: (np.concatenate([low for low, _ in ends]), np.concatenate([high for _, high in ends]))
        for name, ends in parts.items()
    }


def _scipy(data: tuple[Floats, Floats], method: str, **more: Any) -> Any:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # scipy warns about clusters without variance
        return bootstrap(
            data, ratio, paired=True, vectorized=True, axis=-1, method=method,
            confidence_level=0.95, **more,
        )  # fmt: skip


def _around(mean: Floats, error: Floats) -> Ends:
    return mean - Z * error, mean + Z * error


def _clustered(sums: Floats, sizes: Floats) -> Floats:
    clusters, rows = sums.shape[-1], sizes.sum(axis=-1)
    residuals = sums - sizes * ratio(sums, sizes)[:, None]
    within: Floats = (residuals**2).sum(axis=-1)
    return np.sqrt(within * clusters / (clusters - 1)) / rows


def _independent(draws: Draws) -> Floats:
    rows, mean = draws.sizes.sum(axis=-1), ratio(draws.sums, draws.sizes)
    squares = np.where(draws.mask, (draws.values - mean[:, None, None]) ** 2, 0.0)
    spread: Floats = squares.sum(axis=(1, 2))
    return np.sqrt(spread / (rows - 1) / rows)
