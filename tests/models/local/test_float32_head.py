"""The output layer in float32: the same weights, products that are not rounded, bounded memory."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from soulkit.models.local import float32_head
from soulkit.models.local.float32_head import Float32Product, widen_head
from soulkit.models.local.sampler import LocalModel
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import Span
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.training import config, random_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def half(folder: Path, dtype: str = "bfloat16") -> Policy:
    return load_policy(config(dtype=dtype, lora={"r": 4, "alpha": 8}), folder)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


@pytest.mark.parametrize("block", [1, 70, 1 << 22])
def test_the_product_and_its_gradients_are_those_of_float32(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float32_head, "BLOCK", block)
    x, w = drawn(5, 16, seed=1).requires_grad_(), drawn(37, 16, seed=2).requires_grad_()
    out = Float32Product.apply(x, w)
    weights = drawn(5, 37, seed=3, dtype=torch.float32)
    dx, dw = torch.autograd.grad((out * weights).sum(), (x, w))
    wide_x, wide_w = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
    expected = wide_x @ wide_w.t()
    assert out.dtype == torch.float32 and torch.allclose(out, expected, rtol=1e-6, atol=1e-5)
    ex, ew = torch.autograd.grad((expected * weights).sum(), (wide_x, wide_w))
    assert (dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(dx, ex.bfloat16()) or torch.allclose(dx.float(), ex, rtol=1e-2)
    assert torch.allclose(dw.float(), ew, rtol=1e-2, atol=1e-2)


def test_log_probs_of_a_bfloat16_model_are_not_rounded(folder: Path) -> None:
    policy = half(folder)
    ids = tuple(range(300, 340))
    span = Span(ids, (False, *(True,) * 39), ())
    (logs,) = log_probs(policy, [span], None)
    with torch.no_grad():
        states = policy.decoder(input_ids=torch.tensor([ids]))[0][0, :-1]
        weight = policy.causal.get_output_embeddings().weight
        targets = torch.tensor(ids[1:])[:, None]
        exact = torch.log_softmax(states.double() @ weight.double().t(), -1).gather(1, targets)
        rounded = torch.log_softmax((states @ weight.t()).float(), -1).gather(1, targets)
    assert (logs - exact[:, 0]).abs().max() < 2e-5
    assert (rounded - exact).abs().mean() > 100 * (logs - exact[:, 0]).abs().mean()


def test_the_sampler_and_the_trainer_agree_on_a_bfloat16_model(folder: Path) -> None:
    """What is left between them are the hidden states, which each rounds on its own road."""
    policy = half(folder)
    sampler = policy.sampler(4)
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=5)

    async def replies() -> list[Completion]:
        calls = [Call(role="actor", example_id=f"x{i}") for i in range(8)]
        context = (Segment("user", "Where is the ball now?"),)
        every = [sampler.complete(context, sampling, call) for call in calls]
        return list(await asyncio.gather(*every))

    completions = asyncio.run(replies())
    spans = [
        Span((*c.prompt_ids, *c.token_ids),
             (*(False,) * len(c.prompt_ids), *(True,) * len(c.token_ids)), ())
        for c in completions
    ]  # fmt: skip
    trained = torch.cat(log_probs(policy, spans, None))
    sampled = torch.tensor([log for c in completions for log in c.logprobs])
    assert (trained - sampled).abs().mean() < 0.02


def test_a_float32_head_stays_the_layer_it_was(folder: Path) -> None:
    model = LocalModel.load(folder, device="cpu").model
    assert type(model.get_output_embeddings()) is torch.nn.Linear and not widen_head(model)
    model.bfloat16()
    assert widen_head(model) and widen_head(model)
    out = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert out.dtype == torch.float32 and isinstance(model.lm_head, torch.nn.Linear)


def test_a_widened_model_saves_what_it_was(folder: Path, tmp_path: Path) -> None:
    model = LocalModel.load(folder, device="cpu", dtype="bfloat16").model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(t, before[name]) for name, t in again.state_dict().items())
    assert again.state_dict().keys() == before.keys()
