"""One report in every form: a suite's table first where there is one, then each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.report import table
from soulkit.report.grid import Grid, grid_markdown, grid_parts, suite_grid
from soulkit.report.load import RunData
from soulkit.report.suites import SuiteTable
from soulkit.text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class ReportView:
    """What is shown of some runs, and how much of it."""

    runs: Sequence[RunData]
    suite: SuiteTable | None = None
    playable: bool = False
    """Of the suite only members that a run has."""
    details: bool = False
    """Every metric and break-down."""
    notes: Sequence[str] = ()
    """What the runs' folder says beside their numbers; on the page."""

    def parts(self) -> list[RenderableType]:
        """For a terminal: rich renderables, top to bottom."""
        grid = self._grid()
        if grid is None:
            return table.report_parts(self.runs, details=self.details)
        if self.details:
            inner = table.report_parts(self.runs, details=True)
            return [*_heads(self.runs), *grid_parts(grid), *inner]
        return [*_heads(self.runs), *grid_parts(grid), *_trainings(self.runs)]

    def text(self) -> str:
        """The same as plain text."""
        return table.parts_text(self.parts())

    def markdown(self) -> str:
        grid = self._grid()
        if grid is None:
            return table.markdown(self.runs, details=self.details)
        inner = [table.markdown(self.runs, details=True)] if self.details else []
        for run in () if self.details else _trained(self.runs):
            inner += [f"## {table.md_text(run.name)}\n", table.md_steps(run)]
        return "\n".join(["# Results\n", grid_markdown(grid), *inner])

    def latex(self) -> str:
        """A `table` for an article; the runs without a suite are one of all their tasks."""
        from soulkit.report.exports.latex import grid_latex

        grid = self._grid()
        return grid_latex(grid) if grid is not None else ""

    def csv(self) -> str:
        """A line for each number of the suite."""
        from soulkit.report.exports.sheet import suite_csv

        return suite_csv(self.suite, **self._shown()) if self.suite is not None else ""

    def values(self) -> dict[str, Any]:
        """What `--json` prints."""
        from soulkit.report.exports.sheet import suite_values

        suite = {} if self.suite is None else {"suite": suite_values(self.suite, **self._shown())}
        return {**table.merged(self.runs), **suite}

    def page(self, path: Path) -> Path:
        """Write the page; returns `path`."""
        from soulkit.report import html

        shown = None if self.suite is None else html.suite_view(self.suite, **self._shown())
        return html.write_page(self.runs, path, suite=shown, notes=self.notes)

    def _grid(self) -> Grid | None:
        return None if self.suite is None else suite_grid(self.suite, **self._shown())

    def _shown(self) -> dict[str, bool]:
        return {"playable": self.playable, "details": self.details}


def _heads(runs: Sequence[RunData]) -> list[RenderableType]:
    """The head of each run: what it is, by whom, at what cost."""
    return [table.run_head(run) for run in runs]


def _trained(runs: Sequence[RunData]) -> list[RunData]:
    return [run for run in runs if run.steps]


def _trainings(runs: Sequence[RunData]) -> list[RenderableType]:
    """The first and the last step of each training, under its name where there are several."""
    from rich.text import Text

    shown: list[RenderableType] = []
    for run in _trained(runs):
        if len(runs) > 1:
            shown.append(Text("\n" + one_line(run.name), style="bold"))
        shown.append(table.terminal_steps(run))
    return shown
