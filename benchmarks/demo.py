"""The demo over ten seeds: does the result depend on the seed that is shown?

Every seed draws a rule and rows, warms up a tiny model and trains it in the three arms of
`soul demo`, and in a fourth: GRPO with a reward for every right word. Evaluations are greedy, on
combinations of job, town and pet that training never showed.

    .venv/bin/python benchmarks/demo.py --out runs/demo_seeds
    .venv/bin/python benchmarks/demo.py --report runs/demo_seeds --figure docs/figures/demo.svg

Every part is an ordinary run folder: the first command resumes unfinished parts, the second reports
finished ones. To use two cores, start two processes with `--seeds 5` and another `--first-seed`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from soulkit.demo.training import METRICS, Demo, evaluation_of
from soulkit.metrics.intervals import estimate, estimate_text, number

LABELS = {
    "warmup": "before training", "ditto": "Ditto", "shuffled": "Ditto, shuffled feedback",
    "grpo": "GRPO, same reward", "dense": "GRPO, reward for every right word",
}  # fmt: skip
REACHED = 0.9
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Result:
    """The evaluation after one part of one seed; the interval is over combinations."""

    exact: float
    low: float
    high: float
    words: float
    in_form: float


def run_seed(demo: Demo) -> None:
    """Train and evaluate all parts of one seed, one after another; finished ones are skipped."""
    demo.write_rows()
    for name in LABELS:
        if not is_finished(demo, name):
            started = time.process_time()
            demo.make(name)
            seconds = time.process_time() - started
            exact = demo.cells(name)["exact"].mean
            print(f"seed {demo.seed}, {name}: {number(exact)}, {seconds:.0f} s of processor time",
                  flush=True)  # fmt: skip


def is_finished(demo: Demo, name: str) -> bool:
    return (demo.out / evaluation_of(name) / "summary.json").exists()


# -- results ---------------------------------------------------------------------------------------

Results = dict[str, dict[int, Result]]
"""Part → seed → result."""


def read_results(out: Path) -> Results:
    results: Results = {}
    for folder in out.glob("seed*"):
        demo = Demo(folder, int(folder.name.removeprefix("seed")))
        for name in filter(lambda name: is_finished(demo, name), LABELS):
            exact, words, in_form = (demo.cells(name)[metric] for metric in METRICS)
            results.setdefault(name, {})[demo.seed] = Result(
                exact.mean, exact.ci_low, exact.ci_high, words.mean, in_form.mean
            )
    return {name: dict(sorted(results[name].items())) for name in LABELS if name in results}


def over_seeds(values: Sequence[float]) -> str:
    """Mean over seeds with its 95 % interval."""
    mean = estimate(values, range(len(values)), scale=SHARE)
    return estimate_text(mean.mean, mean.ci_low, mean.ci_high)


def report(out: Path) -> str:
    """Two Markdown tables: means over seeds, and exactness by seed."""
    results = read_results(out)
    lines = [
        f"| arm | exactly right | seeds ≥ {REACHED} | words right | in form | least in form |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, by_seed in results.items():
        runs = list(by_seed.values())
        columns = [[getattr(run, metric) for run in runs] for metric in METRICS]
        reached = sum(run.exact >= REACHED for run in runs)
        cells = (LABELS[name], over_seeds(columns[0]), f"{reached} of {len(runs)}",
                 *map(over_seeds, columns[1:]), number(min(columns[2])))  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"| seed | {' | '.join(LABELS[name] for name in results)} |",
              f"|---|{'--:|' * len(results)}"]  # fmt: skip
    for seed in sorted({seed for by_seed in results.values() for seed in by_seed}):
        runs = [by_seed.get(seed) for by_seed in results.values()]
        cells = (estimate_text(run.exact, run.low, run.high) if run else "–" for run in runs)
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    return "\n".join(lines)


# -- figure ----------------------------------------------------------------------------------------

STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px; fill: #59636e }
  .grid { stroke: #d1d9e0 } .dot { fill: #8c959f; fill-opacity: .7 } .ditto { fill: #0969da }
  .mean { stroke: #1f2328; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc } .small { fill: #9198a1 } .grid { stroke: #3d444d }
    .dot { fill: #9198a1 } .ditto { fill: #4493f8 } .mean { stroke: #f0f6fc }
  }
"""
WIDTH, LEFT, RIGHT, TOP, ROW = 760, 250, 60, 46, 40


def draw(results: Results) -> str:
    """SVG: a row per arm, a dot per seed, and a line at the mean. Readable in dark mode."""
    bottom = TOP + ROW * len(results)
    seeds = max(map(len, results.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 44}" role="img">',
        f"<title>Exactly right replies by arm, {seeds} seeds</title><style>{STYLE}</style>",
        f'<text x="0" y="18">Replies that are exactly right, on new combinations of job, town and '
        f"pet; one dot per seed ({seeds})</text>",
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x = _x(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" '
                     f'y2="{bottom}"/><text class="small" x="{x:.1f}" y="{bottom + 20}" '
                     f'text-anchor="middle">{tick:g}</text>')  # fmt: skip
    for place, (name, by_seed) in enumerate(results.items()):
        parts += _row(TOP + ROW * (place + 0.5), name, [run.exact for run in by_seed.values()])
    return "\n".join([*parts, "</svg>\n"])


def _row(y: float, name: str, shares: Sequence[float]) -> list[str]:
    kind = "dot ditto" if name == "ditto" else "dot"
    mean = statistics.fmean(shares)
    dots = [
        f'<circle class="{kind}" r="5" cx="{_x(share):.1f}" '
        f'cy="{y + (2 * place / max(len(shares) - 1, 1) - 1) * ROW / 4:.1f}"/>'
        for place, share in enumerate(shares)
    ]
    label = f'<text x="{LEFT - 20}" y="{y + 5:.1f}" text-anchor="end">{LABELS[name]}</text>'
    line = (f'<line class="mean" x1="{_x(mean):.1f}" x2="{_x(mean):.1f}" y1="{y - 15:.1f}" '
            f'y2="{y + 15:.1f}"/>')  # fmt: skip
    value = f'<text x="{WIDTH - RIGHT + 14}" y="{y + 5:.1f}">{mean:.3f}</text>'
    return [label, *dots, line, value]


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Demo(Path()).steps)
    parser.add_argument("--out", type=Path, default=Path("runs/demo_seeds"))
    parser.add_argument("--report", type=Path, metavar="OUT", help="only report finished seeds")
    parser.add_argument("--figure", type=Path, help="with --report: write the picture to this file")
    chosen = parser.parse_args()
    if chosen.report is None:
        for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
            run_seed(Demo(chosen.out / f"seed{seed}", seed, chosen.steps))
    out = chosen.report or chosen.out
    print(report(out))
    if chosen.figure is not None:
        chosen.figure.write_text(draw(read_results(out)), encoding="utf-8")


if __name__ == "__main__":
    main()
