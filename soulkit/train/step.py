"""One training step on a page: rollout → sequences → advantages → update.

    rollout     P prompts × G drafts, feedback, and a refined rollout for every draft with feedback
    sequences   rollouts → token sequences, each with its group, its weight and its kind of loss
    advantages  A = (reward − mean of its group) / (standard deviation of its group + ε)
    update      mini-batches of whole prompts, one optimizer step each

The last letter of a name is its axis: R rollouts of the step, S token sequences, M updates.
Sampling is in `rollouts/`, methods in `objectives/`, arithmetic in `loss/`, the model in `model/`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from soulkit.runs.records import without_tokens
from soulkit.train.config import TrainConfig
from soulkit.train.loss.advantage import group_advantages, singleton_of
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import prepare_step
from soulkit.train.model.teacher import Teacher, start_ema
from soulkit.train.model.update import kl_to_base, take_updates
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.sequences import TrainSequence, without_truncated
from soulkit.train.ranks.world import on_all_ranks, ranks
from soulkit.train.rollouts.canaries import CanaryMonitor
from soulkit.train.rollouts.feedback import FeedbackMonitor
from soulkit.train.rollouts.play import Rollouts, feedback_slots, refuse_stale, step_failure
from soulkit.train.rollouts.rollout_check import NOTHING_CHECKED, CheckedRollouts, RolloutCheck
from soulkit.train.state.loop import Loop
from soulkit.train.state.metrics import Learned, StepLine
from soulkit.train.state.step_metrics import feedback_of, member_of, rewards_of, with_groups
from soulkit.train.state.stops import Skips
from soulkit.types import Record


@dataclass
class Step:
    """Takes one step of a Loop per call."""

    loop: Loop
    objective: Objective
    rollouts: Rollouts
    teacher: Teacher
    """Gives the distributions to follow, in methods with a teacher."""
    check: RolloutCheck
    recent: deque[Sequence[Record]]
    """Records of the last steps without tokens, for the run's summary."""
    canaries: CanaryMonitor
    watch: FeedbackMonitor | None = None
    """Counts used and unused feedback, in methods that learn from it."""
    skips: Skips = field(default_factory=Skips)
    """Counts skipped updates."""

    async def __call__(self, step: int) -> StepLine:
        config, policy, started = self.loop.config, self.loop.policy, time.monotonic()
        self.loop.reporter.phase("rollouts")

        # Rollout: the current weights play every prompt G times.
        jobs = self.rollouts.jobs(step)
        version = await self.rollouts.take(policy)
        records_R = await self.rollouts.sample(jobs)
        refuse_stale(records_R, version)

        # Sequences: the objective turns rollouts into token sequences with groups.
        read_R = self.rollouts.as_read(records_R, step)
        sequences_S = self.objective.sequences(read_R, policy.renderer, feedback_slots(jobs))
        if config.mask_truncated:
            sequences_S = without_truncated(sequences_S, records_R)

        checked = self.check(step, records_R, sequences_S)  # before saving or learning
        self.keep(records_R)
        canaries = await self.canaries.score(step, self.rollouts.cast, records_R)
        await self.rollouts.rest()
        sampled = time.monotonic() - checked.seconds
        self.loop.reporter.phase("update")  # advantages and updates
        if config.reference_steps and step % config.reference_steps == 0:
            start_ema(policy)  # the reference of the iteration
        optimizer = self.loop.optimizer
        learned = learn(policy, optimizer, sequences_S, config, self.teacher, self.skips, checked)
        trained = time.monotonic()
        feedback = feedback_of(records_R)
        if self.watch is not None:
            feedback = self.watch.look(feedback, records_R, read_R)
        return StepLine(
            step=step, push=checked.push, learned=learned, canaries=canaries, version=version,
            rewards=rewards_of(records_R, mixture=len(config.tasks) > 1), feedback=feedback,
            sample_seconds=round(sampled - started, 3), train_seconds=round(trained - sampled, 3),
        )  # fmt: skip

    async def measure(self, step: int) -> dict[str, float | None]:
        """Dev scores of the weights after `step`; empty when no measurement is due."""
        return await self.rollouts.evaluate(step, self.loop.policy, self.loop.reporter)

    def keep(self, records_R: Sequence[Record]) -> None:
        """Write the step's rollouts. CallError if all failed, after the weights are saved."""
        error = step_failure(records_R)
        if error is not None and self.loop.step:
            self.loop.checkpoint(within_step=True)
        self.loop.episodes.write(*records_R)
        if error is not None:
            raise error
        self.recent.append([without_tokens(record) for record in records_R])


@on_all_ranks
def learn(
    policy: Policy, optimizer: torch.optim.Optimizer, sequences_S: Sequence[TrainSequence],
    config: TrainConfig, teacher: Teacher | None = None, skips: Skips | None = None,
    checked: CheckedRollouts = NOTHING_CHECKED,
) -> Learned:  # fmt: skip
    """Update the weights on the sequences of one step; returns the metrics of the updates.

    Without `teacher`, the policy is its own teacher. Log-probs in `checked` are reused.
    """
    trained_S = with_advantages(sequences_S, config)
    # Fixed before the weights change, [tokens] per sequence: old log-probs, teacher's log-probs.
    fixed = prepare_step(policy, trained_S, config, sequences_S, teacher, checked.scores)
    updates = take_updates(policy, optimizer, fixed, config, skips or Skips())
    return replace(
        with_groups(updates, sequences_S, trained_S),
        sampler=checked.gap or updates.sampler,
        teacher=fixed.metrics, kl_base=kl_to_base(policy, trained_S, config),
        imbalance=ranks().imbalance(),
    )  # fmt: skip


def with_advantages(
    sequences_S: Sequence[TrainSequence], config: TrainConfig
) -> list[TrainSequence]:
    """The sequences with group advantages, without those of weight 0 (algorithms §3).

    Sequences that are not compared keep the advantage from their objective. A non-finite reward
    is left out of the statistics and gives a NaN advantage, which updates skip.
    """
    compared = [member_of(s) for s in sequences_S if s.compared]
    rest = iter(group_advantages(
        compared, std=config.advantage_std, singleton=singleton_of(config.protocol)
    ))  # fmt: skip
    advantages_S = [next(rest) if s.compared else s.advantage for s in sequences_S]
    advantages_S = [a if math.isfinite(s.reward or 0.0) else math.nan
                    for a, s in zip(advantages_S, sequences_S, strict=True)]  # fmt: skip
    return [replace(s, advantage=a) for s, a in zip(sequences_S, advantages_S, strict=True)
            if a is not None and s.weight > 0]  # fmt: skip
