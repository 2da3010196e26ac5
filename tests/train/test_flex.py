"""FlexAttention over packs: the same visibility, values and gradients as the other kernel.

On a CPU its plain form runs forward only. The tests marked `gpu` compare gradients of compiled
FlexAttention, packed SDPA and one sequence at a time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.train.forward.attention import FLEX_BLOCK, Packed, block_mask
from soulkit.train.forward.fuse import FusedPart, fuse
from soulkit.train.forward.packing import Pack, in_tries
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.trie import Ids, Trie, build_trie
from soulkit.train.objectives.sequences import Span
from tests.support.one_by_one import Outcome, one_by_one, packed
from tests.support.shapes import WORDS, build
from tests.support.training import assert_close, policy_of

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 16
WINDOWS = (None, 1, 5, 30)

ids = st.lists(st.integers(0, 2), min_size=1, max_size=60).map(tuple)


@st.composite
def tries(draw: st.DrawFn) -> Trie:
    """Sequences over three ids, so that prefixes meet, some of them behind a longer common head."""
    heads: list[Ids] = [(), draw(ids), draw(ids) * 2]
    tails = draw(st.lists(st.tuples(st.sampled_from(heads), ids), min_size=1, max_size=5))
    return build_trie([(*head, *tail) for head, tail in tails])


def padded(trie: Trie) -> int:
    return -(-len(trie) // FLEX_BLOCK) * FLEX_BLOCK


def whole(trie: Trie, window: int | None, length: int) -> torch.Tensor:
    """bool [length, length]: `Trie.visible` with padding that sees itself."""
    seen = torch.eye(length, dtype=torch.bool)
    n = len(trie)
    seen[:n, :n] = torch.from_numpy(trie.visible((0, n), [(0, n)], window))
    return seen


@settings(max_examples=25, deadline=None)
@given(tries(), st.sampled_from(WINDOWS))
def test_the_block_mask_is_the_visibility_of_the_trie(trie: Trie, window: int | None) -> None:
    length = padded(trie)
    mask, expected = block_mask(trie, length, window, CPU), whole(trie, window, length)
    dense = create_mask(mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0]
    assert torch.equal(dense, expected)
    blocks = expected.view(length // FLEX_BLOCK, FLEX_BLOCK, -1, FLEX_BLOCK).any(3).any(1)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(tries(), st.sampled_from(WINDOWS), st.integers(0, 99))
def test_flex_equals_sdpa_and_the_rectangles(trie: Trie, window: int | None, seed: int) -> None:
    n, length = len(trie), padded(trie)
    random_ = torch.Generator().manual_seed(seed)
    shapes = ((1, heads, length, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    q, k, v = (torch.randn(shape, generator=random_) for shape in shapes)
    mask = block_mask(trie, length, window, CPU)
    flex = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, scale=0.3)
    seen = whole(trie, window, length)
    plain = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(flex, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(flex[:, :, n:], v[:, :, n:].repeat_interleave(2, 1))
    rectangles = Packed(trie)(q[:, :, :n], k[:, :, :n], v[:, :, :n], window, 0.3)
    torch.testing.assert_close(flex[:, :, :n], rectangles, rtol=1e-5, atol=1e-5)
    from_pack = Packed(trie, kernel="flex", length=length)(q, k, v, window, 0.3)
    assert torch.equal(from_pack, flex)


# --- policies -------------------------------------------------------------------------------------


def forest(seed: int, longest: int = 40, heads: int = 2, each: int = 4) -> list[Span]:
    """Replies of different lengths to a few prompts, one reply being the start of another."""
    rng, spans = random.Random(seed), []
    for _ in range(heads):
        prompt = tuple(rng.randrange(300, 340) for _ in range(rng.randint(longest // 2, longest)))
        replies = [
            tuple(rng.randrange(300, 340) for _ in range(rng.randint(2, longest)))
            for _ in range(each)
        ]
        for reply in (*replies, replies[0][: len(replies[0]) // 2 or 1]):
            trained = (False,) * len(prompt) + (True,) * len(reply)
            spans.append(Span((*prompt, *reply), trained, ()))
    return spans


def pack_of(spans: Sequence[Span]) -> Pack:
    [pack] = in_tries(spans, 1 << 20)
    return pack


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-sliding", "gemma3"])
def test_a_policy_reads_the_same_with_both_kernels(kind: str, tmp_path: Path) -> None:
    folder, spans = build(kind, tmp_path / kind), forest(3)
    scores = []
    for attention in ("sdpa", "flex"):
        policy = policy_of(folder, attention=attention, lora={"r": 4, "alpha": 8})
        assert policy.kernel == attention
        with torch.no_grad():
            scores.append(policy.score(pack_of(spans)))
    torch.testing.assert_close(scores[0].log_prob, scores[1].log_prob, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[0].entropy, scores[1].entropy, rtol=1e-5, atol=1e-5)


# --- on a GPU -------------------------------------------------------------------------------------

WINDOW = 50
FUSED: tuple[tuple[FusedPart, ...], ...] = ((), ("lora", "norm", "mlp"), ("lora", "compile"))


@pytest.fixture
def exact() -> Iterator[None]:
    """float32 products in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def policy_on_gpu(dtype: torch.dtype, attention: Any, sliding: bool, again: bool) -> Policy:
    """Three layers, heads of 32 (FlexAttention has none below 16), and an adapter that is not 0."""
    tokenizer = tiny_tokenizer(WORDS)
    kinds = ["full_attention", "sliding_attention" if sliding else "full_attention"]
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, layer_types=[*kinds, kinds[1]],
        use_sliding_window=sliding, sliding_window=WINDOW if sliding else None,
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
        model.cuda(),
        tokenizer,
        packing="auto",
        attention=attention,
        activation_checkpointing=again,
        fused="off",
    )


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


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("attention", ["flex", "sdpa"])
def test_packed_gradients_on_a_gpu(attention: str, again: bool, sliding: bool) -> None:
    """In float32, over packs of several lengths, so that the kernel is compiled for any length."""
    seeds = (0, 1, 2)
    expected = outcomes(policy_on_gpu(torch.float32, "sdpa", sliding, False), seeds, alone=True)
    actual = outcomes(policy_on_gpu(torch.float32, attention, sliding, again), seeds)
    for a, b in zip(actual, expected, strict=True):
        assert_close(a.grads, b.grads)
        for x, y in zip(a.log_prob, b.log_prob, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("parts", FUSED[1:], ids="+".join)
def test_fused_gradients_on_a_gpu(parts: tuple[FusedPart, ...], again: bool) -> None:
    seeds = (0, 1)
    expected = outcomes(policy_on_gpu(torch.float32, "sdpa", True, False), seeds, alone=True)
    policy = policy_on_gpu(torch.float32, "flex", True, again)
    assert min(fuse(policy.decoder, parts).values()) > 0
    for a, b in zip(outcomes(policy, seeds), expected, strict=True):
        assert_close(a.grads, b.grads)


@pytest.mark.gpu
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("parts", FUSED, ids=lambda parts: "+".join(parts) or "plain")
def test_bfloat16_is_as_near_to_the_truth_as_one_by_one(
    parts: tuple[FusedPart, ...], sliding: bool
) -> None:
    """The truth being float32 with the same weights; all tensors' distance together."""
    half = torch.bfloat16
    rounded = policy_on_gpu(half, "sdpa", sliding, False)
    exact = policy_on_gpu(torch.float32, "sdpa", sliding, False)
    states = {n: p.detach().float() for n, p in rounded.model.named_parameters()}
    exact.model.load_state_dict(states, strict=False)
    [truth] = outcomes(exact, (1,), alone=True)
    [alone] = outcomes(rounded, (1,), alone=True)
    policy = policy_on_gpu(half, "flex", sliding, False)
    fuse(policy.decoder, parts)
    [packed] = outcomes(policy, (1,))
    assert distance(packed, truth) <= 1.5 * distance(alone, truth) + 1e-3


def distance(a: Outcome, b: Outcome) -> float:
    apart = sum(float((a.grads[n].float() - g.float()).norm()) ** 2 for n, g in b.grads.items())
    return float((apart / sum(float(g.float().norm()) ** 2 for g in b.grads.values())) ** 0.5)
