"""Tables that a narrow terminal cannot hold are shown in parts, one below the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

_UNBOUNDED = 1000
"""Columns of a terminal in which every table fits."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A table, or the parts that stand in its place where it does not fit without folding."""

    whole: Table
    parts: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.measure import Measurement

        room = console.options.update(width=_UNBOUNDED)
        fits = Measurement.get(console, room, self.whole).maximum <= options.max_width
        yield from [self.whole] if fits else self.parts
