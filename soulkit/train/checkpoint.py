"""Checkpoints: adapter, optimizer and position, without pickle.

Written aside and renamed, so a half-written one is never found under its name. The optimizer's
state is a safetensors file of `parameter:slot` tensors; everything else is JSON.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from soulkit.errors import RunError
from soulkit.train.policy import Policy


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: steps done, bytes of its append-only files, the policy's hash."""

    step: int
    metrics: int
    episodes: int
    policy: str
    seconds: float = 0.0


def save_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, position: Position
) -> Path:
    """Write `folder/step_000050`, aside first."""
    final = folder / f"step_{position.step:06d}"
    aside = folder / f".{final.name}.part"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    policy.save(aside)
    save_file(_trained_tensors(policy), aside / "trained.safetensors")
    save_file(_optimizer_tensors(policy, optimizer), aside / "optimizer.safetensors")
    (aside / "position.json").write_text(json.dumps(asdict(position)), encoding="utf-8")
    shutil.rmtree(final, ignore_errors=True)
    os.replace(aside, final)
    return final


def latest_checkpoint(folder: Path) -> Path | None:
    found = sorted(p for p in folder.glob("step_*") if (p / "position.json").is_file())
    return found[-1] if found else None


def load_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Position:
    """Put weights and optimizer back; RunError when the files do not fit the position's hash."""
    position = Position(**json.loads((path / "position.json").read_text(encoding="utf-8")))
    weights = load_file(path / "trained.safetensors")
    with torch.no_grad():
        for name, parameter in policy.trained:
            parameter.copy_(weights[name])
    if policy.version() != position.policy:
        raise RunError(
            f"The checkpoint {path.name} does not hold the weights it names.",
            "Its files were changed, or another base model is loaded.",
            "Delete this checkpoint to resume from the one before it.",
        )
    _restore_optimizer(load_file(path / "optimizer.safetensors"), policy, optimizer)
    return position


def prune(folder: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints."""
    for old in sorted(folder.glob("step_*"))[:-keep_last]:
        shutil.rmtree(old)


def _trained_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    # Cloned, because tied weights share memory and safetensors refuses that.
    return {name: p.detach().cpu().clone().contiguous() for name, p in policy.trained}


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, parameter in policy.trained:
        for slot, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}:{slot}"] = torch.as_tensor(value).detach().cpu().clone().contiguous()
    return tensors


def _restore_optimizer(
    tensors: dict[str, torch.Tensor], policy: Policy, optimizer: torch.optim.Optimizer
) -> None:
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        name, _, slot = key.rpartition(":")
        by_name.setdefault(name, {})[slot] = value
    for name, parameter in policy.trained:
        state = by_name.get(name)
        if state:
            # AdamW keeps its step count on the CPU and its moments beside the parameter.
            optimizer.state[parameter] = {
                slot: v if slot == "step" else v.to(parameter.device) for slot, v in state.items()
            }
