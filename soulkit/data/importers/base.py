"""What every importer returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from soulkit.data.files import BadRow, RawRow
from soulkit.errors import DataError

Half = Literal["cotp", "vp", "all"]
HALVES: tuple[Half, ...] = get_args(Half)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Flat rows, the records that could not be one, and what the reader should know."""

    rows: tuple[dict[str, Any], ...]
    bad: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()


class BadRecord(Exception):
    """Raised inside an importer: this one record is no row; the message says why."""


def need(row: RawRow, *names: str) -> tuple[str, ...]:
    """The text of the named fields; BadRecord when one is absent, blank or no text."""
    for name in names:
        value = row.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BadRecord(f"it has no text under '{name}'")
    return tuple(str(row.fields[name]) for name in names)


def wrong_shape(path: Path, wanted: Iterable[str], way_out: str) -> DataError:
    return DataError(
        f"'{path}' is not of the original format.",
        f"None of its records has {', '.join(wanted)}.",
        way_out,
    )
