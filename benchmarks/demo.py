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

from soulkit.demo.training import METRICS, TASK, Demo, evaluation_of
from soulkit.metrics.intervals import estimate, estimate_text, number
from soulkit.runs.jsonl import read_jsonl

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

Curve = list[float]
"""Share of right words in the replies of each training step."""
COLOURS = {
    "ditto": ("#0969da", "#4493f8"), "dense": ("#bc4c00", "#f0883e"),
    "grpo": ("#59636e", "#9198a1"), "shuffled": ("#8250df", "#ab7df8"),
}  # fmt: skip
"""Arm → colour on a light and on a dark page."""
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 } .small { font-size: 12px; fill: #59636e }
.grid { stroke: #d1d9e0 } path { fill: none; stroke-opacity: .3 }
.mean { stroke-width: 2.5; stroke-opacity: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 } .grid { stroke: #3d444d } DARK
}
"""
LEFT, RIGHT, TOP, BOTTOM, GAP = 40, 470, 50, 300, 22
"""Edges of the curves, and the least distance of two labels, in pixels."""


def read_curves(out: Path) -> dict[str, list[Curve]]:
    """Arm → the curve of every seed that has finished it."""
    curves: dict[str, list[Curve]] = {}
    for name, by_seed in read_results(out).items():
        for seed in by_seed if name in COLOURS else ():
            lines = read_jsonl(out / f"seed{seed}" / name / "metrics.jsonl")
            words = [line[f"task/{TASK}/words"] for line in lines]
            curves.setdefault(name, []).append(words)
    return curves


def draw(results: Results, curves: dict[str, list[Curve]]) -> str:
    """SVG: right words by training step, a thin line per seed and a thick one for their mean; the
    labels show how many replies to held-out people are exactly right. Readable in dark mode."""
    seeds = max(map(len, curves.values()))
    light, dark = (" ".join(f".{name} {{ stroke: {both[mode]} }} text.{name} {{ stroke: none; "
                            f"fill: {both[mode]} }}" for name, both in COLOURS.items())
                   for mode in (0, 1))  # fmt: skip
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {BOTTOM + 48}" role="img">',
        f"<title>Right words by training step, {seeds} seeds</title>",
        f"<style>{light}{STYLE.replace('DARK', dark)}</style>",
        '<text x="0" y="18">Right words in the replies during training</text>',
        f'<text class="small" x="0" y="36">one thin line per seed ({seeds} seeds)</text>',
        f'<text x="{RIGHT + 12}" y="18">Held-out people, exactly right</text>',
        f'<text class="small" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}" text-anchor="middle">'
        "training step</text>",
    ]
    parts += _axes(max(len(curve) for some in curves.values() for curve in some))
    for name, some in curves.items():
        mean = [statistics.fmean(shares) for shares in zip(*some, strict=False)]
        parts += [f'<path class="{name}" d="{_path(curve)}"/>' for curve in some]
        parts.append(f'<path class="{name} mean" d="{_path(mean)}"/>')
    return "\n".join([*parts, *_labels(results, curves), "</svg>\n"])


def _axes(steps: int) -> list[str]:
    parts = []
    for share, words in ((0, "0"), (1 / 7, "1/7"), (0.5, "0.5"), (1, "1")):
        y = _y(share)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
                     f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
                     f"{words}</text>")  # fmt: skip
    for step in (1, steps):
        parts.append(f'<text class="small" x="{LEFT if step == 1 else RIGHT}" y="{BOTTOM + 20}" '
                     f'text-anchor="middle">{step}</text>')  # fmt: skip
    return parts


def _labels(results: Results, curves: dict[str, list[Curve]]) -> list[str]:
    """The arms at the ends of their curves, one above the other."""
    ends = {name: statistics.fmean(curve[-1] for curve in some) for name, some in curves.items()}
    parts, y = [], 0.0
    for name in sorted(ends, key=lambda name: -ends[name]):
        y = max(_y(ends[name]), y + GAP)
        exact = statistics.fmean(run.exact for run in results[name].values())
        parts.append(f'<text class="{name}" x="{RIGHT + 12}" y="{y + 5:.1f}">{exact:.3f}  '
                     f"{LABELS[name]}</text>")  # fmt: skip
    return parts


def _path(curve: Curve) -> str:
    width = (RIGHT - LEFT) / max(len(curve) - 1, 1)
    return "M" + "L".join(f"{LEFT + i * width:.1f} {_y(y):.1f}" for i, y in enumerate(curve))


def _y(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)


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
        chosen.figure.write_text(draw(read_results(out), read_curves(out)), encoding="utf-8")


if __name__ == "__main__":
    main()
