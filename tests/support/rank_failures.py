"""Failures of one rank of several, as programs of rank 0."""

from __future__ import annotations

import math
from typing import Any

import torch

from soulkit.train.model.policy import Policy
from soulkit.train.ranks.follower import make_optimizer, same_state
from soulkit.train.ranks.world import RankError, on_all_ranks, ranks
from soulkit.train.state.stops import Skips
from soulkit.train.step import learn
from tests.support.methods import batch_of
from tests.support.rank_steps import RECORDS, Case, loaded
from tests.support.training import jolt


def break_backward(model: str, rank: int) -> tuple[list[tuple[Any, ...]], str]:
    """Three steps of two updates each in which the gradients of `rank` alone are NaN, and one
    after them; then the error for weights that `rank` alone has changed."""
    case = Case({"method": "grpo", "mini_batch_prompts": 1})
    policy, skips = loaded(case, model), Skips()
    optimizer = make_optimizer(policy, case.config)
    jolt(policy, 0.05, seed=1)
    same_state(policy, optimizer)
    _break_backward(policy, rank)
    steps = []
    for step in range(4):
        if step == 3:
            _mend(policy)
        learned = learn(policy, optimizer, batch_of(case.config, RECORDS), case.config, None, skips)
        steps.append((learned.updates, learned.skipped, skips.row, policy.version()))
    _change_weights(policy, rank)
    try:
        return steps, policy.version()
    except RankError as error:
        return steps, error.what


_handles: list[Any] = []


@on_all_ranks
def _break_backward(policy: Policy, rank: int) -> None:
    def spoil(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        if output.requires_grad:
            output.register_hook(lambda grad: grad * math.nan)
        return output

    if ranks().rank == rank:
        _handles.append(policy.decoder.norm.register_forward_hook(spoil))


@on_all_ranks
def _mend(policy: Policy) -> None:
    for handle in _handles:
        handle.remove()


@on_all_ranks
def _change_weights(policy: Policy, rank: int) -> None:
    if ranks().rank == rank:
        jolt(policy, 1e-6, seed=2)


def fail(rank: int | None) -> None:
    """Raise an error on `rank` within a command, or on rank 0 between commands."""
    _fail(rank)
    raise ValueError("broken between commands")


@on_all_ranks
def _fail(rank: int | None) -> None:
    if ranks().rank == rank:
        raise ValueError(f"broken on rank {rank}")
    ranks().gather(None)
