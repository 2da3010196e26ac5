"""The training loop: steps, checkpoints, resume. The steps are in `step.py` and `sft/steps.py`.

A run resumes from its newest intact checkpoint: weights, moving average, optimizer and position are
restored, and JSONL files are cut at the checkpoint's offsets (the tails are kept in other files).
Replies sampled since then are reused from the journal. Steps whose scores rank among the best also
get a checkpoint.

A stopped run is cancelled while it waits, never during an update, and writes a checkpoint. On
resume, unfinished rollouts are played again, with replies from the journal, and an unfinished
evaluation is repeated.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from soulkit.data.corpora.stream import LessonStream
from soulkit.errors import UserError
from soulkit.models.local.journal import Journal
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run
from soulkit.runs.jsonl import JsonlWriter
from soulkit.runs.records import RecordWriter
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy
from soulkit.train.ranks.follower import make_optimizer, same_state
from soulkit.train.ranks.world import alone
from soulkit.train.rollouts.feedback import newest_rollout_line
from soulkit.train.state.checkpoint import (
    Merit,
    Position,
    among_best,
    merit_of,
    prune,
    resume_checkpoint,
    save_checkpoint,
)
from soulkit.train.state.metrics import StepLine, dev_lines, lines_of_step, read_step_lines
from soulkit.train.state.stops import Stops, dev_score, ended_by, newest_learned, step_words
from soulkit.train.state.tracking import MetricsTracker

if TYPE_CHECKING:
    from soulkit.train.sft.exposure import ExposureLimit

BASE = -1
"""Number of the step before the first: the initial weights."""
Measure = Callable[[int], Awaitable[Mapping[str, float | None]]]
"""Returns dev scores per task of the weights after a step; empty if none are due."""
Validate = Callable[[int], Mapping[str, Any]]
"""Returns the fields of a StepLine with validation losses after a step; empty if none are due."""


async def nothing_held_out(step: int) -> dict[str, float | None]:
    """The dev scores of a run without a dev split."""
    return {}


def nothing_to_validate(step: int) -> dict[str, Any]:
    """The validation losses of a run without validation conversations."""
    return {}


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
    """Replies sampled since the newest checkpoint."""
    stream: LessonStream | None = None
    """Stream of conversations, if the run trains on them."""
    reporter: Reporter = SILENT
    """Shows steps and their phases."""
    limit: ExposureLimit | None = None
    """Limit on what the weights remember, if there is one."""
    step: int = 0
    seconds: float = 0.0
    unmeasured: bool = False
    """Whether the weights after the newest step have not been measured yet."""
    _episodes_at: int = 0
    """Size of the episodes file after the newest complete step, for its checkpoint."""
    _stream_at: Mapping[str, Any] | None = None
    """Position of the stream after the newest complete step."""
    _saved_at: float = field(default_factory=time.monotonic)
    """Time of the newest checkpoint or of the start."""

    def __post_init__(self) -> None:
        self._stops = Stops(self.config, self.run.path)

    @classmethod
    def open(
        cls,
        config: TrainConfig,
        run: Run,
        policy: Policy,
        tracker: MetricsTracker,
        journal: Journal | None = None,
        stream: LessonStream | None = None,
        reporter: Reporter = SILENT,
    ) -> Loop:
        """Open the run's files, and resume from its newest intact checkpoint if there is one.

        `policy.ema` must exist if the run uses one, so that a resume can restore it. Damaged
        checkpoints are named on stderr; RunError if none is intact.
        """
        optimizer = make_optimizer(policy, config)
        loop = cls(config, run, policy, optimizer, RecordWriter(run.episodes),
                   JsonlWriter(run.metrics), tracker, journal, stream, reporter)  # fmt: skip
        loop._resume()
        same_state(policy, optimizer)
        return loop

    def _resume(self) -> None:
        position, remarks = resume_checkpoint(self.run.checkpoints, self.policy, self.optimizer)
        for remark in remarks:
            sys.stderr.write(f"{self.run.path}: {remark}\n")
        if position is not None:  # the run may have been killed before it pruned
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
        """Take all remaining steps; writes checkpoints when due, at the end, and when stopped."""
        try:
            if not self.step:
                self.reporter.phase("validation")  # the losses before the first step
                self.metrics.write_all(dev_lines(replace(StepLine(step=BASE), **validate(BASE))))
            if self.unmeasured:
                last = read_step_lines(self.run.metrics)[-1]
                await self._complete(last, measure, validate, probe)
            while self.step < self.config.steps and not (self.limit and self.limit.reached):
                await asyncio.sleep(0)  # lets a stop interrupt steps that never wait
                line = await self._take(take_step)
                await self._complete(line, measure, validate, probe)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self.step:
                with alone(unless_sharded=True):  # another rank may be lost
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
        line = replace(line, **validate(line.step))
        line = replace(line, dev=await measure(line.step))
        line = replace(line, probe=await probe(line.step))
        due = self._due(merit(line))
        if due and self.limit is not None:
            self.reporter.phase("exposure of canaries")
            line = replace(line, exposure=self.limit.after(self.step))
        self.seconds += time.monotonic() - start
        self.metrics.write_all(dev_lines(line))
        self.unmeasured = False
        self.tracker.log(line)
        if due:
            self.reporter.phase("checkpoint")
            self.checkpoint(line)
        self.reporter.step(line.step + 1, step_words(line), self._stops.remarks(line))
        self._end(self._stops.after(line, last=self.step >= self.config.steps))

    def refuse_ended(self) -> None:
        """Raise the error that ended the run in its last step, if there was one."""
        if self.step == self.config.steps:
            for line in (newest_rollout_line(self.run.metrics), newest_learned(self.run.metrics)):
                self._end(ended_by(self.config.method, line))

    def _end(self, error: UserError | None) -> None:
        """Save a checkpoint and raise `error`, if there is one."""
        if error is not None:
            self.checkpoint()
            raise error

    def _due(self, worth: Merit | None) -> bool:
        turn = self.step % self.config.checkpoint_every == 0 or self.step == self.config.steps
        late = time.monotonic() - self._saved_at >= 60 * self.config.checkpoint_minutes
        return turn or late or among_best(self.run.checkpoints, worth, self.config.keep_best)

    def checkpoint(self, line: StepLine | None = None, *, within_step: bool = False) -> None:
        """Write a checkpoint; `line` has the scores of these weights, if known.

        Older checkpoints are pruned, and the sampler's journal is cleared unless a step is running.
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


def mean_loss(losses: Mapping[str, float | None]) -> float | None:
    """Mean over the sources; None if any of them is not finite."""
    finite = [loss for loss in losses.values() if loss is not None]
    return fmean(finite) if finite and len(finite) == len(losses) else None


def merit(line: StepLine) -> Merit | None:
    """Ranking key of the weights after a step, higher is better; see `Position.merit`."""
    return merit_of(dev_score(line.dev), None if line.dev else mean_loss(line.valid))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Learning rate of `step` (from 0): linear warm-up, then constant or a cosine to a tenth."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    share = (step - config.warmup_steps) / max(config.steps - config.warmup_steps, 1)
    return config.lr * (0.55 + 0.45 * math.cos(math.pi * share))
