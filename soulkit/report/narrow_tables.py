"""Tables that stay whole on a narrow terminal.

What a terminal cannot hold side by side is shown in parts, one below the other (`InParts`). A table
that is too wide still would lose its columns one by one: first the names of its rows, then the ends
of its numbers. So what stands in brackets behind a number or a name goes to a line of its own, then
columns fold between words; no word and no interval is cut. Where even that has no room, each row
becomes a paragraph of its own: its name, then every column with its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from re import Pattern
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Column, Table
    from rich.text import Text


_WORD = re.compile(r"^\s+\S+|\S+")
_WHOLE = re.compile(r"\[[^\]\n]*\]|^\s+\S+|\S+")
"""What is not folded: an interval, or a word."""
_UNBOUNDED = 1000
"""Columns of a terminal in which every table fits."""


def plain_table(*heads: str, title: str | None = None) -> Table:
    """An empty table in soulkit's look; columns whose head begins with `>` are right-aligned."""
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
    """A table, or the parts that stand in its place where it does not fit without folding."""

    whole: Table
    parts: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        room = console.options.update(width=_UNBOUNDED)
        fits = Measurement.get(console, room, self.whole).maximum <= options.max_width
        yield from [self.whole] if fits else self.parts


@dataclass(frozen=True, slots=True)
class FittingTable:
    """`table`, whose cells are texts and whose first column names the rows, at any width. Columns
    that do not wrap stay on one line where the others can be folded enough."""

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
        least = [_longest(_WHOLE, column) for column in columns]
        if sum(least) <= room:
            self._fold(room, least)
            yield self.table
        else:
            yield from self._paragraphs()

    def _fold(self, room: int, least: Sequence[int]) -> None:
        """Give every column the width of its texts, or less where `room` signs are not enough."""
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
    """What a column may be folded to: not at all, to what it asks for, or to its longest word."""
    return _longest_text(column) if whole else asked or _longest(_WORD, column)


def _line(text: str) -> str:
    return " ".join(text.split())


def _texts(column: Column) -> list[str]:
    """The head of a column and its cells."""
    return [str(text) for text in (column.header, *column._cells)]


def _longest_text(column: Column) -> int:
    return max((_cells_of(line) for text in _texts(column) for line in text.split("\n")), default=0)


def _longest(pattern: Pattern[str], column: Column) -> int:
    words = (word for text in _texts(column) for word in pattern.findall(text))
    return max(map(_cells_of, words), default=0)


def _break_before(bracket: str, columns: Iterable[Column]) -> None:
    """Put what follows the bracket on the next line, in every cell."""
    from rich.text import Text

    for column in columns:
        for cell in column._cells:
            if isinstance(cell, Text):
                cell.plain = cell.plain.replace(f" {bracket}", f"\n{bracket}")


def _cells_of(text: str) -> int:
    """How many places of a terminal a text takes: some letters take two."""
    from rich.cells import cell_len

    return cell_len(text)
