"""Packing is invisible to every method: one update gives the gradients of one row at a time.

The step is prepared, the weights move a little (so that ratios are not 1 and clips bind), then the
gradients of one update are compared. The reference puts every sequence into a pack of its own, a
padded row, for the student and its teacher alike.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.train.config import TrainConfig
from soulkit.train.model.packing import Pack, in_tries
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import Prepared, prepare_step
from soulkit.train.model.teacher import Teacher, start_ema
from soulkit.train.model.update import Tally, update
from soulkit.train.objectives.base import rollout_methods
from soulkit.train.objectives.sequences import Span
from soulkit.train.step import with_advantages
from soulkit.types import Record
from tests.support.methods import SMALL, advice, batch_of, play
from tests.support.shapes import build
from tests.support.training import assert_close, config, gradients, jolt, policy_of

OTHER: dict[str, Any] = {"teacher_model": "another"}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((method, OTHER if method == "opd" else {}) for method in rollout_methods()),
    ("opd", OTHER | {"opd_form": "logits"}),
    ("ditto", {"ratio": "sequence"}),
    ("ditto", {"aggregation": "seq-mean-token-mean", "denominator": "separate"}),
    ("ditto", {"kl_coef": 0.1, "entropy_coef": 0.05}),
    ("ditto", {"sampler_cap": 2.0}),
    ("sdpo-token", {"estimator": "discount", "teacher": "ema"}),
    ("sdpo-logits", {"teacher": "base", "divergence": "jsd", "divergence_tail": "bucket"}),
]
NAMES = [" ".join([method, *map(str, more.values())]) for method, more in CASES]
BUDGETS = (30, 10_000)


def rollouts() -> list[Record]:
    """Of each example four drafts and their refined rollouts, in two turns of some length each;
    rollouts 0 and 1 say the same at first, 2 and 3 the same throughout."""
    rng = random.Random(0)

    def random_turn(n: int) -> list[int]:
        return [rng.randrange(400, 420) for _ in range(n)]

    made = []
    for example in ("x", "y"):
        first, second = random_turn(7), random_turn(5)
        for number in range(4):
            rewards = rng.random(), rng.random()
            turns = (first, second if number > 1 else random_turn(6))
            draft = play(example, number, "draft", rewards[0], *turns, received=advice(example))
            better = (turns[0], random_turn(4)) if number % 2 else (random_turn(8), random_turn(3))
            made += [draft, play(example, number, "refined", rewards[1], *better)]
    return made


@pytest.fixture(
    scope="module", params=["qwen3-sliding", pytest.param("gemma3", marks=pytest.mark.slow)]
)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return build(request.param, tmp_path_factory.mktemp("kinds") / request.param)


@contextmanager
def laid_out(policies: Sequence[Policy], *, tries: bool) -> Iterator[None]:
    """Within it the policies lay out tries, or each sequence as a row of its own."""

    def packs(spans: Sequence[Span], budget: int) -> list[Pack]:
        if tries:
            return list(in_tries(spans, budget))
        return [Pack((index,), (span,)) for index, span in enumerate(spans)]

    for policy in policies:
        policy.packs = packs  # type: ignore[method-assign]
    try:
        yield
    finally:
        for policy in policies:
            del policy.packs  # the class's own shows again


def prepared(policy: Policy, other: Policy, settings: TrainConfig) -> Prepared:
    sequences = with_advantages(batch_of(settings, rollouts()), settings)
    reader = Teacher(other) if settings.method == "opd" else None
    return prepare_step(policy, sequences, settings, sequences, reader)


def grads_of(policy: Policy, step: Prepared, settings: TrainConfig) -> dict[str, torch.Tensor]:
    still = torch.optim.SGD([p for _, p in policy.trained], lr=0.0)
    everything = range(len(step.sequences))
    line = update(policy, still, step, everything, settings, Tally())
    assert line.grad_norm > 0
    return gradients(policy)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_packing_does_not_show_in_a_methods_gradients(
    folder: Path, case: tuple[str, dict[str, Any]]
) -> None:
    method, more = case
    # Old log-probs are asked for, as in a step of several updates.
    settings = config(method=method, **SMALL, mini_batch_prompts=1, **more)
    policy, other = policy_of(folder, **SMALL), policy_of(folder, **SMALL)
    jolt(other, 0.1, seed=4)
    start_ema(policy)
    outcomes = []
    both = (policy, other)
    weights = {name: p.detach().clone() for name, p in policy.trained}
    for tries, budget in ((False, 1), *((True, b) for b in BUDGETS)):
        budgeted = settings.model_copy(update={"tokens_per_batch": budget})
        with torch.no_grad():
            for name, parameter in policy.trained:
                parameter.copy_(weights[name])
        with laid_out(both, tries=tries):
            step = prepared(policy, other, budgeted)
            jolt(policy, 0.02, seed=3)
            outcomes.append(grads_of(policy, step, budgeted))
    for one in outcomes[1:]:
        assert_close(one, outcomes[0])
