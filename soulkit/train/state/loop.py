"""The training loop: steps, checkpoints, resume.

What a step does is `step.py` or `sft/lessons.py`.

A run resumes from its newest whole checkpoint: weights, moving average, optimizer and position are
put back, and the JSONL files are cut at the checkpoint's offsets (the tail is kept aside). What the
sampler produced since then is answered from its journal. A step that evaluates and ranks among the
best gets a checkpoint, whether one is due or not.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from soulkit.models.local.journal import Journal
from soulkit.runs.folder import JsonlWriter, Run
from soulkit.runs.records import RecordWriter
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.state.checkpoint import (
    Position,
    prune,
    ranks,
    resume_checkpoint,
    save_checkpoint,
)
from soulkit.train.state.lines import StepLine, lines_of_step
from soulkit.train.state.tracking import MetricsTracker

Show = Callable[[StepLine], None]


@dataclass
class Loop:
    """The state of one training run between steps."""

    config: TrainConfig
    run: Run
    policy: Policy
    optimizer: torch.optim.Optimizer
    episodes: RecordWriter
    metrics: JsonlWriter
    tracker: MetricsTracker
    journal: Journal | None = None
    """What the sampler produced since the newest checkpoint."""
    step: int = 0
    seconds: float = 0.0

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        run: Run,
        policy: Policy,
        tracker: MetricsTracker,
        journal: Journal | None = None,
    ) -> Loop:
        """Open the run's files; resume from its newest whole checkpoint when there is one.

        `policy.ema` must be there already in a run that keeps one: a resume puts it back. Damaged
        checkpoints are named on stderr; RunError when none is whole.
        """
        optimizer = torch.optim.AdamW(
            [p for _, p in policy.trained],
            lr=config.lr,
            betas=(0.9, config.beta2),
            weight_decay=config.weight_decay,
        )
        loop = cls(config, run, policy, optimizer, RecordWriter(run.episodes),
                   JsonlWriter(run.metrics), tracker, journal)  # fmt: skip
        loop._resume()
        return loop

    def _resume(self) -> None:
        position, remarks = resume_checkpoint(self.run.checkpoints, self.policy, self.optimizer)
        for remark in remarks:
            sys.stderr.write(f"{self.run.path}: {remark}\n")
        if position is not None:  # the checkpoint was written, what follows may have been cut short
            prune(self.run.checkpoints, self.config.keep_last, self.config.keep_best)
        position = position or Position(0, 0, 0, "")
        self.step, self.seconds = position.step, position.seconds
        self.metrics.cut_to(position.metrics)
        self.episodes.cut_to(position.episodes)

    async def run_all(self, take_step: Callable[[int], Awaitable[StepLine]], show: Show) -> None:
        """Take every remaining step; a checkpoint every so often and at the end."""
        while self.step < self.config.steps:
            start, rate = time.monotonic(), learning_rate(self.config, self.step)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            line = replace(await take_step(self.step), lr=rate)
            self.seconds += time.monotonic() - start
            self.metrics.write_all(lines_of_step(line))
            self.tracker.log(line)
            self.step += 1
            if self._due(score := dev_score(line.dev)):
                self.checkpoint(score)
            show(line)
        self._forget_sampled()

    def _due(self, dev: float | None) -> bool:
        turn = self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps
        return turn or ranks(self.run.checkpoints, dev, self.config.keep_best)

    def checkpoint(self, dev: float | None = None, *, within_step: bool = False) -> None:
        """Write where the run stands; `dev` is the dev score of these weights, where there is one.

        Older checkpoints go, but for the newest and the best; the sampler's journal begins anew,
        unless a step is under way, which will be taken again from what was sampled.
        """
        position = Position(
            step=self.step,
            metrics=self.metrics.offset,
            episodes=self.episodes.offset,
            policy=self.policy.version(),
            seconds=self.seconds,
            dev=dev,
        )
        save_checkpoint(self.run.checkpoints, self.policy, self.optimizer, position)
        prune(self.run.checkpoints, self.config.keep_last, self.config.keep_best)
        if not within_step:
            self._forget_sampled()

    def _forget_sampled(self) -> None:
        if self.journal is not None:
            self.journal.clear()

    def close(self) -> None:
        self.episodes.close()
        self.metrics.close()
        self.tracker.close()
        if self.journal is not None:
            self.journal.close()


def dev_score(dev: Mapping[str, float | None]) -> float | None:
    """Mean over the tasks that have a score; None when there is none to rank by."""
    scores = [score for score in dev.values() if score is not None]
    return fmean(scores) if scores else None


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant or a cosine to a tenth."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    share = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * share))
