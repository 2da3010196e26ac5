"""Find run folders and read what they recorded.

A run is recognised by its files, so that a run which was killed before its summary can still be
looked at: `metrics.jsonl` makes it a training run, otherwise it is an evaluation. Nothing is scored
or averaged here; what a run did not write is missing from the report, and the report says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from soulkit.errors import DataError, RunError
from soulkit.eval.summary import Cells, Summary
from soulkit.runs.provenance import origin_of
from soulkit.runs.records import load_records
from soulkit.train.state.lines import StepLine, read_step_lines
from soulkit.train.state.summary import TrainSummary
from soulkit.types import Record

_FILES = ("summary.json", "episodes.jsonl", "metrics.jsonl")
_ORDER = ("warmup", "before", "train", "after")
"""The order in which the parts of one story are told; other names follow alphabetically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """One run folder, read."""

    name: str
    path: Path
    kind: Literal["eval", "train"]
    summary: Summary | None
    """That of a training run is a TrainSummary; None while the run is unfinished."""
    steps: tuple[StepLine, ...] = ()
    """Training lines of `metrics.jsonl`, by step."""
    evals: tuple[tuple[int, dict[str, float]], ...] = ()
    """(step, task → mean) of the evaluations during training."""
    records: tuple[Record, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Judges, rows, model and the rest that makes it comparable; as far as it was recorded."""

    @property
    def tasks(self) -> Cells:
        """Task → metric → cell, empty without a summary."""
        return self.summary.tasks if self.summary else {}


def load_runs(paths: Sequence[Path], *, episodes: bool = True) -> list[RunData]:
    """The runs in `paths`: run folders, or folders whose children are runs (one level deep).

    RunError when a path holds no run; DataError when a file cannot be read. Without `episodes` the
    (large) episode files stay closed.
    """
    folders: list[Path] = []
    for path in paths:
        folders += [p for p in find_runs(path) if p not in folders]
    names = _names(folders)
    return [_read(path, name, episodes) for path, name in zip(folders, names, strict=True)]


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
    records_something = any((path / name).is_file() for name in _FILES if name != "summary.json")
    if records_something or (_is_run(path) and not inside):
        return [path]
    if not inside:
        raise RunError(
            f"There is no run in '{path}'.",
            f"A run folder holds at least one of {', '.join(_FILES)}.",
            "Name a folder that `soul eval`, `soul train` or `soul demo` wrote.",
        )
    return sorted(inside, key=lambda p: (_rank(p.name), p.name))


def _rank(name: str) -> int:
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in _FILES) and not _is_check(path)


def _is_check(path: Path) -> bool:
    """Whether `soul judge check` wrote it."""
    return (path / "judgements.jsonl").is_file()


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


def _read(path: Path, name: str, episodes: bool) -> RunData:
    line = _summary(path / "summary.json")
    lines = read_step_lines(path / "metrics.jsonl")
    log = path / "episodes.jsonl"
    training = bool(lines) or str((line or {}).get("command", "")).startswith("train")
    kind: type[Summary] = TrainSummary if training else Summary
    return RunData(
        name=name,
        path=path,
        kind="train" if training else "eval",
        summary=None if line is None else kind.from_json(line),
        steps=_steps(lines),
        evals=_evals(lines),
        records=tuple(load_records(log)) if episodes and log.is_file() else (),
        provenance=origin_of(path, line or {}),
    )


def _summary(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _bad_summary(path, str(error)) from error
    if not isinstance(loaded, dict):
        raise _bad_summary(path, "it holds no object")
    return loaded


def _bad_summary(path: Path, detail: str) -> DataError:
    return DataError(
        f"The summary '{path}' cannot be read ({detail}).",
        "A report prints the numbers that the run recorded there.",
        "Run the same command again: it resumes, and writes the summary anew.",
    )


def _steps(lines: Sequence[StepLine]) -> tuple[StepLine, ...]:
    """Training lines by step; a later line of a step replaces an earlier one."""
    by_step = {line.step: line for line in lines if not line.dev}
    return tuple(by_step[step] for step in sorted(by_step))


def _evals(lines: Sequence[StepLine]) -> tuple[tuple[int, dict[str, float]], ...]:
    by_step: dict[int, dict[str, float]] = {}
    for line in lines:
        if line.dev:
            means = {task: mean for task, mean in line.dev.items() if mean is not None}
            by_step.setdefault(line.step, {}).update(means)
    return tuple(sorted(by_step.items()))
