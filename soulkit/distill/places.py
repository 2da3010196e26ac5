"""Where experts lie: folders of weights and of training runs, at any depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from soulkit.distill.config import ANY, DistillConfig
from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.local.names import ADAPTER_CONFIG, NOTE, adapter_folder, model_place
from soulkit.runs.folder import is_run, read_environment

SERVED = "endpoint:"
"""What stands before the name of a served expert, in the place of a folder."""
WEIGHTS = ("best", "model")
"""Where a training run keeps what it ends with, the best by its dev score first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A folder with weights, and for which task it was named, if for one."""

    folder: Path
    task: str = ""
    origin: str = ""
    """The run that it is the outcome of."""


def expert_candidates(config: DistillConfig) -> Iterator[Candidate]:
    """Those that are named for a task, then those that are found and not named."""
    named = {t: w for t, w in config.experts.items() if t != ANY and not w.startswith(SERVED)}
    settled = [_weights_of(_folder(where), task) for task, where in named.items()]
    yield from settled
    if ANY in config.experts and not config.experts[ANY].startswith(SERVED):
        root = Path(config.experts[ANY]).expanduser()
        if not root.is_dir():
            raise _no_folder(root)
        taken = {one.folder.resolve() for one in settled}
        taken |= {Path(one.origin).resolve() for one in settled if one.origin}
        there = [one for one in _found_in(root, set()) if one.resolve() not in taken]
        if not there and not config.experts.keys() - {ANY}:
            raise _no_expert(root)
        yield from (c for c in map(_weights_of, there) if c.folder.resolve() not in taken)


def _folder(where: str) -> Path:
    """A folder here, or an adapter of the hub, downloaded."""
    place = model_place(where, "adapter")
    return adapter_folder(where) if place.on_hub else Path(place.where)


def _found_in(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Folders of runs and weights below `folder`, each place once, in order of their names."""
    if folder.resolve() in seen:
        return
    seen.add(folder.resolve())
    if is_run(folder):
        if str(read_environment(folder).get("command", "")).startswith("train"):
            yield folder
    elif (folder / NOTE).is_file() or (folder / ADAPTER_CONFIG).is_file():
        yield folder
    else:
        inner = (path for path in folder.iterdir() if not path.name.startswith("."))
        for path in sorted(path for path in inner if path.is_dir()):
            yield from _found_in(path, seen)


def _weights_of(folder: Path, task: str = "") -> Candidate:
    """A folder of weights as it is; of a run what it ended with."""
    if not is_run(folder):
        return Candidate(folder, task)
    for name in WEIGHTS:
        if (folder / name).is_dir():
            return Candidate(folder / name, task, str(folder))
    raise ConfigError(
        f"The run '{folder}' has not ended: there is no model in it yet.",
        "Without it its task would have no expert, and nobody would notice.",
        "Let it end by giving its command again, move it elsewhere, or name a checkpoint: "
        f"--experts TASK={folder}/checkpoints/STEP",
    )


def _no_folder(root: Path) -> ConfigError:
    beside = [p.name for p in root.parent.iterdir() if p.is_dir()] if root.parent.is_dir() else []
    return ConfigError(
        f"There is no folder '{root}' with experts.",
        "An expert is an adapter, a model or a training run, in a folder of its own.",
        did_you_mean(root.name, beside) if beside else "Check the path.",
    )


def _no_expert(root: Path) -> ConfigError:
    return ConfigError(
        f"There is no expert in '{root}'.",
        f"None of the folders below it is a training run, or holds {NOTE} or {ADAPTER_CONFIG}.",
        "Train one with: soul train ditto --task TASK …; or name a folder: --experts TASK=FOLDER",
    )
