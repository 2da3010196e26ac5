"""A suite's table for LaTeX: one `table` with the rules of booktabs, to be put into an article.

Its only need is `\\usepackage{booktabs}`. Names come from files, so everything that TeX would read
as a command is escaped, and a sign that a plain LaTeX does not know is written as its number.
"""

from __future__ import annotations

from soulkit.report.grid import Grid, GridCell, GridRow
from soulkit.text import one_line

_SIGNS = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%",
    "#": r"\#", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "\"": "''",
    "\u2013": "--", "\u2212": "$-$", "\u00b1": r"$\pm$", "\u2014": "---", "\u2026": r"\dots{}",
    "\u2018": "`", "\u2019": "'", "\u201c": "``", "\u201d": "''", "\u00b7": r"$\cdot$",
}  # fmt: skip
_LETTERS = range(0xC0, 0x180)
"""Letters with accents that LaTeX reads in UTF-8 without a package: Latin-1 and Extended-A."""
_BARE = {0xD0, 0xDE, 0xF0, 0xFE, 0x110, 0x111, 0x138, 0x149, 0x14A, 0x14B, 0x17F, 0x166, 0x167,
         0x126, 0x127, 0x132, 0x133, 0x13F, 0x140, 0xD7, 0xF7,
         0x104, 0x105, 0x118, 0x119, 0x12E, 0x12F, 0x172, 0x173}  # fmt: skip
"""Those among them that its oldest font encoding has no sign for."""


def latex_text(text: str) -> str:
    """One line as LaTeX sets it: every special sign escaped."""
    return "".join(_sign(character) for character in one_line(text, 1000))


def _sign(character: str) -> str:
    code = ord(character)
    if character in _SIGNS:
        return _SIGNS[character]
    if 0x20 <= code < 0x7F or (code in _LETTERS and code not in _BARE):
        return character
    return f"[U+{code:04X}]"


def grid_latex(grid: Grid) -> str:
    """The grid as a `table` environment; its notes stand below it in small print."""
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
    # A bracket right after the end of a row would be read as the row's extra height.
    first, *rest = cells
    opening = f"{{{first}}}" if first.startswith("[") else first
    return " & ".join([opening, *rest]) + " \\\\"


def _latex_notes(grid: Grid) -> list[str]:
    if not grid.notes:
        return []
    lines = [f"{latex_text(note)}\\par" for note in grid.notes]
    return ["\\par\\medskip", "\\begin{minipage}{\\linewidth}\\footnotesize", *lines,
            "\\end{minipage}"]  # fmt: skip
