"""What every importer returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Flat rows, the records that could not be one, and what the reader should know."""

    rows: tuple[dict[str, Any], ...]
    bad: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()


class BadRecord(Exception):
    """Raised inside an importer: this one record is no row; the message says why."""


class WrongShape(DataError):
    """A file that an importer does not know: it is of none of the forms that it reads."""


def of_shape(path: Path, fields: Sequence[str], way_out: str) -> tuple[list[RawRow], list[BadRow]]:
    """The records of a file and its broken ones; DataError when no record has all of `fields`."""
    raw, bad = read_rows(path)
    if not any(all(name in row.fields for name in fields) for row in raw):
        raise wrong_shape(path, fields, way_out)
    return raw, bad


def rows_from(
    raw: Iterable[RawRow], bad: list[BadRow], make: Callable[[RawRow, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """What `make` gives for each record and its place; `bad` grows by those that are no row."""
    rows: list[dict[str, Any]] = []
    for index, record in enumerate(raw):
        try:
            rows.append(make(record, index))
        except BadRecord as error:
            bad.append(BadRow(record.source, str(error)))
    return rows


def need(row: RawRow, *names: str) -> tuple[str, ...]:
    """The text of the named fields; BadRecord when one is absent, blank or no text."""
    for name in names:
        value = row.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BadRecord(f"it has no text under '{name}'")
    return tuple(str(row.fields[name]) for name in names)


def wrong_shape(path: Path, fields: Iterable[str], way_out: str) -> WrongShape:
    return WrongShape(
        f"'{path}' is not of the original format.",
        f"None of its records has {', '.join(fields)}.",
        way_out,
    )
