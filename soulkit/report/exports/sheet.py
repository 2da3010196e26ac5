"""A suite's table for programs: one record a number, as JSON values and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from soulkit.eval.cells import named_with_origin
from soulkit.eval.suites import SuiteLine
from soulkit.eval.summary import headline_name
from soulkit.report.load import RunData
from soulkit.report.suites import ContextColumn, SuiteTable, TableLine
from soulkit.report.table import metric_label

FIELDS = (
    "suite", "level", "name", "axis", "column", "source", "metric", "mean", "ci_low", "ci_high",
    "n_scored", "n", "n_clusters", "worst", "best", "members", "missing", "best_of_line",
    "comparable",
)  # fmt: skip
"""The columns of the CSV, in order; what a number has not is empty."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would take for the beginning of a formula."""


def suite_values(
    table: SuiteTable, *, playable: bool = False, details: bool = False
) -> dict[str, Any]:
    """Plain JSON values: the suite, its notes, and a record for each number."""
    return {
        "suite": table.name,
        "title": table.suite.title,
        "partial": table.partial,
        "average": table.suite.average,
        "absent": dict(table.absent),
        "notes": list(table.notes),
        "lines": [record for line in table.shown(playable=playable, details=details)
                  for record in _numbers_of(table, line)],
    }  # fmt: skip


def suite_csv(table: SuiteTable, *, playable: bool = False, details: bool = False) -> str:
    """The same records as CSV, a line each."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for line in table.shown(playable=playable, details=details):
        for record in _numbers_of(table, line):
            writer.writerow({name: _plain_cell(record.get(name)) for name in FIELDS})
    return text.getvalue()


def _numbers_of(table: SuiteTable, line: TableLine) -> Iterator[dict[str, Any]]:
    place = {"suite": table.name, "level": line.level, "name": line.name, "axis": line.axis}
    for i, (run, one) in enumerate(zip(table.runs, line.runs, strict=True)):
        yield {**place, **_of_run(run, one), "best_of_line": i in line.best_runs}
    for i, (column, figure) in enumerate(zip(table.context, line.figures, strict=True)):
        if figure is not None:
            yield {**place, **_published(column, figure), "best_of_line": i in line.best_figures}


def _of_run(run: RunData, line: SuiteLine) -> dict[str, Any]:
    cell = line.cell
    numbers = ("mean", "ci_low", "ci_high", "n_scored", "n", "n_clusters", "worst", "best")
    return {
        "column": run.name, "source": "run",
        "metric": _metric(run, line) or cell.method,
        **{name: getattr(cell, name) for name in numbers},
        "members": list(line.members), "missing": list(line.missing or line.cell.missing),
    }  # fmt: skip


def _metric(run: RunData, line: SuiteLine) -> str:
    cells = run.tasks.get(line.name, {})
    name = metric_label(run, line.name, headline_name(cells)) if cells else ""
    return named_with_origin(name, line.cell) if name else ""


def _published(column: ContextColumn, figure: float) -> dict[str, Any]:
    return {"column": column.model, "source": column.table.name, "mean": figure,
            "comparable": column.comparable}  # fmt: skip


def _plain_cell(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
