"""Every family of models through the same road: sample, train, save, load again, evaluate."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from soulkit.models.local.sampler import LocalModel
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.prepare import log_probs
from soulkit.train.objectives.sequences import Span, spans
from soulkit.train.run import words_of
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.one_by_one import alone
from tests.support.shapes import KINDS, VISUAL, WORDS, build
from tests.support.training import policy_of, rows, soul

PACKED = ("qwen3", "qwen3-sliding", "llama", "mistral", "phi3", "gemma3", "gpt2", *VISUAL)
"""Families that train with shared prefixes; the others need `--packing off`."""

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("kinds")
    return {kind: build(kind, out / kind) for kind in KINDS}


def policy(folders: dict[str, Path], kind: str, **settings: Any) -> Policy:
    plain: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}}
    plain |= {} if kind in PACKED else {"packing": "off"}
    return policy_of(folders[kind], **(plain | settings))


def sampled(model: LocalModel) -> list[Completion]:
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


def spans_of(completions: list[Completion]) -> list[Span]:
    return [s for c in completions for s in spans([(c.prompt_ids, c.token_ids, c.logprobs)])]


def assert_logprobs(scores: list[torch.Tensor], completions: list[Completion]) -> None:
    for log, completion in zip(scores, completions, strict=True):
        torch.testing.assert_close(log, torch.tensor(completion.logprobs), rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sampler_trainer_and_saved_adapter_agree(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    trained = policy(folders, kind)
    completions = sampled(trained.sampler(batch_size=4))
    assert len({c.token_ids for c in completions}) > 3
    scores = log_probs(trained, spans_of(completions), 60)
    assert_logprobs(scores, completions)
    trained.save(tmp_path / "model")
    evaluated = LocalModel.load(folders[kind], adapter=tmp_path / "model")
    again = sampled(evaluated)
    assert [c.token_ids for c in again] == [c.token_ids for c in completions]
    assert_logprobs(scores, again)
    resumed = policy(folders, kind, move=0.0, adapter=str(tmp_path / "model"))
    assert resumed.version() == trained.version()
    assert [n for n, _ in resumed.trained] == [n for n, _ in trained.trained]


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_moves_the_model_and_the_base_stays(
    folders: dict[str, Path], kind: str
) -> None:
    trained, fresh = policy(folders, kind), policy(folders, kind, move=0.0)
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
    names = [name for name, _ in policy(folders, kind).trained]
    assert all("lora_" in n and ".model.language_model.layers." in n for n in names)
    layers = 3 if kind.startswith("gemma") else 2
    places = {n.split(".lora_")[0] for n in names}
    assert len(places) == layers * len(PROJECTIONS)
    assert {p.rpartition(".")[2] for p in places} == PROJECTIONS


@pytest.mark.parametrize("kind", VISUAL)
def test_all_weights_of_the_language_part_are_trained_and_saved_with_the_rest(
    folders: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    trained = policy(folders, kind, move=0.01, full=True, method="sft")
    assert not any("vis" in name or "projector" in name for name, _ in trained.trained)
    trained.save(tmp_path / "model")
    before = load_file(folders[kind] / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed and not any("vis" in n or "projector" in n for n in changed)
    completions = sampled(LocalModel.load(tmp_path / "model"))
    assert_logprobs(log_probs(trained, spans_of(completions), 60), completions)


def test_an_image_text_model_is_trained_and_evaluated_by_commands(tmp_path: Path) -> None:
    """`soul train ditto`, then `soul eval local` with the adapter that it wrote."""
    task, examples = rows("tomi", 8)
    words = words_of([(task, e) for e in examples])
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
