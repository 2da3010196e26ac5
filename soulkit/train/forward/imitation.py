"""Cross-entropy at the trained tokens of a pack, with its gradient made on the way.

`Policy.score` gives log-probs that anything may be done with, so its backward pass computes the
logits of a chunk again, and each chunk's entropy is computed beside it. Here what is done with them
is settled before: a weighted sum. A chunk's logits become its share of the loss and of the gradient
at once and are gone; of the three products with the head none is done twice, and no entropy is
computed that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soulkit.models.local.head import grad_of_input, is_wide
from soulkit.train.forward.packing import Pack, pack_entries
from soulkit.train.forward.policy import Policy


@dataclass(frozen=True, slots=True)
class Imitated:
    """The loss of a pack, and what it was made of: flat, sequence after sequence."""

    loss: Tensor
    """−Σ w·log π, to be differentiated."""
    log_prob: Tensor
    """[n_trained], in nats, detached."""
    owner: Tensor
    """[n_trained]: index of the token's sequence in the pack."""


def imitation_loss(policy: Policy, pack: Pack, weights: Tensor) -> Imitated:
    """The weighted cross-entropy of `pack`.

    `weights` float32 [n_trained], one a trained token, sequence after sequence.
    """
    head = policy.causal.get_output_embeddings() if policy.gathers else None
    plain = type(head) is torch.nn.Linear or is_wide(head)
    if head is None or not plain or head.bias is not None:
        scored = policy.score(pack)
        loss = -(scored.log_prob * weights).sum()
        return Imitated(loss, scored.log_prob.detach(), scored.owner)
    places = pack_entries(pack)
    target, owner = (torch.from_numpy(x).to(policy.device) for x in (places.target, places.owner))
    # Told to leave gradients alone, a Function still says that its inputs need them.
    head_weight = head.weight if torch.is_grad_enabled() else head.weight.detach()
    hidden = policy.hidden(pack)
    loss, log_prob = _WeightedNll.apply(hidden, head_weight, target, weights, policy)
    return Imitated(loss, log_prob, owner)


class _WeightedNll(torch.autograd.Function):
    """−Σ w·log softmax(h Wᵀ / T)[target], chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, target: Tensor, weights: Tensor, policy: Policy
    ) -> tuple[Tensor, Tensor]:
        """hidden [n, width], head [vocabulary, width] → (loss, log-probs [n])."""
        moves_hidden, moves_head = ctx.needs_input_grad[:2]
        to_hidden = torch.empty_like(hidden) if moves_hidden else None
        to_head = torch.zeros(head.shape, device=head.device) if moves_head else None
        log_probs, first = [], 0
        for h, t, w in policy.chunks(hidden, target, weights):
            logits = policy.logits(h)
            picked = t[:, None]
            norm = torch.logsumexp(logits, -1, keepdim=True)
            log_probs.append((logits.gather(1, picked) - norm)[:, 0])
            if moves_hidden or moves_head:
                slope = logits.sub_(norm).exp_()
                slope.scatter_add_(1, picked, slope.new_full(picked.shape, -1.0))
                slope *= (w / policy.temperature)[:, None]
            if to_hidden is not None:
                to_hidden[first : first + len(h)] = grad_of_input(slope, head)
            if to_head is not None:
                to_head.addmm_(slope.t(), h.float())
            first += len(h)
        ctx.slopes = to_hidden, None if to_head is None else to_head.to(head.dtype)
        log_prob = torch.cat(log_probs)
        ctx.mark_non_differentiable(log_prob)
        return -(log_prob * weights).sum(), log_prob

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_loss = grads[0]
        scaled = (None if s is None else s.mul_(of_loss.to(s.dtype)) for s in ctx.slopes)
        return (*scaled, None, None, None)
