"""The policy's log-probs are the model's own, the sampler's, and those of the saved adapter.

Every family of models through the same road: sample, train, save, load again, evaluate.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from soulkit.errors import ModelLoadError
from soulkit.models.local.sampler import LocalModel
from soulkit.train.model.policy import CHUNK, Policy, load_policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import Span, spans
from soulkit.train.run import tiny_model_texts
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.one_by_one import alone
from tests.support.shapes import KINDS, VISUAL, WORDS, build
from tests.support.training import (
    TOKENIZER,
    assert_close,
    config,
    gradients,
    jolt,
    policy_of,
    random_model,
    rows,
    soul,
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


def test_entropy_is_that_of_the_distribution_and_has_a_gradient_when_asked(policy: Policy) -> None:
    some = [s.span for s in step_of(2, examples=1)]
    (pack,) = policy.packs(some, 10_000)
    plain, with_entropy = (policy.score(pack, entropy=how) for how in ("values", "gradient"))
    assert policy.score(pack).entropy.isnan().all()
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
        scores = policy.score(pack, entropy="gradient")
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
    with pytest.raises(ModelLoadError, match="is not an adapter"):
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


PACKED = ("qwen3", "qwen3-sliding", "llama", "mistral", "phi3", "gemma3", "gpt2", *VISUAL)
"""Families that train with shared prefixes; the others need `--packing off`."""

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("kinds")
    return {kind: build(kind, out / kind) for kind in KINDS}


def family_policy(folders: dict[str, Path], kind: str, **settings: Any) -> Policy:
    plain: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}}
    plain |= {} if kind in PACKED else {"packing": "off"}
    return policy_of(folders[kind], **(plain | settings))


def family_replies(model: LocalModel) -> list[Completion]:
    """Completions of prompts of unequal length, from one wave; two of each prompt."""
    sampling = Sampling(max_tokens=6, seed=5)
    prompts = [" ".join(WORDS[n : 3 * n + 2]) for n in (1, 4, 9)]

    async def wave() -> list[Completion]:
        calls = [
            model.complete(
                [Segment("user", prompt)],
                sampling,
                Call(role="actor", example_id=f"x{number}", rollout=rollout),
            )
            for number, prompt in enumerate(prompts)
            for rollout in range(2)
        ]
        return await asyncio.gather(*calls)

    return asyncio.run(wave())


def assert_logprobs(scores: list[torch.Tensor], completions: list[Completion]) -> None:
    for log, completion in zip(scores, completions, strict=True):
        torch.testing.assert_close(log, torch.tensor(completion.logprobs), rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3-sliding", "phi3-long", "gpt2", "gemma3-vl", "llama4"])
def test_sampler_trainer_and_saved_adapter_agree(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    trained = family_policy(folders, kind)
    completions = family_replies(trained.sampler(batch_size=4))
    assert len({c.token_ids for c in completions}) > 3
    scores = log_probs(trained, spans_of(completions), 60)
    assert_logprobs(scores, completions)
    trained.save(tmp_path / "model")
    evaluated = LocalModel.load(folders[kind], adapter=tmp_path / "model")
    again = family_replies(evaluated)
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]
    assert_logprobs(scores, again)
    resumed = family_policy(folders, kind, move=0.0, adapter=str(tmp_path / "model"))
    assert resumed.version() == trained.version()
    assert [n for n, _ in resumed.trained] == [n for n, _ in trained.trained]


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_moves_the_model_and_the_base_stays(
    folders: dict[str, Path], kind: str
) -> None:
    trained, fresh = family_policy(folders, kind), family_policy(folders, kind, move=0.0)
    span = Span(tuple(range(300, 330)), (False,) * 10 + (True,) * 20, ())
    with torch.no_grad():
        moved, base_scores = alone(trained, span)[0], alone(fresh, span)[0]
    with trained.base():
        (base,) = log_probs(trained, [span], 100)
    torch.testing.assert_close(base, base_scores, rtol=1e-4, atol=1e-4)
    assert float((moved - base_scores).abs().max()) > 0.05


@pytest.mark.parametrize("kind", VISUAL)
def test_only_the_language_part_of_an_image_text_model_is_adapted(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    names = [name for name, _ in family_policy(folders, kind).trained]
    assert all("lora_" in n and ".model.language_model.layers." in n for n in names)
    layers = 3 if kind.startswith("gemma") else 2
    places = {n.split(".lora_")[0] for n in names}
    assert len(places) == layers * len(PROJECTIONS)
    assert {p.rpartition(".")[2] for p in places} == PROJECTIONS


@pytest.mark.parametrize("kind", VISUAL)
def test_all_weights_of_the_language_part_are_trained_and_saved_with_the_rest(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    trained = family_policy(folders, kind, move=0.01, full=True, method="sft")
    assert not any("vis" in name or "projector" in name for name, _ in trained.trained)
    trained.save(tmp_path / "model")
    before = load_file(folders[kind] / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and not any("vis" in n or "projector" in n for n in changed)
    completions = family_replies(LocalModel.load(tmp_path / "model"))
    assert_logprobs(log_probs(trained, spans_of(completions), 60), completions)


def test_an_image_text_model_is_trained_and_evaluated_by_commands(tmp_path: Path) -> None:
    """`soul train ditto`, then `soul eval local` with the adapter that it wrote."""
    task, examples = rows("tomi", 8)
    words = tiny_model_texts([(task, e) for e in examples])
    base = build("qwen3-vl", tmp_path / "base", words)
    out, tomi = tmp_path / "run", ("--task", "tomi", "--data", "tomi=synth:8")
    done = soul("train", "ditto", "--model", base, *tomi, "--steps", 1, "--prompts", 2,
                "--group-size", 2, "--max-tokens", 5, "--lora-r", 4, "--lr", 1e-2,
                "--out", out)  # fmt: skip
    assert done == 0
    adapter = next(out.glob("checkpoints/*/adapter_model.safetensors")).parent
    targets = json.loads((adapter / "adapter_config.json").read_text())["target_modules"]
    assert "language_model" in targets
    scores = tmp_path / "eval"
    common = ("--model", base, "--max-tokens", 5, "--max-unscored", 1, *tomi)
    assert soul("eval", "local", *common, "--adapter", adapter, "--out", scores) == 0
    assert json.loads((scores / "summary.json").read_text())["n_scored"] == 8
