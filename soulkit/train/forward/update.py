"""One optimizer update: mini-batch → losses → gradient → step. Reads top to bottom.

The loss is Σ_components λ Σ_sequences factor · ℓ_t with factors from explicit denominators, so
micro-batches add up to the mini-batch exactly (algorithms §2, §3). What ℓ_t is depends on the kind
of the sequence (`terms.py`). Sequences without a gradient (a policy or regression sequence whose
advantage is zero) are counted in the denominators but not computed, unless a KL or entropy term
needs them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from soulkit.errors import SoulError
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.teacher import Teacher, teacher_of
from soulkit.train.forward.terms import Prepared, Tally, denominators, pack_loss
from soulkit.train.maths.advantage import (
    Entry,
    Singleton,
    combine,
    distill_advantages,
    group_advantages,
    spread_over_tokens,
)
from soulkit.train.maths.loss import importance_weights
from soulkit.train.objectives.sequences import Span, TrainSequence


class NotFinite(SoulError):
    """A loss or gradient is not a finite number; the step is not taken."""


# --- before the step ------------------------------------------------------------------------------


def with_advantages(sequences: Sequence[TrainSequence], config: TrainConfig) -> list[TrainSequence]:
    """Group statistics over all that is compared; then those of weight 0 leave (algorithms §3).

    Sequences that are not compared keep the advantage that their objective gave them.
    """
    entries = [Entry(s.group, s.rollout, s.reward) for s in sequences if s.compared]
    found = iter(group_advantages(entries, std=config.advantage_std, singleton=_lone(config)))
    values = [next(found) if s.compared else s.advantage for s in sequences]
    return [
        replace(sequence, advantage=value)
        for sequence, value in zip(sequences, values, strict=True)
        if value is not None and sequence.weight > 0
    ]


def _lone(config: TrainConfig) -> Singleton:
    return "raw" if config.protocol == "reference" else "zero"


def mini_batches(sequences: Sequence[TrainSequence], prompts: int) -> Iterator[list[int]]:
    """Indices of all sequences of `prompts` examples at a time, in the order the examples came."""
    by_example: dict[str, list[int]] = {}
    for index, sequence in enumerate(sequences):
        by_example.setdefault(sequence.example_id, []).append(index)
    whole = list(by_example.values())
    for start in range(0, len(whole), prompts):
        yield [i for group in whole[start : start + prompts] for i in group]


def log_probs(policy: Policy, spans: Sequence[Span], budget: int | None) -> list[Tensor]:
    """Per span, log-probs of its trained tokens [n_trained], without gradient."""
    return Teacher(policy).log_probs(spans, budget)


def sampler_weights(
    sequences: Sequence[TrainSequence],
    old: Sequence[Tensor],
    cap: float,
    untrained: Sequence[tuple[TrainSequence, Tensor]] = (),
) -> list[Tensor]:
    """w_t of every sequence; a copy takes the weights of its refined twin (algorithms §2).

    `untrained` holds the twins that are no part of the step, with their old log-probs. Sequences
    without sampler log-probs get 1; KeyError for a copy whose twin is nowhere.
    """
    sampled = [*zip(sequences, old, strict=True), *untrained]
    twins = {
        _twin_key(s): importance_weights(o, o.new_tensor(s.span.sampler), cap)
        for s, o in sampled
        if s.part != "copy" and s.span.sampler
    }
    return [
        twins[_twin_key(s)] if s.span.sampler else torch.ones_like(o)
        for s, o in zip(sequences, old, strict=True)
    ]


def lost_twins(
    sequences: Sequence[TrainSequence], found: Sequence[TrainSequence]
) -> list[TrainSequence]:
    """Refined sequences of `found` that only their copies in `sequences` stand for."""
    there = {_twin_key(s) for s in sequences if s.part != "copy"}
    wanted = {_twin_key(s) for s in sequences if s.part == "copy"} - there
    return [s for s in found if s.part == "refined" and _twin_key(s) in wanted]


def _twin_key(sequence: TrainSequence) -> tuple[str, str, tuple[float, ...]]:
    return sequence.example_id, sequence.rollout, sequence.span.sampler


def prepare(
    policy: Policy,
    sequences: list[TrainSequence],
    config: TrainConfig,
    found: Sequence[TrainSequence] = (),
    teacher: Policy | None = None,
) -> Prepared:
    """Old log-probs, corrections, base log-probs and token advantages, before the weights move.

    `found` are the sequences before those of weight 0 left: twins of copies are looked for there.
    `teacher` is the second model of on-policy distillation.
    """
    places = [i for i, s in enumerate(sequences) if s.loss == "policy"]
    mine = [sequences[i] for i in places]
    spans, budget = [s.span for s in mine], config.tokens_per_batch
    several = len({s.example_id for s in sequences}) > config.mini_batch_prompts
    taught = any(s.teacher_weight for s in mine)
    reader = teacher_of(config, policy, teacher)

    weights = base = advantages = None
    metrics: dict[str, float] = {}
    need_old = several or taught or config.sampler_cap is not None
    old = log_probs(policy, spans, budget) if need_old else None
    if old is not None and config.sampler_cap is not None:
        weights = sampler_corrections(policy, mine, old, config.sampler_cap, budget, found)
    if config.kl_coef > 0:
        base = Teacher(policy, "base").log_probs(spans, budget)
    if old is not None and taught:
        advantages, metrics = token_advantages(mine, old, reader, config)
    size = len(sequences)
    return Prepared(
        sequences,
        old=_placed(old, places, size),
        weights=_placed(weights, places, size),
        base=_placed(base, places, size),
        advantages=_placed(advantages, places, size),
        teacher=reader,
        metrics=metrics,
    )


def sampler_corrections(
    policy: Policy,
    sequences: Sequence[TrainSequence],
    old: Sequence[Tensor],
    cap: float,
    budget: int | None,
    found: Sequence[TrainSequence],
) -> list[Tensor]:
    """`sampler_weights`, with the twins that are not trained scored for their copies' sake."""
    twins = lost_twins(sequences, found)
    scored = log_probs(policy, [t.span for t in twins], budget)
    return sampler_weights(sequences, old, cap, list(zip(twins, scored, strict=True)))


def _placed(parts: list[Tensor] | None, places: Sequence[int], size: int) -> list[Tensor] | None:
    """The tensors at their sequences' places, with nothing at the others'."""
    if parts is None:
        return None
    whole = [torch.empty(0)] * size
    for place, part in zip(places, parts, strict=True):
        whole[place] = part
    return whole


def token_advantages(
    sequences: Sequence[TrainSequence], old: Sequence[Tensor], teacher: Teacher, config: TrainConfig
) -> tuple[list[Tensor], dict[str, float]]:
    """Per sequence [n_trained]: its advantage plus the weighted distillation advantages (§4).

    The log-ratio is log π_T(y_t | what the teacher reads) − log π_old(y_t | the plain prompt).
    Returned with the numbers of the step's log line.
    """
    taught = [float(s.teacher is not None and s.teacher_weight > 0) for s in sequences]
    told = [s.teacher for s in sequences if s.teacher is not None and s.teacher_weight > 0]
    read = iter(teacher.log_probs(told, config.tokens_per_batch))
    theirs = [next(read) if row else own for row, own in zip(taught, old, strict=True)]
    mask = _padded([torch.ones_like(o) for o in old])
    distilled = distill_advantages(
        _padded(theirs), _padded(old), mask,
        estimator=config.estimator, clip=config.distill_clip, discount=config.estimator_discount,
        window=config.estimator_window, normalize=config.distill_centred,
        groups=[s.group for s in sequences], taught=taught, singleton=_lone(config),
    )  # fmt: skip
    own = spread_over_tokens([s.advantage for s in sequences], mask)
    weight = max(s.teacher_weight for s in sequences)
    total, metrics = combine(own, distilled, mask, weight=weight, taught=taught)
    gaps = torch.cat([t - o for t, o, row in zip(theirs, old, taught, strict=True) if row])
    return (
        [row[: len(o)] for row, o in zip(total, old, strict=True)],
        {"teacher_gap": float(gaps.mean())} | {f"teacher_{k}": v for k, v in metrics.items()},
    )


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


# --- the update -----------------------------------------------------------------------------------


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    prepared: Prepared,
    chosen: Sequence[int],
    config: TrainConfig,
    tally: Tally,
) -> dict[str, float]:
    """One optimizer step on the sequences `chosen`; returns loss and gradient norm.

    Raises NotFinite before the weights are touched.
    """
    counts = denominators(prepared.sequences[i] for i in chosen)
    computed = [i for i in chosen if has_gradient(prepared, i, config)]
    spans = [prepared.sequences[i].span for i in computed]
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for pack in policy.packs(spans, config.tokens_per_batch):
        indices = [computed[i] for i in pack.indices]
        loss = pack_loss(policy, pack, prepared, indices, counts, config, tally)
        loss.backward()
        total += float(loss.detach())
    norm = clip_gradients(policy, config.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise NotFinite(f"loss {total}, gradient norm {norm}")
    optimizer.step()
    return {"loss": total, "grad_norm": norm}


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


def token_counts(sequences: Iterable[TrainSequence]) -> dict[str, int]:
    """Trained tokens per part, and per `part/loss` for other losses than the policy's: what a
    method really trained on."""
    counts: dict[str, int] = {}
    for sequence in sequences:
        plain = sequence.loss == "policy"
        name = sequence.part if plain else f"{sequence.part}/{sequence.loss}"
        counts[name] = counts.get(name, 0) + sequence.span.n_trained
    return counts
