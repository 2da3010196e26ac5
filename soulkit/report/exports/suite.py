"""Results for papers and spreadsheets: LaTeX tables, a suite's numbers as CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from soulkit.eval.results.cells import SuiteLine, named_with_origin
from soulkit.eval.results.summary import headline_name
from soulkit.report.grid import Grid, GridCell, GridRow
from soulkit.report.load import RunData
from soulkit.report.suites import SuiteTable, TableLine
from soulkit.report.tables import metric_label
from soulkit.text import one_line

_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%",
    "#": r"\#", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\"": "''",
    "\u2013": "--", "\u2212": "$-$", "\u00b1": r"$\pm$", "\u2014": "---", "\u2026": r"\dots{}",
    "\u2018": "`", "\u2019": "'", "\u201c": "``", "\u201d": "''", "\u00b7": r"$\cdot$",
}  # fmt: skip
_LETTERS = range(0xC0, 0x180)
"""Accented letters that LaTeX reads in UTF-8 without a package: Latin-1 and Extended-A."""
_BARE = {0xD0, 0xDE, 0xF0, 0xFE, 0x110, 0x111, 0x138, 0x149, 0x14A, 0x14B, 0x17F, 0x166, 0x167,
         0x126, 0x127, 0x132, 0x133, 0x13F, 0x140, 0xD7, 0xF7,
         0x104, 0x105, 0x118, 0x119, 0x12E, 0x12F, 0x172, 0x173}  # fmt: skip
"""Letters in this range that LaTeX's oldest font encoding lacks."""


def latex_text(text: str) -> str:
    """One line of text for LaTeX, with special characters escaped."""
    return "".join(_sign(character) for character in one_line(text, 1000))


def _sign(character: str) -> str:
    code = ord(character)
    if character in _SIGNS:
        return _SIGNS[character]
    if 0x20 <= code < 0x7F or (code in _LETTERS and code not in _BARE):
        return character
    return f"[U+{code:04X}]"


def grid_latex(grid: Grid) -> str:
    """The grid as a `table` environment, with its notes below in small print."""
    columns = "l" + "r" * (len(grid.head) - 1)
    lines = [
        "% needs \\usepackage{booktabs}",
        "\\begin{table}",
        "\\centering",
        *([f"\\caption{{{latex_text(grid.title)}}}"] if grid.title else []),
        "\\small",
        "\\setlength{\\tabcolsep}{4pt}",
        f"\\begin{{tabular}}{{{columns}}}",
        "\\toprule",
        _latex_line([latex_text(text) for text in grid.head]),
        "\\midrule",
        *(line for row in grid.rows for line in _latex_row(row)),
        "\\bottomrule",
        "\\end{tabular}",
        *_latex_notes(grid),
        "\\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _latex_row(row: GridRow) -> list[str]:
    cells = [_latex_cell(cell) for cell in row.cells]
    if row.level == "part":
        cells[0] = f"\\quad {cells[0].strip()}"
    return [*(["\\midrule"] if row.rule else []), _latex_line(cells)]


def _latex_cell(cell: GridCell) -> str:
    text = latex_text(cell.text)
    return f"\\textbf{{{text}}}" if cell.best else text


def _latex_line(cells: list[str]) -> str:
    # A bracket right after the end of a row would be parsed as the row's extra height.
    first, *rest = cells
    opening = f"{{{first}}}" if first.startswith("[") else first
    return " & ".join([opening, *rest]) + " \\\\"


def _latex_notes(grid: Grid) -> list[str]:
    if not grid.notes:
        return []
    lines = [f"{latex_text(note)}\\par" for note in grid.notes]
    return ["\\par\\medskip", "\\begin{minipage}{\\linewidth}\\footnotesize", *lines,
            "\\end{minipage}"]  # fmt: skip


FIELDS = (
    "suite", "level", "name", "axis", "column", "source", "metric", "mean", "ci_low", "ci_high",
    "n_scored", "n", "n_clusters", "worst", "best", "members", "missing", "best_of_line",
    "comparable",
)  # fmt: skip
"""The columns of the CSV, in order; missing values are empty."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that a spreadsheet would read as a formula."""


def suite_values(table: SuiteTable) -> dict[str, Any]:
    """The suite as plain JSON values: its notes, and a record for each number."""
    return {
        "suite": table.name,
        "title": table.suite.title,
        "partial": table.partial,
        "average": table.suite.average,
        "absent": dict(table.absent),
        "notes": list(table.notes),
        "lines": [record for line in table.shown for record in _numbers_of(table, line)],
    }  # fmt: skip


def suite_csv(table: SuiteTable) -> str:
    """The same records as CSV, one line each."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for line in table.shown:
        for record in _numbers_of(table, line):
            writer.writerow({name: plain_cell(record.get(name)) for name in FIELDS})
    return text.getvalue()


def _numbers_of(table: SuiteTable, line: TableLine) -> Iterator[dict[str, Any]]:
    place = {"suite": table.name, "level": line.level, "name": line.name, "axis": line.axis}
    for i, (run, one) in enumerate(zip(table.runs, line.runs, strict=True)):
        yield {**place, **_of_run(run, one), "best_of_line": i in line.best_runs}
    for i, (column, figure) in enumerate(zip(table.context, line.figures, strict=True)):
        if figure is not None:
            yield {
                **place,
                "column": column.model,
                "source": column.table.name,
                "mean": figure,
                "comparable": False,
                "best_of_line": i in line.best_figures,
            }


def _of_run(run: RunData, line: SuiteLine) -> dict[str, Any]:
    cell = line.cell
    numbers = ("mean", "ci_low", "ci_high", "n_scored", "n", "n_clusters", "worst", "best")
    return {
        "column": run.name, "source": "run",
        "metric": _metric_record(run, line) or cell.method,
        **{name: getattr(cell, name) for name in numbers},
        "members": list(line.members), "missing": list(line.missing or line.cell.missing),
    }  # fmt: skip


def _metric_record(run: RunData, line: SuiteLine) -> str:
    cells = run.tasks.get(line.name, {})
    name = metric_label(run, line.name, headline_name(cells)) if cells else ""
    return named_with_origin(name, line.cell) if name else ""


def plain_cell(value: object) -> object:
    """A CSV cell that no spreadsheet reads as a formula."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return value
