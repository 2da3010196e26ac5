"""The training loop: steps, checkpoints, resume. What a step does is `step.py` or `sft/steps.py`.

A run resumes from its newest whole checkpoint: weights, moving average, optimizer and position are
put back, and the JSONL files are cut at the checkpoint's offsets (the tail is kept aside). What the
sampler produced since then is answered from its journal. A step that evaluates and ranks among the
best gets a checkpoint, whether one is due or not.

A stopped run is cancelled where something is waited for; an update is never cut short, and a
checkpoint is written. Rollouts that were under way are played again, from the journal as far as it
goes; a dev split that was being scored is scored when the run goes on.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

import torch

from soulkit.errors import UserError
from soulkit.models.local.journal import Journal
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import JsonlWriter
from soulkit.runs.records import RecordWriter
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.rollouts.feedback import newest_rollout_line
from soulkit.train.state.checkpoint import (
    Merit,
    Position,
    merit_of,
    prune,
    ranks,
    resume_checkpoint,
    save_checkpoint,
)
from soulkit.train.state.metrics import StepLine, dev_lines, lines_of_step, read_step_lines
from soulkit.train.state.stops import Stops, ended_by, newest_learned, step_words
from soulkit.train.state.tracking import MetricsTracker

BASE = -1
"""The step after which the weights are those that the run began with."""
LOADING = "loading the model"
"""What may download: those who load have progress bars of their own."""
Measure = Callable[[int], Awaitable[Mapping[str, float | None]]]
"""Dev scores of the weights that a step has moved, per task; empty where none are due."""
Validate = Callable[[int], Mapping[str, float | None]]
"""Their losses on validation conversations, per source; empty where none are due."""


async def nothing_held_out(step: int) -> dict[str, float | None]:
    """The dev scores of a run without a dev split."""
    return {}


def nothing_to_validate(step: int) -> dict[str, float | None]:
    """The validation losses of a run without validation conversations."""
    return {}


class Stream(Protocol):
    """What a run reads on from where its newest checkpoint was written."""

    def position(self) -> Mapping[str, Any]: ...

    def resume(self, position: Mapping[str, Any]) -> None: ...


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
    stream: Stream | None = None
    """The conversations that are learned from, in supervised training on some."""
    reporter: Reporter = SILENT
    """Shows steps, and what is under way within one."""
    step: int = 0
    seconds: float = 0.0
    unmeasured: bool = False
    """The newest step has moved the weights, and its dev scores are still to come."""
    _episodes_at: int = 0
    """Bytes of the episodes when the newest whole step ended: its checkpoint has no later ones."""
    _stream_at: Mapping[str, Any] | None = None
    """The stream's position then, for the same reason."""
    _saved_at: float = field(default_factory=time.monotonic)
    """When the newest checkpoint was written, or the run begun."""

    def __post_init__(self) -> None:
        self._stops = Stops(self.config)

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        run: Run,
        policy: Policy,
        tracker: MetricsTracker,
        journal: Journal | None = None,
        stream: Stream | None = None,
        reporter: Reporter = SILENT,
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
                   JsonlWriter(run.metrics), tracker, journal, stream, reporter)  # fmt: skip
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
        self.unmeasured = position.unmeasured
        self.metrics.cut_to(position.metrics)
        self.episodes.cut_to(position.episodes)
        self._episodes_at = self.episodes.offset
        if self.stream is not None:
            if position.stream is not None:
                self.stream.resume(position.stream)
            self._stream_at = self.stream.position()

    async def run_all(
        self,
        take_step: Callable[[int], Awaitable[StepLine]],
        measure: Measure = nothing_held_out,
        validate: Validate = nothing_to_validate,
        probe: Measure = nothing_held_out,
    ) -> None:
        """Take every remaining step; a checkpoint every so often, at the end, and when stopped."""
        try:
            if not self.step:
                self.reporter.phase("validation")  # the losses before the first step
                self.metrics.write_all(dev_lines(StepLine(step=BASE, valid=validate(BASE))))
            if self.unmeasured:
                last = read_step_lines(self.run.metrics)[-1]
                await self._complete(last, measure, validate, probe)
            while self.step < self.config.steps:
                await asyncio.sleep(0)  # a step that waits for nothing cannot be stopped elsewhere
                line = await self._take(take_step)
                await self._complete(line, measure, validate, probe)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self.step:
                self.checkpoint(within_step=True)
            raise
        self._forget_sampled()

    async def _take(self, take_step: Callable[[int], Awaitable[StepLine]]) -> StepLine:
        start, rate = time.monotonic(), learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        line = replace(await take_step(self.step), lr=rate)
        self.seconds += time.monotonic() - start
        self.metrics.write_all(lines_of_step(line))
        self.step += 1
        self._episodes_at = self.episodes.offset
        self._stream_at = None if self.stream is None else self.stream.position()
        return line

    async def _complete(
        self, line: StepLine, measure: Measure, validate: Validate, probe: Measure
    ) -> None:
        start, self.unmeasured = time.monotonic(), True
        line = replace(line, valid=validate(line.step))
        line = replace(line, dev=await measure(line.step))
        line = replace(line, probe=await probe(line.step))
        self.seconds += time.monotonic() - start
        self.metrics.write_all(dev_lines(line))
        self.unmeasured = False
        self.tracker.log(line)
        if self._due(merit(line)):
            self.reporter.phase("checkpoint")
            self.checkpoint(line)
        self.reporter.step(line.step + 1, step_words(line), self._stops.remarks(line))
        self._end(self._stops.after(line, last=self.step >= self.config.steps))

    def refuse_ended(self) -> None:
        """Raise again what ended a run in its last step: there is none left to take."""
        if self.step == self.config.steps:
            for line in (newest_rollout_line(self.run.metrics), newest_learned(self.run.metrics)):
                self._end(ended_by(self.config.method, line))

    def _end(self, error: UserError | None) -> None:
        """What was learned is kept."""
        if error is not None:
            self.checkpoint()
            raise error

    def _due(self, worth: Merit | None) -> bool:
        turn = self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps
        late = time.monotonic() - self._saved_at >= 60 * self.config.checkpoint_minutes
        return turn or late or ranks(self.run.checkpoints, worth, self.config.keep_best)

    def checkpoint(self, line: StepLine | None = None, *, within_step: bool = False) -> None:
        """Write where the run stands; `line` says what these weights are worth, where it is known.

        Older checkpoints go, but for the newest and the best, and the sampler's journal begins anew
        unless a step is under way.
        """
        position = Position(
            step=self.step,
            metrics=self.metrics.offset,
            episodes=self._episodes_at,
            policy=self.policy.version(),
            seconds=self.seconds,
            dev=dev_score(line.dev) if line else None,
            valid=mean_loss(line.valid) if line and not line.dev else None,
            unmeasured=self.unmeasured,
            stopgap=within_step,
            stream=self._stream_at,
        )
        save_checkpoint(self.run.checkpoints, self.policy, self.optimizer, position)
        prune(self.run.checkpoints, self.config.keep_last, self.config.keep_best)
        self._saved_at = time.monotonic()
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


def mean_loss(losses: Mapping[str, float | None]) -> float | None:
    """Mean over the sources; None where one is no finite number, which no other makes good."""
    finite = [loss for loss in losses.values() if loss is not None]
    return fmean(finite) if finite and len(finite) == len(losses) else None


def merit(line: StepLine) -> Merit | None:
    """What the weights after a step are ranked by, higher is better; see `Position.merit`."""
    return merit_of(dev_score(line.dev), None if line.dev else mean_loss(line.valid))


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant or a cosine to a tenth."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    share = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * share))
