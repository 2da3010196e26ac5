"""A suite's table as cells of text: what terminal, Markdown and LaTeX have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from soulkit.eval.suites import SuiteLine
from soulkit.eval.summary import Cell, headline
from soulkit.metrics.intervals import DASH, number
from soulkit.report.costs import dollar_text
from soulkit.report.fitting import FittingTable, InParts
from soulkit.report.suites import SuiteTable, TableLine
from soulkit.report.table import (
    bounds_text,
    cell_text,
    clusters_text,
    headline_label,
    literal_text,
    md_text,
    mean_text,
    plain_table,
)
from soulkit.text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

CONTEXT = "*"
"""Behind the name of a published column that is no more than context."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One text; `best` of its line among what it may be compared with."""

    text: str
    best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    """One line; the first cell is its name."""

    cells: tuple[GridCell, ...]
    level: str
    rule: bool = False
    """Whether a rule stands above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table of texts with a title and the sentences below it."""

    title: str
    head: tuple[str, ...]
    rows: tuple[GridRow, ...]
    notes: tuple[str, ...]
    n_published: int = 0
    """How many of the columns, the last ones, are published elsewhere."""


def suite_grid(table: SuiteTable, *, playable: bool = False, details: bool = False) -> Grid:
    """The cells of the table: of one run with interval, clusters and bounds in columns of their
    own, of several runs a column each."""
    lines = table.shown(playable=playable, details=details)
    single = len(table.runs) == 1
    # A column that stays empty in a complete run would only take room from the others.
    bounded = any(bounds_text(line.runs[0].cell) for line in lines)
    costs = single and any(line_cost(table, line) is not None for line in lines)
    head = ["task", *(_SINGLE[: 4 if bounded else 3] if single else _names(table))]
    head += ["cost"] if costs else []
    head += [c.model + ("" if c.comparable else CONTEXT) for c in table.context]
    return Grid(
        title=table_title(table), head=tuple(head), notes=_notes(table),
        n_published=len(table.context),
        rows=tuple(_row(table, line, before, bounded, costs)
                   for before, line in zip([None, *lines], lines, strict=False)),
    )  # fmt: skip


_SINGLE = ("mean [95% CI]", "scored", "clusters", "worst to best")


def table_title(table: SuiteTable) -> str:
    """`soul-23 (partial): The 23 rows …`; of runs without a suite, nothing."""
    if not table.name:
        return ""
    partial = " (partial)" if table.partial else ""
    title = f": {table.suite.title}" if table.suite.title else ""
    return f"{table.name}{partial}{title}"


def line_label(table: SuiteTable, line: TableLine) -> str:
    """What stands at the head of a line: a task, a group, or a mean and what it is over."""
    first = line.runs[0]
    match line.level:
        case "part":
            return f"  {one_line(line.name)}"
        case "group":
            return f"{one_line(line.name)} (mean of {len(first.members)})"
        case "axis":
            return f"{line.name} mean ({_coverage(line)})"
        case "suite":
            return f"{table.name} mean ({_coverage(line)}{_files(table)})"
    return headline_label(table.runs, line.name)


def _coverage(line: TableLine) -> str:
    """`4 of 5`; of several runs that differ in it, each one's."""
    return ", ".join(dict.fromkeys(one.coverage for one in line.runs))


def _files(table: SuiteTable) -> str:
    """`; 27 of 27 tasks` where the tasks of groups are shown, too; of several runs the least."""
    if not table.suite.parts:
        return ""
    tasks = table.suite.tasks
    counts = [sum(headline(run.tasks.get(task, {})).whole for task in tasks) for run in table.runs]
    return f"; {min(counts)} of {len(tasks)} tasks"


def _names(table: SuiteTable) -> list[str]:
    return [one_line(run.name, 40) for run in table.runs]


def line_cost(table: SuiteTable, line: TableLine) -> float | None:
    """US dollars that the only run of a table paid for a line's tasks; None where none is known."""
    summary = table.runs[0].summary
    members = line.runs[0].members if line.level in ("axis", "suite") else (line.name,)
    tasks = [task for member in members for task in table.suite.tasks_of(member)]
    costs = summary.costs if summary is not None else {}
    sums = [one["cost"] for task in tasks for one in costs.get(task, {}).values()
            if one.get("cost") is not None]  # fmt: skip
    return sum(sums) if sums else None


def _row(
    table: SuiteTable, line: TableLine, before: TableLine | None, bounded: bool, costs: bool
) -> GridRow:
    single = len(table.runs) == 1
    texts = _single(line.runs[0], bounded) if single else [_beside(c.cell) for c in line.runs]
    texts += [dollar_text(line_cost(table, line))] if costs else []
    bold = () if single else line.best_runs
    cells = [GridCell(line_label(table, line))]
    cells += [GridCell(text, i in bold) for i, text in enumerate(texts)]
    cells += [GridCell(number(f), i in line.best_figures) for i, f in enumerate(line.figures)]
    rule = before is not None and before.level != line.level and line.level in ("axis", "suite")
    return GridRow(cells=tuple(cells), level=line.level, rule=rule)


def _single(line: SuiteLine, bounded: bool) -> list[str]:
    cell = line.cell
    scored = f"{cell.n_scored}/{cell.n}" if cell.n else DASH
    texts = [cell_text(cell), scored, clusters_text(cell, headed=True)]
    return [*texts, bounds_text(cell)] if bounded else texts


def _beside(cell: Cell) -> str:
    bounds = bounds_text(cell)
    return f"{_mean(cell)}, could be {bounds}" if bounds else _mean(cell)


def _mean(cell: Cell) -> str:
    """As everywhere; a dash alone for a task that was not played or that no row counts for."""
    return mean_text(cell) if cell.n or cell.missing else DASH


def _notes(table: SuiteTable) -> tuple[str, ...]:
    marked = any(line.best_figures or line.best_runs for line in table.lines)
    bold = "Bold: the best of a line, among the runs and within each published table apart."
    caveat = [f"{CONTEXT} {table.footnote}"] if table.footnote else []
    return (*table.notes, *([bold] if marked else []), *caveat)


def grid_markdown(grid: Grid) -> str:
    """The grid as a Markdown section, with its notes as a list."""
    lines = ["| " + " | ".join(map(md_text, grid.head)) + " |", "|" + " --- |" * len(grid.head)]
    lines += ["| " + " | ".join(map(_md_cell, row.cells)) + " |" for row in grid.rows]
    title = f"## {md_text(grid.title)}\n\n" if grid.title else ""
    notes = "\n".join(f"- {md_text(note)}" for note in grid.notes)
    return title + "\n".join(lines) + "\n" + (f"\n{notes}\n" if notes else "")


def _md_cell(cell: GridCell) -> str:
    text = md_text(cell.text)
    return f"**{text}**" if cell.best else text


def grid_parts(grid: Grid) -> list[RenderableType]:
    """The grid for a terminal: rich renderables, top to bottom."""
    from rich.text import Text

    title = [Text("\n" + one_line(grid.title), style="bold")] if grid.title else []
    notes = [Text(one_line(note, 1000), style="dim") for note in grid.notes]
    return [*title, _terminal_table(grid), *notes]


def _terminal_table(grid: Grid) -> RenderableType:
    """What is published stands beside the runs, or below them where a terminal is too narrow."""
    columns = list(range(len(grid.head)))
    own = len(columns) - grid.n_published
    parts = [columns[:own], [0, *columns[own:]]] if grid.n_published else [columns]
    return InParts(
        _terminal_columns(grid, columns),
        [FittingTable(_terminal_columns(grid, part)) for part in parts],
    )


def _terminal_columns(grid: Grid, columns: Sequence[int]) -> Table:
    from rich.text import Text

    table = plain_table()
    for i in columns:
        justify: Literal["left", "right"] = "left" if i == 0 else "right"
        table.add_column(literal_text(grid.head[i]), justify=justify)
    for row in grid.rows:
        if row.rule:
            table.add_section()
        texts = [Text(row.cells[i].text, "bold" if row.cells[i].best else "") for i in columns]
        table.add_row(*texts, style=_STYLES.get(row.level))
    return table


_STYLES = {"part": "dim", "suite": "bold"}
