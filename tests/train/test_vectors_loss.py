"""Losses and their gradients against the conformance vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from soulkit.errors import UserError
from soulkit.train.maths import loss as L
from tests.support.vectors import Vector, assert_tensor, load_vectors

QUIRKS_WE_DIFFER_ON = {
    "empty-mask-gives-nan": "a set without tokens has loss 0, there is nothing to learn from",
    "dp-size-ignored": "the number of ranks must not change the result in any mode",
    "plus-suffix-unknown": "straight-through estimates are accepted",
}
COUNTS = {
    "dp_size": "ranks",
    "batch_num_tokens": "tokens",
    "global_batch_size": "sequences",
    "loss_scale_factor": "length",
}


def _tensor(data: Any, name: str) -> Tensor:
    return torch.tensor(data[name], dtype=getattr(torch, data["dtype"]))


def _counts(source: Any) -> dict[str, Any]:
    return {COUNTS[k]: source[k] for k in COUNTS if source.get(k) is not None}


def _agg_loss(vector: Vector) -> None:
    data = vector.input
    value = L.aggregate(
        _tensor(data, "loss_mat"),
        _tensor(data, "loss_mask"),
        data["loss_agg_mode"],
        **_counts(data),
    )
    assert_tensor(value, vector.expected["loss"], data["dtype"])


def _entropy(vector: Vector) -> None:
    data = vector.input
    mask = _tensor(data, "response_mask")
    value = L.aggregate(L.entropy(_tensor(data, "logits")), mask, data["loss_agg_mode"])
    assert_tensor(value, vector.expected["loss"], data["dtype"])


def _kl(vector: Vector) -> None:
    data = vector.input
    log_prob = _tensor(data, "log_prob").requires_grad_()
    kl = L.kl_penalty(log_prob, _tensor(data, "ref_log_prob"), data["kl_penalty"])
    kl.sum().backward()
    assert_tensor(kl, vector.expected["kl"], data["dtype"])
    assert_tensor(log_prob.grad, vector.expected["grad_log_prob"], data["dtype"], at="grad")


def _policy(vector: Vector) -> None:
    data, config = vector.input, vector.input["config"]
    log_prob = _tensor(data, "log_prob").requires_grad_()
    old, advantages = _tensor(data, "old_log_prob"), _tensor(data, "advantages")
    mask = _tensor(data, "response_mask")
    weights = _tensor(data, "rollout_is_weights") if data["rollout_is_weights"] else None
    bounds = {"eps_low": config["clip_ratio_low"], "eps_high": config["clip_ratio_high"]}
    mode = data["loss_agg_mode"]
    if vector.family == "gspo":
        tokens = L.gspo_loss(log_prob, old, advantages, mask, weights=weights, **bounds)
        # The sequence objective is defined as a mean over sequences, whatever mode was asked for.
        mode = "seq-mean-token-mean"
    else:
        c = config["clip_ratio_c"]
        tokens = L.clipped_loss(
            log_prob, old, advantages, clip_ratio_c=c, weights=weights, **bounds
        )
    _check_policy(vector, log_prob, L.aggregate(tokens.loss, mask, mode, **_counts(config)))
    empty = {"clip_fraction": 0.0, "approx_kl": 0.0, "clip_fraction_lower": 0.0}
    actual = tokens.metrics(mask) or empty
    names = {
        "actor/pg_clipfrac": "clip_fraction",
        "actor/ppo_kl": "approx_kl",
        "actor/pg_clipfrac_lower": "clip_fraction_lower",
    }
    expected = {names[k]: v for k, v in vector.expected["metrics"].items()}
    assert_tensor(actual, expected, data["dtype"], at="metrics")


def _check_policy(vector: Vector, log_prob: Tensor, value: Tensor) -> None:
    value.backward()
    assert_tensor(value, vector.expected["loss"], vector.input["dtype"], at="loss")
    assert log_prob.grad is not None
    grad = log_prob.grad.tolist()
    assert_tensor(grad, vector.expected["grad_log_prob"], vector.input["dtype"], at="grad")


def _sft(vector: Vector) -> None:
    data = vector.input
    log_prob = _tensor(data, "log_prob").requires_grad_()
    mask = _tensor(data, "response_mask")
    counts = _counts(data["config"])
    value = L.aggregate(L.nll_loss(log_prob), mask, data["loss_agg_mode"], **counts)
    _check_policy(vector, log_prob, value)
    assert_tensor(value, vector.expected["metrics"]["sft/nll_loss"], data["dtype"])


CHECKS: dict[str, Callable[[Vector], None]] = {
    "agg_loss": _agg_loss,
    "vanilla": _policy,
    "gspo": _policy,
    "kl_penalty": _kl,
    "entropy_loss": _entropy,
    "sft": _sft,
}


@pytest.mark.parametrize(
    "vector", load_vectors("train.loss", fns=set(CHECKS), differ=QUIRKS_WE_DIFFER_ON)
)
def test_loss(vector: Vector) -> None:
    check = CHECKS[vector.family]
    if vector.raises:
        with pytest.raises(UserError):
            check(vector)
    else:
        check(vector)
