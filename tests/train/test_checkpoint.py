"""Checkpoints put back weights and optimizer to the bit, and half-written ones do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from soulkit.errors import RunError
from soulkit.train.checkpoint import (
    Position,
    latest_checkpoint,
    load_checkpoint,
    prune,
    save_checkpoint,
)
from soulkit.train.policy import Policy
from soulkit.train.update import Tally, prepare, update, with_advantages
from tests.train.support import config, jolt, policy_of, random_model, step_of

SMALL = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


def adam(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in policy.trained], lr=1e-3)


def step(policy: Policy, optimizer: torch.optim.Optimizer, seed: int) -> None:
    asked = config(**SMALL)
    prepared = prepare(policy, with_advantages(step_of(seed, examples=2), asked), asked)
    update(policy, optimizer, prepared, range(len(prepared.sequences)), asked, Tally())


def position(policy: Policy, number: int = 2) -> Position:
    return Position(step=number, metrics=10, episodes=20, policy=policy.version(), seconds=1.5)


@pytest.mark.parametrize("full", [False, True])
def test_training_goes_on_to_the_bit(tmp_path: Path, folder: Path, full: bool) -> None:
    settings = {**SMALL, "full": full, "method": "sft" if full else "ditto"}
    policy = policy_of(folder, move=0.01, **settings)
    optimizer = adam(policy)
    for seed in (0, 1):
        step(policy, optimizer, seed)
    saved = save_checkpoint(tmp_path, policy, optimizer, position(policy))
    step(policy, optimizer, 2)

    again = policy_of(folder, move=0.3, **settings)
    fresh = adam(again)
    assert load_checkpoint(saved, again, fresh) == position(again)
    step(again, fresh, 2)
    assert again.version() == policy.version()
    for (_, a), (_, b) in zip(policy.trained, again.trained, strict=True):
        assert torch.equal(a, b)
        for slot, value in optimizer.state[a].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(fresh.state[b][slot]))


def test_before_the_first_update_there_is_no_optimizer_state(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    fresh = adam(policy)
    load_checkpoint(saved, policy, fresh)
    assert not fresh.state


def test_only_whole_checkpoints_are_found(tmp_path: Path, folder: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    policy = policy_of(folder, **SMALL)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy, 9))
    assert saved.name == "step_000009"
    (tmp_path / ".step_000011.part").mkdir()
    (tmp_path / "step_000012").mkdir()  # without a position
    assert latest_checkpoint(tmp_path) == saved
    later = save_checkpoint(tmp_path, policy, adam(policy), position(policy, 11))
    assert latest_checkpoint(tmp_path) == later
    assert not (tmp_path / ".step_000011.part").exists()


def test_no_file_of_a_checkpoint_can_run_code(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    optimizer = adam(policy)
    step(policy, optimizer, 0)
    saved = save_checkpoint(tmp_path, policy, optimizer, position(policy))
    assert {p.suffix for p in saved.rglob("*") if p.is_file()} == {".json", ".safetensors"}


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    saved = save_checkpoint(tmp_path, policy, adam(policy), position(policy))
    noted = json.loads((saved / "position.json").read_text())
    (saved / "position.json").write_text(json.dumps({**noted, "policy": "0" * 16}))
    with pytest.raises(RunError, match="does not hold the weights it names"):
        load_checkpoint(saved, policy, adam(policy))


def test_old_checkpoints_go(tmp_path: Path, folder: Path) -> None:
    policy = policy_of(folder, **SMALL)
    for number in (1, 2, 3, 10):
        save_checkpoint(tmp_path, policy, adam(policy), position(policy, number))
        jolt(policy, 0.01, number)
    prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000010"]
