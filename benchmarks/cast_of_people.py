"""Does the content of feedback matter? Ditto against shuffled feedback, GRPO and SFT.

The task is `examples/cast_of_people`: a person's job, town and pet determine the three words they
say, by a rule that is in no prompt; feedback describes the behaviour in other words. Every seed
draws a rule and rows, warms up a tiny model that can follow such advice but does not know the rule,
and trains it in six arms from the same weights. The RL arms sample 1,024 replies per step. The
measurement is greedy, on unseen *combinations* of cues (the rule) and on seen combinations with
other names (memory). A harder size with dense rewards is also run.

    .venv/bin/python benchmarks/cast_of_people.py --out runs/cast_of_people
    .venv/bin/python benchmarks/cast_of_people.py --report runs/cast_of_people --figure FILE.svg

Every arm is an ordinary run folder: the first command resumes unfinished runs, the second reports
the finished ones. `--only` and `--seeds` choose arms and seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from soulkit.data.files import write_rows
from soulkit.data.rows import group_key, groups_aside
from soulkit.eval.config import EvalConfig
from soulkit.eval.run.runner import run_eval
from soulkit.metrics.comparisons import auc, paired_difference
from soulkit.metrics.intervals import estimate
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.run import train

TASK = "cast_of_people"
TASKS_FILE = Path(__file__).parents[1] / "examples" / TASK / "tasks.yaml"
CUES = ("job", "town", "pet")
SHARE = 0.125
"""Share of the combinations of cues that training never sees."""
LESSONS, PEOPLE, MEASURED = 12_000, 4096, 256
EASY, HARD = 8, 24
"""Number of values per cue."""
WARMUP: dict[str, Any] = {
    "method": "sft", "model": "tiny", "full": True, "sft_batch": 48, "lr": 2e-3,
    "lr_schedule": "cosine", "warmup_steps": 20, "beta2": 0.95, "weight_decay": 0.01,
    "sft_feedback": 0.6, "checkpoint_every": 1000, "coach": "terse",
}  # fmt: skip
REINFORCED: dict[str, Any] = {
    "prompts_per_step": 64, "mini_batch_prompts": 8, "lr": 1e-3, "lr_schedule": "cosine",
    "max_tokens": 6, "batch_size": 256, "checkpoint_every": 12, "keep_last": 1, "coach": "terse",
    "dev_by": CUES, "dev_share": SHARE, "dev_limit": MEASURED,
}  # fmt: skip
IMITATED: dict[str, Any] = {
    "method": "sft", "sft_batch": 8, "lr": 1e-3, "lr_schedule": "cosine",
    "checkpoint_every": 1000,
}  # fmt: skip
DENSE = {"option": {"dense": "true"}}
ARMS: dict[str, dict[str, Any]] = {
    "ditto": {"method": "ditto", "group_size": 8},
    "shuffled": {"method": "ditto", "group_size": 8, "shuffle_feedback": True},
    "grpo": {"method": "grpo", "group_size": 16},
    "ditto-dense": {"method": "ditto", "group_size": 8, **DENSE},
    "grpo-dense": {"method": "grpo", "group_size": 16, **DENSE},
    "sft": IMITATED,
}
HARD_ARMS = ("ditto-dense", "grpo-dense", "ditto", "sft")
LABELS = {
    "ditto": "Ditto, G = 8, exact reward",
    "shuffled": "Ditto, shuffled feedback, exact reward",
    "grpo": "GRPO, G = 16, exact reward",
    "ditto-dense": "Ditto, G = 8, dense reward",
    "grpo-dense": "GRPO, G = 16, dense reward",
    "sft": "SFT on gold (upper line)",
    "before": "before training",
}
SCALE = (0.0, 1.0)


@dataclass(frozen=True)
class World:
    """One seed at one size: a folder with its rows, warmed-up model and arms."""

    out: Path
    values: int
    seed: int
    steps: int = 0
    every: int = 0
    warmup: int = 0

    @cached_property
    def folder(self) -> Path:
        return self.out / f"values{self.values}" / f"seed{self.seed}"

    def rows(self, name: str) -> Path:
        return self.folder / "rows" / f"{name}.jsonl"

    def config(self, settings: Mapping[str, Any], rows: str) -> TrainConfig:
        return TrainConfig.model_validate({
            **settings, "tasks": {TASK: 1.0}, "tasks_file": str(TASKS_FILE),
            "data": {TASK: str(self.rows(rows))}, "seed": self.seed,
        })  # fmt: skip

    def prepare(self) -> None:
        """Write the rows and warm up the model, unless they exist."""
        self.write_rows()
        warmup = {**WARMUP, "steps": self.warmup}
        train(self.config(warmup, "lessons"), self.folder / "warmup")
        self.measure("before", None)

    def write_rows(self) -> None:
        """Write lessons, training people, and the people to measure: unseen combinations, and seen
        combinations with other names."""
        if self.rows("measured").exists():
            return
        lessons = self._make(LESSONS, 2 * self.seed, kind="lessons")
        people, others = (self._make(PEOPLE, 2 * self.seed, names=n) for n in ("usual", "others"))
        keys = [group_key(row, CUES) for row in people]
        aside = groups_aside(keys, SHARE, "dev")
        unseen = [row for row, key in zip(people, keys, strict=True) if key in aside]
        training = [row for row, key in zip(people, keys, strict=True) if key not in aside]
        seen = [row for row in others if group_key(row, CUES) not in aside]
        # The tag separates the two kinds in one evaluation.
        measured = [{**row, "kind": kind} for kind, rows in (("unseen", unseen), ("seen", seen))
                    for row in rows[:MEASURED]]  # fmt: skip
        self.rows("lessons").parent.mkdir(parents=True, exist_ok=True)
        files = {"lessons": lessons, "people": people, "train": training, "measured": measured}
        for name, rows in files.items():
            write_rows(self.rows(name), rows, data_source=TASK)

    def _make(self, count: int, seed: int, **options: str) -> list[dict[str, Any]]:
        task = load_registry(TASKS_FILE).task(TASK)
        own = {"values": str(self.values), "world": str(self.seed), **options}
        return make_rows(task, count, seed, own)

    def train_arm(self, name: str) -> None:
        """Train one arm from the warmed-up weights and measure it; finished arms are skipped."""
        warm = {"model": str(self.folder / "warmup" / "model")}
        if ARMS[name]["method"] == "sft":
            updates = self.steps * REINFORCED["prompts_per_step"] // IMITATED["sft_batch"]
            config = self.config({**ARMS[name], **warm, "steps": updates}, "train")
        else:
            times = {"steps": self.steps, "eval_every": self.every}
            config = self.config({**REINFORCED, **ARMS[name], **warm, **times}, "people")
        train(config, self.folder / name)
        self.measure(name, self.folder / name / "model")

    def measure(self, name: str, adapter: Path | None) -> None:
        config = EvalConfig(
            kind="local", model=str(self.folder / "warmup" / "model"),
            adapter=str(adapter) if adapter else None, tasks=(TASK,), tasks_file=str(TASKS_FILE),
            data={TASK: str(self.rows("measured"))}, temperature=0.0, max_tokens=6, batch_size=256,
        )  # fmt: skip
        run_eval(config, self.folder / "measured" / name)


# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The result of one arm of one world, read from its folders."""

    unseen: float
    seen: float
    words: float
    """Share of right words over both kinds of people."""
    curve: tuple[tuple[int, float], ...]
    """(steps, exact on unseen combinations), starting before training; empty for SFT."""
    samples: int
    seconds: float
    refined: float | None
    """Reward of refined replies in the first step."""

    @property
    def area(self) -> float | None:
        return auc([x for x, _ in self.curve], [y for _, y in self.curve]) if self.curve else None


def read_result(world: World, name: str) -> Result | None:
    """The result of an arm; None if it is not finished."""
    summary = world.folder / "measured" / name / "summary.json"
    before = world.folder / "measured" / "before" / "summary.json"
    if not summary.exists() or not before.exists():
        return None
    means = _means(summary)
    curve, samples, seconds, refined = [(0, _means(before)["value/kind=unseen"])], 0, 0.0, None
    metrics = world.folder / name / "metrics.jsonl"
    for line in read_jsonl(metrics) if metrics.exists() else ():
        if f"eval/{TASK}" in line:
            curve.append((line["step"] + 1, line[f"eval/{TASK}"]))
            continue
        samples += line.get("rollouts/draft", 0) + line.get("rollouts/refined", 0)
        seconds += line.get("time/sample", 0.0) + line.get("time/train", 0.0)
        refined = line.get("reward/refined") if line["step"] == 0 else refined
    return Result(
        unseen=means["value/kind=unseen"], seen=means["value/kind=seen"],
        words=means["share"], curve=tuple(curve) if len(curve) > 1 else (),
        samples=samples, seconds=seconds, refined=refined,
    )  # fmt: skip


def _means(summary: Path) -> dict[str, float]:
    cells = json.loads(summary.read_text(encoding="utf-8"))["tasks"][TASK]
    return {name: cell["mean"] for name, cell in cells.items()}


Results = dict[str, dict[int, Result]]
"""Arm → seed → result."""


def read_results(out: Path, values: int) -> Results:
    results: Results = {}
    folders = sorted((out / f"values{values}").glob("seed*"))
    for seed in sorted(int(folder.name.removeprefix("seed")) for folder in folders):
        world = World(out, values, seed)
        for name in ("before", *ARMS):
            result = read_result(world, name)
            if result is not None:
                results.setdefault(name, {})[seed] = result
    return results


def over_seeds(values: Sequence[float]) -> list[float | None]:
    """Mean over seeds and the bounds of its 95 % interval."""
    mean = estimate(values, range(len(values)), scale=SCALE)
    return [mean.mean, mean.ci_low, mean.ci_high]


def with_interval(values: Sequence[float]) -> str:
    return cell(*over_seeds(values))


def cell(mean: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    shown = ["–" if end is None else f"{end:{sign}.3f}" for end in (mean, low, high)]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]".replace("-", "−")


def difference(results: Results, a: str, b: str) -> str:
    """Arm a minus arm b on unseen combinations, paired by seed; empty if they share no seed."""
    in_a, in_b = ({s: run.unseen for s, run in results.get(name, {}).items()} for name in (a, b))
    if not in_a.keys() & in_b.keys():
        return ""
    paired = paired_difference(in_b, in_a, {seed: seed for seed in in_a}, scale=SCALE)
    return cell(paired.difference, paired.ci_low, paired.ci_high, "+")


def table(results: Results) -> list[str]:
    """Markdown table with one row per arm: means over seeds with 95 % intervals."""
    lines = [
        "| arm | seeds | unseen combinations | seen combinations, other names "
        "| words right, both | area under the curve | samples per run | s per run |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in ("before", *ARMS):
        runs = list(results.get(name, {}).values())
        if not runs:
            continue
        areas = [run.area for run in runs if run.area is not None]
        cells = [LABELS[name], str(len(runs))]
        for of in ("unseen", "seen", "words"):
            cells.append(with_interval([getattr(run, of) for run in runs]))
        cells.append(with_interval(areas) if areas else "")
        samples, seconds = (statistics.fmean(getattr(r, of) for r in runs)
                            for of in ("samples", "seconds"))  # fmt: skip
        cells.append(f"{samples:,.0f}" if samples else "")
        cells.append(f"{seconds:.0f}" if seconds else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


PAIRS = (
    ("ditto", "shuffled"), ("ditto", "grpo"), ("ditto-dense", "grpo-dense"),
    ("ditto", "grpo-dense"), ("ditto-dense", "ditto"), ("sft", "ditto"),
)  # fmt: skip


def differences(results: Results) -> list[str]:
    rows = [(a, b, difference(results, a, b)) for a, b in PAIRS]
    body = [f"| {LABELS[a]} − {LABELS[b]} | {shown} |" for a, b, shown in rows if shown]
    return ["| unseen combinations, paired by seed | difference |", "|---|--:|", *body]


def report(out: Path, figure: Path | None) -> str:
    """Markdown report of all finished arms in `out`; draws the figure if a file is given."""
    by_size = {values: read_results(out, values) for values in (EASY, HARD)}
    lines = []
    for values, results in by_size.items():
        if results:
            lines += [f"{values} values per cue ({values**3:,} combinations):", "", *table(results)]
            lines += ["", *differences(results), ""]
    followed = [r.refined for r in by_size[EASY].get("ditto", {}).values() if r.refined is not None]
    if followed:
        lines.append(f"First step, replies with feedback: {with_interval(followed)} exactly right.")
    if figure is not None:
        draw(by_size, figure)
    return "\n".join(lines)


def draw(by_size: Mapping[int, Results], path: Path) -> None:
    """Draw accuracy on unseen combinations over samples with a 95 % band, one panel per size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = {values: results for values, results in by_size.items() if results}
    drawn, axes = pyplot.subplots(
        1, len(sizes), figsize=(5.5 * len(sizes), 4.4), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (values, results), ax in zip(sizes.items(), axes[0], strict=True):
        for place, name in enumerate(ARMS):
            runs = list(results.get(name, {}).values())
            if runs:
                _draw_arm(ax, name, runs, f"C{place}")
        count = max(len(runs) for runs in results.values())
        ax.set_title(f"{values} values per cue, {count} seed{'s' * (count != 1)}")
        ax.set_xlabel("thousand sampled replies")
    axes[0][0].set_ylabel("exactly right, unseen combinations (greedy)")
    handles, names = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, names, loc="outside upper center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path)


def _draw_arm(ax: Any, name: str, runs: Sequence[Result], color: str) -> None:
    if not runs[0].curve:
        mean = statistics.fmean(r.unseen for r in runs)
        ax.axhline(mean, color=color, linestyle=":", label=LABELS[name])
        return
    last = runs[0].curve[-1][0]
    each = runs[0].samples / last / 1000
    points = [(each * at, *over_seeds([dict(r.curve)[at] for r in runs if at in dict(r.curve)]))
              for at, _ in runs[0].curve]  # fmt: skip
    xs, means = [p[0] for p in points], [p[1] for p in points]
    ax.plot(xs, means, color=color, label=LABELS[name], marker="o", markersize=3)
    lows, highs = ([p[1] if p[i] is None else p[i] for p in points] for i in (2, 3))
    ax.fill_between(xs, lows, highs, color=color, alpha=0.12, linewidth=0)


# -- the command -----------------------------------------------------------------------------------


def worlds(seeds: int, hard_seeds: int) -> Iterator[tuple[int, int, Sequence[str]]]:
    """(values, seed, arms) in running order: a table with few seeds is available early."""
    first = min(seeds, 2)
    yield from ((EASY, seed, tuple(ARMS)) for seed in range(first))
    yield from ((HARD, seed, HARD_ARMS) for seed in range(hard_seeds))
    yield from ((EASY, seed, tuple(ARMS)) for seed in range(first, seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--hard-seeds", type=int, default=2, help="number of seeds of the harder size"
    )
    parser.add_argument(
        "--steps", type=int, default=48, help="training steps; 1.5 times as many at the harder size"
    )
    parser.add_argument(
        "--warmup", type=int, default=240, help="warm-up steps; twice as many at the harder size"
    )
    parser.add_argument("--every", type=int, default=4, help="steps between measurements")
    parser.add_argument("--only", default="", help="run only these arms: NAME,NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/cast_of_people"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--report", type=Path, metavar="OUT", help="only report finished runs")
    parser.add_argument("--figure", type=Path, help="with --report: draw the curves to this file")
    chosen = parser.parse_args()
    if chosen.report is not None:
        print(report(chosen.report, chosen.figure))
        return
    only = [name for name in chosen.only.split(",") if name] or list(ARMS)
    if strays := set(only) - set(ARMS):
        parser.error(f"unknown arm: {', '.join(strays)}; choose from {', '.join(ARMS)}")
    import torch

    torch.set_num_threads(chosen.threads)
    for values, seed, arms in worlds(chosen.seeds, chosen.hard_seeds):
        world = World(chosen.out, values, seed, chosen.steps, chosen.every, chosen.warmup)
        if values == HARD:
            longer = {"steps": chosen.steps * 3 // 2, "warmup": chosen.warmup * 2}
            world = replace(world, **longer)
        world.prepare()
        for name in (name for name in arms if name in only):
            world.train_arm(name)
            result = read_result(world, name)
            assert result is not None
            print(f"{values} values, seed {seed}, {name}: unseen {result.unseen:.3f}, seen "
                  f"{result.seen:.3f}, {result.seconds:.0f} s", flush=True)  # fmt: skip
    print(report(chosen.out, chosen.out / "curves.svg"))


if __name__ == "__main__":
    main()
