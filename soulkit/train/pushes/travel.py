"""What it is measured by that weights travel: the time it takes, and what they compute elsewhere.

Old log-probs are the trainer's in any case. How far the servers' are from them says how far what is
sampled is from what is trained: rounding, as long as it stays where it was in the first step.
"""

from __future__ import annotations

from collections.abc import Sequence

from soulkit.models.base import Sampler
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.prepare import log_probs
from soulkit.train.objectives.sequences import TrainSequence
from soulkit.train.pushes.served import ServedPolicy
from soulkit.train.pushes.touchstone import Distance
from soulkit.train.state.lines import Travel
from soulkit.train.state.named import finite

LOOKED_AT = 64
"""Rollouts of a step whose log-probs are compared."""


def travel_of(sampler: Sampler, policy: Policy, sequences: Sequence[TrainSequence]) -> Travel:
    """Of a step whose rollouts `sampler` gave, before the weights move; empty for a sampler in this
    process, and without gaps where servers gave no log-probs."""
    if not isinstance(sampler, ServedPolicy):
        return Travel()
    pusher = sampler.pusher
    seconds, pusher.seconds = pusher.seconds, 0.0
    apart = sampler_distance(policy, sequences)
    return Travel(
        push_seconds=round(seconds, 3),
        gap=finite(apart and apart.mean),
        largest_gap=finite(apart and apart.largest),
        proof=finite(pusher.distance and pusher.distance.largest),
    )


def sampler_distance(policy: Policy, sequences: Sequence[TrainSequence]) -> Distance | None:
    """How far the sampler's log-probs are from the policy's, over some rollouts of a step; None
    without any. A copy's are those of another prompt."""
    spans = [s.span for s in sequences if s.part in ("draft", "refined") and s.span.sampler]
    spans = list(dict.fromkeys(spans))[:LOOKED_AT]
    if not spans:
        return None
    trainer = [part.tolist() for part in log_probs(policy, spans, None)]
    return Distance.between([span.sampler for span in spans], trainer)
