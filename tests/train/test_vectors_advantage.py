"""Group advantages against the conformance vectors."""

from __future__ import annotations

import pytest
import torch

from soulkit.train.maths.advantage import spread_group_advantages
from tests.support.vectors import Vector, assert_tensor, load_vectors

BUILT = {"grpo", "grpo_vectorized", "foldgrpo"}
QUIRKS_WE_DIFFER_ON: dict[str, str] = {}


@pytest.mark.parametrize(
    "vector", load_vectors("train.advantage", fns=BUILT, differ=QUIRKS_WE_DIFFER_ON)
)
def test_advantage(vector: Vector) -> None:
    data = vector.input
    dtype = getattr(torch, data["dtype"])
    rollouts = data.get("gen_uid") if data["estimator"] == "foldgrpo" else None
    advantages = spread_group_advantages(
        torch.tensor(data["token_level_rewards"], dtype=dtype),
        torch.tensor(data["response_mask"]),
        prompts=data["index"],
        rollouts=rollouts,
        roles=data.get("agent_role"),
        epsilon=data["epsilon"],
        std="group" if data["norm_adv_by_std"] else "none",
        singleton="raw",
    )
    assert advantages.dtype == dtype
    assert_tensor(advantages, vector.expected["advantages"], data["dtype"])
