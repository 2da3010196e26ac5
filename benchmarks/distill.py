"""How much of three experts does one generalist retain? Rejection sampling and on-policy teachers.

One tiny model is warmed up with lessons on three tasks: plain stories of `tomi`, `secret_keeper`
with a single value per topic (a dialogue with a scripted visitor) and
`cast_of_people`. It is far from good and follows feedback on two of them (hardly in the
dialogue). Ditto trains an expert for each task. `soul distill` then makes a generalist in two ways
with equally many samples: rejection sampling with SFT, and on-policy distillation with each expert
as the teacher of its task. All measurements are greedy on held-out rows: new combinations of cues;
stories in the wording of training with other names, places and things; facts and secrets that
training showed under other names.

    .venv/bin/python benchmarks/distill.py --out runs/distill_benchmark
    .venv/bin/python benchmarks/distill.py --report runs/distill_benchmark

Every stage is an ordinary run folder: the first command resumes unfinished stages, the second
reports the finished ones. `--quick` runs two tasks in the small sizes of the test.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _distill import lessons

from soulkit.data.files import write_rows
from soulkit.data.rows import group_key, groups_aside
from soulkit.demo.scripted import write_stories
from soulkit.distill.config import DistillConfig, Stage
from soulkit.distill.report import Distillation, read_distillation
from soulkit.distill.run import distill
from soulkit.report.distillation import HEADS, macro_row, row_of
from soulkit.reporting import Reporter
from soulkit.runs.jsonl import read_jsonl
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.run import train

STORIES, KEEPER, CAST = "tomi", "secret_keeper", "cast_of_people"
LESSONS = "keeper_lessons"
HERE = Path(__file__).parent
CUES = ("job", "town", "pet")
BELIEFS = "first_order_.*"
WARMUP: dict[str, Any] = {
    "method": "sft", "model": "tiny", "full": True, "lr": 2e-3, "lr_schedule": "cosine",
    "warmup_steps": 20, "beta2": 0.95, "weight_decay": 0.01, "sft_feedback": 0.8,
    "sft_feedback_always": {"question": BELIEFS}, "checkpoint_every": 100, "coach": "terse",
}  # fmt: skip
EXPERT: dict[str, Any] = {
    "method": "ditto", "lr": 1e-3, "group_size": 8, "batch_size": 256, "checkpoint_every": 4,
    "keep_last": 1, "coach": "terse",
}  # fmt: skip
LONGEST = 12
"""Maximum tokens of a reply on any task."""
VISITOR = "function:soulkit.tasks.secret_keeper.task:visitor_line"
OPTION = {"option": {"max_turns": "5"}}
"""The visitor leaves after this many turns."""
BY_TASK: dict[str, dict[str, Any]] = {
    STORIES: {"prompts_per_step": 64, "mini_batch_prompts": 16},
    KEEPER: {"prompts_per_step": 16, "mini_batch_prompts": 4, "lr": 2e-3, **OPTION},
    CAST: {
        "prompts_per_step": 64,
        "mini_batch_prompts": 4,
        "temperature": 0.8,
        "eps_high": 1.0,
        "coach": "symbolic",
    },
}
DISTILLED: dict[str, Any] = {
    "keep_top": 2, "batch": 8, "lr": 1e-3, "batch_size": 256,
    **OPTION, "exclude_overlap": True,
}  # fmt: skip
BY_ROAD: dict[str, dict[str, Any]] = {"sft": {}, "opd": {"lr": 4e-4}}
"""Lower than for rejection sampling: at that rate, teachers of whole distributions make drafts
unstable, and teachers of sampled tokens destroy the base model."""
ROADS = ("sft", "opd")
LABELS = {"sft": "rejection sampling", "opd": "on-policy teachers"}


@dataclass(frozen=True)
class Size:
    """Numbers of steps, rows and samples."""

    warmup: int = 400
    batch: int = 48
    experts: Mapping[str, int] = field(
        default_factory=lambda: {STORIES: 12, KEEPER: 12, CAST: 20}
    )  # fmt: skip
    """Task → steps of Ditto."""
    values: int = 6
    """Values per cue in the cast of people."""
    unseen: float = 0.125
    """Share of the combinations of cues that are held out from training."""
    made: int = 2500
    """Rows per task for the warm-up and for training experts."""
    stories: tuple[int, int] = (9000, 2100)
    """Rows generated per split (training, evaluation), from which a balanced set is chosen."""
    prompts: int = 384
    """Training rows per task for sampling experts, or for on-policy distillation."""
    measured: int = 540
    samples: int = 4
    """Number of samples per row."""
    epochs: float = 5.0
    few: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Task → settings in which the training of its expert is smaller."""


QUICK = Size(
    warmup=120, batch=24, experts={KEEPER: 6, CAST: 10}, values=3, unseen=0.4, made=500,
    stories=(0, 0), prompts=160, measured=80, samples=2, epochs=6.0,
    few={KEEPER: {"prompts_per_step": 8, "mini_batch_prompts": 2}},
)  # fmt: skip


@dataclass(frozen=True)
class World:
    """One seed: its rows, warmed-up base, experts and generalists."""

    out: Path
    seed: int
    size: Size

    @property
    def tasks_file(self) -> Path:
        return self.out / "tasks" / "tasks.yaml"

    def rows(self, task: str, split: str) -> Path:
        return self.out / "rows" / split / f"{task}.jsonl"

    def run(self, reporter: Reporter, roads: Sequence[str] = ROADS) -> None:
        """Run all stages; finished stages are skipped and unfinished ones resumed."""
        self.write_rows()
        reporter.note("warming up the base")
        self.warm_up()
        for task in self.size.experts:
            reporter.note(f"training the expert for {task}")
            self.make_expert(task)
        for road in roads:
            reporter.note(f"distilling by {LABELS[road]}")
            self.distill(road, reporter)

    # -- rows --------------------------------------------------------------------------------------

    def write_rows(self) -> None:
        """Write the task file and the rows of all splits, unless they exist."""
        if self.tasks_file.exists():
            return
        aside = self.out / "tasks.new"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        prompts = load_registry().spec(KEEPER).home.folder / "prompts"
        shutil.copytree(prompts, aside / "prompts")
        shutil.copy(HERE / "_distill" / "lessons.py", aside)
        shutil.copy(HERE / "_distill" / "lessons.yaml", aside / "tasks.yaml")
        self._write_people()
        self._write(LESSONS, "lessons", lessons.lessons(self.size.made, self._seed(2)))
        self._write(KEEPER, "train", lessons.plain(self.size.made, self._seed(0)))
        self._write(KEEPER, "test", lessons.plain(self.size.measured, self._seed(1)))
        if STORIES in self.size.experts:
            write_stories(self.rows(STORIES, "train"), self.size.stories[0], self.seed, "train")
            write_stories(self.rows(STORIES, "test"), self.size.stories[1], self.seed, "test")
        aside.rename(self.out / "tasks")

    def _seed(self, part: int) -> int:
        return 3 * self.seed + part

    def _write_people(self) -> None:
        """Write lessons, training people, and test people with other combinations of cues."""
        task = load_registry().task(CAST)
        world = {"values": str(self.size.values), "world": str(self.seed)}

        def make(part: int, **options: str) -> list[dict[str, Any]]:
            return make_rows(task, self.size.made * 2, self._seed(part), {**world, **options})

        people = make(0)
        aside = groups_aside([group_key(row, CUES) for row in people], self.size.unseen, "test")
        unseen = [row for row in people if group_key(row, CUES) in aside]
        self._write(CAST, "lessons", make(2, kind="lessons")[: self.size.made])
        self._write(CAST, "train", [row for row in people if group_key(row, CUES) not in aside])
        distinct = {row["name"] + group_key(row, CUES): row for row in unseen}
        self._write(CAST, "test", list(distinct.values())[: self.size.measured])

    def _write(self, task: str, split: str, rows: list[dict[str, Any]]) -> None:
        path = self.rows(task, split)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, rows, data_source=task)

    # -- stages ------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Teach the base the whole vocabulary and how to follow feedback on each task."""
        files = {LESSONS: self.rows(LESSONS, "lessons"), CAST: self.rows(CAST, "lessons")}
        if STORIES in self.size.experts:
            files[STORIES] = self.rows(STORIES, "train")
        self._train("warmup", {
            **WARMUP, "steps": self.size.warmup, "sft_batch": self.size.batch,
            "tasks": dict.fromkeys(files, 1.0), "rows_per_task": self.size.made,
            "data": {task: str(file) for task, file in files.items()},
        })  # fmt: skip

    def make_expert(self, task: str) -> None:
        self._train(f"experts/{task}", {
            **EXPERT, **BY_TASK[task], **self.size.few.get(task, {}), **self._played(),
            "model": str(self.out / "warmup/model"),
            "steps": self.size.experts[task], "tasks": {task: 1.0},
            "data": {task: str(self.rows(task, "train"))},
        })  # fmt: skip

    def _train(self, name: str, settings: Mapping[str, Any]) -> None:
        shared = {"tasks_file": str(self.tasks_file), "seed": self.seed}
        config = TrainConfig.model_validate({**settings, **shared})
        train(config, self.out / name)

    def _played(self) -> dict[str, Any]:
        return {"max_tokens": LONGEST, "partner": VISITOR}

    def distill(self, road: str, reporter: Reporter) -> None:
        """Distil with one method; this also measures the base and the experts."""
        config = DistillConfig.model_validate({
            **DISTILLED, **BY_ROAD[road], **self._played(), "by": road,
            "experts": str(self.out / "experts"),
            "limit": self.size.prompts,
            "samples": self.size.samples, "epochs": self.size.epochs,
            "tasks_file": str(self.tasks_file), "seed": self.seed,
            "data": {task: str(self.rows(task, "train")) for task in self.size.experts},
            "held_out": {task: str(self.rows(task, "test")) for task in self.size.experts},
        })  # fmt: skip
        stages: tuple[Stage, ...] = ("sample", "select", "train", "report")
        distill(config, self.out / road, stages, reporter=reporter)


class Printer(Reporter):
    """Prints notes but no progress steps."""

    def note(self, line: str) -> None:
        print(line, flush=True)


# -- results ---------------------------------------------------------------------------------------


def report(out: Path) -> str:
    """Markdown report of the finished distillations in `out`."""
    lines: list[str] = []
    for road in ROADS:
        if not (out / road / "summary.json").exists():
            continue
        result = read_distillation(out / road)
        assert result is not None
        samples, seconds = costs(out / road, road)
        lines += [f"By {LABELS[road]}: {samples:,} samples, {result.steps} steps, "
                  f"{seconds:.0f} s of sampling and training.", "", *table(result), ""]  # fmt: skip
    made = [f"{name} {_seconds(out / name):.0f} s" for name in
            ("warmup", *(f"experts/{path.name}" for path in sorted((out / "experts").glob("*"))))
            if (out / name / "summary.json").exists()]  # fmt: skip
    return "\n".join([*lines, f"Before: {', '.join(made)}."])


def table(result: Distillation) -> list[str]:
    """A row per task and one for the mean, as `soul distill` prints them."""
    rows = [row_of(one) for one in result.tasks]
    rows += [macro_row(result)] if len(rows) > 1 else []
    head = [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    return [*head, *(f"| {' | '.join(row)} |" for row in rows)]


def costs(folder: Path, road: str) -> tuple[int, float]:
    """Number of samples from the experts (or the student), and seconds of sampling and training."""
    seconds = _seconds(folder / "generalist")
    if road == "opd":
        lines = read_jsonl(folder / "generalist" / "metrics.jsonl")
        return sum(line.get("rollouts/draft", 0) for line in lines), seconds
    runs = [path.parent for path in (folder / "samples").glob("*/summary.json")]
    samples = sum(len(read_jsonl(run / "episodes.jsonl")) for run in runs)
    return samples, seconds + sum(map(_seconds, runs))


def _seconds(run: Path) -> float:
    return float(json.loads((run / "summary.json").read_text(encoding="utf-8"))["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs/distill_benchmark"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="use the small sizes of the test")
    parser.add_argument("--experts-only", action="store_true", help="stop before the distillation")
    parser.add_argument("--report", type=Path, metavar="OUT", help="only report finished runs")
    chosen = parser.parse_args()
    if chosen.report is not None:
        print(report(chosen.report))
        return
    import torch

    torch.set_num_threads(chosen.threads)
    chosen.out.mkdir(parents=True, exist_ok=True)
    size = QUICK if chosen.quick else Size()
    roads = () if chosen.experts_only else ROADS
    World(chosen.out, chosen.seed, size).run(Printer(), roads)
    print(report(chosen.out))


if __name__ == "__main__":
    main()
