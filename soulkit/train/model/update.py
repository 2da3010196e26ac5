"""One optimizer update: mini-batch → loss of every pack → gradient → step.

The loss is Σ_components λ Σ_sequences factor · ℓ_t with factors from explicit denominators, so
packs add up to the mini-batch exactly (algorithms §2, §3). The term ℓ_t depends on the kind of
sequence, not on the method. A pack is one forward pass. Divergences run over chunks of tokens whose
logits are recomputed in the backward pass, so that memory holds the vocabulary of one chunk only.

An update with a non-finite number is skipped and changes neither weights, optimizer nor moving
average. Sequences without a gradient (advantage 0) count in the denominators but are not computed,
unless a KL or entropy term needs them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from soulkit.errors import SoulError
from soulkit.train.config import TrainConfig
from soulkit.train.loss.losses import (
    TokenLoss,
    clamp_log_ratio,
    clipped_loss,
    divergence,
    gspo_loss,
    kl_penalty,
    nll_loss,
    shaped_loss,
    token_weight,
)
from soulkit.train.model.packing import Pack
from soulkit.train.model.policy import Entropies, Policy, Scored
from soulkit.train.model.prepare import Prepared, gap_among, gaps_of, log_probs
from soulkit.train.model.teacher import move_ema
from soulkit.train.objectives.sequences import Loss, TrainSequence
from soulkit.train.ranks.sharding import clip_split
from soulkit.train.ranks.world import is_split, ranks
from soulkit.train.state.metrics import Learned, SamplerGap, TokenMeans
from soulkit.train.state.stops import Skips

PART_NUMBERS = ("clipped", "clipped_dual", "ratio", "kl_old", "entropy")
"""Numbers logged for policy tokens, for drafts and for every part."""


@dataclass
class Tally:
    """Sums over the tokens of a step, for its log line.

    Each number has its own token count: every trained token has an entropy and may be clipped, but
    tokens whose ratio was not computed (no advantage, after the first update) have no ratio.
    """

    tokens: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: bool = False
    """Whether an update of the step has changed the weights; before that, every ratio is 1."""
    gaps: list[Tensor] = field(default_factory=list)
    """Gaps between the sampler's log-probs and those of the first update, if the step has no old
    log-probs."""

    def add(self, used: int, prefix: str = "", **values: float) -> None:
        """Add sums over `used` tokens, by name."""
        for name, value in values.items():
            self.tokens[prefix + name] += used
            self.sums[prefix + name] += value

    def take(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name, value in other.sums.items():
            self.tokens[name] += other.tokens[name]
            self.sums[name] += value
        self.gaps += other.gaps

    def means(self) -> TokenMeans:
        """Means over the tokens of each number; non-finite means are left out."""
        every = {name: value / self.tokens[name] for name, value in self.sums.items()}
        means = {name: value for name, value in every.items() if math.isfinite(value)}
        parts = {name: value for name, value in means.items() if "/" in name}
        drafts = {n: means.get(f"draft/{n}") for n in PART_NUMBERS}
        whole = {name: value for name, value in means.items() if "/" not in name}
        return TokenMeans(**drafts, **whole, parts=parts)


class Denominators:
    """Trained tokens and sequences of a mini-batch, per component. Includes sequences of weight 0
    that are `counted`."""

    def __init__(self, sequences: Iterable[TrainSequence]) -> None:
        self.tokens, self.sequences = Counter[str](), Counter[str]()
        for one in sequences:
            self.tokens[one.component] += one.span.n_trained
            self.sequences[one.component] += 1

    def of(self, sequence: TrainSequence, joint: bool) -> tuple[int, int]:
        """Token and sequence counts that divide a sequence's loss; `joint` is for loss on
        rewards."""
        together = joint and sequence.by_reward
        names = ("base", "feedback") if together else (sequence.component,)
        return sum(self.tokens[n] for n in names), sum(self.sequences[n] for n in names)


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
    """Scores of only these sequences; `owner` is an index into `indices`."""

    @property
    def sequences(self) -> list[TrainSequence]:
        return [self.prepared.sequences[i] for i in self.indices]

    def per_token(self, values: Sequence[float]) -> Tensor:
        """One value per sequence, repeated for each of its trained tokens: [n_trained]."""
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

    `indices` are the indices of the pack's spans in `prepared.sequences`.
    """
    kinds = [prepared.sequences[i].loss for i in indices]
    compared = "divergence" in kinds
    logged = prepared.entropy is None and "policy" in kinds  # else `note_entropy` logs it
    entropy: Entropies = "gradient" if config.entropy_coef > 0 else "values" if logged else "none"
    scored = policy.score(pack, entropy=entropy, hidden=compared)
    if prepared.gap is None and not tally.moved:  # still the weights that sampled
        logs = scored.log_prob.detach().split([span.n_trained for span in pack.spans])
        tally.gaps.append(gaps_of([prepared.sequences[i] for i in indices], logs).cpu())
    total = scored.log_prob.new_zeros(())
    for kind in sorted(set(kinds)):
        rows = [row for row, k in enumerate(kinds) if k == kind]
        places = [indices[row] for row in rows]
        share = Share(policy, prepared, config, tally, places, _of_rows(scored, rows))
        factors = share.per_token([_factor(s, counts, config) for s in share.sequences])
        total = total + (TERMS[kind](share) * factors).sum()
    return total


def _factor(sequence: TrainSequence, counts: Denominators, config: TrainConfig) -> float:
    """The sequence's weight times the factor of its aggregation mode."""
    if sequence.loss == "preference":  # a sum over tokens
        return sequence.weight
    tokens, sequences = counts.of(sequence, joint=config.denominator == "joint")
    mode = config.aggregation if sequence.by_reward else "token-mean"
    n_trained, length = sequence.span.n_trained, config.norm_length
    return sequence.weight * token_weight(
        mode, trained=n_trained, tokens=tokens, sequences=sequences, length=length
    )


def _of_rows(scored: Scored, rows: Sequence[int]) -> Scored:
    """The scores of some sequences, renumbered from 0."""
    count = int(scored.owner.max()) + 1
    number = scored.owner.new_full((count,), -1)
    number[torch.tensor(rows, device=number.device)] = torch.arange(len(rows), device=number.device)
    owner = number[scored.owner]
    tokens = (owner >= 0).nonzero().squeeze(-1)
    hidden = None if scored.hidden is None else scored.hidden[tokens]
    return Scored(scored.log_prob[tokens], scored.entropy[tokens], owner[tokens], hidden)


# --- terms ----------------------------------------------------------------------------------------


def _policy_term(share: Share) -> Tensor:
    """Clipped policy gradient with KL penalty and entropy bonus."""
    config, scored, prepared = share.config, share.scored, share.prepared
    old = share.flat(prepared.old)
    old = scored.log_prob.detach() if old is None else old
    advantages = share.flat(prepared.advantages)
    if advantages is None:
        advantages = share.per_token([s.advantage for s in share.sequences])
    lost = clipped_policy_loss(scored, old, advantages, share.flat(prepared.weights), config)
    loss = lost.loss
    base = share.flat(prepared.base)
    if base is not None:
        loss = loss + config.kl_coef * kl_penalty(scored.log_prob, base, "k3")
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * scored.entropy
    _note(share, lost)
    return loss


def clipped_policy_loss(
    scored: Scored, old: Tensor, advantages: Tensor, weights: Tensor | None, config: TrainConfig
) -> TokenLoss:
    """The clipped loss of algorithms §2, with a ratio per token or per sequence."""
    if config.ratio == "token":
        return clipped_loss(
            scored.log_prob, old, advantages, eps_low=config.eps_low, eps_high=config.eps_high,
            clip_ratio_c=config.clip_ratio_c, weights=weights,
        )  # fmt: skip
    lengths = torch.bincount(scored.owner).tolist()

    def rows(flat: Tensor) -> Tensor:
        return rnn.pad_sequence(flat.split(lengths), batch_first=True)

    mask = rows(torch.ones_like(old))
    lost = gspo_loss(
        rows(scored.log_prob), rows(old), rows(advantages), mask,
        eps_low=config.eps_low, eps_high=config.eps_high,
        weights=None if weights is None else rows(weights),
    )  # fmt: skip
    squares = (lost.loss, lost.log_ratio, lost.clipped, lost.clipped_lower)
    return TokenLoss(*(square[mask.bool()] for square in squares))


def _shaped_term(share: Share) -> Tensor:
    """−A π / (π + γ), without ratio, clip or old policy."""
    advantages = share.per_token([s.advantage for s in share.sequences])
    return shaped_loss(share.scored.log_prob, advantages, share.config.shaping_gamma)


def _regression_term(share: Share) -> Tensor:
    """−A log π: the gradient of a policy gradient without ratio, clip or old policy."""
    advantages = share.per_token([s.advantage for s in share.sequences])
    log_prob = share.scored.log_prob
    share.tally.add(len(log_prob), regression_nll=-float(log_prob.detach().sum()))
    return -advantages * log_prob


def _preference_term(share: Share) -> Tensor:
    """Value 0 with the gradient of −A log π; see `with_slopes`."""
    advantages = share.per_token([s.advantage for s in share.sequences])
    log_prob = share.scored.log_prob
    return advantages * (log_prob.detach() - log_prob)


def _imitation_term(share: Share) -> Tensor:
    """Cross-entropy of the tokens."""
    loss = nll_loss(share.scored.log_prob)
    share.tally.add(len(loss), imitation_nll=float(loss.detach().sum()))
    return loss


def _divergence_term(share: Share) -> Tensor:
    """Divergence of the student's distributions from the teacher's."""
    teacher, config, policy = share.prepared.teacher, share.config, share.policy
    hidden = share.scored.hidden
    if teacher is None or hidden is None:
        raise ValueError("a divergence needs a teacher and the student's hidden states")
    read = [s.span if s.teacher is None else s.teacher for s in share.sequences]
    tasks = [s.task for s in share.sequences]
    # Not divided: this pack is on this rank only.
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
    "shaped": _shaped_term,
    "regression": _regression_term,
    "preference": _preference_term,
    "imitation": _imitation_term,
    "divergence": _divergence_term,
}


def _note(share: Share, lost: TokenLoss) -> None:
    """Count the policy numbers of each part. Entropies from before the first update, if known, are
    counted by `note_entropy` instead."""
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
    """Count policy tokens without advantage, which are not computed.

    Their loss is 0, so none is clipped. Their ratio is 1 until the first update and unknown
    afterwards. If their entropy was not `measured`, −log π of the sampled tokens of drafts is an
    unbiased estimate of it.
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
    """Count the entropies from before the step's first update, if they were measured."""
    for one, spread in zip(prepared.sequences, prepared.entropy or (), strict=False):
        if len(spread):
            tally.add(len(spread), f"{one.part}/", entropy=float(spread.double().sum()))


KL_PROBE = 64
"""Number of drafts used to measure the distance to the base in each step."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    loss: float
    grad_norm: float
    """Before clipping."""
    computed: bool = True
    """Whether any sequence had a gradient."""


class NotFinite(SoulError):
    """A number of an update is not finite, so the update is skipped. The message says which."""


def mini_batches(sequences: Sequence[TrainSequence], prompts: int) -> Iterator[list[int]]:
    """Indices of the sequences in each mini-batch of `prompts` examples, in the examples' order."""
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
    """Take the updates of one step, one per mini-batch, and update the moving average after each.

    An update whose loss or gradient is not finite is skipped and counted; after `MOST_SKIPS` skips
    in a row the step ends.
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
            if taken[-1].computed:  # an update without gradients proves nothing
                skips.none()
            if policy.ema is not None and not config.reference_steps:
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

    Raises NotFinite before weights, optimizer or `tally` change.
    """
    prepared, margins = with_slopes(policy, prepared, indices, config)
    sequences = [prepared.sequences[i] for i in indices]
    examples = {s.example_id for s in sequences}
    counts = Denominators([*sequences, *(s for s in prepared.beside if s.example_id in examples)])
    computed = [i for i in indices if has_gradient(prepared, i, config)]
    check_fixed(prepared, computed)
    spans, world = [prepared.sequences[i].span for i in computed], ranks()
    optimizer.zero_grad(set_to_none=True)
    total, counted = 0.0, Tally(moved=tally.moved)
    for pack in policy.divided(spans, config.tokens_per_batch):
        packed = [computed[i] for i in pack.indices]
        loss = pack_loss(policy, pack, prepared, packed, counts, config, counted)
        loss.backward()
        total += float(loss.detach())
    world.add_gradients(policy.trained)
    (total, counted), *others = world.gather((total, counted))
    for loss_there, counted_there in others:
        total += loss_there
        counted.take(counted_there)
    if len(margins):
        total += float(-logsigmoid(margins).mean())
        counted.add(len(margins), preference_margin=float(margins.sum()))
    norm = take_step(policy, optimizer, total, config)
    silent = sorted(set(indices) - set(computed))
    measured = prepared.entropy is not None
    note_silent(counted, (prepared.sequences[i] for i in silent), measured)
    tally.take(counted)
    tally.moved = tally.moved or bool(computed)
    return Update(total, norm, bool(computed))


def with_slopes(
    policy: Policy, prepared: Prepared, indices: Sequence[int], config: TrainConfig
) -> tuple[Prepared, Tensor]:
    """`prepared` with the slopes of DPO as advantages, and the margins m [pairs] (float64).

    A margin spans packs and ranks. Given its value, the gradient of −log σ(m) is a sum over
    sequences of ∓β σ(−m) ∇log π, for the better and the worse rollout of an example.
    """
    places = [i for i in indices if prepared.sequences[i].loss == "preference"]
    if not places or prepared.reference is None:
        return prepared, torch.empty(0)
    sequences = list(prepared.sequences)
    names = list(dict.fromkeys(sequences[i].example_id for i in places))
    pair = torch.tensor([names.index(sequences[i].example_id) for i in places])
    sides = torch.tensor([sequences[i].advantage for i in places], dtype=torch.float64)  # ±1
    sides *= config.preference_beta
    now = log_probs(policy, [sequences[i].span for i in places], config.tokens_per_batch)
    moved = [float((log - prepared.reference[i]).double().sum())
             for i, log in zip(places, now, strict=True)]  # fmt: skip
    margins = sides.new_zeros(len(names)).index_add_(0, pair, sides * sides.new_tensor(moved))
    slopes = sides * torch.sigmoid(-margins)[pair] / len(names)
    for i, slope in zip(places, slopes.tolist(), strict=True):
        sequences[i] = replace(sequences[i], advantage=slope)
    return replace(prepared, sequences=sequences), margins


def take_step(
    policy: Policy, optimizer: torch.optim.Optimizer, loss: float, config: TrainConfig
) -> float:
    """One optimizer step on the current gradients; returns their norm before clipping.

    Clears the gradients and raises NotFinite if the loss or a gradient is not finite.
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
    """NotFinite if a prepared value of one of these sequences is not finite."""
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
    """Whether the sequence can have a gradient."""
    sequence = prepared.sequences[index]
    if sequence.loss in ("imitation", "divergence"):
        return True
    if sequence.loss in ("regression", "shaped", "preference"):
        return sequence.advantage != 0
    if config.kl_coef > 0 or config.entropy_coef > 0:
        return True
    if prepared.advantages is not None:
        return bool((prepared.advantages[index] != 0).any())
    return sequence.advantage != 0


def clip_gradients(policy: Policy, most: float) -> float:
    """Scale the gradients to a norm of at most `most`; returns the norm before clipping."""
    gradients = [p for _, p in policy.trained if p.grad is not None]
    if any(map(is_split, gradients)):
        return clip_split(gradients, most)
    return float(torch.nn.utils.clip_grad_norm_(gradients, most)) if gradients else 0.0


def kl_to_base(
    policy: Policy, sequences: Sequence[TrainSequence], config: TrainConfig
) -> float | None:
    """Mean k3 estimate of KL(π_θ‖base) in nats over tokens of some drafts, after the updates."""
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
