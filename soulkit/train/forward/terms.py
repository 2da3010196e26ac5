"""The loss of one pack: each kind of sequence gives its own per-token term.

A pack is one forward pass; a sequence that is trained in two ways (with rewards and towards a
teacher) is in it twice and computed once. Terms know nothing of methods. Every term is summed with
the factor of its sequences, so packs add up to the mini-batch exactly.

Divergences need whole distributions. They run over chunks of tokens whose logits are computed again
in the backward pass, so that only one chunk's vocabulary is ever in memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from soulkit.train.config import TrainConfig
from soulkit.train.forward.packing import Pack
from soulkit.train.forward.policy import Policy, Scored
from soulkit.train.forward.prepare import Prepared, gaps_of
from soulkit.train.maths.divergence import divergence
from soulkit.train.maths.loss import (
    TokenLoss,
    clamp_log_ratio,
    clipped_loss,
    gspo_loss,
    kl_penalty,
    nll_loss,
    token_weight,
)
from soulkit.train.objectives.sequences import Loss, TrainSequence
from soulkit.train.state.lines import TokenMeans

PART_NUMBERS = ("clipped", "clipped_dual", "ratio", "kl_old", "entropy")
"""What is told of the policy's tokens, of the drafts and of every part."""


@dataclass
class Tally:
    """Sums over the tokens of a step, for its log line.

    A number has its own tokens: every trained token of a part has an entropy and is clipped or not,
    and those whose ratio nobody computed (without an advantage, after the weights had moved) have
    none.
    """

    tokens: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: bool = False
    """Whether an update of the step has moved the weights: before, every ratio is 1."""
    gaps: list[Tensor] = field(default_factory=list)
    """Distances between the sampler's log-probs and those of the first update's forward pass, where
    the step fixed no old log-probs to compare with."""

    def add(self, used: int, prefix: str = "", **values: float) -> None:
        """Sums over `used` tokens, by name."""
        for name, value in values.items():
            self.tokens[prefix + name] += used
            self.sums[prefix + name] += value

    def take(self, other: Tally) -> None:
        """Add what another one counted."""
        for name, value in other.sums.items():
            self.tokens[name] += other.tokens[name]
            self.sums[name] += value
        self.gaps += other.gaps

    def means(self) -> TokenMeans:
        """Per token that a number was computed for; what is not finite has no mean."""
        every = {name: value / self.tokens[name] for name, value in self.sums.items()}
        means = {name: value for name, value in every.items() if math.isfinite(value)}
        parts = {name: value for name, value in means.items() if "/" in name}
        drafts = {n: means.get(f"draft/{n}") for n in PART_NUMBERS}
        whole = {name: value for name, value in means.items() if "/" not in name}
        return TokenMeans(**drafts, **whole, parts=parts)


@dataclass(frozen=True, slots=True)
class Denominators:
    """Trained tokens and sequences of a mini-batch, per component."""

    tokens: Mapping[str, int]
    sequences: Mapping[str, int]

    def of(self, sequence: TrainSequence, joint: bool) -> tuple[int, int]:
        """(tokens, sequences) that the sequence shares; only policy components ever join."""
        policy = joint and sequence.loss == "policy"
        names = ("base", "feedback") if policy else (sequence.component,)
        tokens, sequences = self.tokens, self.sequences
        return sum(tokens.get(n, 0) for n in names), sum(sequences.get(n, 0) for n in names)


def denominators(sequences: Iterable[TrainSequence]) -> Denominators:
    """Counted over a whole mini-batch, before it is split into packs; with the sequences that
    count although their weight is 0 (`TrainSequence.counted`), where they are handed in."""
    tokens: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    for sequence in sequences:
        tokens[sequence.component] += sequence.span.n_trained
        counts[sequence.component] += 1
    return Denominators(dict(tokens), dict(counts))


@dataclass(frozen=True, slots=True)
class Share:
    """The sequences of one kind in a pack."""

    policy: Policy
    prepared: Prepared
    config: TrainConfig
    tally: Tally
    indices: list[int]
    """Places in `prepared.sequences`."""
    scored: Scored
    """Of these sequences alone; `owner` counts through `indices`."""

    @property
    def sequences(self) -> list[TrainSequence]:
        return [self.prepared.sequences[i] for i in self.indices]

    def per_token(self, values: Sequence[float]) -> Tensor:
        """One value a sequence → [n_trained]."""
        return self.scored.log_prob.new_tensor(values)[self.scored.owner]

    def flat(self, parts: list[Tensor] | None) -> Tensor | None:
        return None if parts is None else torch.cat([parts[i] for i in self.indices])


def pack_loss(
    policy: Policy,
    pack: Pack,
    prepared: Prepared,
    indices: Sequence[int],
    counts: Denominators,
    config: TrainConfig,
    tally: Tally,
) -> Tensor:
    """0-dim: Σ factor · ℓ_t over the trained tokens of `pack`.

    `indices` say which of `prepared.sequences` the pack's spans are.
    """
    kinds = [prepared.sequences[i].loss for i in indices]
    compared = "divergence" in kinds
    scored = policy.score(pack, entropy=config.entropy_coef > 0, hidden=compared)
    if prepared.gap is None and not tally.moved:  # these are log-probs of the weights that sampled
        logs = scored.log_prob.detach().split([span.n_trained for span in pack.spans])
        tally.gaps.append(gaps_of([prepared.sequences[i] for i in indices], logs))
    total = scored.log_prob.new_zeros(())
    for kind in sorted(set(kinds)):
        rows = [row for row, k in enumerate(kinds) if k == kind]
        places = [indices[row] for row in rows]
        share = Share(policy, prepared, config, tally, places, _of_rows(scored, rows))
        factors = share.per_token([_factor(s, counts, config) for s in share.sequences])
        total = total + (TERMS[kind](share) * factors).sum()
    return total


def _factor(sequence: TrainSequence, counts: Denominators, config: TrainConfig) -> float:
    """The component's weight times the factor of its aggregation mode."""
    tokens, sequences = counts.of(sequence, joint=config.denominator == "joint")
    mode = config.aggregation if sequence.loss == "policy" else "token-mean"
    n_trained, length = sequence.span.n_trained, config.norm_length
    return sequence.weight * token_weight(
        mode, trained=n_trained, tokens=tokens, sequences=sequences, length=length
    )


def _of_rows(scored: Scored, rows: Sequence[int]) -> Scored:
    """What was scored of some sequences, renumbered from 0."""
    count = int(scored.owner.max()) + 1
    number = scored.owner.new_full((count,), -1)
    number[torch.tensor(rows, device=number.device)] = torch.arange(len(rows), device=number.device)
    owner = number[scored.owner]
    tokens = (owner >= 0).nonzero().squeeze(-1)
    hidden = None if scored.hidden is None else scored.hidden[tokens]
    return Scored(scored.log_prob[tokens], scored.entropy[tokens], owner[tokens], hidden)


# --- terms ----------------------------------------------------------------------------------------


def _policy_term(share: Share) -> Tensor:
    """Clipped policy gradient with the step's penalties."""
    config, scored, prepared = share.config, share.scored, share.prepared
    old = share.flat(prepared.old)
    old = scored.log_prob.detach() if old is None else old
    advantages = share.flat(prepared.advantages)
    if advantages is None:
        advantages = share.per_token([s.advantage for s in share.sequences])
    lost = clipped(scored, old, advantages, share.flat(prepared.weights), config)
    loss = lost.loss
    base = share.flat(prepared.base)
    if base is not None:
        loss = loss + config.kl_coef * kl_penalty(scored.log_prob, base, "k3")
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * scored.entropy
    _note(share, lost)
    return loss


def clipped(
    scored: Scored, old: Tensor, advantages: Tensor, weights: Tensor | None, config: TrainConfig
) -> TokenLoss:
    """The clipped loss of algorithms §2, with the token's or the sequence's ratio."""
    if config.ratio == "token":
        return clipped_loss(
            scored.log_prob, old, advantages, eps_low=config.eps_low, eps_high=config.eps_high,
            clip_ratio_c=config.clip_ratio_c, weights=weights,
        )  # fmt: skip
    rows = _Rows(scored.owner, int(torch.bincount(scored.owner).max()))
    mask = rows.square(torch.ones_like(old))
    lost = gspo_loss(
        rows.square(scored.log_prob), rows.square(old), rows.square(advantages), mask,
        eps_low=config.eps_low, eps_high=config.eps_high,
        weights=None if weights is None else rows.square(weights),
    )  # fmt: skip
    flat = [rows.flat(t) for t in (lost.loss, lost.log_ratio, lost.clipped, lost.clipped_lower)]
    return TokenLoss(*flat)


def _regression_term(share: Share) -> Tensor:
    """−A log π: the gradient of a policy gradient without ratio, clip or old policy."""
    advantages = share.per_token([s.advantage for s in share.sequences])
    log_prob = share.scored.log_prob
    share.tally.add(len(log_prob), regression_nll=-float(log_prob.detach().sum()))
    return -advantages * log_prob


def _imitation_term(share: Share) -> Tensor:
    """Cross-entropy of the tokens."""
    loss = nll_loss(share.scored.log_prob)
    share.tally.add(len(loss), imitation_nll=float(loss.detach().sum()))
    return loss


def _divergence_term(share: Share) -> Tensor:
    """Divergence of the student's distributions to the teacher's."""
    teacher, config, policy = share.prepared.teacher, share.config, share.policy
    hidden = share.scored.hidden
    if teacher is None or hidden is None:
        raise ValueError("a divergence needs a teacher and the student's hidden states")
    read = [s.span if s.teacher is None else s.teacher for s in share.sequences]
    tasks = [s.task for s in share.sequences]
    teacher_hidden = teacher.hidden(read, config.tokens_per_batch, tasks)

    def compare(student: Tensor, other: Tensor) -> Tensor:
        return divergence(
            policy.logits(student), teacher.logits(other),
            kind=config.divergence, top_k=config.divergence_top_k, tail=config.divergence_tail,
            temperature=config.divergence_temperature, beta=config.jsd_beta,
        )  # fmt: skip

    parts: list[Tensor] = [
        checkpoint(compare, student, other, use_reentrant=False, preserve_rng_state=False)
        for student, other in policy.chunks(hidden, teacher_hidden)
    ]
    values = torch.cat(parts)
    share.tally.add(len(values), divergence=float(values.detach().sum()))
    return values


TERMS: Mapping[Loss, Callable[[Share], Tensor]] = {
    "policy": _policy_term,
    "regression": _regression_term,
    "imitation": _imitation_term,
    "divergence": _divergence_term,
}


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


def _note(share: Share, lost: TokenLoss) -> None:
    """What became of the tokens of each part. Their entropy is that of the step's beginning, where
    a pass from before the first update knows it."""
    sequences, tally, scored = share.sequences, share.tally, share.scored
    parts = sorted({s.part for s in sequences})
    ratio = clamp_log_ratio(lost.log_ratio).exp()
    columns = (lost.clipped, lost.clipped_lower, ratio, -lost.log_ratio, scored.entropy.detach())
    values = torch.stack([column.double() for column in columns])
    place = share.per_token([float(parts.index(s.part)) for s in sequences]).long()
    sums = values.new_zeros(len(columns), len(parts)).index_add_(1, place, values)
    used = torch.bincount(place, minlength=len(parts)).tolist()
    for part, n, column in zip(parts, used, sums.T.tolist(), strict=True):
        numbers = dict(zip(PART_NUMBERS, column, strict=True))
        if share.prepared.entropy is not None:
            del numbers["entropy"]
        tally.add(n, f"{part}/", **numbers)


def note_silent(tally: Tally, sequences: Iterable[TrainSequence], measured: bool) -> None:
    """Count the policy's tokens that no pass is made for, since they have no advantage.

    Their loss is 0 on both sides of a bound: none is clipped. Their ratio is 1 as long as the
    weights have not moved, and unknown from then on. Unless their entropy was `measured`, a draft's
    surprise stands for it: −log π of what was sampled from this very policy is right on average.
    """
    for one in sequences:
        if one.loss != "policy":
            continue
        numbers = {"clipped": 0.0, "clipped_dual": 0.0}
        n = one.span.n_trained
        if not tally.moved:
            numbers |= {"ratio": float(n), "kl_old": 0.0}
        if not measured and one.part == "draft" and len(one.span.sampler) == n:
            numbers["entropy"] = -sum(one.span.sampler)
        tally.add(n, f"{one.part}/", **numbers)


def note_entropy(tally: Tally, prepared: Prepared) -> None:
    """Count the entropies from before the step's first update, where a pass measured them."""
    for one, spread in zip(prepared.sequences, prepared.entropy or (), strict=False):
        if len(spread):
            tally.add(len(spread), f"{one.part}/", entropy=float(spread.double().sum()))
