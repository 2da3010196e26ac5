"""Checkpoints: adapter, optimizer, moving average and position, without pickle.

A checkpoint is a folder `step_000050` that was written aside, synced and renamed, so a half-written
one never stands under its name. `position.json` says where the run stood and holds the SHA-256 of
every other file and of itself; nothing is loaded before all of them agree. A resume takes the
newest checkpoint that is whole, moves damaged newer ones out of the way, and says so.

Beside the newest ones those with the best dev score are kept, or, in a run that measures nothing
else, with the lowest validation loss. The ranking is read from the folders
on disk, so it needs no memory of its own and survives a resume.

No state of a random generator is kept: every draw of a run has a stream of its own (sampling,
batches, lessons), keyed by the seed and what it is for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from soulkit.errors import RunError
from soulkit.models.local.loading import modes_by_umask
from soulkit.models.local.weights import misfit_of
from soulkit.train.model.policy import Policy

POSITION, TRAINED = "position.json", "trained.safetensors"
OPTIMIZER, TEACHER = "optimizer.safetensors", "teacher.safetensors"
STATE = (POSITION, TRAINED, OPTIMIZER, TEACHER)
"""What only a resume reads; the other files of a checkpoint are the model as others load it."""

STEP = "step"
"""AdamW's count of a weight's updates, a number beside its moments."""

COMPLETE = "optimizer_complete"
"""Noted where every trained weight has optimizer state; earlier checkpoints left some out."""


Merit = tuple[bool, float]
"""Whether it is a dev score, and how good: those who were played stand above those who were not."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: steps done, bytes of its append-only files, the policy's hash."""

    step: int
    metrics: int
    episodes: int
    policy: str
    seconds: float = 0.0
    dev: float | None = None
    """Mean dev score of these very weights, where the step before evaluated them."""
    valid: float | None = None
    """Their mean validation loss over the sources, where there is one and no dev score."""
    unmeasured: bool = False
    """The step before was to evaluate these weights, and was stopped before it had."""
    stopgap: bool = False
    """Written because the run was stopped: the next one takes its place."""
    stream: Mapping[str, Any] | None = None
    """Where the stream of conversations stands, of a run that learns from one."""

    @property
    def merit(self) -> Merit | None:
        """What checkpoints are ranked by, higher is better; None where nothing was measured."""
        return merit_of(self.dev, self.valid)

    def serves(self, other: Position) -> bool:
        """Whether a run would go on from here as from `other`, and this lasts as long."""
        names = ("step", "metrics", "episodes", "policy", "unmeasured")
        same = all(getattr(self, name) == getattr(other, name) for name in names)
        return same and (other.stopgap or not self.stopgap)


def merit_of(dev: float | None, loss: float | None) -> Merit | None:
    """Of weights with this mean dev score, or else this mean validation loss.

    The last step of a run has a loss even where no dev score is due: the two are on no one scale.
    """
    if dev is not None:
        return True, dev
    return None if loss is None else (False, -loss)


class DamagedCheckpoint(RunError):
    """A checkpoint's files are not those that were written; `detail` says which."""

    def __init__(self, path: Path, detail: str) -> None:
        self.detail = detail
        super().__init__(
            f"The checkpoint {path.name} is damaged: {detail}.",
            "What it would put back is not what the run wrote.",
            "Delete this checkpoint to resume from the one before it.",
        )


# --- writing --------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer, position: Position
) -> Path:
    """Write `folder/step_000050`, aside first; a whole one of the same state is left alone."""
    final = folder / f"step_{position.step:06d}"
    if final.exists() and not damage(final) and read_position(final).serves(position):
        return final

    def fill(aside: Path) -> None:
        policy.save(aside, position.step)
        save_file(_trained_tensors(policy), aside / TRAINED)
        save_file(_optimizer_tensors(policy, optimizer), aside / OPTIMIZER)
        if policy.ema is not None:
            save_file(_plain(policy.ema), aside / TEACHER)
        _write_position(aside, position)

    replace_folder(final, fill)
    return final


def replace_folder(final: Path, fill: Callable[[Path], object]) -> None:
    """Let `fill` write the folder aside, sync it, and put it in the place of `final`."""
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
    """Give the checkpoint its name whose writer was killed between the two renames of
    `replace_folder`: it was whole on the disk by then, and the one before it has no name any more.
    """
    for old in folder.glob(".step_*.old"):
        final = folder / old.stem.removeprefix(".")
        aside = old.with_suffix(".part")
        if aside.is_dir() and not final.exists() and not damage(aside):
            os.replace(aside, final)


def remove_folder(path: Path) -> None:
    """Delete a folder whose name disappears first: a kill leaves none that looks whole."""
    gone = path.with_name(f".{path.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    shutil.rmtree(gone)


def _sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
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
    """The position of checkpoint `path`; DamagedCheckpoint when it cannot be read."""
    noted = _noted(path)
    # Earlier checkpoints have no word of what can be missing or temporary.
    return Position(**{name: noted[name] for name in Position.__slots__ if name in noted})


def damage(path: Path) -> str:
    """What is wrong with the files of checkpoint `path`; empty when it is whole."""
    try:
        hashes = _noted(path)["files"]
    except DamagedCheckpoint as error:
        return error.detail
    files = {p.relative_to(path).as_posix(): p for p in _files(path)}
    missing = sorted(set(hashes) - set(files))
    if missing:
        return f"it lacks {', '.join(missing)}"
    changed = [name for name, sha256 in hashes.items() if _sha256(files[name]) != sha256]
    return f"{', '.join(changed)} differs from what was written" if changed else ""


def _noted(path: Path) -> dict[str, Any]:
    try:
        noted = json.loads((path / POSITION).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DamagedCheckpoint(path, f"it lacks {POSITION}") from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(path, f"{POSITION} cannot be read") from error
    sha256 = noted.pop("sha256", None) if isinstance(noted, dict) else None
    if sha256 is None or sha256 != _digest(noted):
        raise DamagedCheckpoint(path, f"{POSITION} differs from what was written")
    return dict(noted)


def resume_checkpoint(
    folder: Path, policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[Position | None, list[str]]:
    """Load the newest whole checkpoint; its position (None: there is none), and remarks to show.

    Damaged newer ones are renamed to `damaged_step_…`. RunError when there are checkpoints and none
    is whole: the run would silently begin again.
    """
    _finish_replacing(folder)
    broken: dict[Path, str] = {}
    for path in reversed(checkpoints(folder)):
        broken[path] = damage(path)
        if not broken[path]:
            remarks = [_set_aside(p, why, path) for p, why in broken.items() if why]
            return load_checkpoint(path, policy, optimizer), remarks
    if broken:
        reasons = "; ".join(f"{path.name}: {why}" for path, why in broken.items())
        raise RunError(
            f"None of the {len(broken)} checkpoints in {folder} is whole ({reasons}).",
            "The run cannot go on from where it stood, and is not begun again unasked.",
            f"Bring the files back, or delete {folder} to begin at the first step.",
        )
    return None, []


def _set_aside(path: Path, why: str, used: Path) -> str:
    aside = path.with_name(f"damaged_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    return (
        f"checkpoint {path.name} is damaged ({why}): going on from {used.name}; "
        f"it is kept as {aside.name}"
    )


def load_checkpoint(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Position:
    """Put weights, moving average and optimizer back.

    DamagedCheckpoint when a file is not what was written; RunError when the files are whole and
    hold other tensors than those of this model and optimizer, or than the position names.
    """
    if fault := damage(path):
        raise DamagedCheckpoint(path, fault)
    position = read_position(path)
    weights = _tensors(path, TRAINED, dict(policy.trained))
    with torch.no_grad():
        for name, parameter in policy.trained:
            parameter.copy_(weights[name])
    if policy.version() != position.policy:
        raise _other_weights(path, "Their hash is not the one that was written.")
    _restore_teacher(path, policy)
    _restore_optimizer(path, policy, optimizer)
    return position


def _tensors(path: Path, file: str, places: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file of checkpoint `path`; RunError unless they are exactly `places`."""
    tensors = load_file(path / file)
    if fault := misfit_of(tensors, places):
        raise _other_weights(path, f"In {file}: {fault}.")
    return tensors


def _other_weights(path: Path, detail: str) -> RunError:
    return RunError(
        f"The checkpoint {path.name} does not hold the weights it names.",
        f"{detail} Its files were changed, or another base model is loaded.",
        "Delete this checkpoint to resume from the one before it.",
    )


def _restore_teacher(path: Path, policy: Policy) -> None:
    has_average = (path / TEACHER).is_file()
    if has_average != (policy.ema is not None):
        raise RunError(
            f"The checkpoint {path.name} holds {'a' if has_average else 'no'} moving average.",
            f"This run {'has no' if has_average else 'has a'} teacher that is one.",
            "Resume with the settings it was started with, or give another folder with --out.",
        )
    if policy.ema is not None:
        average = _tensors(path, TEACHER, policy.ema)
        policy.ema = {name: average[name].to(t.device) for name, t in policy.ema.items()}


# --- which ones are kept --------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first, whole or not."""
    return sorted(p for p in folder.glob("step_*") if p.is_dir())


def ranking(folder: Path) -> list[tuple[Path, Merit]]:
    """Checkpoints with a merit, best first; of equal ones the later is the better."""
    scored = []
    for path in checkpoints(folder):
        try:
            merit = read_position(path).merit
        except DamagedCheckpoint:  # a resume names it; it has no score to rank by
            continue
        if merit is not None:
            scored.append((path, merit))
    return sorted(scored, key=lambda one: (one[1], one[0].name), reverse=True)


def ranks(folder: Path, merit: Merit | None, keep_best: int) -> bool:
    """Whether a merit is among the `keep_best` best of those that have a checkpoint."""
    if merit is None or not keep_best:
        return False
    best = ranking(folder)[:keep_best]
    return len(best) < keep_best or merit >= best[-1][1]


def prune(folder: Path, keep_last: int, keep_best: int = 0) -> None:
    """Delete all checkpoints but the newest `keep_last` and the best `keep_best`.

    One that a stop left lasts while it is the newest, and counts as none of them.
    """
    every = checkpoints(folder)
    planned = [path for path in every if not _is_stopgap(path)]
    best = (path for path, _ in ranking(folder)[:keep_best])
    lasting = {*every[-1:], *planned[-keep_last:], *best}
    for path in every:
        if path not in lasting:
            remove_folder(path)
    for leftover in (*folder.glob(".step_*.old"), *folder.glob(".step_*.part")):
        shutil.rmtree(leftover)


def _is_stopgap(path: Path) -> bool:
    try:
        return read_position(path).stopgap
    except DamagedCheckpoint:
        return False


def export_best(run: Path, folder: Path) -> Path | None:
    """Copy the model of the best whole checkpoint to `run/best`; the checkpoint.

    None when none was measured. The copy is loaded like `run/model`.
    """
    for path, _ in ranking(folder):
        if not damage(path):
            replace_folder(run / "best", partial(_copy_model, path))
            return path
    return None


def _copy_model(source: Path, aside: Path) -> None:
    shutil.copytree(source, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*STATE))


# --- tensors --------------------------------------------------------------------------------------


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # Cloned, because tied weights share memory and safetensors refuses that.
    return {name: t.detach().cpu().clone().contiguous() for name, t in tensors.items()}


def _trained_tensors(policy: Policy) -> dict[str, torch.Tensor]:
    return _plain(dict(policy.trained))


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State by `weight:slot`; nothing before the first update."""
    slots = {slot for state in optimizer.state.values() for slot in state}
    return _plain(
        {
            f"{name}:{slot}": _slot(optimizer, parameter, slot)
            for name, parameter in policy.trained
            for slot in slots
        }
    )


def _slot(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, slot: str
) -> torch.Tensor:
    """One state of a weight; of a weight that has had no gradient yet, what it will begin with."""
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
    if fault := misfit_of(tensors, places):
        raise _other_weights(path, f"In {OPTIMIZER}: {fault}.")
    for name, parameter in stated:
        # AdamW keeps its step count on the CPU and its moments beside the parameter.
        optimizer.state[parameter] = {
            slot: tensors[f"{name}:{slot}"].to("cpu" if slot == STEP else parameter.device)
            for slot in slots
        }
