"""How far a student's next-token distributions are from a teacher's, token by token.

Pure functions of logits. With z_s, z_t the logits divided by the divergence temperature,
p = softmax(z_s) and q = softmax(z_t), over the outcomes that are compared:

| kind | nats per token |
|---|---|
| `reverse_kl` | KL(p‖q) = Σ p (log p − log q) |
| `forward_kl` | KL(q‖p) = Σ q (log q − log p) |
| `jsd` | β KL(q‖m) + (1−β) KL(p‖m), m = β q + (1−β) p |

The outcomes are the whole vocabulary, or the k tokens that the student finds likeliest. What lies
outside those is left out (`renorm`: p and q are each divided by their mass inside) or becomes one
more outcome (`bucket`). Only the student gets a gradient; the choice of the k tokens carries none.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from soulkit.errors import ConfigError, did_you_mean

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
    """Divergence of each row in nats: logits [n, vocabulary] of both → [n].

    `top_k` None, or not below the vocabulary, compares everything. Raises ConfigError for an
    unknown `kind` or `tail`.
    """
    _check("divergence", kind, get_args(DivergenceKind))
    _check("divergence_tail", tail, get_args(Tail))
    logits, other = student / temperature, teacher.detach() / temperature
    log_p, log_q = compared_log_probs(logits, other, top_k, tail)
    return between(log_p, log_q, kind, beta)


def compared_log_probs(
    student: Tensor, teacher: Tensor, top_k: int | None, tail: Tail
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [n, outcomes] of both over the outcomes that are compared."""
    if top_k is None or top_k >= student.shape[-1]:
        return torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    likeliest = student.detach().topk(top_k, -1).indices
    inside = [logits.gather(-1, likeliest) for logits in (student, teacher)]
    if tail == "bucket":
        outside = [_outside(logits, likeliest) for logits in (student, teacher)]
        inside = [torch.cat(pair, -1) for pair in zip(inside, outside, strict=True)]
    return torch.log_softmax(inside[0], -1), torch.log_softmax(inside[1], -1)


def between(log_p: Tensor, log_q: Tensor, kind: DivergenceKind, beta: float) -> Tensor:
    """The formulas of the module, from log-probabilities [n, outcomes] to [n]."""
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

    From the rest itself, not from one minus the inside, which loses every digit of a small rest.
    """
    rest = logits.scatter(-1, indices, -torch.inf)
    return torch.logsumexp(rest, -1, keepdim=True)


def _check(name: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        raise ConfigError(
            f"'{value}' is not a value of '{name}'.",
            "It decides how far apart two distributions are, so it is not guessed.",
            did_you_mean(value, values),
        )
