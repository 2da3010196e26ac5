"""One optimizer update: mini-batch → losses → gradient → step. Reads top to bottom.

The loss is Σ_components λ Σ_sequences factor · ℓ_t with factors from explicit denominators, so
micro-batches add up to the mini-batch exactly (algorithms §2, §3). Sequences whose advantage is
zero have no policy gradient: they are counted in the denominators but not computed, unless a KL or
entropy term needs them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from soulkit.errors import SoulError
from soulkit.train.advantage import Entry, Singleton, group_advantages
from soulkit.train.config import TrainConfig
from soulkit.train.loss import (
    TokenLoss,
    clipped_loss,
    gspo_loss,
    importance_weights,
    kl_penalty,
    token_weight,
)
from soulkit.train.policy import Policy, Scored
from soulkit.train.sequences import Part, Span, TrainSequence


class NotFinite(SoulError):
    """A loss or gradient is not a finite number; the step is not taken."""


@dataclass
class Tally:
    """Sums over the trained tokens of a step, for its log line."""

    tokens: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, used: int, **values: float) -> None:
        self.tokens += used
        for name, value in values.items():
            self.sums[name] += value

    def means(self) -> dict[str, float]:
        return {k: v / self.tokens for k, v in self.sums.items()} if self.tokens else {}


@dataclass(frozen=True, slots=True)
class Denominators:
    """Trained tokens and sequences of a mini-batch, per component or joint."""

    tokens: dict[str, int]
    sequences: dict[str, int]

    def of(self, sequence: TrainSequence, joint: bool) -> tuple[int, int]:
        if joint:
            return sum(self.tokens.values()), sum(self.sequences.values())
        return self.tokens[sequence.component], self.sequences[sequence.component]


def with_advantages(sequences: Sequence[TrainSequence], config: TrainConfig) -> list[TrainSequence]:
    """Group statistics over all sequences; then those of weight 0 leave (algorithms §3)."""
    entries = [Entry(s.group, s.rollout, s.reward) for s in sequences]
    singleton: Singleton = "raw" if config.protocol == "reference" else "zero"
    values = group_advantages(entries, std=config.advantage_std, singleton=singleton)
    return [
        replace(sequence, advantage=value)
        for sequence, value in zip(sequences, values, strict=True)
        if value is not None and sequence.weight > 0
    ]


def mini_batches(sequences: Sequence[TrainSequence], prompts: int) -> Iterator[list[TrainSequence]]:
    """All sequences of `prompts` examples at a time, in the order the examples came."""
    by_example: dict[str, list[TrainSequence]] = {}
    for sequence in sequences:
        by_example.setdefault(sequence.example_id, []).append(sequence)
    whole = list(by_example.values())
    for start in range(0, len(whole), prompts):
        yield [s for group in whole[start : start + prompts] for s in group]


def micro_batches(spans: Sequence[Span], budget: int) -> Iterator[list[int]]:
    """Indices of sequences of like length, at most `budget` padded tokens (or one sequence).

    Equal sequences stand together and cost once: `Policy.score` computes them once.
    """
    order = sorted(range(len(spans)), key=lambda i: (-len(spans[i].ids), spans[i].ids))
    batch: list[int] = []
    rows = 0
    for index in order:
        new = not batch or spans[batch[-1]].key != spans[index].key
        if new and batch and (rows + 1) * len(spans[batch[0]].ids) > budget:
            yield batch
            batch, rows = [], 0
        batch.append(index)
        rows += new
    if batch:
        yield batch


def denominators(sequences: Iterable[TrainSequence]) -> Denominators:
    tokens: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    for sequence in sequences:
        tokens[sequence.component] += sequence.span.n_trained
        counts[sequence.component] += 1
    return Denominators(dict(tokens), dict(counts))


@torch.no_grad()
def log_probs(policy: Policy, spans: Sequence[Span], budget: int) -> list[Tensor]:
    """Per span, log-probs of its trained tokens [n_trained], without gradient."""
    found: list[Tensor] = [torch.empty(0)] * len(spans)
    for batch in micro_batches(spans, budget):
        scored = policy.score([spans[i] for i in batch])
        for row, index in enumerate(batch):
            found[index] = scored.log_prob[scored.owner == row]
    return found


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


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is fixed before a step's first update."""

    sequences: list[TrainSequence]
    old: list[Tensor] | None
    """π_old per sequence; None when the step has one update, where π_old is π_θ itself."""
    weights: list[Tensor] | None
    base: list[Tensor] | None
    """Log-probs of the frozen base, for the KL penalty."""


def prepare(
    policy: Policy,
    sequences: list[TrainSequence],
    config: TrainConfig,
    found: Sequence[TrainSequence] = (),
) -> Prepared:
    """Old log-probs, sampler correction and base log-probs, before the weights move.

    `found` are the sequences before those of weight 0 left: twins of copies are looked for there.
    """
    spans = [s.span for s in sequences]
    examples = len({s.example_id for s in sequences})
    several = examples > config.mini_batch_prompts
    budget = config.tokens_per_batch
    need_old = several or config.sampler_cap is not None
    old = log_probs(policy, spans, budget) if need_old else None
    weights = None
    if config.sampler_cap is not None and old is not None:
        twins = lost_twins(sequences, found)
        scored = log_probs(policy, [t.span for t in twins], budget)
        untrained = list(zip(twins, scored, strict=True))
        weights = sampler_weights(sequences, old, config.sampler_cap, untrained)
    base = None
    if config.kl_coef > 0:
        with policy.base():
            base = log_probs(policy, spans, budget)
    return Prepared(sequences, old, weights, base)


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
    sequences = [prepared.sequences[i] for i in chosen]
    counts = denominators(sequences)
    everything = config.kl_coef > 0 or config.entropy_coef > 0
    computed = [i for i in chosen if everything or prepared.sequences[i].advantage != 0]
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for batch in micro_batches([prepared.sequences[i].span for i in computed],
                               config.tokens_per_batch):  # fmt: skip
        loss = _micro_loss(policy, prepared, [computed[i] for i in batch], counts, config, tally)
        loss.backward()
        total += float(loss.detach())
    norm = clip_gradients(policy, config.max_grad_norm)
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise NotFinite(f"loss {total}, gradient norm {norm}")
    optimizer.step()
    return {"loss": total, "grad_norm": norm}


def clip_gradients(policy: Policy, most: float) -> float:
    """Scale the gradients to a norm of at most `most`; returns the norm before."""
    gradients = [p for _, p in policy.trained if p.grad is not None]
    return float(torch.nn.utils.clip_grad_norm_(gradients, most)) if gradients else 0.0


def _micro_loss(
    policy: Policy,
    prepared: Prepared,
    indices: Sequence[int],
    counts: Denominators,
    config: TrainConfig,
    tally: Tally,
) -> Tensor:
    sequences = [prepared.sequences[i] for i in indices]
    scored = policy.score([s.span for s in sequences], entropy=config.entropy_coef > 0)
    old = _flat(prepared.old, indices)
    old = scored.log_prob.detach() if old is None else old
    factors = torch.stack([_factor(s, counts, config) for s in sequences])
    factors = factors.to(scored.log_prob.device)[scored.owner]
    advantages = scored.log_prob.new_tensor([s.advantage for s in sequences])[scored.owner]
    lost = _policy_loss(scored, old, advantages, _flat(prepared.weights, indices), config)
    token_loss = lost.loss
    base = _flat(prepared.base, indices)
    if base is not None:
        token_loss = token_loss + config.kl_coef * kl_penalty(scored.log_prob, base, "k3")
    if config.entropy_coef > 0:
        token_loss = token_loss - config.entropy_coef * scored.entropy
    _note(tally, lost, scored, sequences)
    return (token_loss * factors).sum()


def _flat(parts: list[Tensor] | None, indices: Sequence[int]) -> Tensor | None:
    return None if parts is None else torch.cat([parts[i] for i in indices])


def _factor(sequence: TrainSequence, counts: Denominators, config: TrainConfig) -> Tensor:
    """λ times the token weight of the sequence's aggregation mode; 0-dim."""
    tokens, sequences = counts.of(sequence, joint=config.denominator == "joint")
    own = sequence.span.n_trained
    weight = token_weight(
        config.aggregation, own=own, tokens=tokens, sequences=sequences, length=config.norm_length
    )
    return torch.tensor(sequence.weight * weight)


def _policy_loss(
    scored: Scored, old: Tensor, advantages: Tensor, weights: Tensor | None, config: TrainConfig
) -> TokenLoss:
    bounds = {"eps_low": config.eps_low, "eps_high": config.eps_high, "weights": weights}
    if config.ratio == "token":
        return clipped_loss(
            scored.log_prob, old, advantages, clip_ratio_c=config.clip_ratio_c, **bounds  # type: ignore[arg-type]
        )  # fmt: skip
    width = int(torch.bincount(scored.owner).max())
    rows = _Rows(scored.owner, width)
    mask = rows.square(torch.ones_like(old))
    lost = gspo_loss(
        rows.square(scored.log_prob), rows.square(old), rows.square(advantages), mask,
        eps_low=config.eps_low, eps_high=config.eps_high,
        weights=None if weights is None else rows.square(weights),
    )  # fmt: skip
    flat = [rows.flat(t) for t in (lost.loss, lost.log_ratio, lost.clipped, lost.clipped_lower)]
    return TokenLoss(*flat)


class _Rows:
    """Flat token values ↔ [sequence, token], for losses that look at whole sequences."""

    def __init__(self, owner: Tensor, width: int) -> None:
        starts = torch.cumsum(torch.bincount(owner), 0) - torch.bincount(owner)
        self.owner, self.width, self.count = owner, width, int(owner.max()) + 1
        self.place = torch.arange(len(owner), device=owner.device) - starts[owner]

    def square(self, flat: Tensor) -> Tensor:
        return flat.new_zeros(self.count, self.width).index_put((self.owner, self.place), flat)

    def flat(self, square: Tensor) -> Tensor:
        return square[self.owner, self.place]


def _note(
    tally: Tally, lost: TokenLoss, scored: Scored, sequences: Sequence[TrainSequence]
) -> None:
    ratio = lost.log_ratio.exp()
    tally.add(
        len(ratio),
        clip_fraction=float(lost.clipped.float().sum()),
        clip_fraction_dual=float(lost.clipped_lower.float().sum()),
        ratio_mean=float(ratio.sum()),
        approx_kl=float(-lost.log_ratio.sum()),
        entropy=float(scored.entropy.detach().sum()),
    )


def token_counts(sequences: Iterable[TrainSequence]) -> dict[Part, int]:
    """Trained tokens per part: what an ablation really trained on."""
    counts: dict[Part, int] = {}
    for sequence in sequences:
        counts[sequence.part] = counts.get(sequence.part, 0) + sequence.span.n_trained
    return counts
