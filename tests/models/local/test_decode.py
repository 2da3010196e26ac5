"""The decode loop: equal to transformers' own, whatever shares a batch and whenever it ends.

Replies of two contexts: at either end ordinary sampling, in between the mixture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from soulkit.errors import ConfigError
from soulkit.models.local import decode
from soulkit.models.local.continuous import ContinuousBatching, Row
from soulkit.models.local.decode import (
    Decoder,
    LaneLayout,
    Replies,
    decode_batch,
    grouped_attention,
    lay_out,
    windows_of,
)
from soulkit.models.local.decode_check import _differences
from soulkit.models.local.draw import Draw, uniforms
from soulkit.models.local.sampler import LocalModel, expert_turns
from soulkit.models.local.tiny import build_tiny
from soulkit.train.model.attention import install_packed_attention
from soulkit.types import Call, Completion, Sampling, Segment

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
ALTERNATE = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3 with windows": ("Qwen3", {"use_sliding_window": True, **ALTERNATE}),
    "llama": ("Llama", {}),
    "mistral, windows only": ("Mistral", {"sliding_window": 6}),
    "gemma2, windows and soft caps": ("Gemma2", ALTERNATE),
    "gemma3": ("Gemma3Text", ALTERNATE),
    "gpt2, learned positions": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}
LEFT_TO_GENERATE: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2, convolutions": ("Lfm2", {"layer_types": ["conv", "full_attention"]}),
    "mamba, recurrent": ("Mamba", {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, max_context=128)


def made(folder: Path, name: str, settings: dict[str, Any]) -> LocalModel:
    """A model of another family with sharp random weights and the tiny tokenizer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    stem = name.removesuffix("Text")
    kind: Any = getattr(transformers, f"{name}Config")
    config = kind(**{**SMALL, **ends, "vocab_size": len(tokenizer), "pad_token_id": 0, **settings})
    heads = {"GPT2": "GPT2LMHeadModel"}
    torch.manual_seed(0)
    model = getattr(transformers, heads.get(name, f"{stem}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(6.0)
    return LocalModel(model, tokenizer)


def requests(groups: Sequence[int]) -> list[tuple[list[Segment], Call]]:
    """So many rows of each of some prompts of unequal lengths."""
    prompts = [[Segment("user", " ".join(WORDS[p : 2 * p + 3]))] for p in range(len(groups))]
    return [
        (prompts[p], Call(role="actor", example_id=f"e{p}", rollout=r))
        for p, rows in enumerate(groups)
        for r in range(rows)
    ]


def ask(model: LocalModel, groups: Sequence[int], sampling: Sampling) -> list[Completion]:
    async def wave() -> list[Completion]:
        return await asyncio.gather(*(model.complete(c, sampling, k) for c, k in requests(groups)))

    return asyncio.run(wave())


def assert_equal(actual: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a.token_ids, a.text, a.stop_reason) == (b.token_ids, b.text, b.stop_reason)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-4)


def by_generate(model: LocalModel, groups: Sequence[int], sampling: Sampling) -> list[Completion]:
    other = LocalModel(model.model, model.tokenizer)
    other.codec.end_ids = model.codec.end_ids
    other.__dict__["windows"] = None
    return ask(other, groups, sampling)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("shape", SHAPES)
def test_the_loop_agrees_with_generate(folder: Path, shape: str) -> None:
    model = made(folder, *SHAPES[shape])
    # Any of forty ids ends a row, so rows end at all times and leave the batch.
    model.codec.end_ids = model.codec.end_ids | frozenset(range(300, 340))
    sampling = Sampling(max_tokens=14, seed=3, temperature=1.3, top_p=0.95)
    replies = ask(model, (1, 5, 2, 20), sampling)
    assert model.windows is not None
    assert_equal(replies, by_generate(model, (1, 5, 2, 20), sampling))
    assert {r.stop_reason for r in replies} == {"stop", "length"}
    assert len({len(r.token_ids) for r in replies}) > 4


@pytest.mark.parametrize("shape", LEFT_TO_GENERATE)
def test_other_memories_are_left_to_generate(folder: Path, shape: str) -> None:
    model = made(folder, *LEFT_TO_GENERATE[shape])
    replies = ask(model, (2, 2), Sampling(max_tokens=5, seed=2))
    assert model.windows is None
    assert all(len(r.logprobs) == len(r.token_ids) > 0 for r in replies)


@pytest.mark.parametrize("shape", SHAPES | LEFT_TO_GENERATE)
def test_rows_that_join_a_running_batch_get_their_own_replies(folder: Path, shape: str) -> None:
    model = made(folder, *(SHAPES | LEFT_TO_GENERATE)[shape])
    model.codec.end_ids = model.codec.end_ids | frozenset(range(300, 340))
    sampling, groups = Sampling(max_tokens=14, seed=3, temperature=1.3, top_p=0.95), (1, 3, 2, 6)
    expected, engine = ask(model, groups, sampling), ContinuousBatching(model)

    async def join() -> list[Row]:
        rows: list[Row] = []
        for number, (context, call) in enumerate(requests(groups)):
            ids = model.codec.prompt_ids(context)
            rows.append(Row(ids, sampling, uniforms(3, call, 14), streams=True))
            engine.submit(rows[-1:])
            if number % 3 == 0:
                await rows[-1].changed.wait()
        while not all(row.done for row in rows):
            await asyncio.sleep(0.002)
        return rows

    for row, reply in zip(asyncio.run(join()), expected, strict=True):
        assert (row.error, tuple(row.ids)) == (None, reply.token_ids)
        np.testing.assert_allclose(row.logprobs, reply.logprobs, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_that_mistakes_the_masks_is_found_out_and_reported_once(
    folder: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = made(folder, "Qwen3", {})
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            kwargs["attention_mask"] = torch.zeros_like(mask)
        return plain(*args, **kwargs)

    model.model.forward = forward
    model.model.to(dtype)
    model.name = f"mistaken {dtype}"
    for _ in range(2):
        ask(model, (2,), Sampling(max_tokens=3, seed=2))
    assert model.windows is None
    assert LocalModel(model.model, model.tokenizer, name=model.name).windows is None
    (said,) = [r.getMessage() for r in caplog.records if model.name in r.getMessage()]
    assert "the loop's log-probs differ" in said and "prompt anew for every draft" in said


def other_kernel(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The decode loop's attention with other rounding, like another kernel of a GPU."""
    if mask is not None and mask.is_floating_point():  # a step of the loop
        query, key, value, mask = (x.float() for x in (query, key, value, mask))
    out, _ = grouped_attention(module, query, key, value, mask, **kwargs)
    return out.to(torch.bfloat16), None


@pytest.mark.parametrize(("layers", "scale"), [(4, 0.02), (36, 0.02), (36, 0.3)])
def test_deep_models_in_half_precision_keep_the_loop(
    folder: Path, layers: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding in many layers moves log-probs by more than 0.15 nats, in plain passes as well."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=2000, hidden_size=256, intermediate_size=768, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=1, head_dim=64, initializer_range=scale,
    )  # fmt: skip
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    sampler = LocalModel(model, transformers.AutoTokenizer.from_pretrained(folder))
    monkeypatch.setattr(decode, "grouped_attention", other_kernel)
    windows = windows_of(model)
    assert windows is not None
    off, noise = _differences(model.eval(), windows)
    step = 2**-8  # one unit of rounding; processors differ in where they round
    assert off < 3 * noise + step and (max(off, noise) > 0.15) == (scale == 0.3)
    model.gradient_checkpointing_enable()
    model.train()  # as between two updates; checkpointing would switch off the cache
    assert sampler.windows is not None and model.training


def test_a_prompt_is_computed_once_and_rows_that_end_are_not_computed(folder: Path) -> None:
    model = made(folder, "Qwen3", {})
    ask(model, (1,), Sampling(max_tokens=1, seed=2))
    shapes: list[tuple[int, ...]] = []
    model.model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: shapes.append(tuple(args[0].shape))
    )
    model.codec.end_ids = frozenset()
    replies = ask(model, (6,), Sampling(max_tokens=4, seed=2))
    assert shapes == [(1, len(replies[0].prompt_ids)), *[(1, 6)] * 3]
    shapes.clear()
    model.codec.end_ids = frozenset(r.token_ids[1] for r in replies[:5]) - {
        r.token_ids[0] for r in replies
    }
    ask(model, (6,), Sampling(max_tokens=4, seed=2))
    assert len(shapes) < 4 or shapes[-1][1] < 6


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation makes in memory of its own."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in before:
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("shape", ["qwen3", "qwen3 with windows"])
@pytest.mark.parametrize("packed", [False, True], ids=["sampler", "model in training"])
def test_heads_that_share_keys_read_them_in_place(folder: Path, shape: str, packed: bool) -> None:
    model = made(folder, *SHAPES[shape])
    if packed:  # a trainer's attention function lies between
        install_packed_attention(model.model.get_decoder())
    windows = windows_of(model.model)
    assert windows is not None
    prompts = [[i % 300 for i in range(100 + p)] for p in range(2) for _ in range(6)]
    decoder = Decoder(model.model, windows, prompts, 0, 8)
    with torch.inference_mode():
        tokens = decoder.first().argmax(-1)
        with Largest() as largest:
            logits = decoder.next(tokens)
    lanes, heads, columns, width = (2, 4, 101 + 6, 16)
    assert decoder.cache.layers[0].keys.shape[:2] == (lanes, heads // 2)
    assert largest.numel < lanes * heads * columns * width
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, int(tokens[decoder.rows.index(row)])]])
        with torch.no_grad():
            plain = model.model(input_ids=ids).logits[0, -1]
        torch.testing.assert_close(logits[decoder.rows.index(row)], plain, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [60, 130, 200])
@pytest.mark.parametrize("shape", ["qwen3", "mistral, windows only", "gpt2, learned positions"])
def test_long_replies_wait_for_space(
    folder: Path, shape: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal replies within a limit of tokens that all rows together would exceed."""
    model = made(folder, *SHAPES[shape])
    windows = windows_of(model.model)
    assert windows is not None
    prompts = [[5 + p] * (3 + 2 * p) for p in range(4) for _ in range(4)]
    uniform = torch.from_numpy(np.random.default_rng(0).random((16, 40)))
    used: list[int] = []
    step = Decoder.next

    def watched(decoder: Decoder, tokens: Tensor) -> Tensor:
        logits = step(decoder, tokens)
        keys = decoder.cache.layers[0].keys
        used.append(len(keys) * decoder.cache.get_seq_length() if len(decoder.rows) > 1 else 0)
        return logits

    monkeypatch.setattr(Decoder, "next", watched)

    def run(limit: float) -> tuple[Replies, int]:
        used.clear()
        replies = decode_batch(
            model.model, windows, prompts, Draw(uniform, Sampling()),
            lambda row, ids: len(ids) > 2 * row + 4, 0, limit,
        )  # fmt: skip
        return replies, max(used)

    (free, most), (bounded, held), (again, _) = run(float("inf")), run(limit), run(limit)
    assert most > held and held <= limit
    assert bounded.ids == free.ids and [len(i) for i in free.ids] == [2 * r + 5 for r in range(16)]
    for a, b in zip(bounded.logprobs, free.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    assert again.logprobs == bounded.logprobs


def test_a_row_that_is_alone_grows_beyond_the_limit_without_copies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(folder, *SHAPES["qwen3"])
    windows, copies = windows_of(model.model), list[int]()
    assert windows is not None
    monkeypatch.setattr(Decoder, "_compact", lambda *_: copies.append(1))
    draw = Draw(torch.full((1, 30), 0.5, dtype=torch.float64), Sampling())
    replies = decode_batch(model.model, windows, [[5, 6]], draw, lambda *_: False, 0, limit=4)
    assert len(replies.ids[0]) == 30 and not copies


def test_stop_strings_end_a_row_in_the_loop(folder: Path) -> None:
    model = made(folder, "Qwen3", {})
    model.codec.end_ids = frozenset()
    (free,) = ask(model, (1,), Sampling(max_tokens=30, seed=2))
    steps: list[Tensor] = []
    model.model.register_forward_hook(lambda module, args, out: steps.append(out.logits))
    stop = free.text[len(free.text) // 3 :][:3]
    (cut,) = ask(model, (1,), Sampling(max_tokens=30, seed=2, stop=(stop,)))
    assert cut.text == free.text[: free.text.index(stop)]
    assert len(steps) == len(cut.token_ids) < 30
    assert all(logits.shape[1] == 1 for logits in steps)  # no logits over the prompt


def test_layouts_hold_every_row_once() -> None:
    groups = [list(range(20)), [20], [21, 22]]
    for columns in (1, 100, 5000):
        layout, owners = lay_out(groups, columns)
        for row, lane, _ in layout.places():
            assert row in groups[owners[lane]]
        assert sorted(row for row, _, _ in layout.places()) == list(range(23))
    assert lay_out([[0], [1], [2]], 50)[0] == LaneLayout(((0,), (1,), (2,)))
    assert lay_out([list(range(16))], 1024)[0].slots == 16


FACT = Segment("system", " ".join(WORDS[20:29]))


@pytest.fixture(scope="module")
def model(folder: Path) -> LocalModel:
    sampler = made(folder, *SHAPES["qwen3"])
    # Rows end at all times and leave the batch, in the one context as in the other.
    sampler.codec.end_ids = sampler.codec.end_ids | frozenset(range(300, 340))
    return sampler


def question(number: int) -> list[Segment]:
    return [Segment("user", " ".join(WORDS[number : 2 * number + 3]))]


ROWS = [(p, Call(role="actor", example_id=f"e{p}", sample=s)) for p in range(3) for s in range(6)]


def both(model: LocalModel, share: float, sampling: Sampling) -> list[Completion]:
    async def wave() -> list[Completion]:
        return await asyncio.gather(*(
            model.complete_mixed(question(p), [FACT, *question(p)], share, sampling, call)
            for p, call in ROWS
        ))  # fmt: skip

    return asyncio.run(wave())


def alone(
    model: LocalModel, context: Callable[[int], list[Segment]], sampling: Sampling
) -> list[Completion]:
    async def wave() -> list[Completion]:
        return await asyncio.gather(*(model.complete(context(p), sampling, c) for p, c in ROWS))

    return asyncio.run(wave())


def words_of(replies: Sequence[Completion]) -> list[tuple[tuple[int, ...], str, str]]:
    return [(r.token_ids, r.text, r.stop_reason) for r in replies]


SAMPLING = Sampling(max_tokens=14, seed=2, temperature=1.3)


def test_a_share_of_one_is_sampling_with_the_fact_and_of_none_without(model: LocalModel) -> None:
    with_fact = alone(model, lambda p: [FACT, *question(p)], SAMPLING)
    without = alone(model, question, SAMPLING)
    ends = {1.0: with_fact, 0.0: without}
    for share, expected in ends.items():
        replies = both(model, share, SAMPLING)
        assert words_of(replies) == words_of(expected)
        for reply, plain in zip(replies, expected, strict=True):
            np.testing.assert_allclose(reply.logprobs, plain.logprobs, atol=1e-5)
        assert [r.prompt_ids for r in replies] == [r.prompt_ids for r in without]
    assert words_of(with_fact) != words_of(without)
    assert len({len(r.token_ids) for r in with_fact}) > 3


@torch.inference_mode()
def conditional(model: LocalModel, ids: Sequence[int], temperature: float) -> torch.Tensor:
    logits = model.model(input_ids=torch.tensor([list(ids)])).logits[0, -1].float()
    return torch.log_softmax(logits / temperature, -1)


def test_every_token_is_drawn_where_its_switch_says_behind_all_tokens_before(
    model: LocalModel,
) -> None:
    replies, drawn = both(model, 0.5, SAMPLING), set()
    for (p, call), reply in zip(ROWS, replies, strict=True):
        turns = expert_turns(SAMPLING.seed, call, 0.5, len(reply.token_ids))
        drawn |= set(turns.tolist())
        told = model.renderer().prompt_ids([FACT, *question(p)])
        for k, (token, logprob) in enumerate(zip(reply.token_ids, reply.logprobs, strict=True)):
            prompt = told if turns[k] else reply.prompt_ids
            ids = [*prompt, *reply.token_ids[:k]]
            expected = conditional(model, ids, SAMPLING.temperature)[token]
            assert logprob == pytest.approx(float(expected), abs=2e-4)
    assert drawn == {False, True}


def test_the_text_does_not_depend_on_who_shares_the_batch(model: LocalModel) -> None:
    together = both(model, 0.5, SAMPLING)
    small = LocalModel(model.model, model.tokenizer, batch_size=4)
    small.codec.end_ids = model.codec.end_ids
    assert words_of(both(small, 0.5, SAMPLING)) == words_of(together)


def test_first_tokens_have_the_frequencies_of_the_mixture(model: LocalModel) -> None:
    """Of 1,500 draws every token's count lies within five deviations of λp + (1 − λ)q."""
    share, n, context = 0.5, 1500, question(1)
    once = Sampling(max_tokens=1, seed=5, temperature=0.3)

    async def wave() -> list[Completion]:
        return await asyncio.gather(*(
            model.complete_mixed(context, [FACT, *context], share, once,
                                 Call(role="actor", example_id="one", sample=s))
            for s in range(n)
        ))  # fmt: skip

    drawn = [reply.token_ids[0] for reply in asyncio.run(wave())]
    counts = np.bincount(drawn, minlength=len(model.tokenizer))
    p, q = (
        conditional(model, model.renderer().prompt_ids(c), once.temperature).exp().numpy()
        for c in ([FACT, *context], context)
    )
    mixture = share * p + (1 - share) * q
    deviation = np.sqrt(n * mixture * (1 - mixture)) + 1
    assert (abs(counts - n * mixture) < 5 * deviation).all()
    # Either conditional alone would be seen to be another one.
    assert (abs(n * p - n * mixture) > 6 * deviation).any()
    assert (abs(n * q - n * mixture) > 6 * deviation).any()


def test_switches_are_independent_of_the_tokens_and_of_the_share() -> None:
    call = Call(role="actor", example_id="one")
    few, many = (expert_turns(3, call, share, 4000) for share in (0.25, 0.75))
    assert few.mean() == pytest.approx(0.25, abs=0.03)
    assert many.mean() == pytest.approx(0.75, abs=0.03)
    assert not (few & ~many).any()  # a larger share keeps every turn of a smaller one


def test_a_memory_that_cannot_be_kept_twice_is_refused_by_name(folder: Path) -> None:
    recurrent = made(folder, *LEFT_TO_GENERATE["mamba, recurrent"])
    with pytest.raises(ConfigError, match="two contexts"):
        both(recurrent, 0.5, SAMPLING)
