"""What all ranks of a training job do with models, and the life of a follower.

A follower has no run folder, rows or players. It loads the models that rank 0 names, takes over its
weights, moving average and optimizer state, and then runs commands until rank 0 stops.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from soulkit.models.local.threads import take_threads
from soulkit.train.config import TrainConfig
from soulkit.train.memory import PassChoice
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.model.teacher import load_teacher, start_ema
from soulkit.train.objectives.base import Objective
from soulkit.train.ranks.launch import FOLDER, LOST
from soulkit.train.ranks.world import (
    RankError,
    RankLost,
    is_split,
    join,
    launched,
    leave,
    on_all_ranks,
    ranks,
)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a weight, besides its number of updates."""


@contextmanager
def leading() -> Iterator[None]:
    """Context in which this process is rank 0 of the job that it was launched in, if it was."""
    if not launched() or ranks().size > 1:  # training within training
        yield
        return
    world = join()
    try:
        yield
        world.stop()
    except BaseException as error:  # also a stop by a signal
        with suppress(RankLost):
            world.stop()
        if isinstance(error, RankLost) and FOLDER in os.environ:
            raise SystemExit(LOST) from error  # the process that started the ranks explains it
        raise
    finally:
        leave()


def follow() -> None:
    """Run what rank 0 commands until it stops."""
    world = join()
    take_threads(None, None)
    try:
        world.follow()
    except RankError as error:
        raise SystemExit(LOST) from error  # rank 0 or its launcher explains it
    finally:
        leave()


@on_all_ranks
def load_student(config: TrainConfig, folder: str, choice: PassChoice) -> Policy:
    """The trained policy."""
    world = ranks()
    world.sharded = config.shard and world.size > 1
    policy = load_policy(config, folder, choice)
    world.shared["policy"] = policy
    return policy


@on_all_ranks
def load_teachers(config: TrainConfig, objective: Objective, policy: Policy) -> Policy | None:
    """The teacher model of the method, if it has one; starts the moving average, if there is one.

    The moving average exists before the run resumes, which then restores the saved one.
    """
    teacher = load_teacher(config, objective, policy)
    if teacher is not None:
        ranks().shared["teacher"] = teacher
    if config.teacher == "ema" and objective.reader == "self":
        start_ema(policy)
    return teacher


@on_all_ranks
def make_optimizer(policy: Policy, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW over the trained weights."""
    # Pieces of split weights and whole ones cannot be in one of torch's operations on lists.
    trained = [[p for _, p in policy.trained if is_split(p) is split] for split in (False, True)]
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in trained if group],
        lr=config.lr,
        betas=(0.9, config.beta2),
        weight_decay=config.weight_decay,
    )
    ranks().shared["optimizer"] = optimizer
    return optimizer


@on_all_ranks
def same_weights(policy: Policy) -> None:
    """Give all ranks the trained weights of rank 0, except pieces of split weights."""
    ranks().copy_from_first([p for _, p in policy.trained])


def same_state(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Give all ranks the weights, the moving average and the optimizer state of rank 0."""
    steps = [optimizer.state.get(p, {}).get("step") for _, p in policy.trained]
    _copy_state(policy, optimizer, [None if s is None else float(s) for s in steps])


@on_all_ranks
def _copy_state(
    policy: Policy, optimizer: torch.optim.Optimizer, steps: list[float | None]
) -> None:
    """`steps`: for each trained weight its number of updates; None if it has had none."""
    world = ranks()
    if world.size == 1:
        return
    tensors: list[Any] = [p for _, p in policy.trained]
    tensors += (policy.ema or {}).values()
    for (_, p), step in zip(policy.trained, steps, strict=True):
        if step is None:
            continue
        state = optimizer.state[p]
        state["step"] = torch.tensor(step)
        tensors += [state.setdefault(name, torch.zeros_like(p)) for name in MOMENTS]
    world.copy_from_first(tensors)
    policy.version()
