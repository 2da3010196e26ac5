"""A Policy on the device: gradients of packs, half precision, memory of a pass.

Packs, fused parts and activation checkpointing give the gradients of one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from soulkit.models.local.footprint import footprint
from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.train.memory import choose_pass, device_kind
from soulkit.train.model.fused import FusedPart, fuse
from soulkit.train.model.packing import in_tries
from soulkit.train.model.policy import Policy, load_policy
from tests.support.one_by_one import Outcome, one_by_one, packed
from tests.support.shapes import WORDS
from tests.support.training import assert_close, config, gradients, jolt, soul, step_of
from tests.train.test_packing import forest

pytestmark = pytest.mark.gpu

FLEX_WINDOW = 50
FUSED: tuple[tuple[FusedPart, ...], ...] = ((), ("lora", "norm", "mlp"), ("lora", "compile"))


@pytest.fixture
def exact() -> Iterator[None]:
    """float32 products in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def policy_on(
    device: str, dtype: torch.dtype, attention: Any, sliding: bool, again: bool
) -> Policy:
    """Three layers, heads of 32 (FlexAttention has none below 16), and an adapter that is not 0."""
    tokenizer = tiny_tokenizer(WORDS)
    kinds = ["full_attention", "sliding_attention" if sliding else "full_attention"]
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, layer_types=[*kinds, kinds[1]],
        use_sliding_window=sliding, sliding_window=FLEX_WINDOW if sliding else None,
        max_position_embeddings=4096, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model: Any = Qwen3ForCausalLM(shape)
        lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", lora_dropout=0.0)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.12)
        model = peft.get_peft_model(model, lora, adapter_name="policy")
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    model.get_base_model().to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return Policy(
        model.to(device),
        tokenizer,
        packing="auto",
        attention=attention,
        activation_checkpointing=again,
        fused="off",
    )


def best(device: str) -> str:
    return "sdpa" if device == "cpu" else "flex"


def kernel(device: str, attention: str) -> str:
    """The kernel, which must have a backward pass."""
    if device == "cpu" and attention == "flex":
        pytest.skip("FlexAttention has no backward pass on a CPU")
    return attention


def refuse_slow(device: str, parts: Sequence[str]) -> None:
    if device == "cpu" and "compile" in parts:
        pytest.skip("compiling for a CPU takes long; tests/train/test_fused.py does it")


def outcomes(policy: Policy, seeds: Sequence[int], alone: bool = False) -> list[Outcome]:
    """Of forests of several sizes, each with a weight per token that depends on its seed."""
    gradients = []
    for seed in seeds:
        spans = forest(seed, longest=90 + 40 * seed)
        random_ = torch.Generator().manual_seed(seed)
        w, v = (
            [torch.randn(s.n_trained, generator=random_).to(policy.device) for s in spans]
            for _ in "wv"
        )
        gradients.append(
            one_by_one(policy, spans, w, v) if alone else packed(policy, spans, w, v, 1 << 20)
        )
    return gradients


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_packed_gradients(device: str, attention: str, again: bool, sliding: bool) -> None:
    """In float32, over packs of several lengths, so that the kernel is compiled for any length."""
    attention, seeds = kernel(device, attention), (0, 1, 2)
    expected = outcomes(policy_on(device, torch.float32, "sdpa", sliding, False), seeds, alone=True)
    actual = outcomes(policy_on(device, torch.float32, attention, sliding, again), seeds)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a.grads, b.grads)
        for x, y in zip(a.log_prob, b.log_prob, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("parts", FUSED[1:], ids="+".join)
def test_fused_gradients(device: str, parts: tuple[FusedPart, ...], again: bool) -> None:
    refuse_slow(device, parts)
    seeds = (0, 1)
    expected = outcomes(policy_on(device, torch.float32, "sdpa", True, False), seeds, alone=True)
    policy = policy_on(device, torch.float32, best(device), True, again)
    assert min(fuse(policy.decoder, parts).values()) > 0
    for a, b in zip(outcomes(policy, seeds), expected, strict=True):
        assert_close(a.grads, b.grads)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("parts", FUSED, ids=lambda parts: "+".join(parts) or "plain")
def test_bfloat16_is_as_near_to_the_truth_as_one_by_one(
    device: str, parts: tuple[FusedPart, ...], sliding: bool
) -> None:
    """The truth being float32 with the same weights; all tensors' distance together."""
    refuse_slow(device, parts)
    half = torch.bfloat16
    rounded = policy_on(device, half, "sdpa", sliding, False)
    exact = policy_on(device, torch.float32, "sdpa", sliding, False)
    states = {n: p.detach().float() for n, p in rounded.model.named_parameters()}
    exact.model.load_state_dict(states, strict=False)
    [truth] = outcomes(exact, (1,), alone=True)
    [alone] = outcomes(rounded, (1,), alone=True)
    policy = policy_on(device, half, best(device), sliding, False)
    fuse(policy.decoder, parts)
    [packed] = outcomes(policy, (1,))
    assert distance(packed, truth) <= 1.5 * distance(alone, truth) + 1e-3


def distance(a: Outcome, b: Outcome) -> float:
    apart = sum(float((a.grads[n].float() - g.float()).norm()) ** 2 for n, g in b.grads.items())
    return float((apart / sum(float(g.float().norm()) ** 2 for g in b.grads.values())) ** 0.5)


# --- memory ---------------------------------------------------------------------------------------


def test_recomputed_activations_are_chosen_where_memory_is_short(device: str, folder: Path) -> None:
    """The same gradients in less memory, chosen by the free bytes alone."""
    settings = config(device=device, dtype="float32", lora={"r": 4}, tokens_per_batch=4096)
    model, kind = footprint(folder), device_kind(device)
    stored = choose_pass(settings, model, kind, 1 << 50)
    short = choose_pass(settings, model, kind, stored.needs // 2)
    assert (stored.checkpointing, short.checkpointing) == (False, True)
    results, peaks = [], []
    for choice in (stored, short):
        policy = load_policy(settings, folder, choice)
        jolt(policy, 0.05, seed=1)
        assert bool(policy.recomputed) is choice.checkpointing
        [pack] = in_tries([one.span for one in step_of(examples=12)], 1 << 20)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        policy.score(pack).log_prob.sum().backward()
        results.append(gradients(policy))
        peaks.append(torch.cuda.max_memory_allocated() if device == "cuda" else 0)
    assert_close(results[1], results[0], rel=1e-4)
    if device == "cuda":
        assert peaks[1] < peaks[0]


def test_out_of_memory_is_an_error_with_advice(
    gpu: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (3 << 20)) / total)
    try:
        code = soul("train", "grpo", "--model", folder, "--task", "tomi", "--data", "synth:8",
                    "--steps", 1, "--device", gpu, "--engine", "local", "--out",
                    tmp_path / "run")  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert code == 2 and "--tokens-per-batch" in capsys.readouterr().err
