"""The rows of one stretch, read at once and unpacked one by one.

A window holds its rows as the file has them (lines, Arrow columns), which takes a fraction of the
memory that Python objects would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.data.corpora.index import FileIndex, Stretch, open_parquet
from soulkit.data.corpora.whole import whole_rows
from soulkit.data.files import PACKED, BadRow, SourcedRow, parse_row_json, unreadable


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are shuffled together."""

    ordinals: Sequence[int]
    """Where each stands in its source: equal in every pass."""
    row: Callable[[int], SourcedRow]
    """(`file:row`, the row or a BadRow) of the one at a place from 0."""

    def __len__(self) -> int:
        return len(self.ordinals)


class WindowReader:
    """Reads stretches of the files of a source; the next one in a bundle without a new start."""

    def __init__(self, files: Sequence[FileIndex], labels: Sequence[str]) -> None:
        """`labels` name the files in the keys of their rows."""
        self.files, self.labels = files, labels
        self._offsets = [sum(f.span for f in files[:n]) for n in range(len(files))]
        self._cursor: _ParquetCursor | None = None

    def read(self, stretch: Stretch) -> Window:
        """DataError when the file is not what it was when it was indexed."""
        file = self.files[stretch.file]
        label = self.labels[stretch.file]
        base = self._offsets[stretch.file] + stretch.first
        try:
            if file.kind == "lines":
                return _line_window(file.path, stretch, label, base)
            if file.kind == "parquet":
                return self._parquet_window(file.path, stretch, label, base)
        except OSError as error:
            raise unreadable(file.path, str(error.strerror or error)) from error
        rows = whole_rows(file.path)[stretch.first : stretch.first + stretch.rows]
        return Window(range(base, base + len(rows)), rows.__getitem__)

    def _parquet_window(self, path: Path, stretch: Stretch, label: str, base: int) -> Window:
        cursor = self._cursor
        if cursor is None or (cursor.path, cursor.row) != (path, stretch.first):
            if cursor is not None:
                cursor.close()
            cursor = self._cursor = _ParquetCursor(path, stretch)
        table, packed = cursor.take(stretch.rows), cursor.packed

        def row(place: int) -> SourcedRow:
            source = f"{label}:{stretch.first + place + 1}"
            values = table.slice(place, 1).to_pylist()[0]
            try:
                texts = {n: parse_row_json(values[n]) for n in packed if values[n] is not None}
            except ValueError as error:
                return source, BadRow(source, f"a packed column is not JSON: {error}")
            return source, {**values, **texts}

        return Window(range(base, base + stretch.rows), row)


def _line_window(path: Path, stretch: Stretch, label: str, base: int) -> Window:
    with path.open("rb") as file:
        file.seek(stretch.at)
        content = file.read(stretch.size)
    if len(content) < stretch.size:
        raise unreadable(path, "it is shorter than it was when its rows were counted")
    lines = content.split(b"\n")
    places = [n for n, line in enumerate(lines) if line.strip()]

    def row(place: int) -> SourcedRow:
        number = places[place]
        source = f"{label}:{stretch.first + number + 1}"
        try:
            return source, parse_row_json(lines[number].decode("utf-8-sig"))
        except UnicodeDecodeError:
            return source, BadRow(source, "the line is not UTF-8 text")
        except ValueError as error:
            return source, BadRow(source, f"the line is not JSON: {error}")

    # Blank lines have no ordinal, so that a part of the rows is drawn among rows.
    return Window(range(base, base + len(places)), row)


class _ParquetCursor:
    """Reads the rows of a Parquet file onwards from the beginning of a stretch."""

    def __init__(self, path: Path, stretch: Stretch) -> None:
        self.path, self.row = path, stretch.first
        self._file = open_parquet(path)
        schema = self._file.schema_arrow
        self.packed = [f.name for f in schema if PACKED in (f.metadata or {})]
        groups = list(range(stretch.at, self._file.metadata.num_row_groups))
        self._batches: Iterator[Any] = self._file.iter_batches(256, row_groups=groups)
        self._rest: Any = None
        for _ in self._slices(stretch.size):  # what is before is read and gone
            pass

    def take(self, rows: int) -> Any:
        """The next rows, as a table."""
        import pyarrow as pa

        self.row += rows
        batches = list(self._slices(rows))
        return pa.Table.from_batches(batches, self._file.schema_arrow).combine_chunks()

    def _slices(self, rows: int) -> Iterator[Any]:
        import pyarrow as pa

        while rows > 0:
            try:
                batch = self._rest if self._rest is not None else next(self._batches)
            except (pa.ArrowException, StopIteration) as error:
                raise unreadable(self.path, f"rows are missing or damaged: {error}") from error
            head = batch.slice(0, rows)
            self._rest = batch.slice(rows) if batch.num_rows > rows else None
            rows -= head.num_rows
            yield head

    def close(self) -> None:
        self._file.close()
