"""Checkpoints: adapter, optimizer, moving average and position, without pickle.

A checkpoint is a folder `step_000050` that is written under a temporary name, synced and renamed,
so it is never half-written. `position.json` has the position of the run and the SHA-256 of every
file and of itself, which are verified before loading. A resume uses the newest intact checkpoint,
renames damaged newer ones, and reports that. It reads the trained weights from the files of the
model; `trained.safetensors` has only those weights that these files do not hold to the bit. Older
checkpoints have all of them there.

Besides the newest checkpoints, those with the best dev score are kept (without dev scores, those
with the lowest validation loss). The ranking is read from the folders, so it survives a resume. No
random state is saved, because every random stream is derived from the seed and its purpose.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from soulkit.errors import RunError
from soulkit.models.local.loading import ADAPTER, modes_by_umask
from soulkit.models.local.weights import misfit_of
from soulkit.runs.jsonl import stored_json
from soulkit.train.model.policy import Policy
from soulkit.train.ranks.follower import same_weights
from soulkit.train.ranks.sharding import FirstRankTensors, put_pieces, whole_on_first
from soulkit.train.ranks.world import is_split, on_all_ranks

POSITION, TRAINED = "position.json", "trained.safetensors"
OPTIMIZER, TEACHER = "optimizer.safetensors", "teacher.safetensors"
STATE = (POSITION, TRAINED, OPTIMIZER, TEACHER)
"""Files that only a resume reads; the other files of a checkpoint are the model."""

Tensors = Mapping[str, torch.Tensor]

STEP = "step"
"""AdamW's number of updates of a weight."""

COMPLETE = "optimizer_complete"
"""Set if every trained weight has optimizer state; older checkpoints may lack some."""


Merit = tuple[bool, float]
"""(whether it is a dev score, value); dev scores rank above validation losses."""


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run: steps done, sizes of its append-only files, hash of the policy."""

    step: int
    metrics: int
    episodes: int
    policy: str
    seconds: float = 0.0
    dev: float | None = None
    """Mean dev score of these weights, if they were evaluated."""
    valid: float | None = None
    """Mean validation loss over the sources, if there is one and no dev score."""
    unmeasured: bool = False
    """Whether the run was stopped before it had evaluated these weights."""
    stopgap: bool = False
    """Whether it was written only because the run was stopped; the next one replaces it."""
    stream: Mapping[str, Any] | None = None
    """Position in the stream of conversations, if there is one."""

    @property
    def merit(self) -> Merit | None:
        """Ranking key of the checkpoint, higher is better; None if nothing was measured."""
        return merit_of(self.dev, self.valid)

    def serves(self, other: Position) -> bool:
        """Whether this checkpoint has the same state as `other` and is kept for as long."""
        names = ("step", "metrics", "episodes", "policy", "unmeasured")
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and (other.stopgap or not self.stopgap)


def merit_of(dev: float | None, loss: float | None) -> Merit | None:
    """The ranking key of weights with this mean dev score, or else this mean validation loss.

    The two are on different scales, and the last step may have a loss without a dev score.
    """
    if dev is not None:
        return True, dev
    return None if loss is None else (False, -loss)


class DamagedCheckpoint(RunError):
    """Files of a checkpoint are missing or changed; `detail` says which."""

    def __init__(self, path: Path, detail: str) -> None:
        self.detail = detail
        super().__init__(
            f"The checkpoint {path.name} is damaged: {detail}.",
            "Loading it would not restore the state that the run saved.",
            "Delete this checkpoint to resume from the previous one.",
        )


# --- writing --------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, position: Position
) -> Path:
    """Write `folder/step_000050`; an intact checkpoint of the same state is kept."""
    final = folder / f"step_{position.step:06d}"
    if final.exists() and not damage(final) and read_position(final).serves(position):
        return final

    def fill(aside: Path) -> None:
        policy.save(aside, position.step)
        if rest := _not_in_model(aside, policy):
            save_file(_plain(rest), aside / TRAINED)
        save_file(_optimizer_tensors(policy, optimizer), aside / OPTIMIZER)
        if policy.ema is not None:
            save_file(_plain(policy.ema), aside / TEACHER)
        _write_position(aside, position)

    replace_folder(final, fill)
    return final


def replace_folder(final: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write a temporary folder, sync it, and replace `final` with it."""
    aside, old = (final.with_name(f".{final.name}.{kind}") for kind in ("part", "old"))
    for leftover in (aside, old):
        shutil.rmtree(leftover, ignore_errors=True)
    aside.mkdir(parents=True)
    fill(aside)
    modes_by_umask(aside)
    for path in sorted(aside.rglob("*")):
        _sync(path)
    _sync(aside)
    if final.exists():
        os.replace(final, old)
    os.replace(aside, final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _finish_replacing(folder: Path) -> None:
    """Finish the rename of a complete checkpoint if `replace_folder` was killed between its two
    renames."""
    for old in folder.glob(".step_*.old"):
        final = folder / old.stem.removeprefix(".")
        aside = old.with_suffix(".part")
        if aside.is_dir() and not final.exists() and not damage(aside):
            os.replace(aside, final)


def remove_folder(path: Path) -> None:
    """Delete a folder, renaming it first, so that a kill leaves nothing that looks intact."""
    gone = path.with_name(f".{path.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    shutil.rmtree(gone)


def _sync(path: Path) -> None:
    """Sync a file or folder to disk."""
    if os.name == "nt" and path.is_dir():  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_position(folder: Path, position: Position) -> None:
    files = {p.relative_to(folder).as_posix(): _sha256(p) for p in _files(folder)}
    noted = {**asdict(position), COMPLETE: True, "files": files}
    text = json.dumps({**noted, "sha256": _digest(noted)}, indent=2)
    (folder / POSITION).write_text(text + "\n", encoding="utf-8")


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != POSITION)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest(noted: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(noted, sort_keys=True).encode()).hexdigest()


# --- reading --------------------------------------------------------------------------------------


def read_position(path: Path) -> Position:
    """The position of checkpoint `path`; DamagedCheckpoint if it cannot be read."""
    noted = _noted(path)
    # Older checkpoints lack some fields.
    return Position(**{name: noted[name] for name in Position.__slots__ if name in noted})


def damage(path: Path) -> str:
    """What is wrong with the files of checkpoint `path`; empty if it is intact."""
    try:
        hashes = _noted(path)["files"]
    except DamagedCheckpoint as error:
        return error.detail
    files = {p.relative_to(path).as_posix(): p for p in _files(path)}
    missing = sorted(set(hashes) - set(files))
    if missing:
        return f"{', '.join(missing)} is missing"
    changed = [name for name, sha256 in hashes.items() if _sha256(files[name]) != sha256]
    return f"{', '.join(changed)} has changed since it was saved" if changed else ""


def _noted(path: Path) -> dict[str, Any]:
    try:
        noted = stored_json(path / POSITION)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, f"{POSITION} is missing") from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(path, f"{POSITION} cannot be read") from error
    sha256 = noted.pop("sha256", None) if isinstance(noted, dict) else None
    if sha256 is None or sha256 != _digest(noted):
        raise DamagedCheckpoint(path, f"{POSITION} has changed since it was saved")
    return dict(noted)


def resume_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[Position | None, list[str]]:
    """Load the newest intact checkpoint; returns its position (None without one) and remarks.

    Damaged newer ones are renamed to `damaged_step_…`. RunError if there are checkpoints but none
    is intact, because the run would silently start again.
    """
    _finish_replacing(folder)
    broken: dict[Path, str] = {}
    for path in reversed(checkpoints(folder)):
        try:
            position = load_checkpoint(path, policy, optimizer)
        except DamagedCheckpoint as error:
            broken[path] = error.detail
        else:
            return position, [_set_aside(p, why, path) for p, why in broken.items()]
    if broken:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in broken.items())
        raise RunError(
            f"All {len(broken)} checkpoints in {folder} are damaged ({reasons}).",
            "The run cannot resume, and it does not restart from step 0 automatically.",
            f"Restore the files, or delete {folder} to start from step 0.",
        )
    return None, []


def _set_aside(path: Path, why: str, used: Path) -> str:
    aside = path.with_name(f"damaged_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return (
        f"checkpoint {path.name} is damaged ({why}) and was renamed to {aside.name}; resuming from "
        f"{used.name}"
    )


def load_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Position:
    """Restore weights, moving average and optimizer.

    DamagedCheckpoint if a file has changed; RunError if the tensors do not fit this model and
    optimizer, or the recorded hash.
    """
    if fault := damage(path):
        raise DamagedCheckpoint(path, fault)
    position = read_position(path)
    rest = load_file(path / TRAINED) if (path / TRAINED).is_file() else {}
    weights = _model_weights(path, [name for name, _ in policy.trained if name not in rest]) | rest
    _check_fit(path, TRAINED if rest else "the saved model", weights, dict(policy.trained))
    put_pieces(policy, optimizer, FirstRankTensors(weights))
    with torch.no_grad():
        for name, parameter in policy.trained:
            if not is_split(parameter):
                parameter.copy_(weights[name])
    same_weights(policy)
    if policy.version() != position.policy:
        raise _other_weights(path, "The hash of the weights differs from the recorded one.")
    _restore_teacher(path, policy)
    _restore_optimizer(path, policy, optimizer)
    return position


def _check_fit(path: Path, file: str, tensors: Tensors, places: Tensors) -> None:
    """RunError unless the tensors in a file of checkpoint `path` are exactly `places`."""
    if fault := misfit_of(tensors, places):
        raise _other_weights(path, f"In {file}: {fault}.")


def _other_weights(path: Path, detail: str) -> RunError:
    return RunError(
        f"The weights in checkpoint {path.name} do not match its record.",
        f"{detail} Its files were changed, or another base model is loaded.",
        "Delete this checkpoint to resume from the previous one.",
    )


def _restore_teacher(path: Path, policy: Policy) -> None:
    has_average = (path / TEACHER).is_file()
    if has_average != (policy.ema is not None):
        raise RunError(
            f"The checkpoint {path.name} has {'a' if has_average else 'no'} moving average.",
            f"With these settings the teacher is {'not ' if has_average else ''}a moving average.",
            "Resume with the settings that the run was started with, or use another --out.",
        )
    if policy.ema is not None:
        average = load_file(path / TEACHER)
        _check_fit(path, TEACHER, average, policy.ema)
        policy.ema = {name: average[name].to(t.device) for name, t in policy.ema.items()}


# --- pruning --------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, intact or not."""
    return sorted(p for p in folder.glob("step_*") if p.is_dir())


def ranking(folder: Path) -> list[tuple[Path, Merit]]:
    """Checkpoints with a ranking key, best first; later ones win ties."""
    scored = [
        (path, merit) for path in checkpoints(folder)
        if (position := _known_position(path)) and (merit := position.merit) is not None
    ]  # fmt: skip
    return sorted(scored, key=lambda one: (one[1], one[0].name), reverse=True)


def among_best(folder: Path, merit: Merit | None, keep_best: int) -> bool:
    """Whether weights with this key would be among the `keep_best` best checkpoints."""
    if merit is None or not keep_best:
        return False
    best = ranking(folder)[:keep_best]
    return len(best) < keep_best or merit >= best[-1][1]


def prune(folder: Path, keep_last: int, keep_best: int = 0) -> None:
    """Delete all checkpoints except the newest `keep_last` and the best `keep_best`.

    A checkpoint written at a stop does not count and is kept only while it is the newest.
    """
    every = checkpoints(folder)
    planned = [path for path in every if not ((p := _known_position(path)) and p.stopgap)]
    best = (path for path, _ in ranking(folder)[:keep_best])
    lasting = {*every[-1:], *planned[-keep_last:], *best}
    for path in every:
        if path not in lasting:
            remove_folder(path)
    for leftover in (*folder.glob(".step_*.old"), *folder.glob(".step_*.part")):
        shutil.rmtree(leftover)


def _known_position(path: Path) -> Position | None:
    """The position of checkpoint `path`; None if it is damaged, which the next resume reports."""
    try:
        return read_position(path)
    except DamagedCheckpoint:
        return None


def export_best(run: Path, folder: Path) -> Path | None:
    """Copy the model of the best intact checkpoint to `run/best` and return the checkpoint.

    None if none was measured. The copy can be loaded like `run/model`.
    """
    for path, _ in ranking(folder):
        if not damage(path):
            model = partial(shutil.copytree, path, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns(*STATE))  # fmt: skip
            replace_folder(run / "best", model)
            return path
    return None


# --- tensors --------------------------------------------------------------------------------------


def _plain(tensors: Tensors) -> dict[str, torch.Tensor]:
    # Cloned, because safetensors refuses tied weights, which share memory.
    return {name: t.clone().contiguous() for name, t in whole_on_first(tensors).items()}


def _model_weights(folder: Path, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Those of the weights `names` that a model's files in `folder` have under PEFT's names."""
    saved = {name.replace(f".{ADAPTER}", "").replace(".modules_to_save", ""): name
             for name in names}  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        if saved and path.name not in STATE:
            with safe_open(path, framework="pt") as file:
                tensors |= {saved[key]: file.get_tensor(key) for key in saved.keys() & file.keys()}
    return tensors


def _not_in_model(folder: Path, policy: Policy) -> dict[str, torch.Tensor]:
    """The trained weights that the model's files in `folder` do not hold to the bit."""
    held, trained = _model_weights(folder, [n for n, _ in policy.trained]), _on_first(policy)
    return {name: weight for name, weight in trained.items()
            if name not in held or not _same_bits(held[name], weight)}  # fmt: skip


@on_all_ranks
def _on_first(policy: Policy) -> dict[str, torch.Tensor]:
    return whole_on_first(dict(policy.trained))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape
    return same and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))


@on_all_ranks
def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State by `weight:slot`; empty before the first update."""
    slots = {slot for state in optimizer.state.values() for slot in state}
    return _plain(
        {
            f"{name}:{slot}": _slot(optimizer, parameter, slot)
            for name, parameter in policy.trained
            for slot in sorted(slots)  # as on other ranks
        }
    )


def _slot(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, slot: str
) -> torch.Tensor:
    """One state of a weight; its initial value if the weight has had no gradient yet."""
    if value := optimizer.state.get(parameter):
        return torch.as_tensor(value[slot])
    return torch.zeros(()) if slot == STEP else torch.zeros_like(parameter)


def _restore_optimizer(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    tensors = load_file(path / OPTIMIZER)
    names = {key.rpartition(":")[0] for key in tensors}
    slots = {key.rpartition(":")[2] for key in tensors}
    whole = _noted(path).get(COMPLETE, False)
    stated = [(n, p) for n, p in policy.trained if n in names or (names and whole)]
    places = {
        f"{name}:{slot}": torch.zeros(()) if slot == STEP else parameter
        for name, parameter in stated
        for slot in slots
    }
    _check_fit(path, OPTIMIZER, tensors, places)
    for name, parameter in stated:
        # AdamW keeps its step count on the CPU and its moments on the parameter's device.
        optimizer.state[parameter] = {
            slot: tensors[f"{name}:{slot}"].to("cpu" if slot == STEP else parameter.device)
            for slot in slots
            if slot == STEP or not is_split(parameter)
        }
    put_pieces(policy, optimizer, FirstRankTensors(tensors))
