"""The local sampler, checkpoints and whole runs on the device."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import spans
from soulkit.train.state.fingerprint import deterministic
from soulkit.types import Call, Completion, Sampling
from tests.support.training import lines_of, policy_of, rows, soul

pytestmark = pytest.mark.gpu

BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats by which a sampler's mean log-prob may differ from the trainer's."""


def policy(device: str, folder: Path, dtype: str = "float32") -> Policy:
    return policy_of(folder, device=device, dtype=dtype, lora={"r": 8})


def sample(policy: Policy, temperature: float, *, fixed: bool = False) -> list[Completion]:
    """Replies to eight prompts, sampled together."""
    task, examples = rows("tomi", 8)
    model = policy.sampler(4, deterministic=fixed)
    sampling = Sampling(temperature=temperature, max_tokens=12, seed=5)

    async def wave() -> list[Completion]:
        calls = [Call(role="actor", example_id=e.id) for e in examples]
        talks = zip(map(task.preview, examples), calls, strict=True)
        return await asyncio.gather(*(model.complete(t, sampling, c) for t, c in talks))

    return asyncio.run(wave())


@pytest.mark.parametrize("dtype", BOUNDS)
def test_the_sampler_and_the_trainer_agree(device: str, folder: Path, dtype: str) -> None:
    model = policy(device, folder, dtype)
    replies = sample(model, 1.0)
    reply_spans = [s for c in replies for s in spans([(c.prompt_ids, c.token_ids, c.logprobs)])]
    scored = torch.cat(log_probs(model, reply_spans, None)).cpu()
    sampled = torch.tensor([x for span in reply_spans for x in span.sampler])
    assert len({c.token_ids for c in replies}) > 4
    assert float((scored - sampled).abs().mean()) <= BOUNDS[dtype]


def test_greedy_replies_are_those_of_the_cpu(device: str, folder: Path) -> None:
    here, there = sample(policy(device, folder), 0.0), sample(policy("cpu", folder), 0.0)
    same = [a.token_ids == b.token_ids for a, b in zip(here, there, strict=True)]
    assert sum(same) >= len(same) - 1  # two tokens may be equally likely


def test_deterministic_replies_are_equal_to_the_bit(device: str, folder: Path) -> None:
    with deterministic(True):
        first, second = (sample(policy(device, folder), 1.0, fixed=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.token_ids == other.token_ids and one.logprobs == other.logprobs


def test_a_resumed_run_ends_with_the_same_bits(device: str, folder: Path, tmp_path: Path) -> None:
    def run(name: str, steps: int) -> None:
        code = soul(
            "train", "ditto", "--model", folder, "--task", "tomi", "--data", "synth:16",
            "--prompts", 2, "--group-size", 3, "--max-tokens", 8, "--lora-r", 4, "--lr", 1e-2,
            "--set", "entropy_coef=0.1", "--set", "checkpoint_every=1", "--deterministic",
            "--device", device, "--engine", "local", "--steps", steps, "--out", tmp_path / name,
        )  # fmt: skip
        assert code == 0

    run("whole", 2)
    run("resumed", 1)
    run("resumed", 2)
    weights = [load_file(tmp_path / name / "model" / "adapter_model.safetensors")
               for name in ("whole", "resumed")]  # fmt: skip
    assert all(torch.equal(weights[1][name], one) for name, one in weights[0].items())
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "resumed")
    assert any(one.any() for name, one in weights[0].items() if "lora_B" in name)
