"""Can a model learn new facts without forgetting its other skills? Plain SFT against MixSD.

Every seed generates 200 facts (a person's home, trade and pet), stories of `tomi`, and a tiny model
with random weights and a vocabulary for both. The warm-up (settings of the demo) teaches it to
answer questions about stories, to read a fact in its context, and to guess without context in its
own wording ("Bura works as a judge."). It knows none of the 200 facts. Each arm then teaches the
facts from the same weights in equally many steps, training all weights:

    plain        SFT on the answers of the rows, whose wording differs from the model's own
    own-form     SFT on the same answers in the model's own wording, which real data never has: it
                 separates forgetting due to the facts from forgetting due to the wording
    mixsd-L      the model writes the answers itself, a share L of the tokens with the fact in view

Greedy measurements every few steps: the facts without context, held-out stories (may be forgotten),
and facts about other people in the context.

    .venv/bin/python benchmarks/mixsd.py --out runs/mixsd
    .venv/bin/python benchmarks/mixsd.py --report runs/mixsd --figure FILE.svg

Every arm is an ordinary run folder: the first command resumes unfinished runs, the second reports
the finished ones. `--only` and `--seeds` choose arms and seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from soulkit.demo.scripted import TASK, write_stories
from soulkit.metrics.comparisons import paired_difference
from soulkit.metrics.intervals import estimate
from soulkit.models.local.sampler import LocalModel
from soulkit.runs.jsonl import read_jsonl, write_aside, write_json
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import examples_to_inspect
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.run import train
from soulkit.train.sft.mixsd import expert_context
from soulkit.types import Call, Example, Sampling, Segment

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tomi_ditto"))
from tomi_ditto import WARMUP

FACTS, OTHERS = 200, 200
"""Number of people whose facts are taught, and of people whose facts are only read in context."""
STORIES, HELD_OUT = 9000, 2100
"""Number of generated rows; `write_stories` keeps a quarter."""
LESSONS = 12_000
SHARES = {"stories": 0.6, "reading": 0.3, "guessing": 0.1}
"""Number of warm-up lessons."""
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
KINDS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "town": ("Where does {name} live?", "{name} lives in {value}.",
             "{name} has a house in {value}.",
             ("Delft", "Porto", "Ghent", "Turku", "Graz", "Lyon", "Kyoto", "Cusco", "Fez", "Hue",
              "Oslo", "Bern")),
    "trade": ("What is the trade of {name}?", "{name} works as a {value}.",
              "The trade of {name} is that of a {value}.",
              ("baker", "nurse", "pilot", "farmer", "tailor", "teacher", "plumber", "judge",
               "miner", "poet", "clerk", "smith")),
    "pet": ("Which animal does {name} keep?", "{name} keeps a {value}.", "{name} has a {value}.",
            ("goat", "parrot", "cat", "tortoise", "hen", "ferret", "carp", "mule", "owl", "newt",
             "dog", "hamster")),
}  # fmt: skip
"""Kind → question, answer in the model's own form, fact, values."""
VALUES = frozenset(value for *_, values in KINDS.values() for value in values)
TAUGHT: dict[str, Any] = {
    "method": "sft", "full": True, "sft_batch": 32, "lr": 3e-4, "lr_schedule": "constant",
    "warmup_steps": 10, "beta2": 0.95, "keep_last": 1000, "side": "assistant",
}  # fmt: skip
MIXED = {"objective": "mixsd", "mix_tokens": 24}
ARMS: dict[str, dict[str, Any]] = {
    "plain": {}, "own-form": {},
    **{f"mixsd-{share:g}": {**MIXED, "mix_lambda": share} for share in (0.0, 0.25, 0.5, 0.75, 1.0)},
}  # fmt: skip
LABELS = {
    "before": "before", "plain": "plain SFT, the rows' answers",
    "own-form": "plain SFT, answers in the model's form",
    **{f"mixsd-{share:g}": f"MixSD, λ = {share:g}" for share in (0.0, 0.25, 0.5, 0.75, 1.0)},
}  # fmt: skip
ENOUGH = 0.9
"""Share of learned facts at which arms are compared, because they learn at different speeds."""
GUESSING = 0.5
"""Accuracy of guessing between the two places of a story."""
SCALE = (0.0, 1.0)

Row = dict[str, Any]


def fact_row(rng: random.Random, name: str) -> dict[str, str]:
    """A fact about a person: question, answer in two wordings, value."""
    kind = rng.choice(sorted(KINDS))
    question, own, fact, values = KINDS[kind]
    value = rng.choice(values)
    parts = {"question": question, "own": own, "fact": fact, "plain": "Answer: {value}"}
    return {"value": value, **{k: v.format(name=name, value=value) for k, v in parts.items()}}


def chat(context: Sequence[Segment], reply: str, **beside: str) -> Row:
    messages = [*context, Segment("assistant", reply)]
    return {"messages": [{"role": s.role, "content": s.text} for s in messages], **beside}


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    write_aside(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


@dataclass(frozen=True)
class World:
    """One seed: a folder with its facts, stories, warmed-up model and arms."""

    out: Path
    seed: int
    steps: int
    every: int
    warmup: int
    texts: int = 16
    """Number of answers that MixSD writes per fact."""
    most: int = 1000
    """Maximum number of measured rows of a kind."""

    @property
    def folder(self) -> Path:
        return self.out / f"seed{self.seed}"

    def rows(self, name: str) -> Path:
        return self.folder / "rows" / f"{name}.jsonl"

    @cached_property
    def people(self) -> list[str]:
        """Generated names; facts about the first FACTS people are taught."""
        rng = random.Random(f"people/{self.seed}")
        every = [(a + b).capitalize() for a in SYLLABLES for b in SYLLABLES if a != b]
        return rng.sample(every, FACTS + OTHERS)

    @cached_property
    def facts(self) -> list[dict[str, str]]:
        """One fact per person."""
        rng = random.Random(f"facts/{self.seed}")
        return [fact_row(rng, name) for name in self.people]

    @cached_property
    def task(self) -> Task:
        return load_registry().task(TASK)

    def stories(self, name: str) -> list[Example]:
        return list(examples_to_inspect(self.task, str(self.rows(name))).examples)

    def prepare(self) -> None:
        """Write the rows, warm up the model and measure it, unless this is done."""
        if not self.rows("lessons").exists():
            self.write_rows()
        warmup = {k: v for k, v in WARMUP.items() if not k.startswith(("sft_feedback", "coach"))}
        config = {**warmup, "steps": self.warmup, "side": "assistant"}
        self.train(config, "lessons", "warmup")
        self.measure("before", self.folder / "warmup" / "model", whole=True)

    def write_rows(self) -> None:
        write_stories(self.rows("stories"), STORIES, self.seed, "train")
        write_stories(self.rows("held_out"), HELD_OUT, self.seed, "test")
        taught = self.facts[:FACTS]
        for form in ("plain", "own"):
            write_lines(self.rows(form), (
                chat([Segment("user", row["question"])], row[form], fact=row["fact"])
                for row in taught
            ))  # fmt: skip
        write_lines(self.rows("lessons"), self.lessons())

    def lessons(self) -> list[Row]:
        """The warm-up lessons. Every name occurs in the first lessons, each time with a new random
        value, so that it becomes a word of the vocabulary."""
        rng = random.Random(f"lessons/{self.seed}")
        stories = [self.story(example) for example in self.stories("stories")]
        rows = [self.about(rng, name, told=False) for name in self.people]
        rows += [chat([Segment("user", "?")], self.facts[0]["plain"])]
        for kind in rng.choices(list(SHARES), list(SHARES.values()), k=LESSONS):
            name = rng.choice(self.people)
            told = kind == "reading"
            rows.append(rng.choice(stories) if kind == "stories" else self.about(rng, name, told))
        return rows

    def about(self, rng: random.Random, name: str, told: bool) -> Row:
        row = fact_row(rng, name)
        context: tuple[Segment, ...] = (Segment("user", row["question"]),)
        return chat(expert_context(context, row["fact"]) if told else context, row["own"])

    def story(self, example: Example) -> Row:
        episode = self.task.gold(example)
        assert episode is not None
        turn = episode.traces[0].turns[0]
        return chat(turn.context, turn.completion.text)

    def train(self, settings: Mapping[str, Any], rows: str, name: str) -> None:
        corpora = [{"path": str(self.rows(rows)), "name": rows}]
        config = TrainConfig.model_validate({**settings, "corpora": corpora, "seed": self.seed})
        train(config, self.folder / name)

    def train_arm(self, name: str) -> None:
        """Train one arm from the warmed-up weights and measure it; finished arms are skipped."""
        rows = "own" if name == "own-form" else "plain"
        warm = str(self.folder / "warmup" / "model")
        times = {"steps": self.steps, "checkpoint_every": self.every}
        texts = {"mix_samples": self.texts} if name.startswith("mixsd") else {}
        self.train({**TAUGHT, **ARMS[name], **texts, "model": warm, **times}, rows, name)
        for folder in sorted((self.folder / name / "checkpoints").glob("step_*")):
            step = int(folder.name.removeprefix("step_"))
            if step % self.every == 0:
                self.measure(f"{name}/{step}", folder, whole=step == self.steps)

    def measure(self, name: str, weights: Path, *, whole: bool) -> None:
        """Measure a model: on all held-out stories at the start and the end, on some in between."""
        path = self.folder / "measured" / f"{name}.json"
        if path.exists():
            return
        stories = self.stories("held_out")
        random.Random(0).shuffle(stories)
        taught, others = self.facts[:FACTS][: self.most], self.facts[FACTS:][: self.most]
        model = LocalModel.load(weights, batch_size=256)
        hits = {
            "stories": self._stories(model, stories[: self.most if whole else FACTS]),
            "facts": self._facts(model, taught, lambda row, context: context),
            "reading": self._facts(
                model, others, lambda row, context: expert_context(context, row["fact"])
            ),
        }
        write_json(path, hits)

    def _stories(self, model: LocalModel, examples: Sequence[Example]) -> dict[str, Any]:
        task: Any = self.task
        contexts = [next(iter(task.previews(example).values())) for example in examples]
        replies = answers(model, contexts, 8)
        right = [
            task.grade(e, task.parse(reply)[0]) for e, reply in zip(examples, replies, strict=True)
        ]
        return {"share": sum(right) / len(right), "n": len(right)}

    def _facts(
        self, model: LocalModel, rows: Sequence[Mapping[str, str]],
        around: Callable[[Mapping[str, str], tuple[Segment, ...]], Sequence[Segment]],
    ) -> dict[str, Any]:  # fmt: skip
        """Whether the reply names the right value and no other, in any wording."""
        contexts = [around(row, (Segment("user", row["question"]),)) for row in rows]
        replies = answers(model, contexts, 12)
        named = [VALUES & set(re.findall(r"[A-Za-z]+", reply)) for reply in replies]
        right = [values == {row["value"]} for values, row in zip(named, rows, strict=True)]
        return {"share": sum(right) / len(right), "n": len(right), "examples": replies[:3]}


def answers(model: LocalModel, contexts: Sequence[Sequence[Segment]], limit: int) -> list[str]:
    """Greedy replies."""
    greedy = Sampling(temperature=0.0, max_tokens=limit)

    async def ask() -> list[str]:
        calls = [Call(role="actor", example_id=str(i)) for i in range(len(contexts))]
        asked = (model.complete(c, greedy, k) for c, k in zip(contexts, calls, strict=True))
        return [reply.text for reply in await asyncio.gather(*asked)]

    return asyncio.run(ask())


# -- results ---------------------------------------------------------------------------------------

Point = dict[str, float]
"""`stories`, `facts`, `reading`: shares of one measurement."""


@dataclass(frozen=True)
class Result:
    """The result of one arm and seed: step → measurement, starting before training."""

    curve: dict[int, Point]
    seconds: float

    @property
    def before(self) -> Point:
        return self.curve[0]

    @property
    def end(self) -> Point:
        return self.curve[max(self.curve)]

    @property
    def enough(self) -> tuple[int, Point] | None:
        """The first measurement with ENOUGH of the facts; None if there is none."""
        points = sorted(self.curve.items())
        return next(((at, p) for at, p in points if p["facts"] >= ENOUGH), None)

    @property
    def kept(self) -> float | None:
        """Retained share of the story accuracy above guessing; None if there was none."""
        before = self.before["stories"] - GUESSING
        return (self.end["stories"] - GUESSING) / before if before else None


Results = dict[str, dict[int, Result]]
"""Arm → seed → result."""


def read_point(path: Path) -> Point:
    return {k: v["share"] for k, v in json.loads(path.read_text(encoding="utf-8")).items()}


def read_results(out: Path) -> Results:
    results: Results = {}
    for folder in sorted(out.glob("seed*")):
        before = folder / "measured" / "before.json"
        for name in ARMS:
            points = {
                int(p.stem): read_point(p) for p in (folder / "measured" / name).glob("*.json")
            }
            if not before.exists() or not (folder / name / "summary.json").exists() or not points:
                continue
            lines = read_jsonl(folder / name / "metrics.jsonl")
            seconds = sum(line.get("time/train", 0.0) for line in lines)
            seed = int(folder.name.removeprefix("seed"))
            result = Result({0: read_point(before), **points}, seconds)
            results.setdefault(name, {})[seed] = result
    return results


def cell(values: Sequence[float | None]) -> str:
    """Mean over seeds, with its interval if there is one."""
    if all(value is None for value in values):
        return "–"
    outcome = estimate(values, range(len(values)), scale=SCALE)
    low, high = outcome.ci_low, outcome.ci_high
    beside = "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
    return f"{outcome.mean:.3f}{beside}"


def table(results: Results) -> list[str]:
    """Markdown table with one row per arm: means over seeds with 95 % intervals."""
    lines = [
        "| arm | seeds | facts recalled | held-out stories | kept, beyond guessing "
        f"| facts read in context | stories where {ENOUGH:.0%} of the facts are there (step) "
        "| facts read there | s a run |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    first = next(iter(results.values()), {})
    start = [run.before for run in first.values()]
    cells = [cell([p[of] for p in start]) for of in ("facts", "stories", "reading")]
    lines.append(f"| before | {len(start)} | {cells[0]} | {cells[1]} | | {cells[2]} | | | |")
    for name, runs in ((n, list(results[n].values())) for n in ARMS if n in results):
        ends = [run.end for run in runs]
        reached = [run.enough for run in runs if run.enough is not None]
        steps = f" ({', '.join(str(at) for at, _ in reached)})" if reached else ""
        parts = [
            LABELS[name], str(len(runs)), cell([p["facts"] for p in ends]),
            cell([p["stories"] for p in ends]), cell([run.kept for run in runs]),
            cell([p["reading"] for p in ends]),
            cell([p["stories"] for _, p in reached]) + steps,
            cell([p["reading"] for _, p in reached]),
            f"{sum(run.seconds for run in runs) / len(runs):.0f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(parts)} |")
    return lines


def differences(results: Results) -> list[str]:
    """Each arm minus plain SFT at the end, paired by seed."""
    lines = ["| paired by seed | held-out stories | facts read in context |", "|---|--:|--:|"]
    plain = results.get("plain", {})
    for name in (n for n in ARMS if n != "plain" and n in results):
        if plain.keys() & results[name].keys():
            parts = [_difference(plain, results[name], of) for of in ("stories", "reading")]
            lines.append(f"| {LABELS[name]} − {LABELS['plain']} | {' | '.join(parts)} |")
    return lines


def _difference(a: Mapping[int, Result], b: Mapping[int, Result], of: str) -> str:
    """b − a, with its interval if at least two seeds differ."""
    before, after = (_ends(side, of) for side in (a, b))
    d = paired_difference(before, after, {seed: seed for seed in a.keys() & b.keys()}, scale=SCALE)
    ends = "" if d.ci_low is None else f" [{d.ci_low:+.2f}, {d.ci_high:+.2f}]"
    return f"{d.difference:+.3f}{ends}".replace("-", "−")


def _ends(runs: Mapping[int, Result], of: str) -> dict[Hashable, float | None]:
    return {seed: run.end[of] for seed, run in runs.items()}


def curves(results: Results) -> list[str]:
    """Markdown table: facts / stories at every measurement, means over seeds."""
    names = [name for name in ARMS if name in results]
    steps = sorted({at for runs in results.values() for run in runs.values() for at in run.curve})
    lines = [
        f"| step | {' | '.join(LABELS[name] for name in names)} |",
        f"|--:|{'--:|' * len(names)}",
    ]
    for at in steps:
        cells = []
        for name in names:
            points = [run.curve[at] for run in results[name].values() if at in run.curve]
            means = [
                sum(p[of] for p in points) / max(len(points), 1) for of in ("facts", "stories")
            ]
            cells.append(f"{means[0]:.2f} / {means[1]:.2f}" if points else "")
        lines.append(f"| {at} | {' | '.join(cells)} |")
    return lines


def report(out: Path, figure: Path | None) -> str:
    """Markdown report of all finished arms in `out`; draws the figure if a file is given."""
    results = read_results(out)
    if not results:
        return "nothing is finished"
    if figure is not None:
        draw(results, figure)
    parts = [*table(results), "", *differences(results), "", "facts / stories:", ""]
    return "\n".join([*parts, *curves(results)])


def draw(results: Results, path: Path) -> None:
    """Draw held-out stories over recalled facts: one line per arm through the means over seeds at
    each measurement; dots are single seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, ax = pyplot.subplots(figsize=(8.4, 4.8), layout="constrained")
    for place, name in enumerate(ARMS):
        curves = [run.curve for run in results.get(name, {}).values()]
        if not curves:
            continue
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        across, upward = (
            [statistics.fmean(curve[step][what] for curve in curves) for step in steps]
            for what in ("facts", "stories")
        )
        ax.plot(across, upward, f"C{place}-", label=LABELS[name])
        dots = [curve[step] for curve in curves for step in steps]
        ax.plot(
            [dot["facts"] for dot in dots], [dot["stories"] for dot in dots], f"C{place}o",
            markersize=2.5, alpha=0.4,
        )  # fmt: skip
    ax.set_xlabel("facts recalled without context")
    ax.set_ylabel("held-out stories")
    drawn.legend(loc="outside right upper", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path)


# -- the command -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", default="0,1,2,3,4", help="SEED,SEED")
    parser.add_argument("--steps", type=int, default=400, help="training steps per arm")
    parser.add_argument("--every", type=int, default=50, help="steps between measurements")
    parser.add_argument("--warmup", type=int, default=300, help="warm-up steps")
    parser.add_argument("--texts", type=int, default=16, help="MixSD answers per fact")
    parser.add_argument(
        "--most", type=int, default=1000, help="maximum number of measured rows of a kind"
    )
    parser.add_argument("--only", default="", help="run only these arms: NAME,NAME")
    parser.add_argument("--out", type=Path, default=Path("runs/mixsd"))
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
    for seed in map(int, chosen.seeds.split(",")):
        world = World(
            chosen.out, seed, chosen.steps, chosen.every, chosen.warmup, chosen.texts, chosen.most
        )
        world.prepare()
        for name in only:
            started = time.monotonic()
            world.train_arm(name)
            end = read_results(chosen.out)[name][seed].end
            print(f"seed {seed}, {name}: facts {end['facts']:.3f}, stories {end['stories']:.3f}, "
                  f"reading {end['reading']:.3f}, {time.monotonic() - started:.0f} s",
                  flush=True)  # fmt: skip
    print(report(chosen.out, chosen.out / "curves.svg"))


if __name__ == "__main__":
    main()
