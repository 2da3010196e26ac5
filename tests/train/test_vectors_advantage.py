"""Group advantages against the conformance vectors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from soulkit.train.maths.advantage import (
    GroupMember,
    Singleton,
    StdMode,
    group_advantages,
    spread_over_tokens,
)
from tests.support.vectors import Vector, assert_tensor, load_vectors

BUILT = {"grpo", "grpo_vectorized", "foldgrpo"}
QUIRKS_WE_DIFFER_ON: dict[str, str] = {}


def spread_group_advantages(
    rewards: Tensor,
    mask: Tensor,
    *,
    prompts: Sequence[str],
    rollouts: Sequence[str] | None,
    roles: Sequence[str | None] | None,
    epsilon: float,
    std: StdMode,
    singleton: Singleton,
) -> Tensor:
    """Group advantages of token-level rewards, spread over the trained tokens: [batch][token].

    A row's reward is the sum over all its tokens, trained or not: it belongs
    to the sequence, wherever it was written. The group key is (prompt, role), no role and an empty
    one being the same; without `rollouts` every row is its own rollout.
    """
    rollouts = rollouts if rollouts is not None else [str(i) for i in range(len(prompts))]
    roles = roles if roles is not None else [None] * len(prompts)
    totals: list[float] = rewards.detach().sum(-1).tolist()
    entries = [
        GroupMember((prompt, role or ""), str(rollout), total)
        for prompt, role, rollout, total in zip(prompts, roles, rollouts, totals, strict=True)
    ]
    values = group_advantages(entries, epsilon=epsilon, std=std, singleton=singleton)
    return spread_over_tokens(values, mask.to(rewards.dtype))


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
