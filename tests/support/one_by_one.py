"""The slow reference for packing: a plain model call per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soulkit.train.model.packing import Pack
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.sequences import Span
from tests.support.training import gradients

Weights = Sequence[Tensor]
"""Per sequence, one number per trained token."""


@dataclass(frozen=True)
class Outcome:
    """Log-probs and entropies per sequence, and the gradients of their weighted sum."""

    log_prob: list[Tensor]
    entropy: list[Tensor]
    grads: dict[str, Tensor]


def alone(policy: Policy, span: Span) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) of one sequence's trained tokens."""
    ids = torch.tensor([span.ids], device=policy.device)
    logits = policy.model(input_ids=ids).logits[0, :-1].float() / policy.temperature
    at = [p - 1 for p, trained in enumerate(span.trained) if trained]
    log = torch.log_softmax(logits[at], -1)
    chosen = log.gather(1, ids[0, 1:][at][:, None]).squeeze(1)
    return chosen, -(log.exp() * log).sum(-1)


def one_by_one(policy: Policy, spans: Sequence[Span], w: Weights, v: Weights) -> Outcome:
    """Gradients of Σ w · log-prob + v · entropy over (sequence, token), one sequence at a time."""
    policy.model.zero_grad(set_to_none=True)
    logs, entropies = [], []
    for span, a, b in zip(spans, w, v, strict=True):
        log, entropy = alone(policy, span)
        (log @ a + entropy @ b).backward()
        logs.append(log.detach())
        entropies.append(entropy.detach())
    return Outcome(logs, entropies, gradients(policy))


def packed(policy: Policy, spans: Sequence[Span], w: Weights, v: Weights, budget: int) -> Outcome:
    """The same through `Policy.packs` and `Policy.score`."""
    policy.model.zero_grad(set_to_none=True)
    logs: list[Any] = [None] * len(spans)
    entropies: list[Any] = [None] * len(spans)
    for pack in policy.packs(spans, budget):
        scored = policy.score(pack, entropy="gradient")
        assert_order(pack, scored.owner)
        a, b = (torch.cat([x[i] for i in pack.indices]) for x in (w, v))
        (scored.log_prob @ a + scored.entropy @ b).backward()
        for row, index in enumerate(pack.indices):
            assert logs[index] is None, "a sequence was computed twice"
            logs[index] = scored.log_prob[scored.owner == row].detach()
            entropies[index] = scored.entropy[scored.owner == row].detach()
    return Outcome(logs, entropies, gradients(policy))


def assert_order(pack: Pack, owner: Tensor) -> None:
    """Assert that flat results are ordered by sequence, in the order of the pack."""
    counts = [span.n_trained for span in pack.spans]
    expected = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    assert torch.equal(owner.cpu(), expected)
