"""What a step fixes before its weights move: old log-probs, corrections, what a teacher says.

Lists are by sequence; each tensor holds one value a trained token of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.teacher import Teacher
from soulkit.train.maths.advantage import (
    combine,
    distill_advantages,
    singleton_of,
    spread_over_tokens,
)
from soulkit.train.maths.loss import importance_weights
from soulkit.train.objectives.sequences import Span, TrainSequence


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is fixed before a step's first update. Lists are by sequence, [n_trained] each."""

    sequences: list[TrainSequence]
    old: list[Tensor] | None
    """π_old of the policy sequences; None when the step has one update, where it is π_θ itself."""
    weights: list[Tensor] | None
    base: list[Tensor] | None
    """Log-probs of the frozen base, for the KL penalty."""
    advantages: list[Tensor] | None = None
    """Token advantages, where a teacher gives any; None: every token has its sequence's."""
    teacher: Teacher | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the teacher's token advantages look like."""
    entropy: list[Tensor] | None = None
    """In nats, of the policy sequences, where `old` is."""
    beside: Sequence[TrainSequence] = ()
    """Sequences of weight 0 whose tokens stay in the denominators."""


def log_probs(policy: Policy, spans: Sequence[Span], budget: int | None) -> list[Tensor]:
    """Per span, log-probs of its trained tokens [n_trained], without gradient."""
    return Teacher(policy).log_probs(spans, budget)


def prepare_step(
    policy: Policy,
    sequences: list[TrainSequence],
    config: TrainConfig,
    before: Sequence[TrainSequence] = (),
    teacher: Teacher | None = None,
) -> Prepared:
    """Old log-probs, corrections, base log-probs and token advantages, before the weights move.

    `before` are the sequences before those of weight 0 left: twins of copies are looked for there.
    Without a `teacher` it is the policy itself, in the state that the settings name.
    """
    places = [i for i, s in enumerate(sequences) if s.loss == "policy"]
    rewarded = [sequences[i] for i in places]
    spans, budget = [s.span for s in rewarded], config.tokens_per_batch
    several = len({s.example_id for s in sequences}) > config.mini_batch_prompts
    taught = any(s.teacher_weight for s in rewarded)
    teacher = teacher or Teacher(policy, config.teacher)

    weights = base = advantages = None
    metrics: dict[str, float] = {}
    need_old = several or taught or config.sampler_cap is not None
    old, entropy = Teacher(policy).scores(spans, budget) if need_old else (None, None)
    if old is not None and config.sampler_cap is not None:
        weights = sampler_corrections(policy, rewarded, old, config.sampler_cap, budget, before)
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
    )


def token_advantages(
    sequences: Sequence[TrainSequence], old: Sequence[Tensor], teacher: Teacher, config: TrainConfig
) -> tuple[list[Tensor], dict[str, float]]:
    """Per sequence [n_trained]: its advantage plus the weighted distillation advantages (§4).

    The log-ratio is log π_T(y_t | what the teacher reads) − log π_old(y_t | the plain prompt).
    Returned with the numbers of the step's log line.
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


def sampler_corrections(
    policy: Policy,
    sequences: Sequence[TrainSequence],
    old: Sequence[Tensor],
    cap: float,
    budget: int | None,
    before: Sequence[TrainSequence],
) -> list[Tensor]:
    """`sampler_weights`, with the twins that are not trained scored for their copies' sake."""
    twins = lost_twins(sequences, before)
    scored = log_probs(policy, [t.span for t in twins], budget)
    return sampler_weights(sequences, old, cap, list(zip(twins, scored, strict=True)))


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
    sequences: Sequence[TrainSequence], before: Sequence[TrainSequence]
) -> list[TrainSequence]:
    """Refined sequences of `before` that only their copies in `sequences` stand for."""
    there = {_twin_key(s) for s in sequences if s.part != "copy"}
    missing = {_twin_key(s) for s in sequences if s.part == "copy"} - there
    return [s for s in before if s.part == "refined" and _twin_key(s) in missing]


def _twin_key(sequence: TrainSequence) -> tuple[str, str, tuple[float, ...]]:
    return sequence.example_id, sequence.rollout, sequence.span.sampler


def _placed(parts: list[Tensor] | None, places: Sequence[int], size: int) -> list[Tensor] | None:
    """The tensors at their sequences' places, with nothing at the others'."""
    if parts is None:
        return None
    whole = [torch.empty(0)] * size
    for place, part in zip(places, parts, strict=True):
        whole[place] = part
    return whole


def _padded(parts: Sequence[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
