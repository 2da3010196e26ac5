"""Losses and divergences: pure functions from log-probabilities to per-token losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from soulkit.errors import ConfigError, did_you_mean

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]
"""How token losses are reduced to one number; `token_weight` has the four formulas."""

AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this value before exponentiation."""

KL_BOUND = 10.0
"""The k3 estimate is clamped to ± this value, so that one token cannot dominate a batch."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """Per-token policy losses, with detached ratio statistics (any shape)."""

    loss: Tensor
    log_ratio: Tensor
    """log π_θ − log π_old per token; clamped in the token-level loss."""
    clipped: Tensor
    """Bool: the clipped surrogate is larger, so the token has no gradient."""
    clipped_lower: Tensor
    """Bool: the dual clip bounds a token with negative advantage."""

    def metrics(self, mask: Tensor) -> dict[str, float]:
        """Means over trained tokens: clip fractions and the k1 estimate of KL(old‖new) in nats.

        Empty if no token is trained.
        """
        used = mask != 0
        if not bool(used.any()):
            return {}
        return {
            "clip_fraction": float(self.clipped[used].double().mean()),
            "clip_fraction_lower": float(self.clipped_lower[used].double().mean()),
            "approx_kl": float(-self.log_ratio[used].double().mean()),
        }


def clamp_log_ratio(log_ratio: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """log-ratio clamped to [−bound, bound] (algorithms §2); no gradient outside."""
    return log_ratio.clamp(-bound, bound)


def clipped_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    clip_ratio_c: float = 10.0,
    weights: Tensor | None = None,
) -> TokenLoss:
    """Clipped policy loss with asymmetric bounds and dual clip, per token (any shape).

    Source: algorithms §2. With ρ = exp(clamp(log π_θ − log π_old)):
    s = max(−Â ρ, −Â clip(ρ, 1−ε_low, 1+ε_high)); ℓ = min(s, −c Â) if Â < 0 else s; times `weights`
    (detached sampler correction, see `importance_weights`). Raises ConfigError if c ≤ 1.
    """
    if clip_ratio_c <= 1.0:
        raise ConfigError(
            f"clip_ratio_c is {clip_ratio_c}, which is not above 1.",
            "It bounds the ratio of tokens with negative advantage; this ratio starts at 1.",
            "Use a value above 1; the default is 10.",
        )
    log_ratio = clamp_log_ratio(log_prob - old_log_prob)
    surrogate, clipped = _surrogate(log_ratio.exp(), advantages, eps_low, eps_high)
    bound = -clip_ratio_c * advantages
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(surrogate, bound), surrogate)
    lower = negative & (surrogate.detach() > bound)
    return TokenLoss(_weighted(loss, weights), log_ratio.detach(), clipped, lower)


def gspo_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    weights: Tensor | None = None,
) -> TokenLoss:
    """Sequence-level ratio (GSPO), per token; aggregate it with `seq-mean-token-mean`.

    Source: algorithms §2 (sequence-level ratio). ρ_seq = exp(mean over the row's trained tokens of
    log π_θ − log π_old). Each token carries the value ρ_seq and the gradient ρ_seq ∇log π_θ(y_t),
    so that the row's mean has the gradient of the sequence ratio even if advantages differ between
    tokens. Clipped like `clipped_loss`, without the dual clip.
    """
    log_ratio = log_prob - old_log_prob
    used = (mask != 0).to(log_ratio.dtype)
    counts = used.sum(-1, keepdim=True).clamp(min=1)
    per_sequence = ((log_ratio * used).sum(-1, keepdim=True) / counts).detach()
    straight = clamp_log_ratio(log_prob - log_prob.detach() + per_sequence)
    loss, clipped = _surrogate(straight.exp(), advantages, eps_low, eps_high)
    never = torch.zeros_like(clipped)
    return TokenLoss(_weighted(loss, weights), log_ratio.detach(), clipped, never)


def nll_loss(log_prob: Tensor) -> Tensor:
    """−log π_θ(y_t), per token (any shape): SFT (algorithms §5) and the SFT term of `erl` (§4)."""
    return -log_prob


def shaped_loss(log_prob: Tensor, advantages: Tensor, gamma: float) -> Tensor:
    """−Â π / (π + γ) per token (any shape), π = exp(log π_θ): Critique-GRPO (arXiv 2506.03106)."""
    return -advantages * torch.sigmoid(log_prob - math.log(gamma))


def entropy(logits: Tensor) -> Tensor:
    """H = log Σ exp z − Σ p z in nats, from [..., vocabulary] to [...] (entropy bonus, §2)."""
    return torch.logsumexp(logits, -1) - (torch.softmax(logits, -1) * logits).sum(-1)


def importance_weights(old_log_prob: Tensor, sampler_log_prob: Tensor, cap: float) -> Tensor:
    """w = min(π_old / π_sampler, cap), detached (any shape).

    Source: algorithms §2. Both log-probabilities must use the context that the token was sampled
    in; a copy uses the weights of its refined rollout. Raises ConfigError if cap ≤ 0.
    """
    if cap <= 0:
        raise ConfigError(
            f"--sampler-cap is {cap}, which is not positive.",
            "Importance weights are capped at this value, so every token's "
            "loss would become zero or change its sign.",
            "Use a positive cap, for example 2, or remove the option for no correction.",
        )
    return clamp_log_ratio(old_log_prob - sampler_log_prob).exp().clamp(max=cap).detach()


# --- KL penalties ---------------------------------------------------------------------------------


def _k3(difference: Tensor) -> Tensor:
    gap = clamp_log_ratio(-difference)
    return (gap.exp() - gap - 1.0).clamp(-KL_BOUND, KL_BOUND)


def _k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


_KL: Mapping[str, Callable[[Tensor], Tensor]] = {
    "kl": lambda d: d,
    "k1": lambda d: d,
    "abs": torch.abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_KINDS: tuple[str, ...] = tuple(_KL)
"""Values of `kind` in `kl_penalty`; each may end in `+`."""


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kind: str = "k3") -> Tensor:
    """Per-token estimate of KL(π_θ‖π_ref) in nats (any shape).

    Source: algorithms §2 (KL to the frozen base). With d = log π_θ − log π_ref: `k1`/`kl` d, `abs`
    |d|, `k2`/`mse` d²/2, `k3`/`low_var_kl` e^{−d} + d − 1 (−d clamped to ±20, the estimate to ±10).
    A trailing `+` keeps the value but uses k2's gradient, an unbiased gradient of the KL for tokens
    sampled from π_θ. Raises ConfigError for any other name: a full KL needs whole distributions,
    not the log-probability of one token.
    """
    name = kind.removesuffix("+")
    if name not in _KL:
        raise ConfigError(
            f"'{kind}' is not a KL estimate from token log-probabilities.",
            "The penalty has one log-probability per token, not whole distributions.",
            did_you_mean(name, _KL),
        )
    difference = log_prob - ref_log_prob
    value = _KL[name](difference)
    if name == kind:
        return value
    proxy = _k2(difference)
    return value.detach() + proxy - proxy.detach()


# --- aggregation ----------------------------------------------------------------------------------


def token_weight(
    mode: Aggregation, *, trained: float, tokens: float, sequences: float, length: float
) -> float:
    """The factor of each trained token of one sequence, so that the loss is Σ factor · ℓ_t.

    Source: algorithms §2 (aggregation modes) and §3 (denominators). `trained` = trained tokens of
    this sequence; `tokens`, `sequences` = trained tokens, and sequences with trained tokens, of
    the whole mini-batch over all micro-batches and ranks; `length` = fixed length of the last mode.

    | mode | factor |
    |---|---|
    | token-mean | 1 / tokens |
    | seq-mean-token-mean | 1 / (trained · sequences) |
    | seq-mean-token-sum | 1 / sequences |
    | seq-mean-token-sum-norm | 1 / length: a sum over sequences, despite its name |
    """
    divisors = {
        "token-mean": tokens,
        "seq-mean-token-mean": trained * sequences,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-sum-norm": length,
    }
    if mode not in divisors:
        raise ConfigError(
            f"'{mode}' is not a way to aggregate token losses.",
            "The mode sets the relative weight of long and short sequences.",
            did_you_mean(mode, divisors),
        )
    return 1.0 / divisors[mode] if trained else 0.0


def aggregate(
    losses: Tensor,
    mask: Tensor,
    mode: Aggregation = "token-mean",
    *,
    tokens: float | None = None,
    sequences: float | None = None,
    length: float | None = None,
    ranks: float | None = None,
) -> Tensor:
    """Reduce token losses [batch][token] to one number: Σ factor(row) · ℓ over trained tokens.

    Source: algorithms §2 and §3; factors as in `token_weight`. Missing counts default to those of
    this batch (`length`: its width), so a micro-batch needs the counts of its mini-batch. `ranks`
    multiplies the result, for gradients that are averaged over ranks instead of summed.
    Raises ConfigError for an unknown mode.
    """
    used = mask != 0
    lengths: list[int] = used.sum(-1).tolist()
    counts = {
        "tokens": float(sum(lengths)) if tokens is None else tokens,
        "sequences": float(sum(n > 0 for n in lengths)) if sequences is None else sequences,
        "length": float(mask.shape[-1]) if length is None else length,
    }
    factors = losses.new_tensor([token_weight(mode, trained=n, **counts) for n in lengths])
    # torch.where, because 0 × inf on an untrained token would be NaN.
    sums = torch.where(used, losses, torch.zeros_like(losses)).sum(-1)
    return (sums * factors).sum() * (1.0 if ranks is None else ranks)


# --- pieces ---------------------------------------------------------------------------------------


def _surrogate(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    return torch.maximum(plain, bounded), (bounded > plain).detach()


def _weighted(loss: Tensor, weights: Tensor | None) -> Tensor:
    return loss if weights is None else loss * weights.detach()


DivergenceKind = Literal["reverse_kl", "forward_kl", "jsd"]
Tail = Literal["renorm", "bucket"]


def divergence(
    student: Tensor,
    teacher: Tensor,
    *,
    kind: DivergenceKind = "reverse_kl",
    top_k: int | None = 10,
    tail: Tail = "renorm",
    temperature: float = 1.0,
    beta: float = 0.5,
) -> Tensor:
    """Divergence of each row in nats, from logits [n, vocabulary] of both to [n].

    `top_k` None compares the whole vocabulary. Raises ConfigError for an unknown `kind` or `tail`.
    """
    _check("divergence", kind, get_args(DivergenceKind))
    _check("divergence_tail", tail, get_args(Tail))
    logits, other = student / temperature, teacher.detach() / temperature
    log_p, log_q = compared_log_probs(logits, other, top_k, tail)
    return between(log_p, log_q, kind, beta)


def compared_log_probs(
    student: Tensor, teacher: Tensor, top_k: int | None, tail: Tail
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, outcomes] of both models over the compared outcomes."""
    if top_k is None or top_k >= student.shape[-1]:
        return torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    likeliest = student.detach().topk(top_k, -1).indices
    inside = [logits.gather(-1, likeliest) for logits in (student, teacher)]
    if tail == "bucket":
        outside = [_outside(logits, likeliest) for logits in (student, teacher)]
        inside = [torch.cat(pair, -1) for pair in zip(inside, outside, strict=True)]
    return torch.log_softmax(inside[0], -1), torch.log_softmax(inside[1], -1)


def between(log_p: Tensor, log_q: Tensor, kind: DivergenceKind, beta: float) -> Tensor:
    """The divergence formulas, from log-probabilities [n, outcomes] to [n]."""
    if kind == "reverse_kl":
        return _kl(log_p, log_q)
    if kind == "forward_kl":
        return _kl(log_q, log_p)
    mixed = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    return beta * _kl(log_q, mixed) + (1 - beta) * _kl(log_p, mixed)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _outside(logits: Tensor, indices: Tensor) -> Tensor:
    """log Σ exp of the logits [n, V] that are not at `indices` [n, k]: one logit [n, 1].

    Computed from the remaining logits, because 1 − Σ of the others is inaccurate when small.
    """
    rest = logits.scatter(-1, indices, -torch.inf)
    return torch.logsumexp(rest, -1, keepdim=True)


def _check(name: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise ConfigError(
            f"'{value}' is not a value of '{name}'.",
            f"It chooses how distributions are compared; its values are {', '.join(values)}.",
            did_you_mean(value, values),
        )
