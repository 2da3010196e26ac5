"""The memory of a training pass: formulas against measured peaks, and the choice of the pass."""

from __future__ import annotations

import gc
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from soulkit.errors import RunError
from soulkit.models.local.footprint import SHAPES, Footprint, footprint, free_bytes
from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.runs.folder import Run, read_environment
from soulkit.train.config import TrainConfig
from soulkit.train.memory import (
    CHUNK,
    LEAST,
    PassChoice,
    choose_pass,
    memory_advice,
    note_pass,
    take_pass,
    training_memory,
)
from soulkit.train.model.packing import Pack
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.objectives.sequences import Span
from tests.support.evaluation import soul
from tests.support.training import config

GB = 10**9
TINY: dict[str, tuple[str, dict[str, int]]] = {
    "qwen3": ("qwen3", {
        "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384, "vocab_size": 512,
    }),
    "llama": ("llama", {
        "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 672, "vocab_size": 1024,
    }),
    "qwen2.5": ("qwen2", {
        "hidden_size": 224, "num_hidden_layers": 8, "num_attention_heads": 7,
        "num_key_value_heads": 1, "intermediate_size": 1216, "vocab_size": 2048,
    }),
    "gemma3": ("gemma3_text", {
        "hidden_size": 160, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 960, "vocab_size": 2048,
    }),
}  # fmt: skip
WIDE = {
    "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288, "vocab_size": 512,
}  # fmt: skip
"""Layers of Qwen3-8B."""


def saved_model(kind: str, shape: dict[str, int], folder: Path, dtype: str = "float32") -> Path:
    torch.manual_seed(0)
    settings = AutoConfig.for_model(kind, **shape, max_position_embeddings=2048)
    model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tiny_tokenizer(["word"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = saved_model(*TINY[name], tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with real vocabularies, a chunk of logits is smaller than those of all tokens."""
    monkeypatch.setitem(CHUNK, "cpu", 1 << 17)


def loaded(settings: TrainConfig, folder: Path, checkpointing: bool) -> Policy:
    choice = PassChoice(checkpointing=checkpointing, tokens=1 << 20, memory=None, words="")
    return load_policy(settings, folder, choice)


def group(policy: Policy, prompt: int, replies: int, new: int) -> tuple[Pack, int]:
    """A pack of `replies` to one prompt (a row each without packing), and its tokens."""
    draw, words = random.Random(0), policy._vocabulary
    start = tuple(draw.randrange(words) for _ in range(prompt))
    spans = [
        Span((*start, *(draw.randrange(words) for _ in range(new))),
             (False,) * prompt + (True,) * new, ())
        for _ in range(replies)
    ]  # fmt: skip
    (pack,) = policy.packs(spans)
    return pack, len(pack.trie) if pack.trie is not None else len(pack.rows) * pack.width


def measured_peak(policy: Policy, pack: Pack) -> int:
    """Most bytes that torch's allocator held during a forward and backward pass, without weights
    and gradients."""
    from torch.profiler import ProfilerActivity, profile

    for _, weight in policy.trained:
        weight.grad = torch.zeros_like(weight)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        policy.score(pack).log_prob.sum().backward()
    events: Any = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    now = most = 0
    for _, size in sizes:
        now += size
        most = max(most, now)
    return most


VARIANTS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "all weights": {"full": True, "method": "sft"},
    "padded rows": {"dtype": "bfloat16", "packing": "off"},
}


QUICK = {
    ("qwen3", "bfloat16", False), ("llama", "float32", True), ("qwen2.5", "padded rows", False),
    ("gemma3", "all weights", True),
}  # fmt: skip
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
    for case in itertools.product(TINY, VARIANTS, (False, True))
]


@pytest.mark.parametrize(("name", "variant", "checkpointing"), CASES)
@pytest.mark.usefixtures("small_chunks")
def test_the_formulas_agree_with_measured_peaks(
    name: str, variant: str, checkpointing: bool, folders: Callable[[str], Path]
) -> None:
    settings = config(**VARIANTS[variant], lora={"r": 16, "alpha": 32})
    model = footprint(folders(name))
    assert model is not None
    policy = loaded(settings, folders(name), checkpointing)
    pack, tokens = group(policy, 256, 8, 32) if policy.shape else group(policy, 64, 4, 64)
    memory = training_memory(
        settings, model, tokens=tokens, checkpointing=checkpointing, kind="cpu"
    )
    peak = measured_peak(policy, pack)
    assert memory.activations + memory.logits == pytest.approx(peak, rel=0.15)
    # The weights and AdamW's state are exact.
    numbers = sum(p.numel() for p in policy.model.parameters())
    trained = sum(p.numel() for _, p in policy.trained)
    size = 4 if settings.full else next(policy.decoder.parameters()).element_size()
    assert memory.weights == (0 if settings.full else (numbers - trained) * size)
    assert memory.trained == pytest.approx(16 * trained, rel=0.001)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("name", ["qwen3", pytest.param("qwen2.5", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("small_chunks")
def test_a_base_in_four_bits_agrees_with_measured_peaks(
    name: str, checkpointing: bool, folders: Callable[[str], Path]
) -> None:
    pytest.importorskip("bitsandbytes")
    settings = config(dtype="bfloat16", quantize="nf4", lora={"r": 16, "alpha": 32})
    model = footprint(folders(name))
    assert model is not None
    policy = loaded(settings, folders(name), checkpointing)
    pack, tokens = group(policy, 256, 8, 32)
    memory = training_memory(
        settings, model, tokens=tokens, checkpointing=checkpointing, kind="cpu"
    )
    assert memory.activations + memory.logits == pytest.approx(
        measured_peak(policy, pack), rel=0.15
    )
    apart = re.compile(r"\.lora_|quant_map|quant_state")
    tensors = policy.model.state_dict().items()
    stored = sum(tensor.nbytes for name, tensor in tensors if not apart.search(name))
    tied = policy.causal.lm_head.weight.nbytes if policy.causal.config.tie_word_embeddings else 0
    assert memory.weights == pytest.approx(stored - tied, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
@pytest.mark.usefixtures("small_chunks")
def test_layers_of_an_8b_model_agree_with_measured_peaks(
    checkpointing: bool, tmp_path: Path
) -> None:
    folder = saved_model("qwen3", WIDE, tmp_path, "bfloat16")
    settings, model = config(dtype="bfloat16"), footprint(folder)
    assert model is not None
    policy = loaded(settings, folder, checkpointing)
    pack, tokens = group(policy, 64, 8, 24)
    memory = training_memory(
        settings, model, tokens=tokens, checkpointing=checkpointing, kind="cpu"
    )
    assert memory.activations + memory.logits == pytest.approx(
        measured_peak(policy, pack), rel=0.15
    )
    saved = sum(saved_sizes(policy, pack).values())
    per_layer = saved / tokens / WIDE["num_hidden_layers"]
    numbers = per_layer / WIDE["hidden_size"] / 2
    assert 24 < numbers < 26 if not checkpointing else numbers < 3  # 190 to 200 KiB, or 8


def saved_sizes(policy: Policy, pack: Pack) -> dict[int, int]:
    """Address → bytes of every tensor saved for the backward pass, without the weights."""
    own = {w.untyped_storage().data_ptr() for w in policy.model.parameters()}
    kept, sizes = [], {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept.append(storage)
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.states(pack)
    return sizes


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("small_chunks")
def test_a_quantised_base_agrees_with_measured_peaks(
    dtype: str, folders: Callable[[str], Path]
) -> None:
    pytest.importorskip("bitsandbytes")
    settings, model = config(quantize="nf4", dtype=dtype), footprint(folders("qwen3"))
    assert model is not None
    policy = loaded(settings, folders("qwen3"), True)
    pack, tokens = group(policy, 256, 8, 32)
    memory = training_memory(settings, model, tokens=tokens, checkpointing=True, kind="cpu")
    assert memory.activations + memory.logits == pytest.approx(
        measured_peak(policy, pack), rel=0.15
    )
    weights = sum(w.nbytes for w in policy.model.parameters() if not w.requires_grad)
    assert memory.weights == pytest.approx(weights, rel=0.05)


# --- common shapes --------------------------------------------------------------------------------

PUBLISHED = {
    "Qwen/Qwen3-VL-8B-Instruct": 8.767, "Qwen/Qwen3-VL-4B-Instruct": 4.438,
    "Qwen/Qwen3-0.6B": 0.596, "Qwen/Qwen3-1.7B-Base": 1.721, "Qwen/Qwen3-4B-Instruct-2507": 4.022,
    "Qwen/Qwen3-8B": 8.191, "Qwen/Qwen3-14B": 14.768, "Qwen/Qwen3-32B": 32.762,
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494, "Qwen/Qwen2.5-1.5B-Instruct": 1.544,
    "Qwen/Qwen2.5-3B-Instruct": 3.086, "Qwen/Qwen2.5-7B-Instruct": 7.616,
    "Qwen/Qwen2.5-14B": 14.770, "Qwen/Qwen2.5-32B": 32.764,
    "meta-llama/Llama-3.2-1B-Instruct": 1.236, "meta-llama/Llama-3.2-3B": 3.213,
    "meta-llama/Llama-3.1-8B-Instruct": 8.030, "meta-llama/Meta-Llama-3-8B@main": 8.030,
}  # fmt: skip
"""Billions of parameters as published on the Hub."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_common_shapes_have_the_published_parameters(name: str, no_cache: None) -> None:
    model = footprint(name)
    assert model is not None and model.itemsize == 2
    assert model.parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.002)


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen2.5-7b", "llama-3.2-1b"])
def test_common_shapes_are_those_of_the_model_classes(name: str, no_cache: None) -> None:
    model = footprint(f"owner/{name}")
    kinds = {"qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama"}
    assert model is not None
    settings = AutoConfig.for_model(
        kinds[name[:5]], num_hidden_layers=model.layers, hidden_size=model.hidden,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, intermediate_size=model.intermediate,
        vocab_size=model.vocabulary, tie_word_embeddings=SHAPES[name][7] == 1,
    )  # fmt: skip
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(settings)
    numbers = sum(weight.numel() for weight in made.parameters())
    assert model.parameters == pytest.approx(numbers, rel=0.001)


@pytest.mark.parametrize(
    "name", ["nobody/own-model", "Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B-FP8", "own-qwen3-8b", "tiny",
             "x/qwen3-8bx", "/no/such/folder"],
)  # fmt: skip
def test_other_models_are_unknown(name: str, no_cache: None) -> None:
    assert footprint(name) is None


@pytest.fixture
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_a_downloaded_model_is_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--qwen--qwen3-8b"
    commit = "1" * 40
    saved_model(*TINY["qwen3"], place / "snapshots" / commit)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(commit)
    model = footprint("qwen/qwen3-8b")
    assert model is not None
    assert (model.layers, model.hidden, model.intermediate) == (6, 128, 384)
    assert model.norms == 2 * 128 + (8 + 2) * 32


# --- the choice -----------------------------------------------------------------------------------


def known(name: str) -> Footprint:
    model = footprint(name)
    assert model is not None
    return model


@pytest.mark.parametrize(("name", "free", "checkpointing", "tokens"), [
    ("Qwen/Qwen3-VL-8B-Instruct", 79, True, 16_384),
    ("Qwen/Qwen3-VL-8B-Instruct", 44, True, 16_384),
    ("Qwen/Qwen3-VL-8B-Instruct", 180, False, 16_384),
    ("Qwen/Qwen3-4B", 23, True, 16_384),
    ("Qwen/Qwen3-VL-8B-Instruct", 24, True, 1024),
    ("Qwen/Qwen3-0.6B", 79, False, 16_384),
])  # fmt: skip
def test_activations_are_recomputed_where_they_do_not_fit(
    name: str, free: int, checkpointing: bool, tokens: int, no_cache: None
) -> None:
    choice = choose_pass(config(model=name), known(name), "cuda", free * GB)
    assert (choice.checkpointing, choice.tokens) == (checkpointing, tokens)
    assert choice.memory is not None and choice.needs == choice.memory.total
    assert choice.needs < free * GB or tokens == LEAST
    on = "on" if checkpointing else "off"
    assert choice.words.startswith(f"{tokens:,} tokens per pass, activation checkpointing {on}")


def test_stored_activations_of_an_8b_model_do_not_fit_80_gb(no_cache: None) -> None:
    settings, model = config(), known("Qwen/Qwen3-8B")
    parts = [
        training_memory(settings, model, tokens=16_384, checkpointing=again, kind="cuda")
        for again in (False, True)
    ]
    stored, again = (memory.activations / 2**30 for memory in parts)
    assert 104 < stored < 118 and 4 < again < 8  # GiB
    assert parts[0].logits == parts[1].logits == 5 << 29


@pytest.mark.parametrize(("settings", "expected"), [
    ({"activation_checkpointing": "off"}, (False, 1024)),
    ({"activation_checkpointing": "on"}, (True, 16_384)),
    ({"activation_checkpointing": "off", "tokens_per_batch": 9000}, (False, 9000)),
    ({"tokens_per_batch": 100_000}, (True, 100_000)),
    ({"lesson_tokens": 40_000, "method": "sft", "tasks": {}, "side": "human",
      "corpora": ["x.jsonl"]},
     (True, 16_384)),
])  # fmt: skip
def test_given_settings_are_kept(
    settings: dict[str, Any], expected: tuple[bool, int], no_cache: None
) -> None:
    choice = choose_pass(config(**settings), known("Qwen/Qwen3-8B"), "cuda", 40 * GB)
    assert (choice.checkpointing, choice.tokens) == expected
    assert choice.words.endswith("this may not fit") is (choice.needs > 0.9 * 40 * GB)


def test_unknown_models_and_devices() -> None:
    unknown = choose_pass(config(model="a/b"), None, "cuda", 80 * GB)
    assert (unknown.checkpointing, unknown.tokens) == (True, 16_384)
    assert unknown.words.endswith("the size of a/b is unknown")
    assert not choose_pass(config(), None, "cpu", None).checkpointing
    assert not choose_pass(config(), known("Qwen/Qwen3-8B"), "cuda", None).checkpointing


@pytest.mark.parametrize(
    ("settings", "free", "expected"),
    [
        ({}, 100 * GB, (False, 16_384)), ({}, 4 * GB, (False, 4096)), ({}, None, (False, 4096)),
        ({"activation_checkpointing": "on"}, 100 * GB, (True, 16_384)),
        ({"tokens_per_batch": 4096}, 100 * GB, (False, 4096)),
    ],
)  # fmt: skip
def test_a_pass_on_a_cpu_is_larger_where_much_memory_is_free(
    settings: dict[str, Any], free: int, expected: object, folders: Callable[[str], Path]
) -> None:
    choice = choose_pass(config(**settings), footprint(folders("qwen3")), "cpu", free)
    assert (choice.checkpointing, choice.tokens) == expected


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A stand-in for a machine with GPUs: the free bytes of each."""
    free = [79 * GB, 20 * GB]

    def mem_get_info(index: int | None = None) -> tuple[int, int]:
        if (index or 0) >= len(free):
            raise RuntimeError("CUDA error: invalid device ordinal")
        return free[index or 0], 80 * GB

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    yield free


def test_free_memory_of_gpus(cuda: list[int]) -> None:
    assert [free_bytes(f"cuda:{n}") for n in (0, 1)] == cuda
    assert free_bytes("auto") == free_bytes("cuda") == cuda[0]
    assert free_bytes("cuda:7") is None and free_bytes("cuda:x") is None


def test_a_gpu_that_is_not_there_has_no_free_memory() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert free_bytes("cuda") is None and free_bytes("cuda:3") is None


def test_a_resumed_run_keeps_its_pass(cuda: list[int], tmp_path: Path, no_cache: None) -> None:
    settings = config(model="Qwen/Qwen3-8B", device="cuda:0")
    run = Run.open(tmp_path / "run", "train ditto", {})
    first = take_pass(settings, settings.model, run.path)
    assert (first.checkpointing, first.tokens) == (True, 16_384)
    note_pass(run.path, first)
    assert read_environment(run.path)["pass"] == {"checkpointing": True, "tokens": 16_384}
    cuda[0] = 200 * GB
    again = take_pass(settings, settings.model, run.path)
    assert (again.checkpointing, again.tokens) == (True, 16_384)
    assert again.words.endswith("as at the start of this run")
    fresh = take_pass(settings, settings.model, tmp_path / "other")
    assert not fresh.checkpointing


@pytest.mark.parametrize(("written", "meant"), [(True, "on"), (False, "off"), ("auto", "auto")])
def test_a_switch_in_a_file_still_works(written: Any, meant: str) -> None:
    assert config(activation_checkpointing=written).activation_checkpointing == meant


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_gpu_out_of_memory_names_the_settings_that_save_it(
    checkpointing: bool, tmp_path: Path
) -> None:
    run = Run.open(tmp_path / "run", "train ditto", {})
    choice = PassChoice(checkpointing=checkpointing, tokens=4096, memory=None, words="")
    note_pass(run.path, choice)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    with pytest.raises(RunError) as caught, memory_advice(config(), run.path):
        raise error
    assert "20.00 MiB" in caught.value.why and "--tokens-per-batch 2048" in caught.value.way_out
    assert ("--activation-checkpointing on" in caught.value.way_out) is not checkpointing
    with pytest.raises(RuntimeError, match="else"), memory_advice(config(), run.path):
        raise RuntimeError("something else")


# --- plans and soul doctor ------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *more: object) -> tuple[str, dict[str, Any]]:
    """What `soul plan` prints about memory, and the same as JSON."""
    command = ("plan", "train", "grpo", "--task", "tomi", "--data", "tomi=synth:20", *more)
    assert soul(*command) == 0
    text = capsys.readouterr().out
    assert soul(*command, "--json") == 0
    return text, json.loads(capsys.readouterr().out)["machine"]


@pytest.mark.usefixtures("no_cache")
def test_a_plan_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    base = ("--model", "Qwen/Qwen3-VL-8B-Instruct", "--set", "lora.r=32", "--device")
    for device in ("cuda", "cuda:7"):
        text, page = planned(capsys, *base, device)
        assert "fits 80 GB (assumed: this machine has no such GPU)" in text
        assert "with 16,384 tokens per pass, activation checkpointing on" in text
        assert "on 24 GB: does not fit (2" in text and "--quantize nf4" in text
        parts = page["parts"]
        assert parts["weights"] == pytest.approx(17.5e9, rel=0.01)
        assert parts["adapter, gradients and optimizer"] == pytest.approx(16 * 87.3e6, rel=0.01)
        assert parts["logits"] == 5 << 29 and 5e9 < parts["activations"] < 9e9
        assert page["memory"] <= sum(parts.values()) <= 80e9
        assert [": fits" in line for line in page["cards"]] == [False, True, True]


@pytest.mark.usefixtures("no_cache")
def test_a_plan_says_what_makes_it_fit(capsys: pytest.CaptureFixture[str], cuda: list[int]) -> None:
    base = ("--model", "Qwen/Qwen3-8B", "--device", "cuda:1")
    text, page = planned(capsys, *base, "--activation-checkpointing", "off")
    assert "does not fit the 20.0 GB that are free: remove --activation-checkpointing off" in text
    assert page["fit"].endswith("and --quantize nf4")
    text, page = planned(capsys, *base, "--quantize", "nf4")
    assert "fits the 20.0 GB that are free with" in text
    text, _ = planned(capsys, "--model", "Qwen/Qwen3-32B", "--device", "cuda:1")
    assert "does not fit" in text and "a base of at most" in text


def test_a_plan_for_this_machine(
    capsys: pytest.CaptureFixture[str], folders: Callable[[str], Path]
) -> None:
    text, page = planned(capsys, "--model", folders("qwen3"), "--device", "cpu")
    fits = r"memory about .* [MG]B; fits the .* GB that are free with (4,096|16,384) tokens"
    assert re.search(fits, text)
    assert page["cards"] == [] and "on 24 GB" not in text


@pytest.mark.usefixtures("no_cache")
def test_doctor_says_whether_a_training_fits(
    capsys: pytest.CaptureFixture[str], cuda: list[int], tmp_path: Path
) -> None:
    settings = tmp_path / "train.yaml"
    for model, health in (("Qwen/Qwen3-8B", "ok"), ("Qwen/Qwen3-32B", "problem")):
        settings.write_text(f"model: {model}\ntask: tomi\ndata: tomi=synth:9\ndevice: cuda:0\n")
        soul("doctor", settings, "--for", "train grpo", "--json")
        lines = json.loads(capsys.readouterr().out)["lines"]
        (line,) = (one for one in lines if one["part"] == "settings" and one["name"] == "memory")
        assert line["health"] == health and "79.0 GB that are free" in line["words"]
        assert (line["way"] == "") is (health == "ok")


@pytest.mark.usefixtures("no_cache")
def test_a_vllm_server_shares_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    base = ("--model", "Qwen/Qwen3-VL-8B-Instruct", "--device", "cuda", "--max-context", 16_384)
    _, page = planned(capsys, *base)
    assert re.search(r"vLLM beside it gets \d\d%", page["fit"])
    assert "on 48 GB: fits" in page["cards"][1] and "vLLM" in page["cards"][1]
    for more in (("--engine", "local"), ("--quantize", "nf4")):
        assert "vLLM" not in planned(capsys, *base, *more)[0]


@pytest.mark.usefixtures("no_cache")
def test_a_teacher_model_counts_as_weights() -> None:
    model = known("Qwen/Qwen3-4B")

    def weights(**settings: Any) -> int:
        memory = training_memory(
            config(model="Qwen/Qwen3-4B", dtype="bfloat16", **settings), model, tokens=1,
            checkpointing=True, kind="cuda",
        )  # fmt: skip
        return memory.weights

    alone = weights()
    assert weights(method="opd", teacher_model="Qwen/Qwen3-8B") == pytest.approx(
        alone + 2 * 8.19e9, rel=0.001
    )
    assert weights(method="opd", teacher_adapter="folder") == 2 * alone


@pytest.mark.usefixtures("no_cache")
def test_an_evaluation_plan_says_whether_the_model_fits(
    capsys: pytest.CaptureFixture[str], cuda: list[int]
) -> None:
    for model, fits in (("Qwen/Qwen3-4B", "fits"), ("Qwen/Qwen3-14B", "does not fit")):
        command = ("eval", "local", "--model", model, "--task", "tomi", "--data", "synth:5",
                   "--engine", "local", "--device", "cuda:1")  # fmt: skip
        assert soul("plan", *command, "--json") == 0
        machine = json.loads(capsys.readouterr().out)["machine"]
        assert machine["fit"].startswith(f"{fits} the 20.0 GB that are free")
        assert machine["parts"]["weights"] == 2 * known(model).parameters
