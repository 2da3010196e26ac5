"""Distillation advantages against the conformance vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from soulkit.errors import UserError
from soulkit.train.maths.advantage import combine, distill_advantages
from tests.support.vectors import Vector, assert_tensor, load_vectors

QUIRKS_WE_DIFFER_ON = {
    "discount-underflow": "the recursion has no power of gamma to divide by",
    "group-normalisation-crashes": "a group without taught tokens has nothing to subtract",
}
METRICS = {
    "opd/n_opd_samples": "samples",
    "opd/adv_mean": "adv_mean",
    "opd/adv_abs_mean": "adv_abs_mean",
    "opd/adv_std": "adv_std",
    "opd/adv_max": "adv_max",
    "opd/adv_min": "adv_min",
    "opd/alpha_adv_abs_mean": "weighted_adv_abs_mean",
    "opd/grpo_adv_abs_mean": "grpo_adv_abs_mean",
}
CONFIG = {
    "opd_clip": "clip",
    "opd_estimator": "estimator",
    "opd_discount": "discount",
    "opd_window": "window",
    "opd_normalize": "normalize",
}


@pytest.mark.parametrize("vector", load_vectors("train.opd", differ=QUIRKS_WE_DIFFER_ON))
def test_opd(vector: Vector) -> None:
    check = _combine if vector.family == "combine" else _plain
    if vector.raises:
        with pytest.raises(UserError):
            check(vector)
    else:
        check(vector)


def _distilled(data: Any, **options: Any) -> torch.Tensor:
    dtype = getattr(torch, data["dtype"])
    return distill_advantages(
        torch.tensor(data["teacher_log_prob"], dtype=dtype),
        torch.tensor(data["student_log_prob"], dtype=dtype),
        torch.tensor(data["response_mask"]),
        groups=data.get("index"),
        taught=data["opd_mask"],
        singleton="raw",
        **options,
    )


def _plain(vector: Vector) -> None:
    names = ("estimator", "clip", "discount", "window", "normalize")
    result = _distilled(vector.input, **{n: vector.input[n] for n in names})
    assert_tensor(result, vector.expected["advantages"], vector.input["dtype"])


def _combine(vector: Vector) -> None:
    data, config = vector.input, vector.input["config"]
    distilled = _distilled(data, **{CONFIG[k]: v for k, v in config.items() if k in CONFIG})
    advantages = torch.tensor(data["advantages"], dtype=distilled.dtype)
    weight = {"weight": config["opd_alpha"]} if "opd_alpha" in config else {}
    mask = torch.tensor(data["response_mask"])
    result, metrics = combine(advantages, distilled, mask, taught=data["opd_mask"], **weight)
    assert_tensor(result, vector.expected["advantages"], data["dtype"])
    expected = {METRICS[k]: v for k, v in vector.expected["metrics"].items()}
    assert_tensor(metrics, expected, data["dtype"], at="metrics")
