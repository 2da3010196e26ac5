"""Renders reports: terminal, Markdown and HTML. Also the page of a rating sheet."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.eval.comparison.provenance_text import provenance_json
from soulkit.eval.results.summary import VALUE, Cell, Summary, headline, headline_name
from soulkit.judge.rating_sheets import PREFERENCE, RaterSheet
from soulkit.metrics.intervals import Interval, estimate_text
from soulkit.report import tables
from soulkit.report.explorer import EpisodePack, pack_episodes
from soulkit.report.exports.suite import grid_latex, suite_csv, suite_values
from soulkit.report.figures import Chart, on_page, results_charts
from soulkit.report.findings import (
    SHOWN,
    Finding,
    combinations_grid,
    difference_text,
    finding_parts,
    findings,
    findings_markdown,
    judges_text,
    training_text,
)
from soulkit.report.grid import Grid, parts_text
from soulkit.report.load import EPISODES, RunData
from soulkit.report.people.page import people_parts, times_text
from soulkit.report.published import Publication, PublishedBeside, published_beside
from soulkit.report.suites import SuiteTable, suite_grid
from soulkit.report.training import dimension_text, feedback_over_time, learning_charts, steps_grid
from soulkit.runs.jsonl import has_lines, write_aside
from soulkit.runs.records import stream_records
from soulkit.text import counted, one_line, sanitise
from soulkit.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from rich.console import RenderableType


N_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Strip:
    """A mean with its interval on the scale [0, 1], in percent of the width."""

    run: str
    colour: str
    left: float
    width: float
    dot: float | None
    """None: there is no mean, and the strip shows its possible bounds."""


def render(
    runs: Sequence[RunData], *, suite: SuiteTable | None = None, notes: Sequence[str] = (),
    reload: int = 0, episodes: EpisodePack | None = None,
) -> str:  # fmt: skip
    """The page for `runs` with all `episodes` (by default inside the page); as a suite if `suite`
    is given. `notes` are shown above the numbers.
    """
    published = PublishedBeside() if suite else published_beside(runs)  # a suite has its own
    people = people_parts(runs)
    found = [*(part.finding for part in people), *findings(runs)]
    return environment().get_template("report.html.j2").render(
        title=" · ".join(one_line(run.name) for run in runs),
        version=__version__,
        lead=found[0] if found else Finding(run="", outcome="", claim="There is no result yet."),
        others=found[1:SHOWN],
        more=max(0, len(found) - SHOWN),
        people=people,
        drawn=on_page,
        times=times_text,
        estimate=estimate_text,
        moved=[one for one in found[:SHOWN] if one.checked],
        difference=difference_text,
        scored=_scored_tasks(runs),
        runs=runs,
        notes=notes,
        grid=combinations_grid(runs),
        reload=reload,
        origin_text=provenance_json,
        table=tables,
        suite=suite and suite_grid(suite),
        strips=[_strips(suite.runs, [one.cell for one in line.runs])
                for line in suite.shown] if suite else [],
        rows=_result_rows(runs, published.tables),
        compared=tables.comparable_runs(runs),
        unlike=tables.side_by_side(runs),
        summarised=[run for run in runs if run.tasks],
        curves=[on_page(chart) for chart in learning_charts(runs)],
        trained=[text for run in runs if run.steps or run.evals
                 for text in (training_text(run), dimension_text(run)) if text],
        feedback_pairs=[(run.name, pairs) for run in runs if (pairs := feedback_over_time(run))],
        published=published.tables,
        published_notes=published.notes,
        episodes=episodes or pack_episodes(runs),
        script_hash=script_hash("episodes_script.html.j2"),
    )  # fmt: skip


def write_page(
    runs: Sequence[RunData], path: Path, *, suite: SuiteTable | None = None,
    notes: Sequence[str] = (), reload: int = 0,
) -> Path:  # fmt: skip
    """Render to the file `path`, or to `index.html` in the folder `path` with the episodes as files
    next to it, atomically; creates parent folders. Returns the page's path."""
    folder = page_folder(path)
    page = render(runs, suite=suite, notes=notes, reload=reload,
                  episodes=pack_episodes(runs, folder))  # fmt: skip
    path = path if folder is None else folder / "index.html"
    write_aside(path, page.encode("utf-8", "replace"))
    return path


def page_folder(path: Path) -> Path | None:
    """The folder `path` that a page is written to; None if `path` is the page's file."""
    named = path.suffix.lower() in (".html", ".htm") and not path.is_dir()
    return None if named else path


def write_comparison_page(
    path: Path, *, title: str, finding: str, grid: Grid, charts: Sequence[Chart],
    facts: Sequence[tuple[str, str]],
) -> Path:  # fmt: skip
    """Render a table, its figures and its facts under one sentence to the file `path`; returns
    it."""
    page = environment().get_template("comparison.html.j2").render(
        title=title, finding=finding, grid=grid, facts=facts, version=__version__,
        figures=[*map(on_page, charts)],
    )  # fmt: skip
    write_aside(path, page.encode("utf-8", "replace"))
    return path


def _mean_and_more(text: str) -> tuple[str, str]:
    """A cell's number, and the text below it: its interval, clusters, or parts."""
    mark = next((m for m in (" [", " (") if m in text), ", ")
    head, _, rest = text.partition(mark)
    return head, f"{mark.strip(', ')}{rest}"


@cache
def environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("soulkit.report", "templates"),
        autoescape=True,
        finalize=lambda value: sanitise(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["line"], made.filters["parts"] = one_line, _mean_and_more
    return made


def script_hash(name: str) -> str:
    """The CSP hash of a script, which the page contains exactly as in the template file."""
    text = environment().get_template(name).render()
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _result_rows(runs: Sequence[RunData], published: Sequence[Publication]) -> list[dict[str, Any]]:
    columns = tables.comparable_runs(runs)
    rows: list[dict[str, Any]] = []
    for task, cells in tables.rows_across(columns):
        context = [[t.figure(task, m) for m in t.highlight] for t in published]
        label = tables.headline_label(columns, task)
        row = {"task": label, "cells": cells, "strips": _strips(columns, cells), "shown": context}
        rows.append({**row, "sub": False})
        without = {"strips": [], "shown": context, "sub": True}
        rows += [{"task": n, "cells": c, **without} for n, c in tables.extra_cells(columns, task)]
    return rows


def _strips(runs: Sequence[RunData], cells: Sequence[Cell | None]) -> list[Strip]:
    strips = []
    for i, (run, cell) in enumerate(zip(runs, cells, strict=True)):
        ends = _strip_ends(cell) if cell else None
        if cell is None or ends is None:
            continue
        low, high = ends
        if not 0 <= low <= high <= 1:
            return []  # another scale: a strip on [0, 1] would mislead
        colour = f"var(--s{i % N_COLOURS + 1})"
        dot = None if cell.mean is None else 100 * cell.mean
        strips.append(Strip(run.name, colour, 100 * low, 100 * (high - low), dot))
    return strips


def _strip_ends(cell: Cell) -> Interval | None:
    """The ends of a strip: the interval, or without a mean its possible bounds."""
    if cell.mean is None:
        return None if cell.worst is None or cell.best is None else (cell.worst, cell.best)
    low = cell.mean if cell.ci_low is None else cell.ci_low
    high = cell.mean if cell.ci_high is None else cell.ci_high
    return min(low, cell.mean), max(high, cell.mean)


def _verdict_counts(path: Path) -> Counter[tuple[str, str]]:
    """(task, kind) → number of verdicts in the newest episodes of `path`."""
    newest = {
        record.key: [
            (record.task, kind) for one in record.score.verdicts
            for kind, fits in (("verdict", True), ("asked again", one.replies > 1),
                               ("unreadable", bool(one.problem)),
                               ("repeated a verdict from the dialogue", one.quoting > 0)) if fits
        ]
        for record in (stream_records(path, light=True) if has_lines(path) else ())
    }  # fmt: skip
    return Counter(chain.from_iterable(newest.values()))


def _scored_tasks(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """The tasks with a headline: coverage, statuses, who judged, and the verdicts."""
    made: list[dict[str, Any]] = []
    for run in runs:
        summary, by_task = run.summary or Summary(), _verdict_counts(run.path / EPISODES)
        for task, cells in run.tasks.items():
            if not headline_name(cells):
                continue
            counts = {kind: n for (of, kind), n in by_task.items() if of == task}
            verdicts = counts.pop("verdict", 0)
            more = [counted(verdicts, "verdict"), *(f"{n} {what}" for what, n in counts.items())]
            controls = summary.controls.get(task, {})
            more += [f"control {name} {c.get('n_scored')} of {c.get('n')} scored"
                     for name, c in controls.items()]  # fmt: skip
            made.append({
                "run": run.name, "task": task, "cell": headline(cells),
                "statuses": tables.statuses_text(summary.statuses.get(task, {})),
                "unscored": tables.unscored_text(cells.get(VALUE, Cell())),
                "judge": judges_text(run, task),
                "verdicts": ", ".join(more) if verdicts or controls else "",
            })  # fmt: skip
    return made


@dataclass(frozen=True, slots=True)
class ReportView:
    """The runs to show, and in how much detail."""

    runs: Sequence[RunData]
    suite: SuiteTable | None = None
    details: bool = False
    """Show every metric and breakdown."""
    notes: Sequence[str] = ()
    """Notes from the runs' folder, shown on the page."""

    def blocks(self) -> list[tables.Block]:
        """The tables, heads and notes below the findings."""
        grid = None if self.details else combinations_grid(self.runs)
        table = [suite_grid(self.suite)] if self.suite else []
        if self.details or not (grid or table):
            return [*table, *tables.blocks(self.runs, details=self.details)]
        trained = [run for run in self.runs if run.steps]
        several = len(self.runs) > 1
        steps = (steps_grid(run, run.name if several else "") for run in trained)
        repeats = (grid for run in self.runs for grid in tables.repeats_grids(run))
        return [*([grid] if grid else self.runs), *table, *repeats, *steps]

    def findings(self) -> list[Finding]:
        """The findings on models of people, then those on scores."""
        return [*(part.finding for part in people_parts(self.runs)), *findings(self.runs)]

    def parts(self) -> list[RenderableType]:
        """The report for a terminal: rich renderables, top to bottom."""
        return [*finding_parts(self.findings()), *tables.report_parts(self.blocks())]

    def text(self) -> str:
        """The same as plain text."""
        return parts_text(self.parts())

    def markdown(self) -> str:
        head = ["# Results\n", findings_markdown(self.findings())]
        return "\n".join([*head, tables.markdown(self.blocks())])

    def latex(self) -> str:
        """A LaTeX `table`; empty without a suite."""
        return grid_latex(suite_grid(self.suite)) if self.suite else ""

    def csv(self) -> str:
        """One line per number of the suite."""
        return suite_csv(self.suite) if self.suite else ""

    def values(self) -> dict[str, Any]:
        """The output of `--json`."""
        suite = {"suite": suite_values(self.suite)} if self.suite else {}
        found = [one.as_dict() for one in self.findings()]
        return {"findings": found, **tables.runs_as_json(self.runs), **suite}

    def page(self, path: Path, *, reload: int = 0) -> Path:
        """Write the page and return `path`. It reloads itself every `reload` seconds; 0: never."""
        return write_page(self.runs, path, suite=self.suite, notes=self.notes, reload=reload)

    def charts(self) -> list[Chart]:
        """The figures: results with intervals, and learning curves."""
        if self.suite is None:
            columns = tables.comparable_runs(self.runs)
            rows = tables.rows_across(columns)
        else:
            columns = list(self.suite.runs)
            rows = [(line.name, [one.cell for one in line.runs]) for line in self.suite.shown]
        people = [chart for part in people_parts(self.runs) for chart in part.charts()]
        results = results_charts([run.name for run in columns], rows)
        return [*people, *results, *learning_charts(self.runs)]


SCRIPT = "sheet_script.html.j2"


def render_sheet(sheet: RaterSheet, guide: str = "") -> str:
    """The page for one rater; `guide` is shown above the cards."""
    return environment().get_template("sheet.html.j2").render(
        sheet=sheet,
        guide=guide,
        preference=PREFERENCE,
        script=SCRIPT,
        script_hash=script_hash(SCRIPT),
        questions=sum(len(card.scales) for card in sheet.cards),
    )  # fmt: skip


def write_sheet_page(sheet: RaterSheet, path: Path, guide: str = "") -> Path:
    """Render to the file `path`, atomically. Returns `path`."""
    write_aside(path, render_sheet(sheet, guide).encode("utf-8", "replace"))
    return path
