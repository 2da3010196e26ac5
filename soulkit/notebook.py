"""Results of the Python API as tables, data frames and figures, and progress in notebooks.

The tables are those of `soul report` and `soul compare`; the results are still the records of the
layers below, such as a Summary.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from soulkit.errors import ConfigError, did_you_mean
from soulkit.eval.comparison.compare import Comparison
from soulkit.eval.gates import GateResult
from soulkit.eval.results.summary import Summary
from soulkit.report.exports.episodes import episode_row
from soulkit.report.figures import matplotlib_figure
from soulkit.report.findings import comparison_blocks
from soulkit.report.load import load_runs
from soulkit.report.pages import ReportView, environment
from soulkit.report.tables import Block, facts, in_order
from soulkit.reporting import SILENT, Bar, LoopState, Reporter
from soulkit.text import one_line
from soulkit.train.state.summary import TrainSummary


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """The rows as a data frame of pandas or polars, else as a list of dictionaries."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = [{name: row.get(name) for name in names} for row in rows]
    if find_spec("pandas"):
        return import_module("pandas").DataFrame(table, columns=names)
    if find_spec("polars"):
        return import_module("polars").DataFrame(table, schema=names, infer_schema_length=None)
    return table


class _Result:
    """A result with its run folders."""

    folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, plain: Any, *folders: Path, **more: Any) -> Self:
        """`plain`, an object of the other base class, with its run folders and more attributes."""
        made = cls(**{one.name: getattr(plain, one.name) for one in fields(plain)})
        for name, value in {"folders": folders, **more}.items():
            object.__setattr__(made, name, value)
        return made

    def episodes(self) -> Any:
        """A data frame with a row per episode, like `soul report --format episodes-csv`."""
        runs = load_runs(self.folders)
        return data_frame([{"run": r.name, **episode_row(one)} for r in runs for one in r.records])

    def scores(self) -> Any:
        """A data frame with a row per metric; `headline` marks the main metric of a task."""
        return data_frame([
            {"run": run.name, "task": task, "metric": metric, **cell.to_json()}
            for run in load_runs(self.folders, episodes=False)
            for task, metrics in run.tasks.items() for metric, cell in in_order(metrics)
        ])  # fmt: skip

    def plot(self, name: str = "") -> Any:
        """A figure of the report, by default the last one, as a figure of matplotlib."""
        charts = {chart.name: chart for chart in self._view().charts()}
        if (name := name or next(reversed(charts), "results")) not in charts:
            hint = did_you_mean(name, charts) if charts else "Play or train first."
            raise ConfigError(f"There is no figure '{name}'.", "The run has no such data.", hint)
        if in_notebook() and find_spec("matplotlib_inline"):  # it shows figures as images
            import_module("matplotlib_inline.backend_inline")
        return matplotlib_figure(charts[name])

    def _repr_html_(self) -> str:
        template = environment().get_template("notebook.html.j2")
        return template.render(blocks=self._blocks(), facts=facts)

    def _blocks(self) -> Sequence[Block]:
        return self._view().blocks()

    def _view(self) -> ReportView:
        return ReportView(load_runs(self.folders, episodes=False))


class EvaluationResult(_Result, Summary):
    """What `sk.evaluate` returns."""

    gates: tuple[GateResult, ...] = ()
    """The outcomes of the gates that were given."""


class TrainingResult(_Result, TrainSummary):
    """What `sk.train_model` returns."""


class ComparisonResult(_Result, Comparison):
    """What `sk.compare` returns."""

    def scores(self) -> Any:
        """A data frame with a row per task: the paired difference B - A with its interval."""
        return data_frame(self.as_dict()["tasks"])

    def _blocks(self) -> Sequence[Block]:
        return comparison_blocks(self)


def in_notebook() -> bool:
    """Whether this process is an IPython kernel."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython else None, "kernel")


def reporter_for(title: str, progress: bool | None, total: int | None = None) -> Reporter:
    """A reporter that shows progress; by default only in a notebook."""
    shown = in_notebook() if progress is None else progress
    return NotebookReporter(title, total) if shown else SILENT


class NotebookReporter(Reporter, Bar):
    """Progress on one line below the cell, which is updated; elsewhere as lines on stderr."""

    def __init__(self, title: str, total: int | None) -> None:
        self.title, self.state, self.shown_at = title, LoopState(total), 0.0
        self.update: Callable[..., Any] | None = None

    @contextmanager
    def progress(
        self, total: int | None, unit: Callable[[float], str] | None = None
    ) -> Iterator[Bar]:
        self.state = LoopState(total, unit)
        yield self

    def step(self, done: int, words: str = "", remarks: Sequence[str] = ()) -> None:
        self.advance(done - self.state.done, words)

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.state.add(steps, note)
        last = self.state.done == self.state.total
        if last or time.monotonic() - self.shown_at > (0.25 if in_notebook() else 5.0):
            self._show()

    def _show(self) -> None:
        self.shown_at, state = time.monotonic(), self.state
        line = one_line(f"{self.title}: {state.amount()} ({state.words()})", 120)
        if not in_notebook():
            sys.stderr.write(f"{line}\n")
        elif self.update is not None:
            self.update({"text/plain": line}, raw=True)
        else:
            display = import_module("IPython.display").display
            self.update = display({"text/plain": line}, raw=True, display_id=True).update
