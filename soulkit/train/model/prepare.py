"""Values computed before a step's first update: old log-probs, corrections, teacher log-probs.

Lists are by sequence; each tensor has one value per trained token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soulkit.metrics.intervals import finite_value
from soulkit.train.config import TrainConfig
from soulkit.train.loss.advantage import (
    combine,
    distill_advantages,
    singleton_of,
    spread_over_tokens,
)
from soulkit.train.loss.losses import importance_weights
from soulkit.train.model.policy import Entropies, Policy
from soulkit.train.model.teacher import Teacher
from soulkit.train.objectives.sequences import Span, TrainSequence
from soulkit.train.state.metrics import SamplerCorrection, SamplerGap

Scores = Mapping[tuple[tuple[int, ...], tuple[bool, ...]], tuple[Tensor, Tensor]]
"""`Span.key` → log-probs and entropies of its trained tokens, both [n_trained], by the policy
before the step's first update."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Values computed before a step's first update. Lists are by sequence, [n_trained] each."""

    sequences: list[TrainSequence]
    old: list[Tensor] | None
    """π_old of the policy sequences; None if the step has one update, where it equals π_θ."""
    weights: list[Tensor] | None
    base: list[Tensor] | None
    """Log-probs of the frozen base, for the KL penalty."""
    advantages: list[Tensor] | None = None
    """Token advantages from a teacher; None: every token has the advantage of its sequence."""
    teacher: Teacher | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Statistics of the teacher's token advantages."""
    entropy: list[Tensor] | None = None
    """Entropies of the policy sequences in nats; None if `old` is."""
    beside: Sequence[TrainSequence] = ()
    """Sequences of weight 0 whose tokens stay in the denominators."""
    gap: SamplerGap | None = None
    """Gap between the sampler's log-probs and `old`; None if there is nothing to compare."""
    correction: SamplerCorrection = field(default_factory=SamplerCorrection)
    """Statistics of `weights`."""
    reference: list[Tensor] | None = None
    """Log-probs of the reference, for pairs of rollouts."""


def log_probs(policy: Policy, spans: Sequence[Span], budget: int | None) -> list[Tensor]:
    """Per span, log-probs of its trained tokens [n_trained], without gradient."""
    return Teacher(policy).log_probs(spans, budget)


def scores_of(
    policy: Policy,
    spans: Sequence[Span],
    budget: int | None,
    known: Scores | None,
    entropy: Entropies,
) -> tuple[list[Tensor], list[Tensor]]:
    """Per span, log-probs and entropies of its trained tokens [n_trained], without gradient;
    `known` ones are not computed again."""
    if not known:
        return Teacher(policy).scores(spans, budget, entropy=entropy)
    missing = [span for span in spans if span.key not in known]
    found = {**scores_by_key(policy, missing, budget, entropy), **known}
    return [found[span.key][0] for span in spans], [found[span.key][1] for span in spans]


def scores_by_key(
    policy: Policy, spans: Sequence[Span], budget: int | None, entropy: Entropies
) -> Scores:
    """Log-probs and entropies of spans, each computed once."""
    single = {span.key: span for span in spans}
    scores = Teacher(policy).scores(list(single.values()), budget, entropy=entropy)
    scored = zip(*scores, strict=True)
    return dict(zip(single, scored, strict=True))


def needs_old(sequences: Sequence[TrainSequence], config: TrainConfig) -> bool:
    """Whether a step needs old log-probs: it has several updates, token advantages from a teacher,
    or the sampler correction."""
    several = len({s.example_id for s in sequences}) > config.mini_batch_prompts
    taught = any(s.loss == "policy" and s.teacher_weight for s in sequences)
    return several or taught or config.sampler_cap is not None


def prepare_step(
    policy: Policy,
    sequences: list[TrainSequence],
    config: TrainConfig,
    before: Sequence[TrainSequence] = (),
    teacher: Teacher | None = None,
    known: Scores | None = None,
) -> Prepared:
    """Old log-probs, corrections, base log-probs and token advantages, before the first update.

    `before` has all sequences, including those of weight 0; the refined twins of copies are among
    them. Without `teacher`, the policy is its own teacher, in the state that the settings name.
    `known` are old log-probs that were already computed.
    """
    places = [i for i, s in enumerate(sequences) if s.loss == "policy"]
    rewarded = [sequences[i] for i in places]
    spans, budget = [s.span for s in rewarded], config.tokens_per_batch
    taught = any(s.teacher_weight for s in rewarded)
    teacher = teacher or Teacher(policy, config.teacher)
    paired = [i for i, s in enumerate(sequences) if s.loss == "preference"]
    reference = teacher.log_probs([sequences[i].span for i in paired], budget) if paired else None

    old = entropy = weights = base = advantages = None
    metrics: dict[str, float] = {}
    correction = SamplerCorrection()
    if needs_old(sequences, config):
        old, entropy = scores_of(policy, spans, budget, known, "values")
    if old is not None and config.sampler_cap is not None:
        # Copies need the scores of their refined twins, even if those are not trained.
        twins = lost_twins(rewarded, before)
        scored, _ = scores_of(policy, [twin.span for twin in twins], budget, known, "none")
        ratios = sampler_ratios(rewarded, old, list(zip(twins, scored, strict=True)))
        weights = capped_weights(ratios, old, config.sampler_cap)
        correction = correction_of(ratios, config.sampler_cap)
    if config.kl_coef > 0:
        base = Teacher(policy, "base").log_probs(spans, budget)
    if old is not None and taught:
        advantages, metrics = token_advantages(rewarded, old, teacher, config)
    size = len(sequences)
    return Prepared(
        sequences,
        old=_placed(old, places, size),
        weights=_placed(weights, places, size),
        base=_placed(base, places, size),
        advantages=_placed(advantages, places, size),
        teacher=teacher,
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        entropy=_placed(entropy, places, size),
        beside=[s for s in before if s.counted and not s.weight and s.reward is not None],
        gap=None if old is None else gap_among([gaps_of(rewarded, old)]),
        correction=correction,
        reference=_placed(reference, paired, size),
    )


def token_advantages(
    sequences: Sequence[TrainSequence], old: Sequence[Tensor], teacher: Teacher, config: TrainConfig
) -> tuple[list[Tensor], dict[str, float]]:
    """Per sequence [n_trained]: its advantage plus the weighted distillation advantages (§4).

    The log-ratio is log π_T(y_t | teacher's prompt) − log π_old(y_t | plain prompt). Also returns
    the metrics of the step's log line.
    """
    taught = [float(s.teacher is not None and s.teacher_weight > 0) for s in sequences]
    read = [
        (s.teacher, s.task) for s in sequences if s.teacher is not None and s.teacher_weight > 0
    ]
    spans, tasks = [span for span, _ in read], [task for _, task in read]
    scored = iter(teacher.log_probs(spans, config.tokens_per_batch, tasks))
    teachers = [next(scored) if row else logs for row, logs in zip(taught, old, strict=True)]
    mask = _padded([torch.ones_like(o) for o in old])
    distilled = distill_advantages(
        _padded(teachers), _padded(old), mask,
        estimator=config.estimator, clip=config.distill_clip, discount=config.estimator_discount,
        window=config.estimator_window, normalize=config.distill_centred,
        groups=[s.group for s in sequences], taught=taught, singleton=singleton_of(config.protocol),
    )  # fmt: skip
    rewards = spread_over_tokens([s.advantage for s in sequences], mask)
    weight = max(s.teacher_weight for s in sequences)
    total, metrics = combine(rewards, distilled, mask, weight=weight, taught=taught)
    gaps = torch.cat([t - o for t, o, row in zip(teachers, old, taught, strict=True) if row])
    return (
        [row[: len(o)] for row, o in zip(total, old, strict=True)],
        {"gap": float(gaps.mean()), **metrics},
    )


def sampler_ratios(
    sequences: Sequence[TrainSequence],
    old: Sequence[Tensor],
    untrained: Sequence[tuple[TrainSequence, Tensor]] = (),
) -> list[Tensor | None]:
    """π_old / π_sampler of every sequence [n_trained each], before the cap; a copy uses those of
    its refined twin, token by token (algorithms §2). None for sequences without sampler log-probs.

    `untrained` are the twins that the step does not train, with their old log-probs. KeyError for
    a copy without a twin.
    """
    own = [_own_ratios(s, o) for s, o in zip(sequences, old, strict=True)]
    sampled = [*zip(sequences, own, strict=True)]
    sampled += [(s, _own_ratios(s, o)) for s, o in untrained]
    pieces: dict[tuple[str, str, str], dict[int, Tensor]] = {}
    for s, ratios in sampled:
        if s.part != "copy":
            pieces.setdefault(s.trace, {})[s.start] = ratios
    return [
        None if not s.span.sampler
        else _of_twin(s, pieces[s.trace]) if s.part == "copy" else ratios
        for s, ratios in zip(sequences, own, strict=True)
    ]  # fmt: skip


def capped_weights(
    ratios: Sequence[Tensor | None], old: Sequence[Tensor], cap: float
) -> list[Tensor]:
    """min(ratio, cap) [n_trained]; 1 for sequences without ratios."""
    return [torch.ones_like(o) if r is None else r.clamp(max=cap)
            for r, o in zip(ratios, old, strict=True)]  # fmt: skip


def correction_of(ratios: Sequence[Tensor | None], cap: float) -> SamplerCorrection:
    """Statistics of a step's sampler correction; empty if no token has a ratio."""
    there = [r.double() for r in ratios if r is not None]
    if not there:
        return SamplerCorrection()
    flat = torch.cat(there)
    weights = flat.clamp(max=cap)
    squares = float((weights**2).sum())
    return SamplerCorrection(
        weight=finite_value(float(weights.mean())),
        capped=finite_value(float((flat > cap).double().mean())),
        ess=finite_value(float(weights.sum()) ** 2 / (len(weights) * squares)) if squares else None,
    )


def gaps_of(sequences: Sequence[TrainSequence], logs: Sequence[Tensor]) -> Tensor:
    """|log π − log π_sampler| in nats, flat over the sampled tokens of drafts and refined rollouts.

    Each token counts once. Copies are left out, because they were sampled from another prompt.
    """
    compared = {
        (s.example_id, s.rollout, s.span.key): (log - log.new_tensor(s.span.sampler)).abs().double()
        for s, log in zip(sequences, logs, strict=True)
        if s.part in ("draft", "refined") and len(s.span.sampler) == len(log)
    }
    return torch.cat(list(compared.values())) if compared else torch.empty(0)


def gap_among(parts: Sequence[Tensor]) -> SamplerGap | None:
    """Mean and maximum of the gaps in `parts`, in nats; None if there are none."""
    gaps = torch.cat([torch.empty(0), *(part.cpu() for part in parts)])
    if not len(gaps):
        return None
    return SamplerGap(
        mean=finite_value(float(gaps.mean())), largest=finite_value(float(gaps.max()))
    )


def _own_ratios(sequence: TrainSequence, old: Tensor) -> Tensor:
    """[n_trained]: π_old / π_sampler from the sequence's own log-probs; 1 if it has none."""
    sampler = sequence.span.sampler
    if not sampler:
        return torch.ones_like(old)
    return importance_weights(old, old.new_tensor(sampler), math.inf)


def _of_twin(copy: TrainSequence, pieces: Mapping[int, Tensor]) -> Tensor:
    """[n_trained]: the ratios of the same tokens in the refined trace, whose sequences by `start`
    are `pieces`. The two may merge turns differently, because feedback changes the prompts."""
    end = copy.start + copy.span.n_trained
    whole = torch.cat([pieces[start] for start in sorted(pieces)])
    if len(whole) < end:
        raise KeyError(f"a part of the refined rollout {copy.trace} is missing")
    return whole[copy.start : end]


def lost_twins(
    sequences: Sequence[TrainSequence], before: Sequence[TrainSequence]
) -> list[TrainSequence]:
    """Refined sequences of `before` that are not in `sequences`, while their copies are."""
    there = {(s.trace, s.start) for s in sequences if s.part != "copy"}
    copied = {s.trace for s in sequences if s.part == "copy"}
    return [
        s for s in before
        if s.part == "refined" and s.trace in copied and (s.trace, s.start) not in there
    ]  # fmt: skip


def _placed(parts: list[Tensor] | None, places: Sequence[int], size: int) -> list[Tensor] | None:
    """The tensors at the indices of their sequences, with empty tensors elsewhere."""
    if parts is None:
        return None
    whole = [torch.empty(0)] * size
    for place, part in zip(places, parts, strict=True):
        whole[place] = part
    return whole


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
