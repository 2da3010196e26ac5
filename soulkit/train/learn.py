"""The training half of a step: sequences → advantages → mini-batches → updates. Top to bottom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.teacher import move_ema
from soulkit.train.forward.terms import Tally
from soulkit.train.forward.update import log_probs, mini_batches, prepare, update, with_advantages
from soulkit.train.maths.loss import kl_penalty
from soulkit.train.objectives.sequences import TrainSequence
from soulkit.train.rollouts.measure import mean_of, sequence_metrics

KL_PROBE = 64
"""Drafts on which the distance to the base is measured each step."""


def learn(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    found: Sequence[TrainSequence],
    config: TrainConfig,
    teacher: Policy | None = None,
) -> dict[str, Any]:
    """Take the updates of one step on the sequences of an objective; returns what to log.

    `teacher` is the second model of on-policy distillation. A moving average follows every update.
    """
    sequences = with_advantages(found, config)
    prepared = prepare(policy, sequences, config, found, teacher)
    tally, updates = Tally(), []
    for chosen in mini_batches(sequences, config.mini_batch_prompts):
        updates.append(update(policy, optimizer, prepared, chosen, config, tally))
        if policy.ema is not None:
            move_ema(policy, config.ema_tau)
    return {
        **sequence_metrics(found, sequences),
        **prepared.metrics,
        **tally.means(),
        **mean_of(updates),
        "updates": len(updates),
        "kl": kl_to_base(policy, sequences, config),
    }


def kl_to_base(
    policy: Policy, sequences: Sequence[TrainSequence], config: TrainConfig
) -> float | None:
    """Mean k3 estimate of KL(π_θ‖base) in nats over some drafts' tokens, after the update."""
    spans = dict.fromkeys((s.rollout, s.span) for s in sequences if s.part == "draft")
    drafts = [span for _, span in spans][:KL_PROBE]
    if config.full or not drafts:
        return None
    budget = config.tokens_per_batch
    now = torch.cat(log_probs(policy, drafts, budget))
    with policy.base():
        base = torch.cat(log_probs(policy, drafts, budget))
    return float(kl_penalty(now, base, "k3").mean())
