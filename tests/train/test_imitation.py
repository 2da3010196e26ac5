"""The supervised loss with its gradient made on the way is the plain one, differentiated."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from soulkit.train.forward import policy as policy_module
from soulkit.train.forward.blocks import Costs
from soulkit.train.forward.imitation import imitation_loss
from soulkit.train.forward.packing import in_rows, in_tries
from soulkit.train.forward.policy import Policy
from soulkit.train.objectives.sequences import Span
from tests.support.shapes import make

pytestmark = pytest.mark.torch

SPANS = [
    Span((5, 6, 7, 8, 9, 10), (False, False, True, True, False, True), ()),
    Span((5, 6, 7, 8, 11), (False, False, False, True, True), ()),
    Span((5, 6, 7, 8, 9, 12, 13), (False, True, False, False, True, True, True), ()),
]


def policy_of(dtype: torch.dtype, *, head: bool) -> Policy:
    model, tokenizer = make("qwen3")
    model = model.to(dtype)
    model.requires_grad_(True)
    model.get_output_embeddings().weight.requires_grad_(head)
    return Policy(model, tokenizer, 0.7, packing="auto")


def gradients(policy: Policy, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.model.zero_grad(set_to_none=True)
    loss.backward()
    return {n: p.grad.clone() for n, p in policy.trained if p.grad is not None}


@pytest.mark.parametrize("layout", ["tries", "rows"])
@pytest.mark.parametrize("head", [True, False])
def test_loss_log_probs_and_gradients_are_those_of_the_plain_sum(
    layout: str, head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(torch.float64, head=head)
    # A chunk is less than the pack, so that several make up its loss.
    monkeypatch.setitem(policy_module.CHUNK, "cpu", 1)
    monkeypatch.setattr(Policy, "_rows_at_once", 3)
    (pack,) = (in_tries if layout == "tries" else in_rows)(SPANS, 100)
    weights = torch.linspace(0.1, 0.9, sum(s.n_trained for s in SPANS), dtype=torch.float64)
    scored = policy.score(pack)
    expected = -(scored.log_prob * weights).sum()
    plain = gradients(policy, expected)
    learned = imitation_loss(policy, pack, weights)
    assert not learned.log_prob.requires_grad
    assert torch.equal(learned.owner, scored.owner)
    torch.testing.assert_close(learned.log_prob, scored.log_prob.detach(), rtol=1e-6, atol=1e-6)
    actual = gradients(policy, 3 * learned.loss)
    assert actual.keys() == plain.keys()
    assert ("lm_head.weight" in plain) is head
    for name, gradient in plain.items():
        assert float((actual[name] / 3 - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8


def test_half_precision_has_its_products_in_float32() -> None:
    policy = policy_of(torch.bfloat16, head=True)
    (pack,) = in_rows(SPANS, 100)
    weights = torch.ones(sum(s.n_trained for s in SPANS))
    plain = gradients(policy, -policy.score(pack).log_prob.sum())
    actual = gradients(policy, imitation_loss(policy, pack, weights).loss)
    for name, gradient in plain.items():
        far = float((actual[name].float() - gradient.float()).norm())
        assert far <= 2e-2 * float(gradient.float().norm()), name


def test_a_head_with_arithmetic_that_is_not_plain_is_itself_itself() -> None:
    policy: Any = policy_of(torch.float64, head=True)
    (pack,) = in_rows(SPANS, 100)
    weights = torch.ones(sum(s.n_trained for s in SPANS))
    with torch.no_grad():
        expected = imitation_loss(policy, pack, weights)
        policy.gathers = False
        itself = imitation_loss(policy, pack, weights)
    assert not expected.loss.requires_grad
    torch.testing.assert_close(itself.loss, expected.loss)


def test_conversations_in_one_pack_never_see_one_another() -> None:
    rng = random.Random(0)
    talks = []
    for length in (30, 41, 57):
        ids = (5, 6, 7, *(rng.randrange(10, 90) for _ in range(length)))
        talks.append(Span(ids, tuple(i > 4 and i % 3 > 0 for i in range(len(ids))), ()))
    policy = policy_of(torch.float64, head=True)
    (together,) = in_tries(talks, 1000, Costs().pays)
    assert together.trie is not None
    assert len(together.trie) == sum(len(t.ids) for t in talks)  # the header was not shared
    weights = torch.full((sum(t.n_trained for t in talks),), 0.5, dtype=torch.float64)
    packed = gradients(policy, imitation_loss(policy, together, weights).loss)
    alone: dict[str, torch.Tensor] = {}
    for talk in talks:
        (pack,) = in_rows([talk], 1000)
        ids = torch.tensor([talk.ids])
        labels = ids.masked_fill(~torch.tensor([talk.trained]), -100)[0, 1:]
        logits = policy.causal(input_ids=ids, use_cache=False).logits[0, :-1] / 0.7
        loss = 0.5 * torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        learned = imitation_loss(policy, pack, weights[: talk.n_trained])
        torch.testing.assert_close(learned.loss.double(), loss, rtol=1e-6, atol=1e-6)
        for name, gradient in gradients(policy, loss).items():
            alone[name] = alone.get(name, torch.zeros_like(gradient)) + gradient
    for name, gradient in alone.items():
        assert float((packed[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8
