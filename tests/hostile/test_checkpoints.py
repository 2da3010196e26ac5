"""Odd model folders: `--model FOLDER` of eval, export and train."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from soulkit.errors import ModelLoadError
from soulkit.models.local.weights import check_folder_files
from tests.support.hostile import Attack, seeds
from tests.support.model_folders import (
    Change,
    build_model,
    linked,
    odd_bytes,
    odd_fields,
    odd_files,
    odd_weights,
    put_copy,
    replaced,
    special,
    with_fields,
)

Attacks = Callable[[Attack, Iterable[Attack]], None]

JSON_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
    "special_tokens_map.json", "added_tokens.json", "model.safetensors.index.json",
    "preprocessor_config.json", "processor_config.json", "chat_template.json", "soulkit.json",
)  # fmt: skip
FILLED = JSON_FILES[:4]
"""The files that the tiny model has."""
WEIGHTS = "model.safetensors"
EVAL = ("eval", "local", "--model", "model", "--task", "cast_of_people", "--data", "synth:1",
        "--max-tokens", "2", "--max-unscored", "1", "--out", "run")  # fmt: skip
EXPORT = ("export", "model", "--merge", "--out", "exported")
PLAN = (
    "plan",
    "eval",
    "local",
    "--model",
    "model",
    "--task",
    "cast_of_people",
    "--data",
    "synth:1",
)
TRAIN = ("train", "grpo", "--model", "model", "--task", "cast_of_people", "--data", "synth:8",
         "--steps", "1", "--prompts", "2", "--max-tokens", "2", "--out", "run")  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - once for all children

    import soulkit.models.local.sampler  # noqa: F401

    return build_model(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture
def attack_folders(model: Path, attack_all: Attacks) -> Callable[..., None]:
    """Run a command on damaged copies of the model."""

    def attack(changes: Iterable[tuple[str, Change]], command: tuple[str, ...] = EVAL) -> None:
        attack_all(
            Attack("undamaged", command, lambda to: put_copy(model, to / "model")),
            (
                Attack(name, command, partial(_put, model, change), canaries=("canary",))
                for name, change in changes
            ),
        )

    return attack


def _put(model: Path, change: Change, folder: Path) -> None:
    put_copy(model, folder / "model", change)


@pytest.mark.parametrize("name", seeds(len(JSON_FILES), quick=0))
def test_other_json_in_the_place_of_a_file(attack_folders: Callable[..., None], name: int) -> None:
    attack_folders(odd_files(JSON_FILES[name]))


@pytest.mark.parametrize("name", JSON_FILES[:3])
def test_odd_files_are_refused_before_a_library_reads_them(tmp_path: Path, name: str) -> None:
    """The quick part: the check that comes before torch and transformers are imported."""
    ids = {"model": {"vocab": {"x": 10**9}}}
    huge = {"config.json": {"num_hidden_layers": 10**6}, "tokenizer.json": ids}
    changes = [*odd_files(name)]
    if name in huge:
        changes.append(("huge", replaced(name, json.dumps(huge[name]).encode())))
    for number, (what, change) in enumerate(changes):
        if what.endswith(("-object", "-twice")):  # an object, so it is for others to judge
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        change(folder)
        with pytest.raises(ModelLoadError, match="cannot be used"):
            check_folder_files(folder)


@pytest.mark.parametrize("seed", seeds(10, quick=0))
@pytest.mark.parametrize("name", FILLED)
def test_odd_values_of_known_fields(
    attack_folders: Callable[..., None], model: Path, name: str, seed: int
) -> None:
    attack_folders(odd_fields(seed, model, name, 12))


@pytest.mark.hostile
@pytest.mark.parametrize("name", FILLED)
def test_damaged_bytes(attack_folders: Callable[..., None], model: Path, name: str) -> None:
    attack_folders(odd_bytes(7, model, name, 25))


@pytest.mark.hostile
def test_odd_weights(attack_folders: Callable[..., None]) -> None:
    attack_folders(odd_weights(WEIGHTS))


def _sizes() -> Iterator[tuple[str, Change]]:
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
             "num_key_value_heads", "intermediate_size", "max_position_embeddings")  # fmt: skip
    names += ("num_labels", "rms_norm_eps", "rope_theta", "attention_dropout")
    for name in names:
        for value in (-1, 0, 10**5, 10**7, 10**10, 2**63, "4", None, 4.0, [4], -1e9):
            yield f"{name}={value}", with_fields("config.json", **{name: value})


@pytest.mark.parametrize("part", seeds(8, quick=0))
def test_odd_sizes(attack_folders: Callable[..., None], part: int) -> None:
    attack_folders(list(_sizes())[part::8])


def _kinds() -> Iterator[tuple[str, Change]]:
    for kind in ("llama", "gpt2", "mamba", "bert", "t5", "qwen3_moe", "mixtral", "gemma3", "clip",
                 "x", "", "../x", "\x1b[2J", None, 1, [], {}):  # fmt: skip
        yield f"model_type={kind!r}", with_fields("config.json", model_type=kind)
        yield f"architectures={kind!r}", with_fields("config.json", architectures=[kind])
    yield "positions", with_fields("config.json", model_type="gpt2", n_positions=10**5)
    yield "layers", with_fields("config.json", model_type="gpt2", n_layer=10**7)
    code = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    for file in ("config.json", "tokenizer_config.json"):
        yield (
            f"code in {file}",
            _both(
                with_fields(file, auto_map={**code, "AutoTokenizer": ["evil.Evil", None]}),
                replaced("evil.py", b"open('../canary', 'w')\nclass Evil: pass\n"),
            ),
        )
    for method in ("gptq", "bitsandbytes", "awq", "x", 7, None, []):
        quantised = {"quant_method": method, "bits": -4}
        yield f"quantised {method!r}", with_fields("config.json", quantization_config=quantised)


def _both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def _indices() -> Iterator[tuple[str, Change]]:
    name = "model.safetensors.index.json"
    weight = "model.embed_tokens.weight"
    for kind, entry in (
        ("bin", "pytorch_model.bin"), ("outside", "../outside.safetensors"), ("null", None),
        ("absolute", "/etc/passwd"), ("number", 7), ("list", []), ("missing", "no.safetensors"),
        ("escape", "\x1b[31m.safetensors"), ("device", "/dev/zero"),
    ):  # fmt: skip
        index = json.dumps({"metadata": {}, "weight_map": {weight: entry}}).encode()
        danger = b"cos\nsystem\n(S'touch ../canary'\ntR."  # a pickle that runs a command
        yield f"index {kind}", _both(
            lambda folder: (folder / WEIGHTS).rename(folder.parent / "outside.safetensors"),
            replaced("pytorch_model.bin", danger), replaced(name, index),
            replaced("x.safetensors", b""),
        )  # fmt: skip
    for kind, index in (
        ("no map", {}),
        ("map list", {"weight_map": []}),
        ("map", {"weight_map": 1}),
    ):
        yield (
            f"index {kind}",
            _both(
                lambda folder: (folder / WEIGHTS).rename(folder / "other.safetensors"),
                replaced(name, json.dumps(index).encode()),
            ),
        )
    yield (
        "only a pickle",
        _both(lambda folder: (folder / WEIGHTS).unlink(), replaced("pytorch_model.bin", danger)),
    )
    for to in ("/etc/passwd", "/dev/zero", "/nowhere", WEIGHTS):
        yield f"weights to {to}", linked(WEIGHTS, to)
    for kind in ("pipe", "folder"):
        yield f"weights {kind}", special(WEIGHTS, kind)


def _endless() -> Iterator[tuple[str, Change]]:
    """Small files that ask a loader for very much."""
    for name, dtype in (("a", ["F32"]), ("m.experts.900000000.w", "F32"), ("m.experts.9999.w", 7),
                        (f"m.experts.{'9' * 5000}.w", "F32")):  # fmt: skip
        header = {name: {"dtype": dtype, "shape": [4], "data_offsets": [0, 16]}}
        text = json.dumps(header).encode()
        extra = len(text).to_bytes(8, "little") + text + bytes(16)
        yield f"tensor {name[:20]}", replaced("extra.safetensors", extra)
    bart = {"model_type": "bart", "architectures": ["BartForCausalLM"], "d_model": 16,
            "encoder_layers": 1, "decoder_attention_heads": 2}  # fmt: skip
    yield "bart", with_fields("config.json", **bart, decoder_layers=10**9)
    git = {"model_type": "git", "architectures": ["GitForCausalLM"]}
    yield "git", with_fields("config.json", **git, num_image_with_embedding=10**9)
    for name in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        yield name, with_fields("config.json", **{name: "me/kernel"})
    longer = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 10}
    for name in ("decoder", "normalizer"):
        several = {"type": "Sequence", f"{name}s": [longer] * 9}
        yield name, with_fields("tokenizer.json", **{name: several})
    for name in ("chat_template.jinja", "additional_chat_templates/x.jinja", "merges.txt"):
        yield (
            name,
            _both(
                lambda folder: (folder / "additional_chat_templates").mkdir(),
                replaced(name, b""),
                lambda folder, name=name: os.truncate(folder / name, 3 << 30),
            ),
        )


@pytest.mark.hostile
def test_small_files_that_ask_for_much(attack_folders: Callable[..., None]) -> None:
    attack_folders(_endless())


@pytest.mark.hostile
def test_odd_kinds_of_models(attack_folders: Callable[..., None]) -> None:
    attack_folders(_kinds())


@pytest.mark.hostile
def test_odd_indices_and_links(attack_folders: Callable[..., None]) -> None:
    attack_folders(_indices())


def _tokens() -> Iterator[tuple[str, Change]]:
    for name in ("eos_token", "pad_token", "unk_token", "bos_token", "extra_special_tokens",
                 "model_max_length", "padding_side", "tokenizer_class", "added_tokens_decoder",
                 "chat_template", "additional_special_tokens"):  # fmt: skip
        for value in (None, 7, -1, [], {}, [None], "", "x" * 100_000, "\x1b[31m", {"content": 1}):
            yield (
                f"{name}={str(value)[:20]!r}",
                with_fields("tokenizer_config.json", **{name: value}),
            )


@pytest.mark.parametrize("part", seeds(8, quick=0))
def test_odd_tokens(attack_folders: Callable[..., None], part: int) -> None:
    attack_folders(list(_tokens())[part::8])


@pytest.mark.hostile
@pytest.mark.parametrize("command", [EXPORT, PLAN, TRAIN], ids=lambda words: words[0])
def test_other_commands(
    attack_folders: Callable[..., None], model: Path, command: tuple[str, ...]
) -> None:
    changes = [c for name in FILLED for c in list(odd_files(name))[::4]]
    attack_folders([*changes, *list(_sizes())[::9], *list(odd_weights(WEIGHTS))[::5]], command)
