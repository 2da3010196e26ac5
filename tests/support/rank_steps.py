"""Training steps of every method, taken by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from soulkit.train.config import TrainConfig
from soulkit.train.memory import PassChoice
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import scores_by_key
from soulkit.train.model.teacher import teacher_of
from soulkit.train.objectives.base import make_objective
from soulkit.train.ranks.follower import load_student, load_teachers, make_optimizer, same_state
from soulkit.train.ranks.world import alone, on_all_ranks
from soulkit.train.rollouts.rollout_check import CheckedRollouts
from soulkit.train.sft.steps import imitate, nll_sums
from soulkit.train.state.metrics import Learned, StepLine
from soulkit.train.state.stops import Skips
from soulkit.train.step import learn
from tests.support.methods import D0, D1, D2, R0, R1, ROLLOUTS, SMALL, advice, batch_of, play
from tests.support.training import config, jolt

RECORDS = [
    *ROLLOUTS,
    play("y", 2, "draft", 0.5, D0, D1), play("y", 3, "draft", 0.75, R1),
    play("x", 2, "draft", 0.25, D2, D0, received=advice("x")), play("x", 2, "refined", 0.5, R1, R0),
    play("x", 3, "draft", 0.75, R1, D2, received=advice("x")), play("x", 3, "refined", 0.5, D0),
]  # fmt: skip
LOADING = ("packing", "full", "shard", "activation_checkpointing")
"""The settings of cases that belong to the loaded model."""


class Taken(NamedTuple):
    """The steps of a case."""

    lines: list[dict[str, Any]]
    """The numbers of every step."""
    change: np.ndarray
    """The change of the weights."""
    imbalance: list[float]
    """Of every step; 0 if one process took it."""
    skipped: list[Mapping[str, str]]
    """For each step, the skipped updates and what was not finite in them."""


@dataclass(frozen=True)
class Case:
    """Two steps of a method."""

    settings: Mapping[str, Any]
    resumed: bool = False
    """Whether rank 0 takes the first step alone, as if it then resumed from a checkpoint."""
    checked: bool = False
    """Whether half of the log-probs before the step are known."""
    sources: bool = False
    """Whether the replies of a supervised step come from named sources."""
    broken: str = ""
    """An example whose sequences have an infinite weight."""

    @property
    def config(self) -> TrainConfig:
        """Its settings, with small packs, so that every rank has some."""
        small = {"tokens_per_batch": 16, "lr": 1e-3, "device": "cpu"}
        return config(**{**SMALL, **small, **self.settings})

    @property
    def loading(self) -> list[Any]:
        return [self.settings.get(name) for name in LOADING]

    @property
    def sft(self) -> bool:
        return bool(self.settings["method"] == "sft")


def take_steps(cases: Mapping[str, Case], model: str) -> dict[str, Taken]:
    """The steps of all cases, taken by the ranks of this process's world."""
    taken, loading = dict[str, Taken](), None
    for name, case in cases.items():
        if case.loading != loading:  # most cases train the same model
            loading, policy = case.loading, loaded(case, model)
            first = [p.detach().clone() for _, p in policy.trained]
        _forget_average(policy)
        for (_, p), weight in zip(policy.trained, first, strict=True):
            p.data.copy_(weight)
        taken[name] = _take_steps(case, policy)
    return taken


def loaded(case: Case, model: str) -> Policy:
    again = case.config.activation_checkpointing == "on"
    choice = PassChoice(checkpointing=again, tokens=4096, memory=None)
    return load_student(case.config, model, choice)


@on_all_ranks
def _forget_average(policy: Policy) -> None:
    policy.ema = None


def _take_steps(case: Case, policy: Policy) -> Taken:
    rate, take = case.config.lr, (_supervised if case.sft else _rollouts)(case, policy)
    optimizer = make_optimizer(policy, case.config)
    jolt(policy, 0.05, seed=1)  # on this rank only
    start, lines, imbalance = flat_weights(policy), list[dict[str, Any]](), list[float]()
    skipped = list[Mapping[str, str]]()
    same_state(policy, optimizer)
    for step in range(2):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + 2 * step)
        with alone() if case.resumed and not step else nullcontext():
            learned, more = take(optimizer)
        same_state(policy, optimizer) if case.resumed else policy.version()
        imbalance.append(learned.imbalance or 0.0)
        skipped.append(learned.not_finite)
        learned = replace(learned, imbalance=None, not_finite={})
        lines.append(StepLine(step=step, learned=learned).to_json() | more)
    return Taken(lines, flat_weights(policy) - start, imbalance, skipped)


Take = Callable[[torch.optim.Optimizer], tuple[Learned, dict[str, Any]]]
"""Takes a step; returns its metrics and other numbers."""


def _rollouts(case: Case, policy: Policy) -> Take:
    settings, skips = case.config, Skips()
    objective = make_objective(settings)
    teacher = teacher_of(settings, objective, policy, load_teachers(settings, objective, policy))
    sequences = [
        replace(s, weight=float("inf")) if s.example_id == case.broken else s
        for s in batch_of(settings, RECORDS)
    ]

    def take(optimizer: torch.optim.Optimizer) -> tuple[Learned, dict[str, Any]]:
        checked = CheckedRollouts()
        if case.checked:
            half = [s.span for s in sequences[::2]]
            checked = CheckedRollouts(scores_by_key(policy, half, 16, "values"))
        learned = learn(policy, optimizer, sequences, settings, teacher, skips, checked)
        return learned, {"row": skips.row}

    return take


def _supervised(case: Case, policy: Policy) -> Take:
    settings, spans = case.config, [s.span for s in batch_of(config(**SMALL), RECORDS)]
    sources = ["abc"[i % 3] for i in range(len(spans))] if case.sources else []

    def take(optimizer: torch.optim.Optimizer) -> tuple[Learned, dict[str, Any]]:
        learned = imitate(policy, optimizer, spans, settings, Skips(), sources)
        return learned, {"valid": nll_sums(policy, spans[:3], 16).estimate().mean}

    return take


def flat_weights(policy: Policy) -> np.ndarray:
    return torch.cat([p.detach().flatten() for _, p in policy.trained]).numpy()
