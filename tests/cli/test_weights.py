"""Every command refuses weights that are not the model's: three lines, exit 2, nothing scored."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.evaluation import FAST, soul, three_lines
from tests.support.training import random_model

TOMI = ("--task", "tomi", "--data", "tomi=synth:4")
KEEPER = ("--task", "secret_keeper", "--data", "secret_keeper=synth:2")
STEP = ("--steps", 1, "--max-tokens", 4)
GONE = "model.layers.1.mlp.down_proj.weight"
HALF = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`whole`, `holed` (a projection is missing), `adapter`, `halved` (it lacks every B)."""
    out = tmp_path_factory.mktemp("models")
    whole, holed = random_model(out / "whole"), out / "holed"
    shutil.copytree(whole, holed)
    without(holed / "model.safetensors", GONE)
    base = AutoModelForCausalLM.from_pretrained(whole)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(base, lora).save_pretrained(out / "adapter")
    shutil.copytree(out / "adapter", out / "halved")
    without(out / "halved" / "adapter_model.safetensors", "lora_B")
    return {name: out / name for name in ("whole", "holed", "adapter", "halved")}


def without(file: Path, part: str) -> None:
    tensors = {k: t for k, t in load_file(file).items() if part not in k}
    save_file(tensors, file, metadata={"format": "pt"})


ROADS: dict[str, tuple[object, ...]] = {
    "the actor": ("eval", "local", "--model", "holed", *TOMI, *FAST),
    "its adapter": ("eval", "local", "--model", "whole", "--adapter", "halved", *TOMI, *FAST),
    "a partner": ("eval", "local", "--model", "whole", "--partner", "local:holed", *KEEPER, *FAST),
    "a base to train": ("train", "grpo", "--model", "holed", *TOMI, *STEP),
    "all of its weights": ("train", "sft", "--full", "--model", "holed", *TOMI, "--steps", 1),
    "an adapter to go on with": (
        "train", "grpo", "--model", "whole", "--adapter", "halved", *TOMI, *STEP
    ),
    "a coach": ("train", "ditto", "--model", "whole", "--coach", "local:holed", *TOMI, *STEP),
    "a teacher": ("train", "opd", "--model", "whole", "--teacher-model", "holed", *TOMI, *STEP),
    "a teacher's adapter": (
        "train", "opd", "--model", "whole", "--teacher-adapter", "halved", *TOMI, *STEP
    ),
}  # fmt: skip


@pytest.mark.parametrize("road", ROADS)
def test_weights_that_are_missing_are_named(
    road: str, models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [_placed(a, models) for a in ROADS[road]]
    assert soul(*arguments, "--out", tmp_path / "run") == 2
    printed = capsys.readouterr().err.splitlines(keepends=True)
    lines = " ".join(
        three_lines("".join(line for line in printed if not line.startswith("run folder ")))
    )
    broken = next(name for name in ("holed", "halved") if any(name in str(a) for a in arguments))
    assert str(models[broken]) in lines and (GONE if broken == "holed" else HALF) in lines
    assert not list((tmp_path / "run").rglob("summary.json"))


def _placed(argument: object, models: dict[str, Path]) -> object:
    kind, mark, name = str(argument).rpartition(":")
    return f"{kind}{mark}{models[name]}" if name in models else argument
