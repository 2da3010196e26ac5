"""One optimizer update: mini-batch → losses → gradient → step. Reads top to bottom.

The loss is Σ_components λ Σ_sequences factor · ℓ_t with factors from explicit denominators, so
micro-batches add up to the mini-batch exactly (algorithms §2, §3). What ℓ_t is depends on the kind
of the sequence (`terms.py`). An update with a number in it that is not finite is not taken: nothing
of it reaches weights, optimizer or moving average. Sequences without a gradient (a policy or
regression sequence whose advantage is zero) are counted in the denominators but not computed,
unless a KL or entropy term needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from soulkit.errors import SoulError
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.prepare import Prepared, gap_among, log_probs
from soulkit.train.forward.teacher import move_ema
from soulkit.train.forward.terms import Tally, denominators, note_entropy, note_silent, pack_loss
from soulkit.train.maths.loss import kl_penalty
from soulkit.train.objectives.sequences import TrainSequence
from soulkit.train.state.lines import Learned, SamplerGap
from soulkit.train.state.skips import Skips

KL_PROBE = 64
"""Drafts on which the distance to the base is measured each step."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    loss: float
    grad_norm: float
    """Before clipping."""
    computed: bool = True
    """Whether any sequence had a gradient."""


class NotFinite(SoulError):
    """A number of an update is not finite; the update is not taken. The words say which."""


def mini_batches(sequences: Sequence[TrainSequence], prompts: int) -> Iterator[list[int]]:
    """Indices of all sequences of `prompts` examples at a time, in the order the examples came."""
    by_example: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_example.setdefault(sequence.example_id, []).append(index)
    whole = list(by_example.values())
    for start in range(0, len(whole), prompts):
        yield [i for group in whole[start : start + prompts] for i in group]


def take_updates(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    prepared: Prepared,
    config: TrainConfig,
    skips: Skips,
) -> Learned:
    """The updates of one step, a mini-batch each; a moving average follows each that is taken.

    One whose loss or gradient is not finite is left out, counted and told; after `MOST_SKIPS` in a
    row the step takes no other.
    """
    tally, taken, reasons = Tally(), list[Update](), dict[str, str]()
    note_entropy(tally, prepared)
    batches = list(mini_batches(prepared.sequences, config.mini_batch_prompts))
    for number, indices in enumerate(batches, 1):
        try:
            taken.append(update(policy, optimizer, prepared, indices, config, tally))
        except NotFinite as error:
            reasons[f"{number} of {len(batches)}"] = str(error)
            if skips.another():
                break
        else:
            if taken[-1].computed:  # where nothing is computed nothing can go well
                skips.none()
            if policy.ema is not None:
                move_ema(policy, config.ema_tau)
    return Learned(
        means=tally.means(),
        sampler=prepared.gap or gap_among(tally.gaps) or SamplerGap(),
        correction=prepared.correction,
        loss=fmean(one.loss for one in taken) if taken else None,
        grad_norm=fmean(one.grad_norm for one in taken) if taken else None,
        updates=len(taken),
        skipped=len(reasons),
        not_finite=reasons,
        skipped_row=skips.row,
    )


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    prepared: Prepared,
    indices: Sequence[int],
    config: TrainConfig,
    tally: Tally,
) -> Update:
    """One optimizer step on the sequences at `indices`; returns loss and gradient norm.

    Raises NotFinite before weights, optimizer and `tally` are touched.
    """
    sequences = [prepared.sequences[i] for i in indices]
    examples = {s.example_id for s in sequences}
    counts = denominators([*sequences, *(s for s in prepared.beside if s.example_id in examples)])
    computed = [i for i in indices if has_gradient(prepared, i, config)]
    check_fixed(prepared, computed)
    spans = [prepared.sequences[i].span for i in computed]
    optimizer.zero_grad(set_to_none=True)
    total, counted = 0.0, Tally(moved=tally.moved)
    for pack in policy.packs(spans, config.tokens_per_batch):
        packed = [computed[i] for i in pack.indices]
        loss = pack_loss(policy, pack, prepared, packed, counts, config, counted)
        loss.backward()
        total += float(loss.detach())
    norm = take_step(policy, optimizer, total, config)
    silent = sorted(set(indices) - set(computed))
    measured = prepared.entropy is not None
    note_silent(counted, (prepared.sequences[i] for i in silent), measured)
    tally.take(counted)
    tally.moved = tally.moved or bool(computed)
    return Update(total, norm, bool(computed))


def take_step(
    policy: Policy, optimizer: torch.optim.Optimizer, loss: float, config: TrainConfig
) -> float:
    """One step of the optimizer on the gradients that are there; returns their norm, unclipped.

    NotFinite, and no gradient is left, where the loss or a gradient is not a finite number.
    """
    norm = clip_gradients(policy, config.max_grad_norm)
    names = {"the loss": loss, "the gradient's norm": norm}
    broken = [f"{name} is {value}" for name, value in names.items() if not math.isfinite(value)]
    if broken:
        optimizer.zero_grad(set_to_none=True)
        raise NotFinite(" and ".join(broken))
    optimizer.step()
    return norm


def check_fixed(prepared: Prepared, indices: Sequence[int]) -> None:
    """NotFinite when what the step fixed beforehand is not finite for one of these sequences."""
    advantages = torch.tensor([prepared.sequences[i].advantage for i in indices])
    fixed = {
        "an advantage": [advantages, *_of(prepared.advantages, indices)],
        "an old log-prob": _of(prepared.old, indices),
        "a sampler correction": _of(prepared.weights, indices),
        "a log-prob of the base": _of(prepared.base, indices),
    }
    for name, tensors in fixed.items():
        if tensors and not bool(torch.cat([t.cpu().double() for t in tensors]).isfinite().all()):
            raise NotFinite(f"{name} is not finite")


def _of(tensors: list[Tensor] | None, indices: Sequence[int]) -> list[Tensor]:
    return [] if tensors is None else [tensors[i] for i in indices]


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
    distance = float(kl_penalty(now, base, "k3").mean())
    return distance if math.isfinite(distance) else None
