"""A checkpoint or adapter that does not hold the model's weights is refused, by name.

Numbers that are none, or that stand for others, in the weights of a base and of an adapter.

The output layer in float32: the same weights, products that are not rounded, bounded memory.
"""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from soulkit.errors import ModelLoadError, RunError
from soulkit.models.local import float32_head
from soulkit.models.local.float32_head import Float32Product, widen_head
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.models.local.weights import weights_misfit
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.model.prepare import log_probs
from soulkit.train.objectives.sequences import Span
from soulkit.train.run import numbers_remark, refuse_untrainable
from soulkit.train.state.checkpoint import Position, load_checkpoint, save_checkpoint
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.shapes import WORDS, build
from tests.support.training import config, policy_of, random_model

Tensors = dict[str, Tensor]
Change = Callable[[Tensors], Tensors]

BASE, ADAPTER = "model.safetensors", "adapter_model.safetensors"
Q, EMBED, HEAD = (
    "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight", "lm_head.weight"
)  # fmt: skip
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("kinds")
    folders = {k: build(k, out / k) for k in ("qwen3", "qwen3-tied", "qwen3-vl", "gpt2")}
    tokenizer = tiny_tokenizer(WORDS)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **shape, **experts))
    folders["moe"] = out / "moe"
    moe.save_pretrained(out / "moe")
    tokenizer.save_pretrained(out / "moe")
    return folders


def changed(source: Path, folder: Path, file: str, change: Change, **settings: Any) -> Path:
    """A copy of `source` with other tensors, and other settings in its configuration."""
    shutil.copytree(source, folder)
    tensors = change(load_file(folder / file))
    save_file({k: t.clone() for k, t in tensors.items()}, folder / file, metadata={"format": "pt"})
    config = folder / ("config.json" if file == BASE else "adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return folder


def same(tensors: Tensors) -> Tensors:
    return tensors


def without(*parts: str) -> Change:
    return lambda tensors: {k: t for k, t in tensors.items() if not any(p in k for p in parts)}


def renamed(old: str, new: str) -> Change:
    return lambda tensors: {k.replace(old, new): t for k, t in tensors.items()}


def plus(**shapes: tuple[int, ...]) -> Change:
    return lambda tensors: (
        tensors | {name.replace("__", "."): torch.ones(shape) for name, shape in shapes.items()}
    )


def refusal(model: Path, adapter: Path | None = None) -> str:
    with pytest.raises(ModelLoadError) as caught:
        LocalModel.load(model, adapter=adapter)
    assert all("\n" not in line and line for line in caught.value.lines())
    return " ".join(caught.value.lines())


LACKING: dict[str, tuple[str, Change, str]] = {
    "one projection": ("qwen3", without(Q), f"1 weight missing: {Q}"),
    "the head": ("qwen3", without(HEAD), f"1 weight missing: {HEAD}"),
    "all renamed": ("qwen3", lambda t: {f"x.{k}": v for k, v in t.items()}, "and 22 more"),
    "everything": ("qwen3", lambda t: {}, "25 weights missing"),
    "both tied": ("qwen3-tied", without(EMBED), f"2 weights missing: {HEAD}, {EMBED}"),
    "of a list without biases": ("gpt2", without("h.1.mlp.c_proj.weight"), "h.1.mlp.c_proj"),
    "of the vision tower": ("qwen3-vl", without("blocks.0.attn.qkv.weight"), "blocks.0.attn.qkv"),
    "an expert's": ("moe", without("0.mlp.experts.3.up_proj"), "layers.0.mlp.experts.3.up_proj"),
    "an expert in the middle": ("moe", without("0.mlp.experts.1."), "experts.1.down_proj"),
    "an expert's name": ("moe", renamed("s.1.down", "s.7.down"), "layers.0.mlp.experts.1.down"),
    "what a bias is": (
        "qwen3", plus(model__layers__0__self_attn__q_proj__bias=(32,)), "q_proj.bias"
    ),
    "what a scale is": (
        "qwen3", plus(model__layers__0__self_attn__q_proj__weight_scale=(1,)), "weight_scale"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_a_base_that_lacks_weights(case: str, kinds: dict[str, Path], tmp_path: Path) -> None:
    kind, change, text = LACKING[case]
    folder = changed(kinds[kind], tmp_path / "m", BASE, change)
    message = refusal(folder)
    assert text in message and str(folder) in message


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "11 weights missing"),
        ({"intermediate_size": 40}, "6 weights with another shape: model.layers.0.mlp.down_proj"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "k_norm.weight"),
    ],
)
def test_a_configuration_of_another_model(
    settings: dict[str, Any], text: str, kinds: dict[str, Path], tmp_path: Path
) -> None:
    assert text in refusal(changed(kinds["qwen3"], tmp_path / "m", BASE, same, **settings))


def test_a_tied_model_that_is_called_untied_lacks_its_head(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed(kinds["qwen3-tied"], tmp_path / "m", BASE, same, tie_word_embeddings=False)
    assert f"1 weight missing: {HEAD}" in refusal(folder)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("qwen3", plus(model__layers__0__self_attn__rotary_emb__inv_freq=(4,))),
        ("qwen3", plus(model__layers__0__self_attn__bias=(1, 1, 4, 4))),  # a mask of old
        ("qwen3", plus(v_head__summary__weight=(1, 32))),
        ("qwen3", renamed("model.", "")),
        ("qwen3-tied", lambda t: t | {HEAD: t[EMBED]}),
        ("qwen3-tied", renamed(EMBED, HEAD)),
        ("qwen3-tied", renamed("model.", "")),
        ("gpt2", plus(transformer__h__0__attn__bias=(1, 1, 4, 4))),
        ("qwen3", plus(model__layers__2__mlp__up_proj__weight=(48, 32))),
        ("moe", same),
    ],
)
def test_what_a_whole_checkpoint_may_have_and_lack(
    kind: str, change: Change, kinds: dict[str, Path], tmp_path: Path
) -> None:
    """Old buffers, other heads, a tied head saved once or twice, names without the prefix."""
    whole = LocalModel.load(kinds[kind]).model
    loaded = LocalModel.load(changed(kinds[kind], tmp_path / "m", BASE, change)).model
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, whole(input_ids=ids).logits)


def sharded(source: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of `source` in two files, with the second of them."""
    model = AutoModelForCausalLM.from_pretrained(source)
    shutil.copytree(source, folder)
    (folder / BASE).unlink()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=int(size * 0.7))
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 2 and (folder / "model.safetensors.index.json").is_file()
    return folder, shards[1]


def test_a_shard_that_lacks_what_the_index_promises(kinds: dict[str, Path], tmp_path: Path) -> None:
    folder, shard = sharded(kinds["qwen3"], tmp_path / "m")
    LocalModel.load(folder)
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    save_file({k: t for k, t in tensors.items() if k != name}, shard, metadata={"format": "pt"})
    assert f"1 weight missing: {name}" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    promises = json.loads(index.read_text())
    other_shards = {k: f for k, f in promises["weight_map"].items() if f != shard.name}
    index.write_text(json.dumps(promises | {"weight_map": other_shards}))
    assert f"{len(tensors)} weights missing" in refusal(folder)
    shard.unlink()
    index.write_text(json.dumps(promises))
    assert shard.name in refusal(folder)


def test_an_adapter_beside_the_model_is_not_put_on_unasked(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    folder, adapter = tmp_path / "m", lora(kinds["qwen3"], tmp_path / "a")
    shutil.copytree(kinds["qwen3"], folder)
    for file in ("adapter_config.json", ADAPTER):
        shutil.copy(adapter / file, folder / file)
    assert "contains an adapter in addition to the model" in refusal(folder)


def lora(base: Path, folder: Path, **settings: Any) -> Path:
    """A LoRA adapter as PEFT saves it."""
    plain = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    config = LoraConfig(**{**plain, **settings})
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


FOREIGN: dict[str, tuple[Change, dict[str, Any], str]] = {
    "one missing": (without(A), {}, f"1 weight missing: {A}"),
    "half missing": (without("lora_B"), {}, "4 weights missing"),
    "empty": (lambda t: {}, {}, "8 weights missing"),
    "another prefix": (renamed("base_model.model.", "x."), {}, "8 weights not in the model"),
    "more layers": (
        lambda t: t | {k.replace("s.1.", "s.7."): v for k, v in t.items()}, {},
        "4 weights not in the model: base_model.model.model.layers.7",
    ),
    "a stranger": (plus(base_model__model__x__weight=(2,)), {},
                   "not in the model: base_model.model.x"),
    "the base's": (
        plus(base_model__model__model__layers__0__mlp__up_proj__weight=(48, 32)), {},
        "1 weight not in the model: base_model.model.model.layers.0.mlp.up_proj.weight",
    ),
    "another rank": (same, {"r": 8}, f"8 weights with another shape: {A}"),
    "fewer targets": (same, {"target_modules": ["q_proj"]}, "4 weights not in the model"),
    "other targets": (same, {"target_modules": ["other"]}, "other"),
    "a head it lacks": (same, {"modules_to_save": ["lm_head"]}, "1 weight missing: base_model"),
    "magnitudes it lacks": (same, {"use_dora": True}, "4 weights missing"),
    "no method": (same, {"peft_type": "OTHER"}, "OTHER"),
}  # fmt: skip


@pytest.mark.parametrize("case", FOREIGN)
def test_an_adapter_of_other_weights(case: str, kinds: dict[str, Path], tmp_path: Path) -> None:
    change, settings, text = FOREIGN[case]
    whole = lora(kinds["qwen3"], tmp_path / "whole")
    folder = changed(whole, tmp_path / "a", ADAPTER, change, **settings)
    message = refusal(kinds["qwen3"], folder)
    assert text in message and str(folder) in message


def test_an_adapter_of_another_model(kinds: dict[str, Path], tmp_path: Path) -> None:
    adapter = lora(kinds["gpt2"], tmp_path / "a", target_modules=["c_attn"])
    assert "c_attn" in refusal(kinds["qwen3"], adapter)
    broken = lora(kinds["qwen3"], tmp_path / "b")
    (broken / ADAPTER).write_bytes(b"not weights")
    assert "does not fit" in refusal(kinds["qwen3"], broken)


def test_biases_that_an_adapter_says_it_has(kinds: dict[str, Path], tmp_path: Path) -> None:
    target = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    whole = lora(kinds["gpt2"], tmp_path / "whole", bias="all", **target)
    LocalModel.load(kinds["gpt2"], adapter=whole)
    folder = changed(whole, tmp_path / "a", ADAPTER, without("ln_f.bias"))
    assert "1 weight missing: base_model.model.transformer.ln_f.bias" in refusal(
        kinds["gpt2"], folder
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"trainable_token_indices": [1, 2]},
        {"layers_to_transform": [0]},
        {"rank_pattern": {"q_proj": 2}},
        {"target_modules": "all-linear", "bias": "lora_only"},
    ],
)
def test_every_part_of_an_adapter_comes_back(
    settings: dict[str, Any], kinds: dict[str, Path], tmp_path: Path
) -> None:
    config = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | settings
    base = AutoModelForCausalLM.from_pretrained(kinds["qwen3"])
    tuned = get_peft_model(base, LoraConfig(**config)).eval()
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    tuned.save_pretrained(tmp_path / "a")
    loaded = LocalModel.load(kinds["qwen3"], adapter=tmp_path / "a").model
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "lora_" in n)
    ids = torch.arange(20, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, tuned(input_ids=ids).logits)


def test_three_names_are_shown_in_the_order_of_layers() -> None:
    assert weights_misfit() == ""
    names = [f"layers.{n}.w" for n in (11, 2, 10, 1)]
    assert (
        weights_misfit(names) == "4 weights missing: layers.1.w, layers.2.w, layers.10.w and 1 more"
    )
    both = weights_misfit(["a"], foreign=["b"])
    assert both == "1 weight missing: a; 1 weight not in the model: b"


UP = "model.layers.0.mlp.up_proj.weight"
LORA = {"r": 4, "alpha": 8}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(whole, tmp_path / "tiny"))


def change(file: Path, alter: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    tensors = {name: alter(name, tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def spoilt(number: float) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """The last number of the second tensor, in the order of names, becomes `number`."""

    def alter(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if "up_proj" in name:
            tensor.view(-1)[-1] = number
        return tensor

    return alter


@pytest.mark.parametrize(
    ("number", "dtype"), [(math.nan, "float32"), (math.inf, "bfloat16"), (-math.inf, "float32")]
)
def test_a_base_with_a_number_that_is_none_is_refused_by_name(
    folder: Path, number: float, dtype: str
) -> None:
    change(folder / "model.safetensors", spoilt(number))
    with pytest.raises(ModelLoadError) as caught:
        LocalModel.load(folder, device="cpu", dtype=dtype)
    assert "with NaN or infinities: model.layers.0.mlp.up_proj.weight" in caught.value.what
    assert "nonsense" in caught.value.why


def test_an_adapter_with_a_nan_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    policy_of(folder, lora=LORA).save(tmp_path / "adapter")
    LocalModel.load(folder, device="cpu", adapter=tmp_path / "adapter")
    change(tmp_path / "adapter" / "adapter_model.safetensors", spoilt(math.nan))
    for load in (
        lambda: LocalModel.load(folder, device="cpu", adapter=tmp_path / "adapter"),
        lambda: load_policy(config(adapter=str(tmp_path / "adapter")), folder),
    ):
        with pytest.raises(ModelLoadError) as caught:
            load()
        assert "with NaN or infinities: base_model.model.model.layers.0" in caught.value.why


def kinds_of_numbers_in_weights(folder: Path, dtype: torch.dtype) -> Path:
    """The model with its matrices in other numbers."""
    change(folder / "model.safetensors",
           lambda name, t: t.to(dtype) if t.ndim == 2 else t)  # fmt: skip
    return folder


def test_integers_without_scales_are_no_weights(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="8-bit integers"):
        LocalModel.load(kinds_of_numbers_in_weights(folder, torch.int8), device="cpu")


def test_float8_is_read_for_an_adapter_and_refused_for_full_training(folder: Path) -> None:
    kinds_of_numbers_in_weights(folder, torch.float8_e4m3fn)
    policy = load_policy(config(lora=LORA), folder)
    assert (policy.stored, policy.computed) == ("float8", "float32")
    with pytest.raises(ModelLoadError) as caught:
        load_policy(config(method="sft", full=True), folder)
    assert "float8" in caught.value.what and "adapter" in caught.value.way_out


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_nothing_is_multiplied_in_eight_bits(folder: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="not a valid number format"):
        LocalModel.load(folder, device="cpu", dtype=name)


def test_a_float16_checkpoint_is_trained_on_in_other_numbers_which_is_said_and_kept(
    folder: Path,
) -> None:
    plain = load_policy(config(lora=LORA), folder)
    assert plain.stored == "float32" and numbers_remark(plain) == ""
    change(folder / "model.safetensors", lambda name, t: t.half())
    policy = load_policy(config(lora=LORA), folder)
    assert (policy.stored, policy.computed) == ("float16", "float32")
    assert (
        numbers_remark(policy)
        == "the checkpoint is stored in float16; training computes in float32"
    )
    assert load_policy(config(lora=LORA, dtype="float16"), folder).computed == "bfloat16"
    with pytest.raises(Exception, match="float16"):
        refuse_untrainable(config(dtype="float16"))


def test_a_checkpoint_of_a_run_with_a_nan_is_refused(folder: Path, tmp_path: Path) -> None:
    policy = policy_of(folder, lora=LORA)
    optimizer = torch.optim.AdamW([p for _, p in policy.trained])
    with torch.no_grad():
        policy.trained[0][1].view(-1)[0] = math.nan
    save_checkpoint(tmp_path / "c", policy, optimizer, Position(1, 0, 0, policy.version()))
    (path,) = (tmp_path / "c").glob("step_*")
    with pytest.raises(RunError) as caught:
        load_checkpoint(path, policy, optimizer)
    assert "1 weight with NaN" in caught.value.why


def half(whole: Path, dtype: str = "bfloat16") -> Policy:
    return load_policy(config(dtype=dtype, lora={"r": 4, "alpha": 8}), whole)


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


def test_log_probs_of_a_bfloat16_model_are_not_rounded(whole: Path) -> None:
    policy = half(whole)
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


def test_the_sampler_and_the_trainer_agree_on_a_bfloat16_model(
    whole: Path,
) -> None:
    """What is left between them are the hidden states, which each rounds on its own road."""
    policy = half(whole)
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


def test_a_float32_head_stays_the_layer_it_was(whole: Path) -> None:
    model = LocalModel.load(whole, device="cpu").model
    assert type(model.get_output_embeddings()) is torch.nn.Linear and not widen_head(model)
    model.bfloat16()
    assert widen_head(model) and widen_head(model)
    out = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert out.dtype == torch.float32 and isinstance(model.lm_head, torch.nn.Linear)


def test_a_widened_model_saves_what_it_was(whole: Path, tmp_path: Path) -> None:
    model = LocalModel.load(whole, device="cpu", dtype="bfloat16").model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(t, before[name]) for name, t in again.state_dict().items())
    assert again.state_dict().keys() == before.keys()
