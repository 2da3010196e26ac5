"""Where the rows of a file begin, so that any stretch of them can be read without what is before.

A stretch is what is read and shuffled at once: at most `window` rows and about `limit` bytes. One
pass over a .jsonl file finds its stretches, counts its rows, and takes its sha256; Parquet files
say all but the checksum themselves. A *bundle* is read in order, because getting to its middle
costs reading its beginning: the rows of one row group, or a file that can only be read whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from soulkit.data.corpora.whole import check_whole, is_scattered, whole_rows
from soulkit.data.files import empty, parse_row_json, unreadable

BLOCK = 1 << 23
_HASHED_WHOLE = 64 << 20
_SAMPLES, _SAMPLE = 64, 1 << 16
_MARK = re.compile(rb'"data_source"\s*:\s*("(?:[^"\\]|\\.)*")')
_MARK_ROOM = 4096

FileKind = Literal["lines", "parquet", "whole"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Rows of one file that are read and shuffled at once."""

    file: int
    """The place of its file in the source."""
    first: int
    """Rows (in .jsonl: lines) of the file before it."""
    rows: int
    """Rows (lines) in it."""
    at: int
    """.jsonl: byte offset; Parquet: row group; else 0."""
    size: int
    """.jsonl: bytes; Parquet: rows of its row group before it; else 0."""


@dataclass(frozen=True, slots=True)
class FileIndex:
    """What is to be known of a file before its rows are read."""

    path: Path
    kind: FileKind
    rows: int
    """Rows; blank lines are none."""
    span: int
    """Places that its stretches cover: rows, or lines."""
    bundles: tuple[tuple[Stretch, ...], ...]
    checksum: str
    """Changes when the file does."""
    data_sources: frozenset[str]
    """Every `data_source` in it, where they were looked for."""


def index_file(path: Path, number: int, window: int, limit: int, marks: bool) -> FileIndex:
    """The stretches of `path`, file `number` of its source; DataError when it cannot be read.

    `window` rows and about `limit` bytes make a stretch; `marks`: collect the names in it.
    """
    try:
        kind = _kind(path)
        if kind == "parquet":
            index = _parquet_index(path, number, window, limit, marks)
        elif kind == "lines":
            index = _lines_index(path, number, window, limit, marks)
        else:
            index = _whole_index(path, number, window)
    except OSError as error:
        raise unreadable(path, str(error.strerror or error)) from error
    if not index.rows:
        raise empty(path)
    return index


def _kind(path: Path) -> FileKind:
    """How a file is read: as a whole where a conversation stands in several of its records."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        names = frozenset(_parquet(path).schema_arrow.names)
        return "whole" if is_scattered(names) else "parquet"
    if suffix != ".jsonl":
        return "whole"
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"{}")
    try:
        row = parse_row_json(first.decode("utf-8-sig"))
    except ValueError:
        return "lines"  # a broken line; whatever it was, the others tell
    return "whole" if isinstance(row, dict) and is_scattered(row) else "lines"


# -- .jsonl --------------------------------------------------------------------------------------


def _lines_index(path: Path, number: int, window: int, limit: int, marks: bool) -> FileIndex:
    digest = hashlib.sha256()
    cutter = _Cutter(number, window, limit)
    names: set[str] = set()
    tail = b""
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            digest.update(block)
            cutter.feed(block)
            if marks:
                names |= _marks_in(tail + block)
                tail = block[-_MARK_ROOM:]
    cutter.finish()
    bundles = tuple((stretch,) for stretch in cutter.stretches)
    checksum = f"sha256:{digest.hexdigest()}"
    return FileIndex(path, "lines", cutter.rows, cutter.line, bundles, checksum, frozenset(names))


def _marks_in(block: bytes) -> set[str]:
    names = set()
    for text in set(_MARK.findall(block)):
        try:
            names.add(str(json.loads(text)))
        except ValueError:
            continue  # part of a line that is no JSON: the line is counted when it is read
    return names - {""}


class _Cutter:
    """Cuts a stream of lines into stretches."""

    def __init__(self, file: int, window: int, limit: int) -> None:
        self.file, self.window, self.limit = file, window, limit
        self.stretches: list[Stretch] = []
        self.rows = 0
        self.line = 0
        """Lines that ended."""
        self._start, self._first, self._end, self._bytes = 0, 0, 0, 0

    def feed(self, block: bytes) -> None:
        import numpy as np

        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + (self._bytes + 1)
        self._bytes += len(block)
        if not len(ends):
            return
        lengths = np.diff(ends, prepend=self._end)
        self.rows += int((lengths > 2).sum())  # a line end of one or two bytes is a blank line
        at = 0
        while at < len(ends):
            by_rows = at + self.window - (self.line - self._first) - 1
            by_size = int(np.searchsorted(ends, self._start + self.limit))
            last = min(max(min(by_rows, by_size), at), len(ends) - 1)
            self.line += last - at + 1
            self._end = int(ends[last])
            if last == by_rows or self._end >= self._start + self.limit:
                self._cut()
            at = last + 1

    def finish(self) -> None:
        if self._bytes > self._end:  # a last line without its end
            self.line, self.rows, self._end = self.line + 1, self.rows + 1, self._bytes
        if self._end > self._start:
            self._cut()

    def _cut(self) -> None:
        rows, size = self.line - self._first, self._end - self._start
        self.stretches.append(Stretch(self.file, self._first, rows, self._start, size))
        self._start, self._first = self._end, self.line


# -- Parquet -------------------------------------------------------------------------------------


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, buffer_size=1 << 20)
    except pa.ArrowException as error:
        raise unreadable(path, f"not a sound Parquet file: {error}") from error


def _parquet_index(path: Path, number: int, window: int, limit: int, marks: bool) -> FileIndex:
    with _parquet(path) as file:
        least = _decoded_size(file)
        bundles = tuple(_group_bundles(file.metadata, number, window, limit, least))
        rows = file.metadata.num_rows
        names = _parquet_marks(file) if marks else frozenset()
    return FileIndex(path, "parquet", rows, rows, bundles, sampled_checksum(path), names)


def _decoded_size(file: Any) -> float:
    """Bytes a row takes in memory, by the first ones: equal texts are stored once in a file."""
    batch = next(file.iter_batches(batch_size=256), None)
    return 0.0 if batch is None or not batch.num_rows else batch.nbytes / batch.num_rows


def _group_bundles(
    metadata: Any, number: int, window: int, limit: int, least: float
) -> Iterator[tuple[Stretch, ...]]:
    """Small row groups together as one stretch; of a large one several in a row.

    A row takes `least` bytes or what the row group says, whichever is more.
    """
    first, start, rows, size = 0, 0, 0, 0
    for group in range(metadata.num_row_groups):
        about = metadata.row_group(group)
        more = max(about.total_byte_size, int(about.num_rows * least))
        if rows and (rows + about.num_rows > window or size + more > limit):
            yield _divided(number, first, rows, start, size, window, limit)
            first, start, rows, size = first + rows, group, 0, 0
        rows, size = rows + about.num_rows, size + more
    if rows:
        yield _divided(number, first, rows, start, size, window, limit)


def _divided(
    number: int, first: int, rows: int, group: int, size: int, window: int, limit: int
) -> tuple[Stretch, ...]:
    step = max(min(window, rows * limit // max(size, 1)), 1)
    return tuple(
        Stretch(number, first + at, min(step, rows - at), group, at) for at in range(0, rows, step)
    )


def _parquet_marks(file: Any) -> frozenset[str]:
    if "data_source" not in file.schema_arrow.names:
        return frozenset()
    names: set[str] = set()
    for batch in file.iter_batches(batch_size=1 << 16, columns=["data_source"]):
        names |= {v for v in batch.column(0).unique().to_pylist() if isinstance(v, str)}
    return frozenset(names - {""})


def sampled_checksum(path: Path) -> str:
    """A checksum of a file: of all of it up to 64 MiB, else of 64 samples and its size.

    The samples lie evenly between the head and the tail, 64 KiB each.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _HASHED_WHOLE:
            digest.update(file.read())
            return f"sha256:{digest.hexdigest()}"
        for place in range(_SAMPLES):
            digest.update(_sample(file, place * (size - _SAMPLE) // (_SAMPLES - 1)))
    return f"samples:{digest.hexdigest()}"


def _sample(file: BinaryIO, at: int) -> bytes:
    file.seek(at)
    return file.read(_SAMPLE)


# -- files that are read as a whole ----------------------------------------------------------------


def _whole_index(path: Path, number: int, window: int) -> FileIndex:
    check_whole(path)
    rows = whole_rows(path)
    names = {row.get("data_source") for _, row in rows if isinstance(row, dict)}
    marks = frozenset(n for n in names if isinstance(n, str) and n)
    stretches = tuple(
        Stretch(number, at, min(window, len(rows) - at), 0, 0) for at in range(0, len(rows), window)
    )
    checksum = sampled_checksum(path)
    return FileIndex(path, "whole", len(rows), len(rows), (stretches,), checksum, marks)
