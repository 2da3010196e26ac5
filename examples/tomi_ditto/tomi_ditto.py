"""Ditto on stories about beliefs (`tomi`), with a control that ends where Ditto ends.

    .venv/bin/python examples/tomi_ditto/tomi_ditto.py --out runs/tomi_ditto

A tiny model learns to read stories and to *use* feedback: fact questions are taught with and
without feedback, belief questions only with it (teaching these without feedback too would train
the model to ignore it). Ditto then trains the model to do without feedback; the control trains for
as many steps with shuffled feedback. Each part is an ordinary run folder: finished parts are
skipped, interrupted ones resumed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.demo.scripted import TASK, write_stories
from soulkit.eval.config import EvalConfig
from soulkit.eval.results.summary import Cell, headline
from soulkit.eval.run.runner import run_eval
from soulkit.metrics.intervals import estimate_text, signed
from soulkit.train.config import TrainConfig
from soulkit.train.run import train
from soulkit.train.state.metrics import read_step_lines

BELIEFS = "first_order_.*"
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
TRAIN_ROWS, TEST_ROWS = 9000, 1800
"""Generated rows, of which `write_stories` keeps a balanced quarter."""


@dataclass(frozen=True)
class Stories:
    """One seed: its rows, its warmed-up model and the runs that start from it."""

    out: Path
    seed: int = 0

    @property
    def warm(self) -> Path:
        return self.out / "warmup" / "model"

    def rows(self, name: str) -> Path:
        return self.out / "rows" / f"{name}.jsonl"

    def write_rows(self) -> None:
        """Write training and held-out stories, unless they exist."""
        write_stories(self.rows("train"), TRAIN_ROWS, self.seed, "train")
        write_stories(self.rows("held_out"), TEST_ROWS, self.seed, "test")

    def config(self, settings: dict[str, Any]) -> TrainConfig:
        rows = {"tasks": {TASK: 1.0}, "data": {TASK: str(self.rows("train"))}, "seed": self.seed}
        return TrainConfig.model_validate({**settings, **rows})

    def measure(self, name: str, adapter: Path | None) -> dict[str, Cell]:
        """Greedy accuracy on the held-out rows."""
        config = EvalConfig(
            kind="local", model=str(self.warm), adapter=str(adapter) if adapter else None,
            tasks=(TASK,), data={TASK: str(self.rows("held_out"))}, temperature=0.0, max_tokens=8,
            batch_size=128, seed=self.seed,
        )  # fmt: skip
        _, summary = run_eval(config, self.out / name)
        return summary.tasks[TASK]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, default=Path("runs/tomi_ditto"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    stories = Stories(chosen.out, chosen.seed)
    stories.write_rows()
    train(stories.config(WARMUP), stories.out / "warmup")
    show("before", stories.measure("before", None))
    ditto = {**DITTO, "model": str(stories.warm), "steps": chosen.steps}
    for name, changes in {"ditto": {}, "shuffled": {"shuffle_feedback": True}}.items():
        train(stories.config({**ditto, **changes}), stories.out / name)
        show(name, stories.measure(f"after_{name}", stories.out / name / "model"))
        gap = read_step_lines(stories.out / name / "metrics.jsonl")[0].rewards
        print(f"  leave-one-out gap of its first step: "
              f"{estimate_text(gap.loo, gap.loo_low, gap.loo_high, signed)}")  # fmt: skip


def show(name: str, cells: dict[str, Cell]) -> None:
    whole = headline(cells)
    print(f"{name}: {estimate_text(whole.mean, whole.ci_low, whole.ci_high)} of held-out questions")
    for kind, meaning in (("tom", "had left"), ("no_tom", "saw the move")):
        print(f"  the person {meaning}: {cells[f'value/question=first_order_{kind}'].mean:.3f}")


if __name__ == "__main__":
    main()
