"""Text tables for Markdown and for terminals of any width.

A table that is too wide is split into parts, one below the other (`InParts`). If a part is still
too wide, rich would cut its columns: first the row names, then the ends of numbers. Instead,
bracketed text moves to its own line, then columns wrap between words; words and intervals are never
cut. If that is still too wide, each row becomes a paragraph: its name, then each column with its
number.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from re import Pattern
from typing import TYPE_CHECKING, Self

from soulkit.text import one_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Column, Table
    from rich.text import Text


_WORD = re.compile(r"^\s+\S+|\S+")
_WHOLE = re.compile(r"\[[^\]\n]*\]|^\s+\S+|\S+")
"""Text that is not split: an interval or a word."""
_UNBOUNDED = 1000
"""Terminal width at which every table fits."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One text; `best` marks the best of the values it is compared with."""

    text: str
    best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GridRow:
    """One row; its first cell is the name."""

    cells: tuple[GridCell, ...]
    level: str = "task"
    rule: bool = False
    """Whether to draw a rule above it."""

    @classmethod
    def of(cls, *texts: str, level: str = "task") -> Self:
        return cls(cells=tuple(map(GridCell, texts)), level=level)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A text table with a title and notes. Columns are right-aligned, except the first one and
    those in `words`."""

    head: tuple[str, ...]
    rows: tuple[GridRow, ...]
    title: str = ""
    notes: tuple[str, ...] = ()
    words: Collection[str] = ()
    whole: Collection[str] = ()
    """Columns that stay on one line if other columns can wrap instead."""
    least: Mapping[str, int] = field(default_factory=dict)
    """Column → minimum width when wrapped."""
    n_below: int = 0
    """Number of last columns that move below the others on a narrow terminal."""
    n_names: int = 1
    """Number of first columns that name a row; they are repeated in the lower part."""
    grouped: bool = False
    """Whether rows with the same name form a group that shows the name once."""
    ruled: bool = False
    """Whether to draw rules between groups."""


STYLES = {"part": "dim", "suite": "bold"}


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


def md_text(text: str) -> str:
    """One line with all Markdown markup escaped."""
    line = one_line(text)
    for mark in "\\`*_[]<>|#":
        line = line.replace(mark, "\\" + mark)
    return line


def grid_parts(grid: Grid) -> list[RenderableType]:
    """The grid for a terminal: rich renderables, top to bottom."""
    from rich.text import Text

    title = [Text("\n" + one_line(grid.title), style="bold")] if grid.title else []
    notes = [Text(one_line(note), style="dim") for note in grid.notes]
    return [*title, _in_parts(grid), *notes]


def _in_parts(grid: Grid) -> InParts:
    """The grid without empty columns, split into parts if necessary."""
    filled = [i for i in range(len(grid.head)) if any(row.cells[i].text for row in grid.rows)]
    own = len(grid.head) - grid.n_below
    below = [i for i in filled if i >= own]
    parts = [_terminal_table(grid, grid.rows, [i for i in filled if i < own])]
    if rows := [row for row in grid.rows if any(row.cells[i].text for i in below)]:
        parts.append(_terminal_table(grid, rows, [*range(grid.n_names), *below]))
    return InParts(_terminal_table(grid, grid.rows, filled), [FittingTable(one) for one in parts])


def _terminal_table(grid: Grid, rows: Iterable[GridRow], columns: Sequence[int]) -> Table:
    from rich.text import Text

    table, before = plain_table(), None
    for i in columns:
        head = grid.head[i]
        table.add_column(
            Text(head), justify="left" if i == 0 or head in grid.words else "right",
            no_wrap=head in grid.whole, overflow="fold", min_width=grid.least.get(head),
        )  # fmt: skip
    for row in rows:
        name, style = row.cells[0].text, STYLES.get(row.level)
        if grid.grouped:
            style = "bold" if name != before else None
        if row.rule or (grid.ruled and before not in (None, name)):
            table.add_section()
        texts = [Text(row.cells[i].text, "bold" if row.cells[i].best else "") for i in columns]
        if grid.grouped and name == before:
            texts[0] = Text()
        table.add_row(*texts, style=style)
        before = name
    return table


def parts_text(parts: Iterable[RenderableType], width: int = 120) -> str:
    """Rich renderables as plain text of `width` columns."""
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, no_color=True)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return capture.get()


# -- on a narrow terminal --------------------------------------------------------------------------


def plain_table(*heads: str, title: str | None = None) -> Table:
    """An empty table in soulkit's style; heads that start with `>` are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", header_style="dim", border_style="dim",
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip
    for head in heads:
        made.add_column(head.removeprefix(">"), justify="right" if head[:1] == ">" else "left")
    return made


@dataclass(frozen=True, slots=True)
class InParts:
    """A table, or its parts if it does not fit without wrapping."""

    whole: Table
    parts: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        room = console.options.update(width=_UNBOUNDED)
        fits = Measurement.get(console, room, self.whole).maximum <= options.max_width
        yield from [self.whole] if fits else self.parts


@dataclass(frozen=True, slots=True)
class FittingTable:
    """Shows a text table at any width; its first column has the row names. Columns with `no_wrap`
    stay on one line if the others can wrap enough."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.table.columns
        asked = [(column.no_wrap, column.min_width) for column in columns]
        for column in columns:
            column.no_wrap, column.min_width = False, None
        measured = self.table.__rich_measure__(console, options).minimum
        room = options.max_width - (measured - sum(_longest(_WORD, one) for one in columns))
        least = [_least_width(column, *own) for column, own in zip(columns, asked, strict=True)]
        if any(whole for whole, _ in asked) and sum(least) <= room:
            self._fold(room, least)
            yield self.table
            return
        for bracket, where in (("(", columns[1:]), ("[", columns[1:]), ("(", columns[:1])):
            if sum(map(_longest_text, columns)) > room:
                _break_before(bracket, where)
        least = [min_width or _longest(_WHOLE, column)
                 for column, (_, min_width) in zip(columns, asked, strict=True)]  # fmt: skip
        if sum(least) <= room:
            self._fold(room, least)
            yield self.table
        else:
            yield from self._paragraphs()

    def _fold(self, room: int, least: Sequence[int]) -> None:
        """Give each column the width of its text, or less if `room` is too small."""
        columns = self.table.columns
        widths = [_longest_text(column) for column in columns]
        while sum(widths) > room:
            slack = [width - word for width, word in zip(widths, least, strict=True)]
            widths[slack.index(max(slack))] -= 1
        for column, width in zip(columns, widths, strict=True):
            column.width = width

    def _paragraphs(self) -> list[Text]:
        from rich.text import Text

        first, *others = self.table.columns
        made = [Text()]
        for i, name in enumerate(_texts(first)[1:]):
            made += [Text(_line(name), style="bold")] if name else []
            pairs = [(texts[0], texts[i + 1]) for texts in map(_texts, others)]
            made.append(
                Text("  " + " · ".join(f"{head} {_line(text)}" for head, text in pairs if text))
            )
        return [*made, Text()]


def _least_width(column: Column, whole: bool, asked: int | None) -> int:
    """The minimum width of a column: its full text, its setting, or its longest word."""
    return _longest_text(column) if whole else asked or _longest(_WORD, column)


def _line(text: str) -> str:
    return " ".join(text.split())


def _texts(column: Column) -> list[str]:
    """The head and cells of a column."""
    return [str(text) for text in (column.header, *column._cells)]


def _longest_text(column: Column) -> int:
    return max((_cells_of(line) for text in _texts(column) for line in text.split("\n")), default=0)


def _longest(pattern: Pattern[str], column: Column) -> int:
    words = (word for text in _texts(column) for word in pattern.findall(text))
    return max(map(_cells_of, words), default=0)


def _break_before(bracket: str, columns: Iterable[Column]) -> None:
    """Insert a line break before the bracket, in every cell."""
    from rich.text import Text

    for column in columns:
        for cell in column._cells:
            if isinstance(cell, Text):
                cell.plain = cell.plain.replace(f" {bracket}", f"\n{bracket}")


def _cells_of(text: str) -> int:
    """Terminal width of a text; some characters take two columns."""
    from rich.cells import cell_len

    return cell_len(text)
