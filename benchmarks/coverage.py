"""How often do the 95 % intervals contain the truth? Simulated coverage, compared with other tools.

    .venv/bin/python benchmarks/coverage.py --out coverage.json      # some minutes
    .venv/bin/python benchmarks/coverage.py --quick                  # seconds; rough

Scores with a known truth are drawn 4,000 times for 2 to 100 clusters: means, differences of two
runs, leave-one-out gaps, means of suites and of parts, metrics over a whole batch, and the share of
an expert's gain that a generalist retains. The table shows how often each 95 % interval contains
the truth; scipy, inspect_ai and lm-eval get the same draws.
Exit code 1 if a bound is broken; `broken_bounds` lists the bounds.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import scipy
from _coverage import draws as made
from _coverage import peers

from soulkit.metrics.comparisons import (
    PairedDifference,
    RewardGroup,
    jackknife_difference,
    leave_one_out_gap,
    paired_difference,
    suite_difference,
)
from soulkit.metrics.intervals import (
    FEW_EVENTS,
    Estimate,
    estimate,
    few_independent_events,
    jackknife,
    overlapping_mean,
    suite_mean,
)
from soulkit.metrics.retention import paired_gains, retention
from soulkit.version import __version__

CLUSTERS = (2, 3, 5, 8, 10, 20, 50, 100)
SIMULATIONS = 4000
LEAST, LEAST_FEW_EVENTS, LEAST_FEW_CLUSTERS = 0.93, 0.91, 0.85
MOST, WIDTH, EXCLUSION = 0.995, 1.15, 0.07
SOULKIT = "soulkit"
BLOCK = 200
UNHELD = ("five texts about equally often",)
"""Diversity near its maximum: removing one text hardly changes it, so the jackknife is too wide."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The result of one tool on one kind of data with `clusters` clusters."""

    part: str
    kind: str
    tool: str
    clusters: int
    coverage: float
    """Share of the intervals that contain the truth."""
    without: float
    """Share of the simulations without an interval."""
    width: float
    """Median width."""
    exclusion: float | None = None
    """If the truth is zero: share of the intervals that exclude zero."""
    events: float | None = None
    """Expected number of failures or successes, whichever is smaller."""
    against: float | None = None
    """Width as a multiple of CR2-t's, for scores on a scale other than yes or no."""
    unheld: bool = False
    """Exempt from the bounds; the docs say why."""
    warned: bool = False
    """Most intervals are marked "few", because few clusters have failures or successes."""
    rare: bool = False
    """Fewer than thirty answers are expected to change between two runs or to be wrong in parts, so
    coverage has no upper bound."""


Ends = Iterable[tuple[float | None, float | None]]


def line_of(
    part: str, kind: str, tool: str, clusters: int, truth: float, ends: Ends,
    *, events: float | None = None, against: float | None = None,
) -> Line:  # fmt: skip
    """Count how often the interval contains the truth, with a tolerance for rounding."""
    pairs = [(math.nan if low is None else low, math.nan if high is None else high)
             for low, high in ends]  # fmt: skip
    low, high = np.array(pairs, dtype=np.float64).T
    there = ~(np.isnan(low) | np.isnan(high))
    inside = (low[there] <= truth + 1e-9) & (high[there] >= truth - 1e-9)
    coverage = float(inside.mean()) if there.any() else math.nan
    width = float(np.median(high[there] - low[there])) if there.any() else math.nan
    return Line(
        part=part, kind=kind, tool=tool, clusters=clusters, coverage=coverage,
        without=1 - float(there.mean()), width=width,
        exclusion=1 - coverage if truth == 0 else None, events=events, against=against,
    )  # fmt: skip


# --- simulations ----------------------------------------------------------------------------------


def means(simulations: int, clusters: int, resamples: int) -> list[Line]:
    lines = []
    for number, kind in enumerate(made.MEANS):
        draws = kind.draw(_stream(1, number, clusters), simulations, clusters)
        events = kind.events(draws)
        results = [_mean(draws, i, kind.scale) for i in range(simulations)]
        against = None
        if kind.scale is not None and not kind.yes_no:
            plain = [_mean(draws, i, None) for i in range(simulations)]
            against = _median_width(results) / _median_width(plain)
        line = line_of(
            "means", kind.name, SOULKIT, clusters, kind.truth, map(_ends, results),
            events=events, against=against,
        )  # fmt: skip
        warned = sum(few_independent_events(result, result.method) for result in results)
        lines.append(replace(line, warned=2 * warned > simulations))
        lines += _peer_lines("means", kind.name, kind.truth, draws, clusters, resamples)
    return lines


def _mean(draws: made.Draws, simulation: int, scale: tuple[float, float] | None) -> Estimate:
    values, clusters = draws.rows(simulation)
    return estimate(values, clusters, scale=scale)


def _ends(result: Estimate) -> tuple[float | None, float | None]:
    return result.ci_low, result.ci_high


def _median_width(results: Sequence[Estimate]) -> float:
    ends = [_ends(result) for result in results]
    return float(
        np.median([high - low for low, high in ends if low is not None and high is not None])
    )


def _peer_lines(
    part: str, kind: str, truth: float, draws: made.Draws, clusters: int, resamples: int
) -> list[Line]:
    return [
        line_of(part, kind, tool, clusters, truth, zip(low, high, strict=True))
        for tool, (low, high) in peers.intervals(draws, resamples).items()
    ]


def differences(simulations: int, clusters: int, resamples: int) -> list[Line]:
    lines = []
    for number, kind in enumerate(made.PAIRS):
        a, b = kind.draw(_stream(2, number, clusters), simulations, clusters)
        ends = [_checked_ends(_difference(a, b, i)) for i in range(simulations)]
        line = line_of("differences", kind.name, SOULKIT, clusters, kind.truth, ends)
        d = made.Draws(b.values - a.values, a.mask)
        changed = float(((d.values != 0) & d.mask).sum()) / simulations
        lines.append(replace(line, rare=kind.yes_no and changed < FEW_EVENTS))
        lines += _peer_lines("differences", kind.name, kind.truth, d, clusters, resamples)
    return lines


def _difference(a: made.Draws, b: made.Draws, simulation: int) -> PairedDifference:
    (in_a, clusters), (in_b, _) = a.rows(simulation), b.rows(simulation)
    return paired_difference(
        dict(enumerate(in_a)), dict(enumerate(in_b)), dict(enumerate(clusters))
    )


def _checked_ends(paired: PairedDifference) -> tuple[float | None, float | None]:
    low, high, p = paired.ci_low, paired.ci_high, paired.p
    if low is not None and high is not None and p is not None:
        assert (p < 0.05) == (low > 0 or high < 0), "p and interval contradict each other"
    return low, high


def gaps(simulations: int, clusters: int, resamples: int) -> list[Line]:
    lines = []
    kinds = (("useless feedback for failures", 0.0), ("feedback worth 0.2", 0.2))
    for number, (name, gain) in enumerate(kinds):
        rng = _stream(3, number, clusters)
        drafts, chosen, refined = made.reward_groups(rng, simulations, clusters, gain)
        twins = np.where(chosen, refined, np.nan)
        ends = [_gap(drafts[i], twins[i]) for i in range(simulations)]
        lines.append(line_of("gaps", name, SOULKIT, clusters, gain, ends))
    return lines


def _gap(drafts: made.Floats, refined: made.Floats) -> tuple[float | None, float | None]:
    """The gap over rows × drafts in each cluster; NaN marks drafts without a refined reply."""
    groups = [
        RewardGroup(row.tolist(), [None if math.isnan(r) else r for r in twins.tolist()], cluster)
        for cluster, (rows, others) in enumerate(zip(drafts, refined, strict=True))
        for row, twins in zip(rows, others, strict=True)
    ]
    return _ends(leave_one_out_gap(groups))


def retentions(simulations: int, clusters: int, resamples: int) -> list[Line]:
    """The share of an expert's gain that a generalist retains; no ratio if the gain may be zero.
    Below ten clusters, or if the interval is too wide, the line is exempt from the bounds."""
    lines = []
    for number, (kind, (base, expert, generalist)) in enumerate(made.TRIPLES.items()):
        drawn = made.triple(_stream(7, number, clusters), simulations, clusters, kind)
        scale = (0.0, 1.0) if kind.startswith("yes") else None
        ends = [_retention(scale, *scores) for scores in zip(*drawn, strict=True)]
        truth = (generalist - base) / (expert - base)
        line = line_of("retention", kind, SOULKIT, clusters, truth, ends)
        lines.append(replace(line, unheld=clusters < 10 or line.coverage > MOST))
    return lines


def _retention(
    scale: tuple[float, float] | None, *scores: made.Floats
) -> tuple[float | None, float | None]:
    base, expert, generalist = (dict(enumerate(side.tolist())) for side in scores)
    kept = retention(
        paired_gains(base, expert, generalist, {key: key for key in base}, scale=scale)
    )
    return kept.ci_low, kept.ci_high


def suites(simulations: int, clusters: int, resamples: int) -> list[Line]:
    """Suites whose members have equally many clusters (second suite: 1, 2 and 4 times as many)."""
    lines = []
    members = {"five tasks": (0, 1, 2, 5, 6), "three tasks, one from −5 to 10": (1, 4, 7)}
    for number, (name, places) in enumerate(members.items()):
        kinds = [made.MEANS[place] for place in places]
        sizes = [clusters * (2**k if number else 1) for k in range(len(kinds))]
        rng = _stream(4, number, clusters)
        drawn = [k.draw(rng, simulations, c) for k, c in zip(kinds, sizes, strict=True)]
        ends = [
            _ends(suite_mean([_mean(d, i, k.scale) for d, k in zip(drawn, kinds, strict=True)]))
            for i in range(simulations)
        ]
        truth = math.fsum(k.truth for k in kinds) / len(kinds)
        lines.append(line_of("suites", name, SOULKIT, clusters, truth, ends))
    return [*lines, *_suite_differences(simulations, clusters)]


def _suite_differences(simulations: int, clusters: int) -> list[Line]:
    """Differences over five tasks, with one row per cluster."""
    lines = []
    kinds = {
        "difference of five tasks, B repairs 3%, breaks none": made.repairs(0.03),
        "difference of five tasks, B repairs 5%, breaks 5%": made.repairs(0.05, broken=0.05),
    }
    for number, (name, kind) in enumerate(kinds.items()):
        rng = _stream(8, number, clusters)
        tasks = [kind.draw(rng, simulations, clusters) for _ in range(5)]
        ends = [
            _checked_ends(suite_difference([_difference(a, b, i) for a, b in tasks]))
            for i in range(simulations)
        ]
        line = line_of("suites", name, SOULKIT, clusters, kind.truth, ends)
        changed = sum(float((a.values != b.values).sum()) for a, b in tasks) / simulations
        lines.append(replace(line, rare=changed < FEW_EVENTS))
    return lines


def parts(simulations: int, clusters: int, resamples: int) -> list[Line]:
    """A headline over parts: of different rows (twice as many in the first two as in the last), and
    correlated parts of the same rows."""
    lines = []
    for number, share in enumerate((0.99, 0.98, 0.5)):
        rng = _stream(9, number, clusters)
        sizes = (2 * clusters, 2 * clusters, clusters)
        drawn = [(rng.random((simulations, n)) < share).astype(float) for n in sizes]
        ends = [_ends(suite_mean([_of_rows(d[i]) for d in drawn])) for i in range(simulations)]
        events = sum(sizes) * min(share, 1 - share)
        line = line_of(
            "parts", f"three parts at {share:g}, 2:2:1 rows", SOULKIT, clusters, share, ends,
            events=events,
        )  # fmt: skip
        lines.append(replace(line, rare=events < FEW_EVENTS))
    kinds = {"four parts of the same rows at 0.9": (0.9,) * 4,
             "the same, two of them at 1": (0.9, 0.9, 1.0, 1.0)}  # fmt: skip
    for number, (name, shares) in enumerate(kinds.items()):
        tables = _together(_stream(10, number, clusters), simulations, clusters, shares)
        ends = [_ends(_of_same_rows(table)) for table in tables]
        truth = math.fsum(shares) / len(shares)
        line = line_of("parts", name, SOULKIT, clusters, truth, ends, events=clusters * (1 - truth))
        lines.append(replace(line, rare=(line.events or 0) < FEW_EVENTS))
    return lines


def _together(
    rng: np.random.Generator, simulations: int, rows: int, shares: Sequence[float]
) -> made.Floats:
    """Simulation × row × part: right if a random number is below the part's share. Half of the time
    all parts of a row use the same number."""
    of_row, alone = rng.random((simulations, rows, 1)), rng.random((simulations, rows, len(shares)))
    draws = np.where(rng.random((simulations, rows, 1)) < 0.5, of_row, alone)
    return (draws < np.array(shares)).astype(float)


def _of_rows(values: made.Floats) -> Estimate:
    """The mean of a part, computed as a batch metric with one row per cluster."""
    total, n = float(values.sum()), len(values)

    def statistic(chosen: Sequence[int]) -> float:
        if len(chosen) == n:
            return total / n
        left_out = n * (n - 1) // 2 - sum(chosen)
        return (total - float(values[left_out])) / (n - 1)

    return jackknife(statistic, n, scale=(0.0, 1.0))


def _of_same_rows(table: made.Floats) -> Estimate:
    """The mean over parts (columns) of the same rows."""
    columns = [table[:, k] for k in range(table.shape[1])]
    of_parts = [_of_rows(column) for column in columns]
    constant = [part for part, c in zip(of_parts, columns, strict=True) if np.ptp(c) == 0]
    return overlapping_mean(_of_rows(table.mean(axis=1)), of_parts, constant)


def batches(simulations: int, clusters: int, resamples: int) -> list[Line]:
    rng = _stream(5, 0, clusters)
    first, second = (made.confusion(rng, simulations, clusters) for _ in range(2))
    f1s = [_ends(jackknife(_f1(table), clusters, scale=(0.0, 1.0))) for table in first]
    paired = [
        jackknife_difference(_f1(a), _f1(b), clusters) for a, b in zip(first, second, strict=True)
    ]
    return [
        line_of("batch", "F1", SOULKIT, clusters, 0.75, f1s),
        line_of(
            "batch", "F1 of two equal runs", SOULKIT, clusters, 0.0,
            [(p.ci_low, p.ci_high) for p in paired],
        ),
        *_diversities(simulations, clusters),
    ]  # fmt: skip


def _diversities(simulations: int, clusters: int) -> list[Line]:
    """Mean distance of pairs of texts: by equality, and by 1 − Jaccard of their words."""
    drawn = {
        name: (1 - float((shares**2).sum()), partial(made.labels, shares=shares))
        for name, shares in made.LABELS.items()
    }
    drawn["words (1 − Jaccard)"] = (made.jaccard_truth(), made.word_sets)
    lines = []
    for number, (name, (truth, draw)) in enumerate(drawn.items()):
        rng = _stream(6, number, clusters)
        blocks = (draw(rng, size, clusters) for size in _blocks(simulations))
        ends = [
            _ends(jackknife(_diversity(d), clusters, scale=(0.0, 1.0))) for b in blocks for d in b
        ]
        line = line_of("batch", f"diversity, {name}", SOULKIT, clusters, truth, ends)
        lines.append(replace(line, unheld=name in UNHELD))
    return lines


def _f1(table: made.Floats) -> Callable[[Sequence[int]], float | None]:
    """2 TP / (2 TP + FP + FN) of the chosen clusters."""

    def statistic(chosen: Sequence[int]) -> float | None:
        hits, alarms, misses = table[list(chosen)].sum(axis=0).tolist()
        below = 2 * hits + alarms + misses
        return 2 * hits / below if below else None

    return statistic


def _blocks(simulations: int) -> Iterator[int]:
    """Block sizes for drawing square tables, to limit memory."""
    for start in range(0, simulations, BLOCK):
        yield min(BLOCK, simulations - start)


def _diversity(distances: made.Floats) -> Callable[[Sequence[int]], float | None]:
    """Mean distance over pairs of the chosen clusters."""

    def statistic(chosen: Sequence[int]) -> float | None:
        n, times = len(chosen), np.bincount(chosen, minlength=len(distances))
        return float(times @ distances @ times) / (n * (n - 1)) if n > 1 else None

    return statistic


def _stream(part: int, number: int, clusters: int) -> np.random.Generator:
    return np.random.default_rng((part, number, clusters))


PARTS: dict[str, Callable[[int, int, int], list[Line]]] = {
    "means": means, "differences": differences, "gaps": gaps, "suites": suites, "parts": parts,
    "batch": batches, "retention": retentions,
}  # fmt: skip


# --- bounds ---------------------------------------------------------------------------------------


def broken_bounds(line: Line) -> list[str]:
    """The bounds that a line of soulkit breaks.

    From five clusters on, coverage is at least 0.93; 0.91 with fewer than thirty expected failures
    or successes ("few events"); 0.85 if most intervals are marked because few clusters have any.
    From ten on it is at most 0.995, unless fewer than thirty answers are expected to change between
    two runs or to be wrong in parts. Equal models differ in at most 7 % of the comparisons. The
    median width for scores other than yes or no is at most 1.15 times that of CR2-t.
    """
    few = line.events is not None and line.events < FEW_EVENTS
    least = LEAST_FEW_CLUSTERS if line.warned else LEAST_FEW_EVENTS if few else LEAST
    broken = []
    if line.clusters >= 5 and math.isnan(line.coverage):
        broken.append("gives no interval")
    if line.clusters >= 5 and line.coverage < least:
        broken.append(f"covers {line.coverage:.3f}, less than {least}")
    if line.clusters >= 10 and line.coverage > MOST and not line.rare:
        broken.append(f"covers {line.coverage:.4f}, more than {MOST}")
    if line.clusters >= 5 and line.exclusion is not None and line.exclusion > EXCLUSION:
        broken.append(f"excludes zero in {line.exclusion:.3f}, more than {EXCLUSION}")
    if line.against is not None and line.against > WIDTH:
        broken.append(f"{line.against:.2f} times as wide as CR2-t, more than {WIDTH}")
    where = f"{line.part}, {line.kind}, {line.clusters} clusters"
    return [] if line.unheld else [f"{where}: {words}" for words in broken]


# --- tables ---------------------------------------------------------------------------------------


def tables(lines: Sequence[Line]) -> str:
    """Markdown: coverage by kind and number of clusters, and the lowest of each tool."""
    parts = []
    for part in dict.fromkeys(line.part for line in lines):
        own = [line for line in lines if line.part == part and line.tool == SOULKIT]
        kinds = dict.fromkeys(line.kind for line in own)
        rows = [(k, [line for line in own if line.kind == k]) for k in kinds]
        parts.append(_table(part, [(k, {x.clusters: _cell(x) for x in ls}) for k, ls in rows]))
    for part in [p for p in ("means", "differences") if any(x.part == p for x in lines)]:
        tools = dict.fromkeys(line.tool for line in lines if line.part == part)
        rows_of_tools = [(tool, _lowest(lines, part, tool)) for tool in tools]
        parts.append(_table(f"{part}, lowest coverage of any kind", rows_of_tools))
    return "\n".join(parts)


def _cell(line: Line) -> str:
    few = line.events is not None and line.events < FEW_EVENTS
    mark = "†" if line.unheld else "§" if line.warned else "*" if few else "‡" if line.rare else ""
    return "–" if math.isnan(line.coverage) else f"{line.coverage:.3f}{mark}"


def _lowest(lines: Sequence[Line], part: str, tool: str) -> dict[int, str]:
    """Clusters → the lowest coverage among the kinds."""
    of_tool = [line for line in lines if (line.part, line.tool) == (part, tool)]
    counts = dict.fromkeys(line.clusters for line in of_tool)
    return {
        c: f"{min(x.coverage for x in of_tool if x.clusters == c and x.coverage == x.coverage):.3f}"
        for c in counts
    }


def _table(head: str, rows: Sequence[tuple[str, dict[int, str]]]) -> str:
    counts = list(rows[0][1]) if rows else []
    lines = [f"| {head} | " + " | ".join(map(str, counts)) + " |"]
    lines.append("|---|" + "--:|" * len(counts))
    lines += [f"| {name} | " + " | ".join(cells[c] for c in counts) + " |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--simulations", type=int, default=SIMULATIONS)
    parser.add_argument(
        "--part", choices=list(PARTS), action="append", help="run only this part; repeatable"
    )
    parser.add_argument("--out", type=Path, help="write all lines to this file as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="few simulations, without checking bounds"
    )
    chosen = parser.parse_args()
    simulations = 60 if chosen.quick else chosen.simulations
    counts = (2, 5, 20) if chosen.quick else CLUSTERS
    start, lines = time.perf_counter(), []
    for part in chosen.part or PARTS:
        for clusters in counts:
            lines += PARTS[part](simulations, clusters, 99 if chosen.quick else peers.RESAMPLES)
        print(f"{part}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(tables(lines))
    print("* fewer than thirty failures or successes expected; § few clusters have any; ‡ fewer "
          "than thirty changed answers expected; † exempt from the bounds\n")  # fmt: skip
    print(f"{simulations:,} simulations; soulkit {__version__}, scipy {scipy.__version__}, "
          f"numpy {np.__version__}, Python {platform.python_version()}")  # fmt: skip
    if chosen.out:
        chosen.out.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    own = [line for line in lines if line.tool == SOULKIT]
    broken = [] if chosen.quick else [text for line in own for text in broken_bounds(line)]
    print("\n".join(["", *broken]) if broken else "no bound is broken" * (not chosen.quick))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
