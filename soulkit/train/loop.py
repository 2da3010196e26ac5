"""The training loop: steps, checkpoints, resume. What a step does is `rollout.py` or `sft.py`.

A run resumes from its newest checkpoint: weights, optimizer and position are put back, and the
JSONL files are cut at the checkpoint's offsets (the tail is kept aside).
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch

from soulkit.records import RecordWriter
from soulkit.runs import JsonlWriter, Run
from soulkit.train.checkpoint import (
    Position,
    latest_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from soulkit.train.config import TrainConfig
from soulkit.train.policy import Policy
from soulkit.train.tracking import Tracker

StepMetrics = dict[str, Any]
Show = Callable[[StepMetrics], None]


@dataclass
class Loop:
    """The state of one training run between steps."""

    config: TrainConfig
    run: Run
    policy: Policy
    optimizer: torch.optim.Optimizer
    episodes: RecordWriter
    metrics: JsonlWriter
    tracker: Tracker
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def open(cls, config: TrainConfig, run: Run, policy: Policy, tracker: Tracker) -> Loop:
        """Open the run's files; resume from its newest checkpoint when there is one."""
        optimizer = torch.optim.AdamW(
            [p for _, p in policy.trained],
            lr=config.lr,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
        )
        loop = cls(config, run, policy, optimizer, RecordWriter(run.episodes),
                   JsonlWriter(run.metrics), tracker)  # fmt: skip
        loop._resume()
        return loop

    def _resume(self) -> None:
        found = latest_checkpoint(self.run.checkpoints)
        position = Position(0, 0, 0, "")
        if found is not None:
            position = load_checkpoint(found, self.policy, self.optimizer)
        self.step, self.seconds = position.step, position.seconds
        self.metrics.cut_to(position.metrics)
        self.episodes.cut_to(position.episodes)

    async def run_all(self, take_step: Callable[[int], Awaitable[StepMetrics]], show: Show) -> None:
        """Take every remaining step; a checkpoint every so often and at the end."""
        while self.step < self.config.steps:
            start, rate = time.monotonic(), learning_rate(self.config, self.step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            line = {"step": self.step, "lr": rate, **await take_step(self.step)}
            self.seconds += time.monotonic() - start
            dev = line.pop("eval", None)
            self.metrics.write_all([line, *([{"step": self.step, "eval": dev}] if dev else [])])
            self.tracker.log({**line, "eval": dev})
            self.step += 1
            due = self.step % self.config.checkpoint_every == 0
            if due or self.step == self.config.steps:
                self.checkpoint()
            show({**line, "eval": dev})

    def checkpoint(self) -> None:
        position = Position(
            step=self.step,
            metrics=self.metrics.offset,
            episodes=self.episodes.offset,
            policy=self.policy.version(),
            seconds=self.seconds,
        )
        save_checkpoint(self.run.checkpoints, self.policy, self.optimizer, position)
        prune(self.run.checkpoints, self.config.keep_last)

    def close(self) -> None:
        self.episodes.close()
        self.metrics.close()
        self.tracker.close()


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant or a cosine to a tenth."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    share = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * share))
