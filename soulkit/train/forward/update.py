"""One optimizer update: mini-batch → losses → gradient → step. Reads top to bottom.

The loss is Σ_components λ Σ_sequences factor · ℓ_t with factors from explicit denominators, so
micro-batches add up to the mini-batch exactly (algorithms §2, §3). What ℓ_t is depends on the kind
of the sequence (`terms.py`). Sequences without a gradient (a policy or regression sequence whose
advantage is zero) are counted in the denominators but not computed, unless a KL or entropy term
needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from soulkit.errors import SoulError
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.prepare import Prepared, log_probs
from soulkit.train.forward.terms import Tally, denominators, pack_loss
from soulkit.train.maths.loss import kl_penalty
from soulkit.train.objectives.sequences import TrainSequence

KL_PROBE = 64
"""Drafts on which the distance to the base is measured each step."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    loss: float
    grad_norm: float
    """Before clipping."""


class NotFinite(SoulError):
    """A loss or gradient is not a finite number; the step is not taken."""


def mini_batches(sequences: Sequence[TrainSequence], prompts: int) -> Iterator[list[int]]:
    """Indices of all sequences of `prompts` examples at a time, in the order the examples came."""
    by_example: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_example.setdefault(sequence.example_id, []).append(index)
    whole = list(by_example.values())
    for start in range(0, len(whole), prompts):
        yield [i for group in whole[start : start + prompts] for i in group]


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    prepared: Prepared,
    indices: Sequence[int],
    config: TrainConfig,
    tally: Tally,
) -> Update:
    """One optimizer step on the sequences at `indices`; returns loss and gradient norm.

    Raises NotFinite before the weights are touched.
    """
    counts = denominators(prepared.sequences[i] for i in indices)
    computed = [i for i in indices if has_gradient(prepared, i, config)]
    spans = [prepared.sequences[i].span for i in computed]
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for pack in policy.packs(spans, config.tokens_per_batch):
        packed = [computed[i] for i in pack.indices]
        loss = pack_loss(policy, pack, prepared, packed, counts, config, tally)
        loss.backward()
        total += float(loss.detach())
    norm = clip_gradients(policy, config.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise NotFinite(f"loss {total}, gradient norm {norm}")
    optimizer.step()
    return Update(total, norm)


def has_gradient(prepared: Prepared, index: int, config: TrainConfig) -> bool:
    """Whether computing the sequence can move anything."""
    sequence = prepared.sequences[index]
    if sequence.loss in ("imitation", "divergence"):
        return True
    if sequence.loss == "regression":
        return sequence.advantage != 0
    if config.kl_coef > 0 or config.entropy_coef > 0:
        return True
    if prepared.advantages is not None:
        return bool((prepared.advantages[index] != 0).any())
    return sequence.advantage != 0


def clip_gradients(policy: Policy, most: float) -> float:
    """Scale the gradients to a norm of at most `most`; returns the norm before."""
    gradients = [p for _, p in policy.trained if p.grad is not None]
    return float(torch.nn.utils.clip_grad_norm_(gradients, most)) if gradients else 0.0


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
