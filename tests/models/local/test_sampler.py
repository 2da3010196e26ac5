"""Local models: results depend on who asks, not on the batch; what is noted is what was drawn."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from soulkit.errors import ContextOverflow, ModelLoadError, ProviderError
from soulkit.models import codec
from soulkit.models.local import batching
from soulkit.models.local.draw import Draw, uniforms
from soulkit.models.local.sampler import LocalModel, batch_tokens
from soulkit.models.local.tiny import build_tiny
from soulkit.types import Call, Completion, Form, Sampling, Segment

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
CALL = Call(role="actor", example_id="x")
SIX = Sampling(max_tokens=6, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose weights are large enough that its choices are far from uniform."""
    out = build_tiny(tmp_path_factory.mktemp("models") / "tiny", WORDS, max_context=96)
    from safetensors.torch import load_file, save_file

    weights = {
        k: v * 1.6 if v.ndim == 2 else v for k, v in load_file(out / "model.safetensors").items()
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> LocalModel:
    return LocalModel.load(folder)


def user(text: str) -> list[Segment]:
    return [Segment("user", text)]


def ask(
    model: LocalModel,
    requests: Sequence[tuple[list[Segment], Call]],
    sampling: Sampling = SIX,
) -> list[Completion]:
    async def wave() -> list[Completion]:
        return await asyncio.gather(*(model.complete(c, sampling, k) for c, k in requests))

    return asyncio.run(wave())


def wave(prompts: int = 5, drafts: int = 3) -> list[tuple[list[Segment], Call]]:
    return [
        (user(" ".join(WORDS[p : 2 * p + 3])), Call(role="actor", example_id=f"e{p}", rollout=r))
        for p in range(prompts)
        for r in range(drafts)
    ]


def reference_logprobs(model: LocalModel, reply: Completion, temperature: float) -> list[float]:
    ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]])
    with torch.no_grad():
        logits = model.model(input_ids=ids).logits[0, len(reply.prompt_ids) - 1 : -1].float()
    picked = torch.log_softmax(logits / temperature, -1)
    rows: list[float] = picked.gather(1, ids[0, len(reply.prompt_ids) :, None])[:, 0].tolist()
    return rows


def test_a_result_does_not_depend_on_its_batch(folder: Path, model: LocalModel) -> None:
    together = ask(model, wave())
    backwards = ask(model, wave()[::-1])[::-1]
    alone = ask(LocalModel.load(folder, batch_size=1), wave())
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.text == b.text == c.text
        np.testing.assert_allclose(a.logprobs, c.logprobs, atol=1e-4)
    assert len({r.token_ids for r in together}) > 10


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
def test_logprobs_are_those_of_the_model(
    model: LocalModel, temperature: float, top_p: float
) -> None:
    sampling = Sampling(max_tokens=5, temperature=temperature, top_p=top_p, seed=3)
    for reply in ask(model, wave(3, 2), sampling):
        assert len(reply.logprobs) == len(reply.token_ids)
        want = reference_logprobs(model, reply, temperature)
        np.testing.assert_allclose(reply.logprobs, want, atol=1e-4)


def test_temperature_zero_takes_the_likeliest(model: LocalModel) -> None:
    one, two = ask(model, wave(1, 2), Sampling(temperature=0.0, max_tokens=6))
    assert one.token_ids == two.token_ids
    ids = torch.tensor([one.prompt_ids])
    with torch.no_grad():
        want = model.model.generate(input_ids=ids, do_sample=False, max_new_tokens=6)
    assert one.token_ids == tuple(want[0, ids.shape[1] :].tolist())
    np.testing.assert_allclose(one.logprobs, reference_logprobs(model, one, 1.0), atol=1e-4)


def test_the_models_own_generation_settings_change_nothing(folder: Path) -> None:
    plain, penal = LocalModel.load(folder), LocalModel.load(folder)
    penal.model.generation_config.update(
        repetition_penalty=9.0, top_k=1, temperature=0.1, no_repeat_ngram_size=1, min_new_tokens=3
    )
    before = [r.token_ids for r in ask(plain, wave(2, 2))]
    after = ask(penal, wave(2, 2))
    assert [r.token_ids for r in after] == before
    for reply in after:
        np.testing.assert_allclose(reply.logprobs, reference_logprobs(penal, reply, 1.0), atol=1e-4)


def test_each_part_of_the_key_has_its_own_stream() -> None:
    changes: list[dict[str, Any]] = [{}, {"role": "partner"}, {"example_id": "y"}, {"rollout": 1}]
    changes += [{"kind": "refined"}, {"turn": 1}, {"sample": 1}, {"step": 1}]
    streams = [tuple(uniforms(0, replace(CALL, **change), 4)) for change in changes]
    streams.append(tuple(uniforms(1, CALL, 4)))
    streams.append(tuple(uniforms(None, CALL, 4)))
    assert len(set(streams)) == len(streams)
    np.testing.assert_array_equal(uniforms(0, CALL, 4), uniforms(0, CALL, 9)[:4])


def test_a_draw_is_the_inverse_of_the_cumulated_probabilities() -> None:
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u, want in ((0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-53, 3)):
        draw = Draw(torch.tensor([[u]], dtype=torch.float64), Sampling())
        assert int(draw(torch.zeros(1, 1), probs.log().clone()).argmax()) == want


def test_text_keeps_tags_and_loses_only_what_ends_a_turn(model: LocalModel) -> None:
    ids = model.tokenizer.encode("<answer>ba</answer>") + sorted(model.codec.end_ids)
    assert model.codec.text(ids) == "<answer>ba</answer>"


def test_ends_lengths_and_usage(model: LocalModel) -> None:
    replies = ask(model, wave(8, 8), Sampling(max_tokens=40, seed=5, temperature=2.0))
    for reply in replies:
        ended = reply.token_ids[-1] in model.codec.end_ids
        assert reply.stop_reason == ("stop" if ended else "length")
        assert ended or len(reply.token_ids) == 40
        assert not set(reply.token_ids[:-1]) & model.codec.end_ids
        assert reply.usage.completion_tokens == len(reply.token_ids)
        assert reply.usage.prompt_tokens == len(reply.prompt_ids)
        assert reply.usage.seconds > 0
    assert {r.stop_reason for r in replies} == {"stop", "length"}


def test_stop_strings_cut_text_and_ids_honestly(model: LocalModel) -> None:
    (free,) = ask(model, wave(1, 1), Sampling(max_tokens=12, seed=1))
    stop = free.text[len(free.text) // 2 :][:3]
    (cut,) = ask(model, wave(1, 1), Sampling(max_tokens=12, seed=1, stop=(stop, "never")))
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.stop_reason == "stop"
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)] and len(cut.token_ids) < 12
    assert stop in model.codec.text(list(cut.token_ids))
    assert stop not in model.codec.text(list(cut.token_ids[:-1]))
    assert len(cut.logprobs) == len(cut.token_ids)


@pytest.mark.parametrize(
    ("text", "is_open", "want"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, ("hm", "yes")),
        ("hm\n</think>\n\nyes", True, ("hm", "yes")),
        ("<think>\nhm", False, ("hm", "")),
        ("hm", True, ("hm", "")),
        (" yes", False, ("", " yes")),
    ],
)
def test_thinking_is_not_said(text: str, is_open: bool, want: tuple[str, str]) -> None:
    assert codec.reasoning_and_text(text, is_open) == want


def test_what_does_not_fit_is_an_overflow_not_a_cut(model: LocalModel) -> None:
    context = user("ba " * 80)
    assert model.context_limit == 96
    room = 96 - model.prompt_length(context)
    ask(model, [(context, CALL)], Sampling(max_tokens=room))
    with pytest.raises(ContextOverflow, match="96"):
        ask(model, [(context, CALL)], Sampling(max_tokens=room + 1))


def test_what_the_model_cannot_do_is_recorded(model: LocalModel) -> None:
    form = Form("Rating", '{"type":"object"}')
    sampling = Sampling(max_tokens=2, thinking=False, reasoning_effort="low", form=form)
    (reply,) = ask(model, [(user("ba"), CALL)], sampling)
    assert reply.dropped == ("form", "reasoning_effort", "thinking")


def test_turns_continue_each_other(model: LocalModel) -> None:
    context = user("ba be")
    (first,) = ask(model, [(context, CALL)])
    turn = Segment("assistant", first.text, token_ids=first.token_ids)
    (second,) = ask(model, [([*context, turn, *user("bi")], replace(CALL, turn=1))])
    start = first.prompt_ids + first.token_ids
    assert second.prompt_ids[: len(start)] == start


def test_a_failing_batch_fails_each_of_its_calls(folder: Path) -> None:
    model = LocalModel.load(folder)
    broken = torch.nn.Embedding(1, 128)
    whole = model.model.get_input_embeddings()
    model.model.set_input_embeddings(broken)

    async def both() -> list[Any]:
        calls = (model.complete(c, Sampling(max_tokens=2), k) for c, k in wave(2, 2))
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(e, ProviderError) and "range" in e.detail for e in asyncio.run(both()))
    model.model.set_input_embeddings(whole)
    assert len(ask(model, wave(2, 2))) == 4


def test_a_cancelled_call_does_not_hurt_the_others(model: LocalModel) -> None:
    async def run() -> tuple[Completion, bool]:
        sampling = Sampling(max_tokens=4, seed=1)
        first, second = (asyncio.create_task(model.complete(c, sampling, k)) for c, k in wave(1, 2))
        await asyncio.sleep(0)
        first.cancel()
        return await second, first.cancelled() or first.cancelling() > 0

    reply, cancelled = asyncio.run(run())
    assert cancelled
    want = ask(model, wave(1, 2), Sampling(max_tokens=4, seed=1))[1]
    assert reply.token_ids == want.token_ids


def test_a_closed_model_refuses(folder: Path) -> None:
    model = LocalModel.load(folder)
    asyncio.run(model.close())
    with pytest.raises(ProviderError, match="closed"):
        ask(model, wave(1, 1))


def test_long_rows_make_small_batches(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [r.token_ids for r in ask(model, wave())]
    monkeypatch.setattr(batching, "BATCH_TOKENS", 60)
    assert [r.token_ids for r in ask(model, wave())] == before


def batch_sizes(model: LocalModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of the batches that `model` generates from now on."""
    sizes: list[int] = []
    once = LocalModel._generate_once

    def watched(self: LocalModel, batch: list[Any], version: str) -> list[Completion]:
        sizes.append(len(batch))
        return once(self, batch, version)

    monkeypatch.setattr(LocalModel, "_generate_once", watched)
    return sizes


@pytest.mark.parametrize(("loop", "sizes"), [(True, [40]), (False, [31, 9])])
def test_batches_have_space_for_replies_of_the_expected_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: bool, sizes: list[int]
) -> None:
    """`generate` cannot set long replies aside, so there the limit of a reply counts."""
    model = LocalModel.load(build_tiny(tmp_path / "tiny", WORDS, max_context=16384))
    model.codec.end_ids = frozenset(range(len(model.tokenizer)))  # every reply has one token
    if not loop:
        model.__dict__["windows"] = None
    made = batch_sizes(model, monkeypatch)
    ask(model, wave(8, 5), Sampling(max_tokens=8192, seed=1))
    assert made == sizes


@pytest.mark.parametrize("deterministic", [False, True])
def test_long_replies_share_a_batch_that_cannot_hold_them(
    folder: Path, model: LocalModel, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    sampling = Sampling(max_tokens=40, seed=1)
    before = ask(model, wave(), sampling)
    monkeypatch.setattr(batching, "EXPECTED", 4)
    monkeypatch.setattr(batching, "BATCH_TOKENS", 300)
    other = LocalModel(model.model, model.tokenizer, deterministic=deterministic)
    sizes = batch_sizes(other, monkeypatch)
    after = ask(other, wave(), sampling)
    assert max(sizes) > 3 and max(sizes) * 50 > 300
    for a, b in zip(before, after, strict=True):
        assert (a.token_ids, a.stop_reason) == (b.token_ids, b.stop_reason)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def small_memory(model: LocalModel, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """From now on, no pass of more than so many rows fits."""
    plain = model.model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs["input_ids"].shape[0] > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.")
        return plain(*args, **kwargs)

    monkeypatch.setattr(model.model, "forward", forward)


def test_a_batch_without_memory_is_halved(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = ask(model, wave())
    sizes = batch_sizes(model, monkeypatch)
    small_memory(model, monkeypatch, 2)
    after = ask(model, wave())
    assert [r.token_ids for r in after] == [r.token_ids for r in before]
    assert sizes[0] == len(before) and sorted(sizes, reverse=True) != sizes
    assert "no memory for 15 replies at once; trying 7" in caplog.text
    assert "--batch-size" in caplog.text


@pytest.mark.parametrize(
    ("deterministic", "rows", "fix"), [(True, 2, "--batch-size"), (False, 0, "--max-tokens")]
)
def test_what_cannot_be_halved_says_what_to_set(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch, deterministic: bool, rows: int, fix: str
) -> None:
    ask(model, wave(1, 1))
    other = LocalModel(model.model, model.tokenizer, deterministic=deterministic)
    other.__dict__["windows"] = model.windows
    small_memory(other, monkeypatch, rows)
    with pytest.raises(ProviderError, match="CUDA out of memory") as failed:
        ask(other, wave())
    assert fix in failed.value.detail


def test_a_failing_probe_fails_each_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LocalModel.load(folder)
    small_memory(model, monkeypatch, 0)
    with pytest.raises(ProviderError, match="out of memory"):
        ask(model, wave())
    assert "windows" not in model.__dict__, "a later call probes again"


class OnCuda(torch.nn.Module):
    """The weights of a model of eight billion parameters, as far as memory is concerned."""

    def __init__(self, trained: int) -> None:
        super().__init__()
        self.config = Qwen3Config(
            hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
            head_dim=128,
        )  # fmt: skip
        self.trained = trained

    def parameters(self, recurse: bool = True) -> Any:
        for count, trained in ((8_190_000_000, False), (self.trained, True)):
            weight = SimpleNamespace(
                device=torch.device("cuda", 0), nbytes=2 * count, requires_grad=trained,
                numel=partial(int, count), element_size=partial(int, 2),
                is_floating_point=partial(bool, 1),
            )  # fmt: skip
            yield weight


@pytest.mark.parametrize(
    ("gigabytes", "other", "deterministic", "tokens"),
    [
        (80, 0, False, 212_000),
        (80, 0, True, 210_000),
        (24, 0, False, 22_000),
        (80, 55, False, 25_000),  # a server on the same card
        (80, 55, True, 210_000),
        (640, 0, False, batching.BATCH_TOKENS),
        (16, 0, True, 1),
    ],
)
def test_a_batch_takes_half_of_a_gpus_free_memory(
    monkeypatch: pytest.MonkeyPatch, gigabytes: int, other: int, deterministic: bool, tokens: int
) -> None:
    """By a stand-in for torch.cuda: 36 layers keep 147,456 bytes for each token."""
    model, whole, cached = OnCuda(44_000_000), gigabytes * 10**9, 10**9
    free = max(0, whole - int(17.5e9) - other * 10**9 - cached)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, whole))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * cached)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * cached)
    assert batch_tokens(model, deterministic=deterministic) == pytest.approx(tokens, rel=0.02)


def test_a_model_in_training_stays_in_training(model: LocalModel) -> None:
    want = [r.token_ids for r in ask(model, wave(2, 2))]
    wrapped = LocalModel(model.model, model.tokenizer, policy_version="step-3")
    model.model.train()
    replies = ask(wrapped, wave(2, 2))
    assert model.model.training
    model.model.eval()
    assert [r.token_ids for r in replies] == want
    assert {r.policy for r in replies} == {"step-3"}


def make_adapter(folder: Path, out: Path) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config, "policy")
    tuned.save_pretrained(str(out), selected_adapters=["policy"])
    return out / "policy"


def test_an_adapter_changes_the_model_and_stamps_its_replies(
    folder: Path, model: LocalModel, tmp_path: Path
) -> None:
    adapter = make_adapter(folder, tmp_path)
    tuned = LocalModel.load(folder, adapter=adapter)
    assert tuned.name == model.name == "tiny"
    replies = ask(tuned, wave(2, 2))
    assert {r.policy for r in replies} == {tuned.policy_version}
    assert len(tuned.policy_version) == 16
    assert [r.token_ids for r in replies] != [r.token_ids for r in ask(model, wave(2, 2))]
    for reply in replies:
        want = reference_logprobs(tuned, reply, 1.0)
        np.testing.assert_allclose(reply.logprobs, want, atol=1e-4)


def refusal(path: str | Path, **options: Any) -> str:
    with pytest.raises(ModelLoadError) as refused:
        LocalModel.load(path, **options)
    assert all(refused.value.lines())
    return " ".join(refused.value.lines())


def test_paths_that_hold_no_model_say_what_is_missing(folder: Path, tmp_path: Path) -> None:
    assert "no folder" in refusal(tmp_path / "none")
    assert "is a file" in refusal(folder / "config.json")
    bare = tmp_path / "bare"
    bare.mkdir()
    text = refusal(bare)
    assert "configuration" in text and "weights" in text and "tokenizer" in text
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    assert "lacks the tokenizer" in refusal(bare)
    (bare / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (bare / "model.safetensors").write_bytes(b"not weights")
    assert "cannot be loaded" in refusal(bare)


def test_wrong_adapters_devices_and_types_are_user_errors(folder: Path, tmp_path: Path) -> None:
    assert "adapter_model.safetensors" in refusal(folder, adapter=tmp_path)
    assert "contains an adapter" in refusal(make_adapter(folder, tmp_path))
    other = build_tiny(tmp_path / "other", WORDS, size="5m")
    assert "does not fit" in refusal(other, adapter=make_adapter(folder, tmp_path))
    assert "device 'abacus'" in refusal(folder, device="abacus")
    assert "'float99'" in refusal(folder, dtype="float99")
