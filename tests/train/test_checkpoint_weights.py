"""A resume puts back all that was trained, and names what a checkpoint lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from soulkit.errors import RunError
from soulkit.train.forward.policy import Policy
from soulkit.train.state.checkpoint import (
    POSITION,
    Position,
    _digest,
    _sha256,
    load_checkpoint,
    read_position,
    save_checkpoint,
)
from tests.support.training import jolt, policy_of, random_model

SMALL = {"lora": {"r": 4, "alpha": 8}}
FILES = ("trained.safetensors", "optimizer.safetensors", "teacher.safetensors")

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def adam(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in policy.trained], lr=1e-3)


def stepped(policy: Policy, spared: int = 0) -> torch.optim.Optimizer:
    """An optimizer after one update in which the first `spared` weights had no gradient."""
    optimizer = adam(policy)
    for _, parameter in policy.trained[spared:]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def saved(folder: Path, policy: Policy, spared: int = 0) -> Path:
    policy.ema = {name: p.detach().clone() for name, p in policy.trained}
    optimizer = stepped(policy, spared)
    return save_checkpoint(folder, policy, optimizer, Position(1, 0, 0, policy.version()))


def sign(path: Path) -> None:
    """Note the files of a checkpoint as they are now, as if they had been written so."""
    noted = json.loads((path / POSITION).read_text())
    del noted["sha256"]
    noted["files"] = {name: _sha256(path / name) for name in noted["files"]}
    (path / POSITION).write_text(json.dumps({**noted, "sha256": _digest(noted)}))
    read_position(path)


def half(tensors: Tensors) -> Tensors:
    weights = sorted({k.partition(":")[0] for k in tensors})
    return {k: t for k, t in tensors.items() if k.partition(":")[0] in weights[::2]}


def stranger(tensors: Tensors) -> Tensors:
    return tensors | {
        name.replace("layers.0", "layers.9"): t.clone() for name, t in tensors.items()
    }


def narrow(tensors: Tensors) -> Tensors:
    return {k: t[:1].clone() if t.ndim else t for k, t in tensors.items()}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("change", "text"),
    [(half, "missing"), (stranger, "foreign"), (narrow, "of another shape"), (lambda t: {}, "")],
)
def test_other_tensors_than_those_that_are_trained(
    file: str, change: Callable[[Tensors], Tensors], text: str, folder: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path, policy_of(folder, **SMALL))
    save_file(change(load_file(path / file)), path / file)
    sign(path)
    again = policy_of(folder, **SMALL)
    again.ema = {name: p.detach().clone() for name, p in again.trained}
    if file == "optimizer.safetensors" and not text:
        load_checkpoint(path, again, adam(again))  # a run that has had no update yet
        return
    with pytest.raises(RunError, match=r"step_000001.*does not hold the weights") as caught:
        load_checkpoint(path, again, adam(again))
    assert file in caught.value.why and (text or "missing") in caught.value.why
    assert "lora_" in caught.value.why and caught.value.why.count("lora_") <= 6


def test_a_weight_without_a_gradient_begins_where_it_would_have(
    folder: Path, tmp_path: Path
) -> None:
    policy, again = policy_of(folder, **SMALL), policy_of(folder, **SMALL)
    policy.ema = again.ema = {name: p.detach().clone() for name, p in policy.trained}
    optimizer, fresh = stepped(policy, spared=3), adam(again)
    position = Position(1, 0, 0, policy.version())
    load_checkpoint(save_checkpoint(tmp_path, policy, optimizer, position), again, fresh)
    for model, adam_ in ((policy, optimizer), (again, fresh)):
        for _, parameter in model.trained:
            parameter.grad = torch.full_like(parameter, 0.5)
        adam_.step()
    assert again.version() == policy.version()


def test_an_earlier_checkpoint_that_left_such_weights_out_is_read(
    folder: Path, tmp_path: Path
) -> None:
    path = saved(tmp_path, policy_of(folder, **SMALL))
    save_file(half(load_file(path / FILES[1])), path / FILES[1])
    noted = json.loads((path / POSITION).read_text())
    del noted["optimizer_complete"]
    (path / POSITION).write_text(json.dumps(noted))
    sign(path)
    again = policy_of(folder, **SMALL)
    again.ema = {name: p.detach().clone() for name, p in again.trained}
    fresh = adam(again)
    load_checkpoint(path, again, fresh)
    assert len(fresh.state) == len(again.trained) // 2


def test_all_weights_of_a_model_are_put_back_or_named(folder: Path, tmp_path: Path) -> None:
    full = {"full": True, "method": "sft"}
    policy = policy_of(folder, move=0.0, **full)
    jolt(policy, 0.01, 1)
    path = saved(tmp_path, policy)
    save_file(half(load_file(path / FILES[0])), path / FILES[0])
    sign(path)
    again = policy_of(folder, move=0.0, **full)
    with pytest.raises(RunError) as caught:
        load_checkpoint(path, again, adam(again))
    assert "weights missing: model." in caught.value.why and "more" in caught.value.why
