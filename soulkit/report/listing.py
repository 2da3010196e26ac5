"""Lists the runs of a folder, one line each: command, model, progress and results.

Only small files are read. For an unfinished run, episodes are counted but not averaged. An
unreadable run is listed as damaged, with the reason, and does not hide the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from soulkit.errors import RunError, UserError
from soulkit.eval.results.cells import named_with_origin, suite_lines
from soulkit.eval.results.summary import (
    DEV,
    Cell,
    Summary,
    headline_name,
    headline_shown,
    summary_line,
)
from soulkit.eval.run.run_lock import is_locked
from soulkit.metrics.intervals import number
from soulkit.models.ledger.view import paid_so_far
from soulkit.report.grid import plain_table
from soulkit.report.load import (
    EPISODES,
    JUDGEMENTS,
    METRICS,
    RunProgress,
    command_in,
    run_progress,
)
from soulkit.report.suites import scales_of
from soulkit.report.tables import bounds_text, mean_text, task_label
from soulkit.runs.conditions import prompt_in
from soulkit.runs.folder import is_run, read_config, read_environment
from soulkit.tasks.kit.registry import load_registry
from soulkit.text import dollars, one_line
from soulkit.train.state.summary import TrainSummary

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

DEPTH = 3
"""Levels of subfolders to search: `runs/NAME/METHOD/seed_0` of a comparison."""
_RECORDS = (EPISODES, METRICS, JUDGEMENTS)
LOSS = "loss"
"""Supervised training has a loss in place of a score."""
State = Literal["finished", "unfinished", "running", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One main result of a run."""

    label: str
    """The task and its metric, `TASK (accuracy)`; in a training run with its kind: `drafts TASK`,
    `dev TASK`, `loss TASK`."""
    cell: Cell

    def as_dict(self) -> dict[str, Any]:
        names = ("mean", "ci_low", "ci_high", "n_scored", "n")
        return {"label": self.label, **{name: getattr(self.cell, name) for name in names}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFolder:
    """One run in the output of `soul runs`."""

    path: Path
    name: str
    """Its path relative to the listed folder."""
    state: State
    command: str = ""
    model: str = ""
    started: str = ""
    """ISO 8601 with time zone; empty if unknown."""
    progress: RunProgress | None = None
    """None for a finished run."""
    headlines: tuple[Headline, ...] = ()
    cost: float | None = None
    """US dollars; None if no price is known."""
    unpriced_calls: int = 0
    problem: str = ""
    """Why the run is damaged."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values under stable names."""
        return {
            **asdict(self),
            "path": str(self.path),
            "progress": self.progress.as_dict() if self.progress else None,
            "headlines": [one.as_dict() for one in self.headlines],
        }


def list_runs(folder: Path) -> list[ListedFolder]:
    """The runs in `folder`, newest first; `folder` itself if it is a run.

    RunError if the folder does not exist.
    """
    if not folder.is_dir():
        raise RunError(
            f"The folder '{folder}' does not exist.",
            "Runs are stored in the folder runs, unless --out names another one.",
            "Give a folder with runs, or start a run: soul demo",
        )
    runs = [_listed(path, folder) for path in _folders(folder, DEPTH)]
    return sorted(runs, key=lambda run: (_moment(run.started), run.name), reverse=True)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Run folders in and below `folder`. Subfolders of a run with records are not listed."""
    if is_run(folder) or any((folder / name).is_file() for name in _RECORDS):
        yield folder
        return
    children = _children(folder) if depth > 0 else []
    inside = [run for child in children for run in _folders(child, depth - 1)]
    if not inside and (folder / "summary.json").is_file():
        yield folder
    yield from inside


def _children(folder: Path) -> list[Path]:
    try:
        return [p for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    except OSError:  # no permission to list the folder
        return []


def _moment(started: str) -> datetime:
    """The start time, for sorting; unknown times come last."""
    try:
        moment = datetime.fromisoformat(started)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


# -- one run ---------------------------------------------------------------------------------------


def _listed(path: Path, folder: Path) -> ListedFolder:
    name = path.resolve().name if path == folder else path.relative_to(folder).as_posix()
    try:
        return _read(path, name)
    except (UserError, OSError, UnicodeDecodeError) as error:
        what = error.what if isinstance(error, UserError) else str(error)
        return ListedFolder(path=path, name=name, state="damaged", problem=one_line(what))


def _read(path: Path, name: str) -> ListedFolder:
    line = summary_line(path)
    settings = read_config(path) if is_run(path) else {}
    command = command_in(path) or str(line.get("command", ""))
    running = is_locked(path)
    summary = _summary(line, path, command) if line and not command.startswith("judge") else None
    unfinished = not line or running
    cost, unpriced = _cost(path, summary, line)
    return ListedFolder(
        path=path,
        name=name,
        state="running" if running else "finished" if line else "unfinished",
        command=command,
        model=_model(summary, settings)
        + (f" · {prompt}" if (prompt := prompt_in(line.get("provenance", {}))) else ""),
        started=str(read_environment(path).get("started", "")) if is_run(path) else "",
        progress=run_progress(path, command) if unfinished else None,
        headlines=tuple(_headlines(summary)),
        cost=cost,
        unpriced_calls=unpriced,
    )


def _summary(line: Mapping[str, Any], path: Path, command: str) -> Summary:
    training = command.startswith("train") or (path / METRICS).is_file()
    return TrainSummary.from_json(line) if training else Summary.from_json(line)


def _model(summary: Summary | None, settings: Mapping[str, Any]) -> str:
    if summary is not None and summary.model:
        return summary.model
    model, adapter = settings.get("model") or "", settings.get("adapter")
    return f"{model} + {adapter}" if adapter else str(model)


def _cost(path: Path, summary: Summary | None, line: Mapping[str, Any]) -> tuple[float | None, int]:
    """The recorded cost and the number of unpriced calls; without a summary, from the ledger."""
    if summary is not None:
        return summary.cost, summary.unpriced_calls
    if line:  # a check of a judge
        cost = line.get("cost")
        return (float(cost) if isinstance(cost, int | float) else None), 0
    return paid_so_far(path)


# -- headlines -------------------------------------------------------------------------------------


def _headlines(summary: Summary | None) -> Iterator[Headline]:
    """The headlines of a run; in training the dev score if there is one, else the draft score."""
    if summary is None:
        return
    yield from _suite_headline(summary)
    cells = {task: (headline_name(metrics), metrics) for task, metrics in summary.tasks.items()}
    if isinstance(summary, TrainSummary) and summary.best_dev is not None and not any(
        name == DEV for name, _ in cells.values()
    ):  # as earlier versions recorded it  # fmt: skip
        yield Headline(label=f"dev (step {summary.best_step})", cell=Cell(mean=summary.best_dev))
    valid = summary.validation if isinstance(summary, TrainSummary) else None
    for source, loss in (valid.last if valid else {}).items():
        n = valid.lessons.get(source, 0) if valid else 0
        ends = (valid.low.get(source), valid.high.get(source)) if valid else (None, None)
        people = valid.people.get(source, 0) if valid else 0
        cell = Cell(mean=loss, ci_low=ends[0], ci_high=ends[1], n_scored=n, n=n, n_clusters=people)
        yield Headline(label=f"validation {LOSS} {source}", cell=cell)
    for task, (name, metrics) in cells.items():
        if name:
            kind = _kind(name, isinstance(summary, TrainSummary))
            label = task_label(task, named_with_origin(headline_shown(metrics), metrics[name]))
            yield Headline(label=f"{kind} {label}".strip(), cell=metrics[name])
        elif LOSS in metrics and valid is None:
            yield Headline(label=f"{LOSS} {task}", cell=metrics[LOSS])


def _suite_headline(summary: Summary) -> Iterator[Headline]:
    """The suite mean, if the run played a suite and every member has a score."""
    registry = load_registry() if summary.suite else None
    if registry is None or summary.suite not in registry.suites:
        return
    lines = suite_lines(registry.suite_spec(summary.suite), summary.tasks, scales_of(registry))
    for line in lines:
        if line.level == "suite" and line.cell.whole:
            yield Headline(label=f"suite {summary.suite}", cell=line.cell)


def _kind(name: str, trained: bool) -> str:
    """What the headline of a training run measures; empty for an evaluation."""
    return "" if not trained else DEV if name == DEV else "drafts"


def state_text(run: ListedFolder) -> str:
    """`finished`, `unfinished: 37 of 120 episodes`, `running: …`, `damaged: why`."""
    more = run.problem or (run.progress.text() if run.progress else "")
    return f"{run.state}: {more}" if more else run.state


def cost_text(run: ListedFolder) -> str:
    """`$1.25`, `at least $1.25`, `unknown` if no call has a price, or empty without calls."""
    if run.cost is None:
        return "unknown" if run.unpriced_calls else ""
    return f"{'at least ' if run.unpriced_calls else ''}{dollars(run.cost)}"


def started_text(run: ListedFolder) -> str:
    """The start time in local time, to the minute; empty if unknown."""
    if not run.started or _moment(run.started) == _moment(""):
        return ""
    return _moment(run.started).astimezone().strftime("%Y-%m-%d %H:%M")


def headline_texts(run: ListedFolder, most: int) -> Sequence[str]:
    """At most `most` headlines, `TASK (accuracy) 0.724 [0.621, 0.805] (98/100)`, then the number of
    further ones."""
    shown = [f"{one_line(one.label)} {_cell_text(one.cell)}" for one in run.headlines[:most]]
    more = len(run.headlines) - most
    return [*shown, f"and {more} more"] if more > 0 else shown


def _cell_text(cell: Cell) -> str:
    if not (cell.n or cell.not_applicable or cell.missing):
        return number(cell.mean)
    bounds = bounds_text(cell) if cell.mean is None else ""
    return f"{mean_text(cell)} [{bounds}]" if bounds else mean_text(cell)


HEADLINES = 3
"""Maximum number of headlines shown per run; --json has all of them."""
NAME_WIDTH = 36
"""Longest run name that is never wrapped, at any terminal width."""
WIDE, WIDE_ONLY = 100, ("command", "started")
"""Minimum terminal width for these columns; --json always has them."""
STYLES = {"finished": "", "running": "green", "unfinished": "yellow", "damaged": "red"}


def runs_table(runs: Sequence[ListedFolder], width: int) -> Table:
    """The table of `soul runs` for a terminal of `width` columns."""
    heads = ("run", "command", "model", "status", "headline", ">cost", "started")
    shown = [i for i, head in enumerate(heads) if width >= WIDE or head not in WIDE_ONLY]
    made = plain_table(*(heads[i] for i in shown))
    for column in made.columns:
        column.overflow = "fold"
    # A wrapped name cannot be copied into the next command.
    made.columns[0].no_wrap = max(len(one_line(run.name)) for run in runs) <= NAME_WIDTH
    for run in runs:
        # Intervals are never split: on a narrow terminal each starts a new line.
        cells = _run_cells(run, " [" if width >= WIDE else "\n[")
        made.add_row(*(cells[i] for i in shown))
    return made


def _run_cells(run: ListedFolder, bracket: str) -> tuple[Text, ...]:
    from rich.text import Text

    names = (Text(one_line(text)) for text in (run.name, run.command, run.model))
    return (
        *names,
        Text(one_line(state_text(run)), STYLES[run.state]),
        Text("\n".join(headline_texts(run, HEADLINES)).replace(" [", bracket)),
        Text(cost_text(run)),
        Text(started_text(run)),
    )
