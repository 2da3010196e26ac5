"""The training demo: what a model learns from partial feedback, and from a reward alone.

    rows ──▶ warm-up (SFT) ──▶ before
                  │
                  ├──▶ ditto ────▶ after_ditto       feedback on the model's own draft
                  ├──▶ shuffled ─▶ after_shuffled    the same with feedback on another draft
                  └──▶ grpo ─────▶ after_grpo        no feedback, as many samples

The task is `cast_of_people`: a hidden rule determines the reply. The warm-up teaches a tiny model
the form of a reply and to follow feedback, but nothing about the rule. The three arms start from
the same weights, have the same reward and sample the same number of replies; each runs in a process
of its own with one thread. Evaluations are greedy, on combinations of job, town and pet that no arm
trained on. Each part is an ordinary run folder: finished parts are skipped, others resumed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.data.files import write_rows
from soulkit.data.rows import group_key, groups_aside
from soulkit.eval.config import EvalConfig
from soulkit.eval.results.summary import Cell, recorded_summary
from soulkit.eval.run.runner import run_eval
from soulkit.report.load import NOTES
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import stored_json, write_json
from soulkit.runs.records import stream_records
from soulkit.tasks.kit.made_rows import make_rows, split_seed
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.processes import run_together
from soulkit.types import Record

TASK = "cast_of_people"
CUES = ("job", "town", "pet")
LESSONS, PEOPLE, MEASURED = 12_000, 4096, 512
"""Rows for the warm-up, rows of people, and how many of the held-out ones are evaluated."""
HELD_OUT = 0.125
"""Share of the combinations of cues that no arm trains on."""
LONGEST = 14
"""Maximum tokens of a reply; one in form has ten."""
WARMUP: dict[str, Any] = {
    "method": "sft", "model": "tiny", "full": True, "steps": 160, "sft_batch": 48, "lr": 2e-3,
    "lr_schedule": "cosine", "warmup_steps": 20, "beta2": 0.95, "weight_decay": 0.01,
    "sft_feedback": 0.6, "checkpoint_every": 40, "coach": "symbolic", "threads": 1,
}  # fmt: skip
REINFORCED: dict[str, Any] = {
    "prompts_per_step": 64, "mini_batch_prompts": 4, "lr": 1e-3, "lr_schedule": "cosine",
    "temperature": 0.8, "eps_high": 1.0,
    "max_tokens": LONGEST, "batch_size": 256, "checkpoint_every": 6, "keep_last": 1,
    "coach": "symbolic", "threads": 1, "engine": "local",
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "ditto": {"method": "ditto", "group_size": 8},
    "shuffled": {"method": "ditto", "group_size": 8, "shuffle_feedback": True},
    "grpo": {"method": "grpo", "group_size": 16},
    "dense": {"method": "grpo", "group_size": 16, "option": {"dense": "true"}},
}
SHOWN = ("ditto", "shuffled", "grpo")
"""The arms of the demo; `benchmarks/demo.py` has all."""
REWARD_ALONE = (
    "One of 343 replies is right, which is why a reward alone finds nothing. With a reward for "
    "every right word, GRPO learns the rule, too: see 'The demo' in docs/benchmarks.md."
)
"""The condition under which the result holds."""
ON_THE_RESULTS = (
    "The held-out people combine job, town and pet in ways that no arm trained on; each job, town "
    "and pet alone occurs in training. Intervals are over combinations, not over people.",
    "Feedback names two of the three ways of a person, in other words than the reply's, and for "
    "another draft perhaps another two. All arms get the same reward: 1 for a right reply, else "
    "0.1 for a reply in form.",
    REWARD_ALONE,
)
"""Notes on the page."""
METRICS = {"exact": "value", "words": "words", "in_form": "in_form"}
"""Name in the results → metric of the evaluation."""


@dataclass(frozen=True)
class Demo:
    """One demonstration in the folder `out`."""

    out: Path
    seed: int = 0
    """Seed of the rule, the rows and the training."""
    steps: int = 24

    def run(self, reporter: Reporter = SILENT) -> dict[str, Any]:
        """Run all parts; finished ones are skipped, interrupted ones resumed."""
        started = time.monotonic()
        self.write_rows()
        shown: list[str] = []

        def show_example(arm: str = "ditto") -> None:
            if arm == "ditto" and not shown:
                shown.extend(self.example())
                for line in shown:
                    reporter.note(line)

        with reporter.steps(WARMUP["steps"], "warm up (SFT)") as steps:
            run_together({"warmup": partial(self.make, "warmup")}, steps)
        with reporter.steps(len(SHOWN) * self.steps, f"train {len(SHOWN)} arms") as steps:
            run_together({arm: partial(self.make, arm) for arm in SHOWN}, steps, show_example)
        show_example()
        return {"seconds": round(time.monotonic() - started, 1), "arms": self.results()}

    def write_rows(self) -> None:
        """Write lessons, people to train on, and people with held-out cues, unless they exist."""
        if self.rows("held_out").exists():
            return
        task, seed = load_registry().task(TASK), split_seed(self.seed, "train")
        world = {"world": str(self.seed)}
        people = make_rows(task, PEOPLE, seed, world)
        aside = groups_aside([group_key(row, CUES) for row in people], HELD_OUT, "dev")
        trained, held_out = (
            [row for row in people if (group_key(row, CUES) in aside) == held] for held in (0, 1)
        )
        self.out.joinpath("rows").mkdir(parents=True, exist_ok=True)
        lessons = make_rows(task, LESSONS, seed, {**world, "kind": "lessons"})
        rows = {"lessons": lessons, "people": trained, "held_out": held_out[:MEASURED]}
        for name, part in rows.items():
            write_rows(self.rows(name), part, data_source=TASK)

    def rows(self, name: str) -> Path:
        return self.out / "rows" / f"{name}.jsonl"

    @property
    def warm(self) -> Path:
        return self.out / "warmup" / "model"

    def make(self, name: str, reporter: Reporter = SILENT) -> None:
        """Train one part and evaluate it."""
        from soulkit.train.run import train

        train(self.config(name), self.out / name, reporter=reporter)
        reporter.phase("evaluation")
        run_eval(self.evaluation(name), self.out / evaluation_of(name))

    def config(self, name: str) -> TrainConfig:
        """The settings of the warm-up or of an arm."""
        own = {**REINFORCED, **ARMS.get(name, {}), "model": str(self.warm), "steps": self.steps}
        settings, rows = (WARMUP, "lessons") if name == "warmup" else (own, "people")
        data = {"tasks": {TASK: 1.0}, "data": {TASK: str(self.rows(rows))}, "seed": self.seed}
        return TrainConfig.model_validate({**settings, **data})

    def evaluation(self, name: str) -> EvalConfig:
        """Greedy replies to the held-out people after the warm-up or after an arm."""
        adapter = None if name == "warmup" else str(self.out / name / "model")
        return EvalConfig(
            kind="local", model=str(self.warm), adapter=adapter, tasks=(TASK,),
            data={TASK: str(self.rows("held_out"))}, temperature=0.0, max_tokens=LONGEST,
            batch_size=64, seed=self.seed, threads=1,
        )  # fmt: skip

    def cells(self, name: str) -> Mapping[str, Cell]:
        """Metric → cell of the evaluation after a part."""
        cells = recorded_summary(self.out / evaluation_of(name)).tasks[TASK]
        return {metric: cells[own] for metric, own in METRICS.items()}

    def results(self) -> dict[str, Any]:
        """The `arms` of `soul demo --json`."""
        names = {"before": "warmup", **{arm: arm for arm in SHOWN}}
        return {shown: _numbers(self.cells(name)) for shown, name in names.items()}

    def example(self) -> list[str]:
        """The first wrong draft of Ditto whose refined reply is right; empty if there is none."""
        drafts: dict[tuple[str, int], Record] = {}
        for record in stream_records(self.out / "ditto" / "episodes.jsonl"):
            place = record.example_id, record.rollout
            draft = drafts.setdefault(place, record)
            if record.given and record.score.value and not draft.score.value:
                return [
                    f"example: {draft.prompt}",
                    f"before training: {_reply(draft)} (wrong)",
                    f"feedback: {record.given.text}",
                    f"with feedback: {_reply(record)} (right)",
                ]
        return []

    def write_summary(self, results: Mapping[str, Any]) -> None:
        """Write `summary.json` of the whole demo: the evaluation after Ditto, and `results`."""
        file = self.out / evaluation_of("ditto") / "summary.json"
        after = stored_json(file)
        evaluation = {key: after[key] for key in ("model", "protocol", "cost", "tasks")}
        line = {"command": "demo", **evaluation, **results, NOTES: list(ON_THE_RESULTS)}
        write_json(self.out / "summary.json", line)


def evaluation_of(name: str) -> str:
    """The folder of the evaluation after a part."""
    return "before" if name == "warmup" else f"after_{name}"


def _numbers(cells: Mapping[str, Cell]) -> dict[str, Any]:
    interval = [cells["exact"].ci_low, cells["exact"].ci_high]
    return {**{metric: cell.mean for metric, cell in cells.items()}, "ci": interval}


def _reply(record: Record) -> str:
    return record.episode.transcript[-1].text
