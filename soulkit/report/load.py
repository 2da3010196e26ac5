"""Find run folders and read what they recorded.

A run is recognised by its files, so that a run which was killed before its summary can still be
looked at: `metrics.jsonl` makes it a training run, otherwise it is an evaluation. Nothing is scored
here; of an evaluation without a summary the means so far are taken, and the report says of how
many episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from soulkit.errors import RunError
from soulkit.eval.summary import Cells, Summary, summary_line
from soulkit.report.progress import (
    JUDGEMENTS,
    RunProgress,
    command_in,
    run_progress,
    summary_so_far,
)
from soulkit.runs.folder import is_run
from soulkit.runs.packing import has_lines
from soulkit.runs.provenance import origin_of
from soulkit.runs.records import load_records
from soulkit.train.state.lines import StepLine, read_step_lines
from soulkit.train.state.summary import TrainSummary
from soulkit.types import Record

_FILES = ("summary.json", "episodes.jsonl", "metrics.jsonl")
_ORDER = ("warmup", "before", "train", "after", "control", "after_shuffled", "careless", "careful")
"""The order in which the parts of one story are told; other names follow alphabetically."""

NOTES = "notes"
"""Under this a folder of runs says in its summary what belongs beside their numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run folder, read."""

    name: str
    path: Path
    kind: Literal["eval", "train"]
    summary: Summary | None
    """That of a training run is a TrainSummary, None while it is unfinished. An unfinished
    evaluation has the means so far, None before its first episode."""
    steps: tuple[StepLine, ...] = ()
    """Training lines of `metrics.jsonl`, by step."""
    progress: RunProgress | None = None
    """How far an unfinished run came; None once it is finished."""
    evals: tuple[tuple[int, dict[str, float]], ...] = ()
    """(step, task → mean) of the evaluations during training."""
    valid: tuple[tuple[int, dict[str, float]], ...] = ()
    """(step, source → loss) on validation conversations."""
    records: tuple[Record, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Judges, rows, model and the rest that makes it comparable; as far as it was recorded."""

    @property
    def tasks(self) -> Cells:
        """Task → metric → cell, empty without a summary."""
        return self.summary.tasks if self.summary else {}


def load_runs(
    paths: Sequence[Path], *, episodes: bool = True, light: bool = False
) -> list[RunData]:
    """The runs in `paths`: run folders, or folders whose children are runs (one level deep).

    RunError when a path holds no run; DataError when a file cannot be read. Without `episodes` the
    (large) episode files stay closed; `light` ones are without what turns saw, ids and log-probs.
    """
    folders: list[Path] = []
    for path in paths:
        folders += [p for p in find_runs(path) if p not in folders]
    names = _names(folders)
    return [_read(path, name, episodes, light) for path, name in zip(folders, names, strict=True)]


def find_runs(path: Path) -> list[Path]:
    """`path` itself when it is a run, else the runs directly inside it; RunError if none.

    A folder whose only record is a summary, such as the demo's, stands for the runs inside it.
    """
    inside = [p for p in path.iterdir() if p.is_dir() and _is_run(p)] if path.is_dir() else []
    if _is_check(path):
        raise RunError(
            f"'{path}' is a check of a judge, which holds no scores of a model.",
            "A report compares what models scored.",
            f"Print the check with: soul judge show {path}",
        )
    records_something = is_run(path) or any(
        (path / name).is_file() for name in _FILES if name != "summary.json"
    )
    if records_something or (_is_run(path) and not inside):
        return [path]
    if not inside:
        raise RunError(
            f"There is no run in '{path}'.",
            f"A run folder holds at least one of {', '.join(_FILES)}.",
            "Name a folder that `soul eval`, `soul train` or `soul demo` wrote.",
        )
    return sorted(inside, key=lambda p: (_rank(p.name), p.name))


def folder_notes(paths: Sequence[Path]) -> list[str]:
    """What folders say beside the numbers of their runs; DataError for a damaged summary."""
    lines = [read_summary(path / "summary.json") or {} for path in paths]
    notes = [line.get(NOTES) for line in lines]
    return [str(note) for part in notes if isinstance(part, list) for note in part]


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _is_run(path: Path) -> bool:
    return (any((path / name).is_file() for name in _FILES) or is_run(path)) and not _is_check(path)


def _is_check(path: Path) -> bool:
    """Whether `soul judge check` wrote it."""
    try:
        return (path / JUDGEMENTS).is_file() or command_in(path).startswith("judge")
    except RunError:  # damaged: whoever reads it says so
        return False


def _names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with their parent's name where they would be equal, else numbered."""
    short = [p.resolve().name for p in paths]
    if len(set(short)) < len(short):
        short = [f"{p.resolve().parent.name}/{p.resolve().name}" for p in paths]
    seen: dict[str, int] = {}
    names = []
    for name in short:
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _read(path: Path, name: str, episodes: bool, light: bool) -> RunData:
    line = read_summary(path / "summary.json")
    lines = read_step_lines(path / "metrics.jsonl")
    log = path / "episodes.jsonl"
    command = str((line or {}).get("command") or command_in(path))
    training = bool(lines) or command.startswith("train")
    kind: type[Summary] = TrainSummary if training else Summary
    so_far = None if training or line is not None else summary_so_far(path, command)
    return RunData(
        name=name,
        path=path,
        kind="train" if training else "eval",
        summary=so_far if line is None else kind.from_json(line),
        progress=run_progress(path, command) if line is None else None,
        steps=_steps(lines),
        evals=_by_step(lines, lambda line: line.dev),
        valid=_by_step(lines, lambda line: line.valid),
        records=tuple(load_records(log, light=light)) if episodes and has_lines(log) else (),
        provenance=origin_of(path, line or {}),
    )


def read_summary(path: Path) -> dict[str, Any] | None:
    """What the `summary.json` at `path` says, None without one; DataError for a damaged one."""
    return summary_line(path.parent) if path.is_file() else None


def _steps(lines: Sequence[StepLine]) -> tuple[StepLine, ...]:
    """Training lines by step; a later line of a step replaces an earlier one."""
    by_step = {line.step: line for line in lines if not line.measures}
    return tuple(by_step[step] for step in sorted(by_step))


def _by_step(
    lines: Sequence[StepLine], read: Callable[[StepLine], Mapping[str, float | None]]
) -> tuple[tuple[int, dict[str, float]], ...]:
    """What was measured of the weights after a step, without what has no number."""
    by_step: dict[int, dict[str, float]] = {}
    for line in lines:
        if read(line):
            means = {name: mean for name, mean in read(line).items() if mean is not None}
            by_step.setdefault(line.step, {}).update(means)
    return tuple(sorted(by_step.items()))
