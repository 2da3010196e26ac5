"""The training demo: trains and evaluates a tiny model on one CPU in minutes, without network.

A tiny model learns to read stories and to *use* feedback: fact questions are taught with and
without feedback, belief questions only with it (teaching these without feedback too would train
the model to ignore it). Then Ditto trains the model to do without feedback. The model is
evaluated before and after on held-out stories: new combinations of names, places and things in the
same wording. A control run trains for as many steps with shuffled feedback. Each part is an
ordinary run folder.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.demo.scripted import BELIEFS, TASK, write_stories
from soulkit.eval.config import EvalConfig
from soulkit.eval.results.summary import Cell, headline
from soulkit.eval.run.runner import run_eval
from soulkit.report.load import NOTES
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.jsonl import write_json
from soulkit.train.config import TrainConfig
from soulkit.train.run import train
from soulkit.train.state.metrics import read_step_lines

WARMUP: dict[str, Any] = {
    "method": "sft", "model": "tiny", "full": True, "steps": 240, "sft_batch": 48, "lr": 2e-3,
    "lr_schedule": "cosine", "warmup_steps": 20, "beta2": 0.95, "weight_decay": 0.01,
    "sft_feedback": 0.5, "sft_feedback_always": {"question": BELIEFS},
    "checkpoint_every": 240, "coach": "terse",
}  # fmt: skip
DITTO: dict[str, Any] = {
    "method": "ditto", "prompts_per_step": 64, "group_size": 8, "mini_batch_prompts": 16,
    "lr": 1e-3, "max_tokens": 8, "coach": "terse",
    "batch_size": 256, "checkpoint_every": 100,
}  # fmt: skip

CONTROL_STAGE = "control: shuffled feedback"
TRAIN_ROWS, TEST_ROWS = 9000, 1800
WHY_THEY_MEET = (
    "With the same number of steps, training on shuffled feedback reaches about the same accuracy "
    "as Ditto. In this task the answer and the feedback are each one of two places, so any "
    "feedback makes the model try the other place, and the reward does the rest. The accuracies "
    "show that this exploration helps, not that the content of the feedback is used; the gap at "
    "the first step shows that. For a task where the content decides, see 'A cast of people' in "
)
"""Explains why training and its control reach similar accuracies."""
WHAT_IS_HELD_OUT = (
    "The held-out stories were not trained on, but only their combinations of names, places and "
    "things are new. Apart from these, nearly every held-out question reads like a training "
    "question. The accuracies do not apply to stories in other words."
)
"""What the held-out rows test."""
ON_THE_RESULTS = (WHAT_IS_HELD_OUT, WHY_THEY_MEET)


@dataclass(frozen=True)
class Demo:
    """One demonstration in the folder `out`."""

    out: Path
    seed: int = 0
    steps: int = 30

    @property
    def rows(self) -> Path:
        return self.out / "rows" / "train.jsonl"

    @property
    def held_out(self) -> Path:
        return self.out / "rows" / "held_out.jsonl"

    @property
    def warm(self) -> Path:
        return self.out / "warmup" / "model"

    def run(self, reporter: Reporter = SILENT) -> dict[str, Any]:
        """Run all stages; finished ones are skipped, interrupted ones resumed."""

        def learn(settings: dict[str, Any], name: str, title: str) -> None:
            with reporter.steps(settings["steps"], title) as steps:
                train(self.config(settings), self.out / name, reporter=steps.run())

        started = time.monotonic()
        self.write_rows()
        learn(WARMUP, "warmup", "warm up (SFT)")
        before = self.measure("before", None)
        ditto = {**DITTO, "model": str(self.warm), "steps": self.steps}
        learn(ditto, "train", "train (Ditto)")
        after = self.measure("after", self.out / "train" / "model")
        learn({**ditto, "shuffle_feedback": True}, "control", CONTROL_STAGE)
        shuffled = self.measure("after_shuffled", self.out / "control" / "model")
        return self.results(before, after, shuffled, time.monotonic() - started)

    def write_rows(self) -> None:
        """Write training and held-out stories, unless they exist."""
        write_stories(self.rows, TRAIN_ROWS, self.seed, "train")
        write_stories(self.held_out, TEST_ROWS, self.seed, "test")

    def config(self, settings: dict[str, Any]) -> TrainConfig:
        rows = {"tasks": {TASK: 1.0}, "data": {TASK: str(self.rows)}, "seed": self.seed}
        return TrainConfig.model_validate({**settings, **rows})

    def measure(self, name: str, adapter: Path | None) -> dict[str, Cell]:
        """Greedy accuracy on the held-out rows."""
        config = EvalConfig(
            kind="local", model=str(self.warm), adapter=str(adapter) if adapter else None,
            tasks=(TASK,), data={TASK: str(self.held_out)}, temperature=0.0, max_tokens=8,
            batch_size=128, seed=self.seed,
        )  # fmt: skip
        _, summary = run_eval(config, self.out / name)
        return summary.tasks[TASK]

    def results(
        self, before: dict[str, Cell], after: dict[str, Cell], control: dict[str, Cell],
        seconds: float,
    ) -> dict[str, Any]:  # fmt: skip
        """The output of `soul demo --json`. The gaps are from the first step, where the policy is
        the warmed-up model in both the run and its control."""
        steps = [line.rewards for line in read_step_lines(self.out / "train" / "metrics.jsonl")]
        first, last = steps[0], steps[-1]
        shuffled = read_step_lines(self.out / "control" / "metrics.jsonl")[0].rewards
        return {
            "before": headline(before).mean,
            "after": headline(after).mean,
            "after_shuffled": headline(control).mean,
            "draft_reward": last.draft,
            "refined_reward": last.refined,
            "loo_gap": first.loo,
            "loo_gap_ci": [first.loo_low, first.loo_high],
            "loo_gap_shuffled": shuffled.loo,
            "loo_gap_shuffled_ci": [shuffled.loo_low, shuffled.loo_high],
            "before_ci": _interval(headline(before)),
            "after_ci": _interval(headline(after)),
            "after_shuffled_ci": _interval(headline(control)),
            "beliefs_before": _beliefs(before),
            "beliefs_after": _beliefs(after),
            "beliefs_after_shuffled": _beliefs(control),
            "seconds": round(seconds, 1),
        }

    def write_summary(self, results: dict[str, Any]) -> None:
        """Write `summary.json` of the whole demo: the evaluation after training, and `results`."""
        after = json.loads((self.out / "after" / "summary.json").read_text(encoding="utf-8"))
        evaluation = {key: after[key] for key in ("model", "protocol", "cost", "tasks")}
        notes = {NOTES: list(ON_THE_RESULTS)}
        write_json(self.out / "summary.json", {"command": "demo", **evaluation, **results, **notes})


def _interval(cell: Cell) -> list[float | None]:
    return [cell.ci_low, cell.ci_high]


def _beliefs(cells: dict[str, Cell]) -> dict[str, float | None]:
    """Accuracy on belief questions, by whether the belief is true or false."""
    prefix = "value/question=first_order_"
    return {k.removeprefix(prefix): c.mean for k, c in cells.items() if k.startswith(prefix)}
