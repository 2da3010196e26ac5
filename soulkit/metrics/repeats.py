"""Statistics of repeats: what several scored episodes of one row say.

pass@k and pass^k are the chances that at least one of k repeats succeeds, and that all do. From n
repeats of a row with c successes, 1 - C(n-c, k)/C(n, k) and C(c, k)/C(n, k) estimate them without
bias. For other scores they become the expected best and worst of k by their own score, which also
rewards lucky judgements. Rows with fewer than k scored repeats are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean
from statistics import variance as variance_of
from typing import Any

import numpy as np

from soulkit.metrics.intervals import Floats, Interval, estimate, jackknife

SOURCES = ("rows", "repeats", "judge samples")
"""What a score varies between, and what can be bought."""
_SHOWN = ("mean", "ci_low", "ci_high", "n_scored", "n", "n_clusters")
_PARTS = 400
"""Maximum number of jackknife parts."""


def repeat_statistics(
    rows: Sequence[Sequence[float]], clusters: Sequence[str], scale: Interval | None = None, *,
    answers: Sequence[Sequence[str]] = (), opinions: Sequence[Sequence[Sequence[float]]] = (),
) -> dict[str, Any]:  # fmt: skip
    """All statistics as plain JSON values: `statistics` by name, `variances` of a score and `sizes`
    by SOURCES.

    `rows` has the scores of each row; `answers` their answers, if these are categories (empty:
    unreadable), and `opinions` the numbers of their judge samples. In a statistic, `n` counts rows
    and `n_scored` those with enough scored repeats.
    """
    most, yes_no = max(map(len, rows)), all(x in (0.0, 1.0) for row in rows for x in row)
    yes_no &= scale in (None, (0.0, 1.0))
    best, worst = ("pass@{}", "pass^{}") if yes_no else ("best of {} by score", "worst of {}")
    columns: dict[str, list[float | None]] = {}
    for name, step in ((best, 1), (worst, -1)):
        for k in range(1 if step == 1 and yes_no else 2, most + 1):
            columns[name.format(k)] = [_last(sorted(row)[::step], k) for row in rows]
    if answers:
        columns[f"majority vote of {most}"] = [*map(_majority, answers, rows)]
    if answers or yes_no:
        columns["agreeing pairs"] = [*map(_agreeing, answers or rows)]
    made = {name: estimate(column, clusters, yes_no or name[:5] == "agree", scale=scale)
            for name, column in columns.items()}  # fmt: skip
    several = [i for i, row in enumerate(rows) if len(row) > 1]
    table = np.array([_moments(rows[i], opinions[i] if opinions else ()) for i in several])
    parts: dict[str, int] = {}
    of_rows = np.array([parts.setdefault(clusters[i], len(parts)) % _PARTS for i in several])
    variances = _components(table)
    inner = cache(lambda chosen: _components(table[np.isin(of_rows, chosen)]))
    for i, name in enumerate(SOURCES if variances[2] else SOURCES[:2]):

        def share(chosen: Sequence[int], i: int = i) -> float | None:
            components = inner((*chosen,))
            return components[i] / sum(components) if sum(components) > 0 else None

        made[f"variance between {name}"] = replace(
            jackknife(share, min(len(parts), _PARTS), scale=(0.0, 1.0)), n=len(rows),
            n_scored=len(several),
        )  # fmt: skip
    sizes = len(rows), sum(map(len, rows)) / len(rows), float(table[:, 5].mean())
    return {
        "statistics": {n: {k: getattr(x, k) for k in _SHOWN} for n, x in made.items()},
        "variances": dict(zip(SOURCES, variances, strict=True)),
        "sizes": dict(zip(SOURCES, sizes, strict=True)),
    }


def needed(made: Mapping[str, Any], part: float = 0.9) -> dict[str, int | None]:
    """How many rows R, repeats n or judge samples m make the interval of the mean `part` as wide,
    if only that number changes; None if no number does.

    The half-width for independent rows is z √V with V = (σ²_rows + (σ²_repeats + σ²_judges / m) /
    n) / R. V part² is solved for R, n and m.
    """
    (rows, repeats, judges), (r, n, m) = made["variances"].values(), made["sizes"].values()
    whole = rows + (repeats + judges / m) / n
    left = whole * part**2 - rows
    ends = (whole * r, whole * part**2), (repeats + judges / m, left), (judges, left * n - repeats)
    return {name: math.ceil(top / below - 1e-9) if top > 0 and below > 0 else None
            for name, (top, below) in zip(SOURCES, ends, strict=True)}  # fmt: skip


def _last(ordered: Sequence[float], k: int) -> float | None:
    """The expected last of k values in this order, drawn without replacement."""
    if k < len(ordered) > 1000:  # the numbers of draws are no floats
        i, share, total = len(ordered), k / len(ordered), 0.0
        while (i := i - 1) >= k - 1 and share:
            total, share = total + ordered[i] * share, share * (i - k + 1) / max(i, 1)
        return total
    total = math.fsum(value * math.comb(i, k - 1) for i, value in enumerate(ordered))
    return total / math.comb(len(ordered), k) if len(ordered) >= k else None


def _agreeing(labels: Sequence[object]) -> float | None:
    """The share of pairs with equal labels; None for fewer than two."""
    n = len(labels)
    return sum(c * (c - 1) for c in Counter(labels).values()) / (n * (n - 1)) if n > 1 else None


def _majority(answers: Sequence[str], scores: Sequence[float]) -> float | None:
    """The mean score of the most frequent readable answers."""
    counts = Counter(filter(None, answers))
    most = max(counts.values(), default=0)
    votes = [score for a, score in zip(answers, scores, strict=True) if counts[a] == most]
    return math.fsum(votes) / len(votes) if votes else None


def _moments(scores: Sequence[float], opinions: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Mean and variance of a row's scores; this variance over n; variance of a judge's mean number
    within a repeat, and of these means between repeats (NaN: unknown); samples per repeat."""
    judged, variance = [one for one in opinions if len(one) > 1], variance_of(scores)
    inner = fmean(variance_of(one) / len(one) for one in judged) if judged else math.nan
    outer = variance_of([*map(fmean, judged)]) if len(judged) > 1 else math.nan
    size = fmean(map(len, judged)) if judged else 1.0
    return fmean(scores), variance, variance / len(scores), inner, outer, size


def _components(table: Floats) -> tuple[float, ...]:
    """Variances by analysis of variance with unweighted means, from the `_moments` of rows.

    σ²_within is the mean of s²; σ²_rows = s²(row means) - mean of s²/n, at least 0. As a score is a
    mean over judge samples, σ²_within = σ²_repeats + σ²_judges / m. The judges' share of it is
    measured on their numbers: the variance of their mean within a repeat over its variance within a
    row. It is 0 with one sample.
    """
    there = ~np.isnan(table)
    mean = np.where(there, table, 0).sum(axis=0) / np.maximum(there.sum(axis=0), 1)
    share = min(1.0, mean[3] / mean[4]) if mean[4] > 0 else 0.0
    rows = max(0.0, np.var(table[:, 0], ddof=1) - mean[2]) if len(table) > 1 else 0.0
    return float(rows), float(mean[1] * (1 - share)), float(mean[1] * share * mean[5])
