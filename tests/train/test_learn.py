"""The distance to the base is measured on a fixed number of drafts, however many a step has."""

from __future__ import annotations

import random

import pytest
import torch

from soulkit.train.forward.policy import Policy
from soulkit.train.forward.update import kl_to_base, log_probs
from soulkit.train.maths.loss import kl_penalty
from soulkit.train.objectives.sequences import TrainSequence
from tests.support.training import config, policy_of, random_model, sequence, span

LORA = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return policy_of(random_model(tmp_path_factory.mktemp("models") / "tiny"), **LORA)


def drafts(count: int) -> list[TrainSequence]:
    """Drafts of different prompts, three trained tokens each."""
    rng = random.Random(3)
    spans = [span(rng, [rng.randrange(300, 400) for _ in range(4)], [3]) for _ in range(count)]
    return [sequence(one, "draft", f"x{i}", 0, 0.5) for i, one in enumerate(spans)]


def by_hand(policy: Policy, sequences: list[TrainSequence]) -> list[float]:
    """The k3 estimate of each sequence, a mean over its tokens."""
    budget = config(**LORA).tokens_per_batch
    spans = [one.span for one in sequences]
    now = log_probs(policy, spans, budget)
    with policy.base():
        base = log_probs(policy, spans, budget)
    return [float(kl_penalty(a, b, "k3").mean()) for a, b in zip(now, base, strict=True)]


def test_the_distance_is_that_of_the_first_sixty_four_drafts(policy: Policy) -> None:
    sequences = drafts(66)
    each = by_hand(policy, sequences)
    measured = kl_to_base(policy, sequences, config(**LORA))
    means = {n: sum(each[:n]) / n for n in (63, 64, 65, 66)}
    assert measured == pytest.approx(means[64], rel=1e-5)
    others = [mean for n, mean in means.items() if n != 64]
    assert all(abs(mean - means[64]) > 1e-4 * means[64] for mean in others)


def test_copies_and_refined_rollouts_are_not_measured(policy: Policy) -> None:
    sequences = drafts(2)
    other = [sequence(one.span, "refined", "y", i, 0.5) for i, one in enumerate(drafts(4)[2:])]
    assert kl_to_base(policy, other, config(**LORA)) is None
    both = kl_to_base(policy, [*other, *sequences], config(**LORA))
    assert both == pytest.approx(sum(by_hand(policy, sequences)) / 2, rel=1e-5)


def test_a_model_that_is_its_own_base_has_no_distance(policy: Policy) -> None:
    full = config(full=True)
    assert kl_to_base(policy, drafts(2), full) is None
    assert torch.is_grad_enabled()
