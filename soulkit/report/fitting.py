"""Tables that stay whole on a narrow terminal.

What a terminal cannot hold side by side is shown in parts, one below the other (`InParts`). A table
that is too wide still would lose its columns one by one: first the names of its rows, then the ends
of its numbers. So columns fold between words, and no word is cut. Where even that has no room, each
row becomes a paragraph of its own: its name, then every column with its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Column, Table
    from rich.text import Text


_UNBOUNDED = 1000
"""Columns of a terminal in which every table fits."""


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
    """`table`, whose cells are texts and whose first column names the rows, at any width."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.table.columns:
            column.no_wrap = False
        least = self.table.__rich_measure__(console, options).minimum
        if least <= options.max_width:
            self._fold(options.max_width - (least - sum(map(_longest_word, self.table.columns))))
            yield self.table
        else:
            yield from self._paragraphs()

    def _fold(self, room: int) -> None:
        """Give every column the width of its texts, or less where `room` signs are not enough."""
        columns = self.table.columns
        least = [_longest_word(column) for column in columns]
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
            made.append(Text(name.strip(), style="bold"))
            pairs = [(texts[0], texts[i + 1]) for texts in map(_texts, others)]
            made.append(
                Text("  " + " · ".join(f"{head} {_line(text)}" for head, text in pairs if text))
            )
        return [*made, Text()]


def _line(text: str) -> str:
    return " ".join(text.split())


def _texts(column: Column) -> list[str]:
    """The head of a column and its cells."""
    return [str(text) for text in (column.header, *column._cells)]


def _longest_text(column: Column) -> int:
    return max((_cells_of(line) for text in _texts(column) for line in text.split("\n")), default=0)


def _longest_word(column: Column) -> int:
    return max((_cells_of(word) for text in _texts(column) for word in text.split()), default=0)


def _cells_of(text: str) -> int:
    """How many places of a terminal a text takes: some letters take two."""
    from rich.cells import cell_len

    return cell_len(text)
