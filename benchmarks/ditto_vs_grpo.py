"""Does verbal feedback teach faster than a scalar? Ditto against GRPO on held-out stories.

Every seed warms up its own tiny model (as `examples/tomi_ditto` does) and trains it in four arms:
Ditto (G = 8: 8 drafts and up to 8 refined), GRPO with as many drafts (G = 8), GRPO with as many
samples (G = 16), and Ditto with shuffled feedback. Greedy accuracy on dev rows (two belief
questions per fact question) is measured every few steps, over steps, sampled tokens and seconds;
the point before training is measured on held-out rows with the same mixture. Differences to Ditto
are paired by seed.

    .venv/bin/python benchmarks/ditto_vs_grpo.py --seeds 5 --out runs/ditto_vs_grpo
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from soulkit.metrics.comparisons import auc
from soulkit.metrics.intervals import Interval, estimate
from soulkit.runs.jsonl import read_jsonl, write_json
from soulkit.train.run import train

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tomi_ditto"))
from tomi_ditto import DITTO, WARMUP, Stories

ARMS: dict[str, dict[str, Any]] = {
    "Ditto G=8": {},
    "GRPO G=8": {"method": "grpo"},
    "GRPO G=16": {"method": "grpo", "group_size": 16},
    "Ditto G=8, shuffled feedback": {"shuffle_feedback": True},
}
ACCURACY = (0.0, 1.0)
AXES = {"step": "steps", "tokens": "sampled tokens", "seconds": "seconds of sampling and training"}


@dataclass(frozen=True)
class Point:
    """One measurement of one run."""

    step: int
    tokens: int
    seconds: float
    accuracy: float


def curve(run: Path) -> list[Point]:
    """Accuracy and cumulative costs at every measurement, from the run's metrics."""
    points, tokens, seconds = [], 0, 0.0
    for line in read_jsonl(run / "metrics.jsonl"):
        if "eval/tomi" in line:
            points.append(Point(line["step"] + 1, tokens, seconds, line["eval/tomi"]))
        else:
            tokens += line["tokens"]
            seconds += line["time/sample"] + line["time/train"]
    return points


def run_seed(seed: int, out: Path, steps: int, every: int) -> dict[str, list[Point]]:
    """Warm up once, then train every arm from the same weights; finished runs are skipped."""
    stories = Stories(out / f"seed{seed}", seed)
    stories.write_rows()
    train(stories.config(WARMUP), stories.out / "warmup")
    start = stories.measure("before", None)
    scores = {}
    for name, changes in ARMS.items():
        folder = stories.out / name.lower().replace(" ", "-").replace(",", "").replace("=", "")
        settings = {
            **DITTO, "model": str(stories.warm), "steps": steps, "eval_every": every,
            "dev_share": 0.15, "dev_limit": 300, **changes,
        }  # fmt: skip
        train(stories.config(settings), folder)
        scores[name] = [Point(0, 0, 0.0, start["value"]["mean"]), *curve(folder)]
        print(f"seed {seed}, {name}: {scores[name][-1].accuracy:.3f}", flush=True)
    return scores


def area(points: Sequence[Point], axis: str) -> float:
    """Mean of the accuracy curve over an axis (area divided by its length)."""
    value = auc([getattr(p, axis) for p in points], [p.accuracy for p in points])
    assert value is not None
    return value


def over_seeds(values: Sequence[float], scale: Interval | None = None) -> list[float | None]:
    """Mean over seeds and the bounds of its 95 % interval."""
    mean = estimate(values, range(len(values)), scale=scale)
    return [mean.mean, mean.ci_low, mean.ci_high]


def paired(a: Sequence[float], b: Sequence[float]) -> list[float | None]:
    """Mean of a − b over seeds with its 95 % interval."""
    return over_seeds([x - y for x, y in zip(a, b, strict=True)])


def score(points: Sequence[Point]) -> dict[str, float]:
    return {"final": points[-1].accuracy, "area": area(points, "step")}


def table(results: Sequence[Mapping[str, Sequence[Point]]]) -> Table:
    """Final accuracy and area of each arm, with paired differences to the first arm."""
    first = next(iter(ARMS))
    shown = Table(title=f"{len(results)} seeds, mean [95 % CI]; differences: {first} minus arm")
    for heading in ("arm", "final", "difference", "area (steps)", "difference", "tokens", "s"):
        shown.add_column(heading, justify="left" if heading == "arm" else "right")
    for name in ARMS:
        cells = [name]
        for metric in ("final", "area"):
            values = [score(r[name])[metric] for r in results]
            base = [score(r[first])[metric] for r in results]
            cells.append(_with_ci(*over_seeds(values, ACCURACY)))
            cells.append("" if name == first else _with_ci(*paired(base, values), sign=True))
        cells.append(f"{statistics.fmean(r[name][-1].tokens for r in results):,.0f}")
        cells.append(f"{statistics.fmean(r[name][-1].seconds for r in results):.0f}")
        shown.add_row(*cells)
    return shown


def _with_ci(*ends: float | None, sign: bool = False) -> str:
    shown = ["–" if end is None else f"{end:+.3f}" if sign else f"{end:.3f}" for end in ends]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def figure(results: Sequence[Mapping[str, Sequence[Point]]], path: Path) -> None:
    """Draw mean accuracy with a 95 % band over seeds, one panel per axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 3, figsize=(13, 4), sharey=True, layout="constrained")
    for (axis, label), ax in zip(AXES.items(), axes, strict=True):
        for name in ARMS:
            _draw(ax, [r[name] for r in results], axis, name)
        ax.set_xlabel(label)
    axes[0].set_ylabel("accuracy on unseen stories (greedy)")
    handles, names = axes[0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside upper center", ncols=len(ARMS), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path)


def _draw(ax: Any, curves: Sequence[Sequence[Point]], axis: str, name: str) -> None:
    xs, means, lows, highs = [], [], [], []
    for points in zip(*curves, strict=True):
        values = [p.accuracy for p in points]
        xs.append(statistics.fmean(getattr(p, axis) for p in points))
        mean, low, high = over_seeds(values, ACCURACY)
        means.append(mean)
        lows.append(mean if low is None else low)
        highs.append(mean if high is None else high)
    (line,) = ax.plot(xs, means, label=name, marker="o", markersize=3)
    ax.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.12, linewidth=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=3, help="steps between measurements")
    parser.add_argument("--out", type=Path, default=Path("runs/ditto_vs_grpo"))
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.seeds < 2:
        parser.error("use at least two seeds: an interval over seeds needs two")
    os.environ["OMP_NUM_THREADS"] = str(chosen.threads)  # every run reads it at its start
    seeds = itertools.islice(itertools.count(chosen.first_seed), chosen.seeds)
    results = [run_seed(seed, chosen.out, chosen.steps, chosen.every) for seed in seeds]
    Console(width=160).print(table(results))
    figure(results, chosen.out / "curves.svg")
    plain = [{n: [vars(p) for p in points] for n, points in r.items()} for r in results]
    write_json(chosen.out / "curves.json", {"arms": list(ARMS), "seeds": plain})
    print(f"curves: {chosen.out / 'curves.svg'}")


if __name__ == "__main__":
    main()
