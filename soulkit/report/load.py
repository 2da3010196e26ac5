"""Finds run folders, reads their records, and reports the progress of unfinished runs."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, Literal

from soulkit.errors import RunError, UserError
from soulkit.eval.results.batch_statistics import summary_terms
from soulkit.eval.results.summary import Cells, Condenser, Summary, summarise, summary_line
from soulkit.eval.run.resume import control_counts
from soulkit.eval.run.run_lock import CLOCK
from soulkit.models.ledger.view import paid_so_far
from soulkit.runs.conditions import Conditions, provenance_of
from soulkit.runs.folder import is_run, read_config, read_environment
from soulkit.runs.jsonl import has_lines, placed_objects, stored_json
from soulkit.runs.records import load_controls, load_records, scored_drafts, stream_records
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.state.metrics import StepLine, read_step_lines
from soulkit.train.state.summary import TrainSummary
from soulkit.types import Protocol, Record

DISTILL = "distill"
EPISODES, METRICS, JUDGEMENTS = "episodes.jsonl", "metrics.jsonl", "judgements.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Progress of a run; `total` is None if the run does not record its size."""

    done: int
    total: int | None
    unit: str
    """`episodes`, `steps`, `stages` or `judgements`."""
    scored: int | None = None
    """Number of finished episodes with a score; None for other units."""

    def text(self) -> str:
        """`37 of 120 episodes`; with `, 12 scored` if some of them have no score."""
        unit = self.unit.removesuffix("s") if (self.total or self.done) == 1 else self.unit
        far = f"{self.done:,} {unit} so far" if self.total is None else (
            f"{self.done:,} of {self.total:,} {unit}"
        )  # fmt: skip
        return far if self.scored in (None, self.done) else f"{far}, {self.scored:,} scored"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def command_in(path: Path) -> str:
    """The command that started the run in folder `path`, such as `eval api`; empty if unknown.

    RunError if the folder's `environment.json` is unreadable.
    """
    return str(read_environment(path).get("command", "")) if is_run(path) else ""


def run_progress(path: Path, command: str) -> RunProgress:
    """Progress of the run in folder `path`.

    DataError or RunError for unreadable files.
    """
    settings = read_config(path) if is_run(path) else {}
    if command == DISTILL:
        return _stages(path, settings)
    if (path / JUDGEMENTS).is_file() or command.startswith("judge"):
        file = path / JUDGEMENTS
        lines = placed_objects(file) if has_lines(file) else ()
        keys = {line.get("key") for _, line in lines}
        return RunProgress(done=len(keys), total=None, unit="judgements")
    if command.startswith("train") or (path / METRICS).is_file():
        steps = {line.step for line in read_step_lines(path / METRICS) if not line.measures}
        return RunProgress(done=len(steps), total=_whole(settings.get("steps")), unit="steps")
    played = scored_drafts(path / EPISODES) if has_lines(path / EPISODES) else {}
    return RunProgress(done=len(played), total=_to_play(path, settings), unit="episodes",
                       scored=sum(played.values()))  # fmt: skip


def _stages(path: Path, settings: Mapping[str, Any]) -> RunProgress:
    """Finished stages of a distillation; experts that teach on-policy are not sampled."""
    made = [path / "selection.json", path / "generalist" / "summary.json", path / "summary.json"]
    parts = made[1:] if settings.get("by") == "opd" else made
    done = sum(part.is_file() for part in parts)
    return RunProgress(done=done, total=len(parts), unit="stages")


def _to_play(path: Path, settings: Mapping[str, Any]) -> int | None:
    """Rows × repeats; None if the run does not record its rows."""
    conditions = Conditions.read(path)
    rows = sum(len(facts.rows) for facts in conditions.tasks.values()) if conditions else 0
    return rows * (_whole(settings.get("repeats")) or 1) or None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- interim results of an unfinished evaluation ---------------------------------------------------


def summary_so_far(path: Path, command: str) -> Summary | None:
    """The means over the episodes so far of the run in folder `path`; None before the first.

    Facts that need a user's task (its scale, batch metrics) are left out, because viewing a run
    never executes its code.
    """
    if not has_lines(path / EPISODES):
        return None
    records, registry = small_records(path / EPISODES), load_registry()
    if not records:
        return None
    settings = read_config(path) if is_run(path) else {}
    protocol: Protocol = "reference" if settings.get("protocol") == "reference" else "paper"
    tasks = (registry.task(name, protocol) for name in dict.fromkeys(one.task for one in records)
             if name in registry.specs and registry.specs[name].home.builtin_task)  # fmt: skip
    cost, unpriced = paid_so_far(path)
    controls = load_controls(path)
    model, adapter = str(settings.get("model") or ""), settings.get("adapter")
    summary = summarise(
        records,
        command=command,
        model=f"{model} + {adapter}" if adapter else model,
        protocol=str(settings.get("protocol") or ""),
        seconds=_seconds(path),
        cost=cost,
        **summary_terms(tasks, controls),
    )
    return replace(summary, unpriced_calls=unpriced, controls=control_counts(controls))


def small_records(path: Path) -> list[Record]:
    """The newest record of each episode in `path`, without texts that no known task summarises.
    DataError if there are none, or a line cannot be read."""
    registry = load_registry()

    @cache
    def reads_texts(name: str) -> bool:
        home = registry.specs[name].home if name in registry.specs else None
        return home is not None and (not home.builtin_task or registry.task(name).batch_reads_texts)

    small = Condenser(reads_texts)
    lines = stream_records(path, light=True) if has_lines(path) else load_records(path)
    return list({one.key: small(one) for one in lines}.values())


def _seconds(path: Path) -> float:
    """Wall-clock seconds so far; 0 if not recorded."""
    try:
        return float(stored_json(path / CLOCK)["seconds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):  # only the time is unknown
        return 0.0


_FILES = ("summary.json", "episodes.jsonl", "metrics.jsonl")

NOTES = "notes"
"""Key in a folder's summary for notes that belong next to the numbers of its runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The contents of one run folder."""

    name: str
    path: Path
    kind: Literal["eval", "train"]
    summary: Summary | None
    """A TrainSummary for a training run, None while it is unfinished. For an unfinished evaluation
    the means so far, None before its first episode."""
    steps: tuple[StepLine, ...] = ()
    """Training lines of `metrics.jsonl`, by step."""
    progress: RunProgress | None = None
    """Progress of an unfinished run; None once it is finished."""
    evals: tuple[tuple[int, dict[str, float]], ...] = ()
    """(step, task → mean) of evaluations during training."""
    valid: tuple[tuple[int, dict[str, float]], ...] = ()
    """(step, source → loss) on validation conversations."""
    records: tuple[Record, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Judges, rows, model and other conditions for comparisons, as far as recorded."""

    @property
    def tasks(self) -> Cells:
        """Task → metric → cell, empty without a summary."""
        return self.summary.tasks if self.summary else {}


def load_runs(paths: Sequence[Path], *, episodes: bool = True) -> list[RunData]:
    """The runs in `paths`: run folders, or folders whose children are runs (one level deep).

    RunError if a path contains no run; RunError or DataError for unreadable files. Without
    `episodes`, the (large) episode files are not read.
    """
    return [_read(path, name, episodes) for name, path in named_runs(paths)]


def named_runs(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """(name, folder) of the runs that `load_runs` reads; RunError if a path contains no run."""
    folders: list[Path] = []
    for path in paths:
        folders += [p for p in find_runs(path) if p not in folders]
    return list(zip(_names(folders), folders, strict=True))


def find_runs(path: Path) -> list[Path]:
    """`path` itself if it is a run, else the runs inside it, oldest first; RunError if there are
    none.

    A folder that has only a summary, such as the demo's, is read as the runs inside it.
    """
    inside = [p for p in path.iterdir() if p.is_dir() and _is_run(p)] if path.is_dir() else []
    if _is_check(path):
        raise RunError(
            f"'{path}' is a check of a judge and contains no model scores.",
            "A report compares model scores.",
            f"Show the check with: soul judge show {path}",
        )
    if _records(path) or (_is_run(path) and not inside):
        return [path]
    if not inside:
        deeper = path.is_dir() and any(p.is_dir() and _is_run(p) for p in path.glob("*/*"))
        raise RunError(
            f"'{path}' contains no run.",
            f"A run folder has at least one of {', '.join(_FILES)}.",
            f"Its folders contain runs. Give these: {shlex.quote(str(path))}/*/" if deeper else
            "Give a folder that `soul eval`, `soul train` or `soul demo` wrote.",
        )  # fmt: skip
    whole = [one for p in inside for one in ([p] if _records(p) else find_runs(p))]
    return sorted(whole, key=lambda p: (_started(p), p.name))


def _records(path: Path) -> bool:
    """Whether a folder records more than a summary."""
    return is_run(path) or any((path / name).is_file() for name in _FILES if name != "summary.json")


def _started(path: Path) -> float:
    """When a run started, in seconds; infinite if that is not recorded."""
    try:
        started = provenance_of(path, summary_line(path)).get("dates", {}).get("started")
        return datetime.fromisoformat(started).timestamp() if started else inf
    except (UserError, TypeError, ValueError):  # damaged: reported when it is read
        return inf


def folder_notes(paths: Sequence[Path]) -> list[str]:
    """Notes that folders store for the numbers of their runs; RunError for a damaged summary."""
    notes = [summary_line(path).get(NOTES) for path in paths]
    return [str(note) for part in notes if isinstance(part, list) for note in part]


def _is_run(path: Path) -> bool:
    return (any((path / name).is_file() for name in _FILES) or is_run(path)) and not _is_check(path)


def _is_check(path: Path) -> bool:
    """Whether the folder was written by `soul judge check`."""
    try:
        return (path / JUDGEMENTS).is_file() or command_in(path).startswith("judge")
    except RunError:  # damaged: reported when it is read
        return False


def _names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with the parent's name if ambiguous, else numbered."""
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
    line = summary_line(path)
    lines = read_step_lines(path / "metrics.jsonl")
    log = path / "episodes.jsonl"
    command = str(line.get("command") or command_in(path))
    training = bool(lines) or command.startswith("train")
    kind: type[Summary] = TrainSummary if training else Summary
    so_far = None if training or line else summary_so_far(path, command)
    return RunData(
        name=name,
        path=path,
        kind="train" if training else "eval",
        summary=kind.from_json(line) if line else so_far,
        progress=run_progress(path, command) if not line else None,
        steps=_steps(lines),
        evals=_by_step(lines, lambda line: line.dev),
        valid=_by_step(lines, lambda line: line.valid),
        records=tuple(load_records(log)) if episodes and has_lines(log) else (),
        provenance=provenance_of(path, line),
    )


def _steps(lines: Sequence[StepLine]) -> tuple[StepLine, ...]:
    """Training lines by step; a later line replaces an earlier one of the same step."""
    by_step = {line.step: line for line in lines if not line.measures}
    return tuple(by_step[step] for step in sorted(by_step))


def _by_step(
    lines: Sequence[StepLine], read: Callable[[StepLine], Mapping[str, float | None]]
) -> tuple[tuple[int, dict[str, float]], ...]:
    """Step → measurements after that step, without missing numbers."""
    by_step: dict[int, dict[str, float]] = {}
    for line in lines:
        if read(line):
            means = {name: mean for name, mean in read(line).items() if mean is not None}
            by_step.setdefault(line.step, {}).update(means)
    return tuple(sorted(by_step.items()))
