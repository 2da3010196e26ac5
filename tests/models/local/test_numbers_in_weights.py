"""Numbers that are none, or that stand for others, in the weights of a base and of an adapter."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from soulkit.errors import ModelLoadError, RunError
from soulkit.models.local.sampler import LocalModel
from soulkit.train.model.policy import load_policy
from soulkit.train.run import numbers_remark, refuse_untrainable
from soulkit.train.state.checkpoint import Position, load_checkpoint, save_checkpoint
from tests.support.training import config, policy_of, random_model

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


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


def kinds(folder: Path, dtype: torch.dtype) -> Path:
    """The model with its matrices in other numbers."""
    change(folder / "model.safetensors",
           lambda name, t: t.to(dtype) if t.ndim == 2 else t)  # fmt: skip
    return folder


def test_integers_without_scales_are_no_weights(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="8-bit integers"):
        LocalModel.load(kinds(folder, torch.int8), device="cpu")


def test_float8_is_read_for_an_adapter_and_refused_for_full_training(folder: Path) -> None:
    kinds(folder, torch.float8_e4m3fn)
    policy = load_policy(config(lora=LORA), folder)
    assert (policy.stored, policy.computed) == ("float8", "float32")
    with pytest.raises(ModelLoadError) as caught:
        load_policy(config(method="sft", full=True), folder)
    assert "float8" in caught.value.what and "adapter" in caught.value.way_out


@pytest.mark.parametrize("name", ["float8_e4m3fn", "int8"])
def test_nothing_is_multiplied_in_eight_bits(folder: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="no number type"):
        LocalModel.load(folder, device="cpu", dtype=name)


def test_a_float16_checkpoint_is_trained_on_in_other_numbers_which_is_said_and_kept(
    folder: Path,
) -> None:
    change(folder / "model.safetensors", lambda name, t: t.half())
    policy = load_policy(config(lora=LORA), folder)
    assert (policy.stored, policy.computed) == ("float16", "float32")
    assert numbers_remark(policy) == "the checkpoint is in float16 and is trained on in float32"
    assert load_policy(config(lora=LORA, dtype="float16"), folder).computed == "bfloat16"
    with pytest.raises(Exception, match="float16"):
        refuse_untrainable(config(dtype="float16"))


def test_other_checkpoints_say_nothing(folder: Path) -> None:
    policy = load_policy(config(lora=LORA), folder)
    assert policy.stored == "float32" and numbers_remark(policy) == ""


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
