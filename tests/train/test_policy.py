"""The policy's log-probs are the model's own, the sampler's, and those of the saved adapter."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from soulkit.errors import ModelLoadError
from soulkit.models.local.sampler import LocalModel
from soulkit.train.forward.policy import CHUNK, Policy, load_policy
from soulkit.train.forward.prepare import log_probs
from soulkit.train.objectives.sequences import Span, spans
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.training import (
    TOKENIZER,
    assert_close,
    config,
    gradients,
    jolt,
    policy_of,
    random_model,
    rows,
    step_of,
)

LORA: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return policy_of(folder, **LORA)


def sampled(model: LocalModel, temperature: float) -> list[Completion]:
    """Completions of a few prompts of unequal length, from one wave."""
    task, examples = rows("tomi", 6)
    sampling = Sampling(max_tokens=9, temperature=temperature, seed=2)

    async def wave() -> list[Completion]:
        calls = (
            model.complete(task.preview(e), sampling, Call(role="actor", example_id=e.id))
            for e in examples
        )
        return await asyncio.gather(*calls)

    return asyncio.run(wave())


def spans_of(completions: list[Completion]) -> list[Span]:
    return [s for c in completions for s in spans([(c.prompt_ids, c.token_ids, c.logprobs)])]


def test_gathered_hidden_states_give_the_full_forwards_log_probs(policy: Policy) -> None:
    assert policy.gathers
    some = [s.span for s in step_of()]
    short = log_probs(policy, some, 10_000)
    try:
        policy.gathers = False
        full = log_probs(policy, some, 10_000)
    finally:
        policy.gathers = True
    for a, b in zip(short, full, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_samplers(folder: Path, temperature: float) -> None:
    policy = policy_of(folder, temperature=temperature, **LORA)
    replies = sampled(policy.sampler(batch_size=4), temperature)
    assert len({c.token_ids for c in replies}) > 3
    scores = log_probs(policy, spans_of(replies), 200)
    for log, completion in zip(scores, replies, strict=True):
        torch.testing.assert_close(log, torch.tensor(completion.logprobs), rtol=0, atol=1e-4)


def test_entropy_is_that_of_the_distribution_and_has_a_gradient_when_asked(
    policy: Policy,
) -> None:
    some = [s.span for s in step_of(2, examples=1)]
    (pack,) = policy.packs(some, 10_000)
    plain, with_entropy = policy.score(pack), policy.score(pack, entropy=True)
    assert not plain.entropy.requires_grad and with_entropy.entropy.requires_grad
    torch.testing.assert_close(plain.entropy, with_entropy.entropy.detach())
    assert float(plain.entropy.min()) >= 0
    counts = torch.bincount(plain.owner).tolist()
    assert counts == [some[i].n_trained for i in pack.indices]


def loss_grads(policy: Policy, some: list[Span], budget: int = 10_000) -> dict[str, torch.Tensor]:
    """Gradients of a weighted sum of log-probs and entropies."""
    for _, parameter in policy.trained:
        parameter.grad = None
    for pack in policy.packs(some, budget):
        scores = policy.score(pack, entropy=True)
        weights = torch.tensor([1.0 + i % 3 for i in pack.indices])[scores.owner]
        ((scores.log_prob + 0.1 * scores.entropy) * weights).sum().backward()
    return gradients(policy)


def test_reading_the_vocabulary_in_chunks_does_not_show(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [s.span for s in step_of(4)]
    whole, before = log_probs(policy, some, 10_000), loss_grads(policy, some)
    monkeypatch.setitem(CHUNK, "cpu", 1)  # 16 positions at a time, the least
    assert_close(loss_grads(policy, some), before)
    for a, b in zip(log_probs(policy, some, 10_000), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("packing", ["auto", "off"])
def test_activations_computed_again_give_the_same_gradients(
    folder: Path, policy: Policy, packing: str
) -> None:
    some = [s.span for s in step_of(5)]
    again = policy_of(folder, packing=packing, activation_checkpointing=True, **LORA)
    assert again.recomputed
    assert_close(loss_grads(again, some), loss_grads(policy, some))
    assert not any(module.training for module in again.model.modules())


def test_the_version_is_that_of_the_weights(folder: Path) -> None:
    a, b = policy_of(folder, **LORA), policy_of(folder, **LORA)
    assert a.version() == b.version() and len(a.version()) == 16
    jolt(b, 1e-4, seed=9)
    assert a.version() != b.version()


def test_the_base_is_the_model_without_its_adapter(folder: Path, policy: Policy) -> None:
    some = [s.span for s in step_of(3, examples=1)]
    untouched = log_probs(policy_of(folder, move=0.0, **LORA), some, 10_000)
    moved = log_probs(policy, some, 10_000)
    with policy.base():
        base = log_probs(policy, some, 10_000)
    after = log_probs(policy, some, 10_000)
    for u, m, b, a in zip(untouched, moved, base, after, strict=True):
        torch.testing.assert_close(u, b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(m, a)
        assert float((m - b).abs().max()) > 0.05


def test_only_the_adapter_is_trained_unless_all_weights_are(folder: Path, policy: Policy) -> None:
    assert all("lora_" in name for name, _ in policy.trained)
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in policy.trained}
    assert layers == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    every = policy_of(folder, move=0.0, full=True, method="sft")
    assert any("embed_tokens" in name for name, _ in every.trained)


@pytest.mark.parametrize(("full", "expected"), [(True, "float32"), (False, "auto")])
def test_all_weights_are_never_trained_in_a_checkpoints_half_precision_unasked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, full: bool, expected: str
) -> None:
    dtypes, plain = [], LocalModel.load

    def load(path: Path, **how: Any) -> LocalModel:
        dtypes.append(how["dtype"])
        return plain(path, **how)

    monkeypatch.setattr(LocalModel, "load", load)
    load_policy(config(full=full, method="sft"), folder)
    assert dtypes == [expected]


def test_a_saved_adapter_gives_the_trainers_log_probs(
    tmp_path: Path, folder: Path, policy: Policy
) -> None:
    policy.save(tmp_path / "model")
    files = {p.name for p in (tmp_path / "model").iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", *TOKENIZER}
    loaded = LocalModel.load(folder, adapter=tmp_path / "model")
    replies = sampled(loaded, 1.0)
    for log, completion in zip(log_probs(policy, spans_of(replies), 500), replies, strict=True):
        torch.testing.assert_close(log, torch.tensor(completion.logprobs), rtol=0, atol=1e-4)


def test_training_goes_on_from_a_saved_adapter(
    tmp_path: Path, folder: Path, policy: Policy
) -> None:
    policy.save(tmp_path / "model")
    again = policy_of(folder, move=0.0, adapter=str(tmp_path / "model"))
    assert again.version() == policy.version()
    assert [n for n, _ in again.trained] == [n for n, _ in policy.trained]


def test_all_weights_are_saved_as_a_model_of_their_own(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, move=0.01, full=True, method="sft")
    policy.save(tmp_path / "model")
    loaded = LocalModel.load(tmp_path / "model")
    assert loaded.renderer().render([Segment("user", "Hello")]).endswith("assistant\n")
    replies = sampled(loaded, 1.0)
    for log, completion in zip(log_probs(policy, spans_of(replies), 500), replies, strict=True):
        torch.testing.assert_close(log, torch.tensor(completion.logprobs), rtol=0, atol=1e-4)


def test_a_folder_that_is_no_adapter_is_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is no adapter"):
        policy_of(folder, adapter=str(tmp_path))


def test_scripted_replies_end_their_turn(policy: Policy) -> None:
    ids = policy.encode_reply("<answer>box</answer>")
    assert ids[-1] == policy.renderer.end_of_turn
    assert policy.tokenizer.decode(ids[:-1]) == "<answer>box</answer>"
    assert config().lora.alpha == 2 * config().lora.r


def test_prompts_are_rendered_as_the_sampler_was_told_to_think(folder: Path) -> None:
    """A copy's prompt is rendered by the policy: it must say of thinking what was sampled."""
    for thinking in (None, False, True):
        assert policy_of(folder, thinking=thinking).renderer.thinking is thinking
