"""Reads the rows of local files window by window, in a new order in every pass.

A *stretch* is read and shuffled at once: at most `window` rows and about `limit` bytes. One pass
over a .jsonl file finds its stretches, counts its rows and computes its sha256; Parquet metadata
has all of that except the checksum. A *bundle* is read in order, because reaching its middle means
reading its beginning: the rows of one row group, or a file that must be read as a whole (.json,
.csv, .tsv, and exports). A *window* holds the rows of a stretch in file
form (lines, Arrow columns), which needs far less memory than Python objects.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import shlex
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from soulkit.data.corpora.settings import hub_address, source_files
from soulkit.data.exports.datasets import is_scattered
from soulkit.data.exports.layouts import ReadOptions
from soulkit.data.exports.reading import is_export, open_export, recognise
from soulkit.data.exports.records import TREE_DEPTH
from soulkit.data.files import (
    BadRow,
    SourcedRow,
    empty_file,
    parse_row_json,
    read_rows,
    unreadable_file,
    write_lines,
)
from soulkit.data.parquet import PACKED, free_memory_for
from soulkit.errors import DataError
from soulkit.parse import ParseError, open_regular

WHOLE_FILE_LIMIT = 64 << 20


def check_whole(path: Path) -> None:
    """DataError if `path` is too large to hold in memory."""
    size = sum(file.size for file in open_export(path) if file.is_readable)
    if size > WHOLE_FILE_LIMIT:
        raise DataError(
            f"'{path}' is too large to read as a whole: {size >> 20} MiB.",
            f"Files of this format are held in memory and limited to {WHOLE_FILE_LIMIT >> 20} MiB.",
            "Write its conversations to a file with one per line, and give that: soul data import "
            f"chats {shlex.quote(str(path))} -o chats.jsonl",
        )


def whole_rows(path: Path) -> list[SourcedRow]:
    """All rows of a file, unreadable ones last; the records of one chat become one row."""
    state = path.stat()
    return _read_whole(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _read_whole(path: Path, changed_ns: int, size: int) -> list[SourcedRow]:
    if is_export(path):
        rows = list(recognise(path).rows(ReadOptions()))
        good: list[SourcedRow] = [
            (f"{path.name}:{n}", r)
            for n, r in enumerate((r for r in rows if not isinstance(r, BadRow)), 1)
        ]
        # A conversation may have the number of an unreadable record: their keys must differ.
        return [*good, *((f"record {r.source}", r) for r in rows if isinstance(r, BadRow))]
    flat, bad = read_rows(path)
    return [*((row.source, row.fields) for row in flat), *((row.source, row) for row in bad)]


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
    """Index of the file in the source."""
    first: int
    """Number of earlier rows in the file (.jsonl: lines)."""
    rows: int
    at: int
    """.jsonl: byte offset; Parquet: row group; else 0."""
    size: int
    """.jsonl: bytes; Parquet: earlier rows in its row group; else 0."""


@dataclass(frozen=True, slots=True)
class FileIndex:
    """Size, checksum and stretches of a file, known before its rows are read."""

    path: Path
    kind: FileKind
    rows: int
    """Number of rows, without blank lines."""
    span: int
    """Number of rows or lines that its stretches cover."""
    bundles: tuple[tuple[Stretch, ...], ...]
    checksum: str
    data_sources: frozenset[str]
    """Every `data_source` in it, if they were collected."""


def index_file(path: Path, number: int, window: int, limit: int, marks: bool) -> FileIndex:
    """Index `path`, file `number` of its source; DataError if it cannot be read.

    A stretch has `window` rows and about `limit` bytes. `marks`: collect the `data_source` names.
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
        raise unreadable_file(path, str(error.strerror or error)) from error
    if not index.rows:
        raise empty_file(path)
    return index


def _kind(path: Path) -> FileKind:
    """How the file is read: as a whole if a conversation is more, or something else, than a row."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        with open_parquet(path) as file:
            names = frozenset(file.schema_arrow.names)
        return "whole" if is_scattered(names) else "parquet"
    return "whole" if suffix != ".jsonl" or is_export(path) else "lines"


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
            continue  # the line is not JSON; it is counted when it is read
    return names - {""}


class _Cutter:
    def __init__(self, file: int, window: int, limit: int) -> None:
        self.file, self.window, self.limit = file, window, limit
        self.stretches: list[Stretch] = []
        self.rows = 0
        self.line = 0
        """Number of complete lines."""
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
        if self._bytes > self._end:  # last line without a line end
            self.line, self.rows, self._end = self.line + 1, self.rows + 1, self._bytes
        if self._end > self._start:
            self._cut()

    def _cut(self) -> None:
        rows, size = self.line - self._first, self._end - self._start
        self.stretches.append(Stretch(self.file, self._first, rows, self._start, size))
        self._start, self._first = self._end, self.line


# -- Parquet -------------------------------------------------------------------------------------


def open_parquet(path: Path) -> Any:
    """Open a Parquet file for reading page by page; DataError if it is not one.

    Reading ahead would hold the compressed columns of a whole row group in memory, and a file may
    have a single row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    except pa.ArrowException as error:
        raise unreadable_file(path, f"not a valid Parquet file: {error}") from error


def _parquet_index(path: Path, number: int, window: int, limit: int, marks: bool) -> FileIndex:
    import pyarrow as pa

    try:
        with open_regular(path) as stream:
            free_memory_for(stream)
    except ParseError as error:
        raise unreadable_file(path, str(error)) from error
    except (pa.ArrowException, OSError, ValueError) as error:
        raise unreadable_file(path, f"not a valid Parquet file: {error}") from error
    with open_parquet(path) as file:
        least = _decoded_size(file)
        bundles = tuple(_group_bundles(file.metadata, number, window, limit, least))
        rows = file.metadata.num_rows
        names = _parquet_marks(file) if marks else frozenset()
    return FileIndex(path, "parquet", rows, rows, bundles, sampled_checksum(path), names)


def _decoded_size(file: Any) -> float:
    """Bytes per row in memory, from the first rows: equal texts are stored only once in a file."""
    batch = next(file.iter_batches(batch_size=256), None)
    return 0.0 if batch is None or not batch.num_rows else batch.nbytes / batch.num_rows


def _group_bundles(
    metadata: Any, number: int, window: int, limit: int, least: float
) -> Iterator[tuple[Stretch, ...]]:
    """Small row groups are combined into one stretch; large ones are divided into several.

    The size of a row is `least` bytes or the row group's own figure, whichever is larger.
    """
    first, start, rows, size = 0, 0, 0, 0
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        more = max(row_group.total_byte_size, int(row_group.num_rows * least))
        if rows and (rows + row_group.num_rows > window or size + more > limit):
            yield _divided(number, first, rows, start, size, window, limit)
            first, start, rows, size = first + rows, group, 0, 0
        rows, size = rows + row_group.num_rows, size + more
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
    """The checksum of a file: of all bytes up to 64 MiB, of the size and 64 samples above that.

    The samples of 64 KiB are evenly spaced from the start to the end of the file.
    """
    digest = hashlib.sha256()
    if path.is_dir():
        for part in open_export(path):
            digest.update(f"{part.name}\n{sampled_checksum(path / part.name)}\n".encode())
        return f"sha256:{digest.hexdigest()}"
    size = path.stat().st_size
    digest.update(str(size).encode())
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


@dataclass(frozen=True, slots=True)
class Window:
    """Rows that are shuffled together."""

    ordinals: Sequence[int]
    """The position of each row in its source, the same in every pass."""
    row: Callable[[int], SourcedRow]
    """Index in the window → (`file:row`, the row or a BadRow)."""

    def __len__(self) -> int:
        return len(self.ordinals)


class WindowReader:
    """Reads stretches of a source's files; the next stretch of a bundle needs no reopening."""

    def __init__(self, files: Sequence[FileIndex], labels: Sequence[str]) -> None:
        """`labels` are the file names used in row keys."""
        self.files, self.labels = files, labels
        self._offsets = [sum(f.span for f in files[:n]) for n in range(len(files))]
        self._cursor: _ParquetCursor | None = None

    def read(self, stretch: Stretch) -> Window:
        """Read one stretch; DataError if the file has changed since it was indexed."""
        file = self.files[stretch.file]
        label = self.labels[stretch.file]
        base = self._offsets[stretch.file] + stretch.first
        try:
            if file.kind == "lines":
                return _line_window(file.path, stretch, label, base)
            if file.kind == "parquet":
                return self._parquet_window(file.path, stretch, label, base)
        except OSError as error:
            raise unreadable_file(file.path, str(error.strerror or error)) from error
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
        raise unreadable_file(path, "it has become shorter since its rows were counted")
    lines = content.split(b"\n")
    places = [n for n, line in enumerate(lines) if line.strip()]

    def row(place: int) -> SourcedRow:
        number = places[place]
        source = f"{label}:{stretch.first + number + 1}"
        try:
            return source, parse_row_json(lines[number].decode("utf-8-sig"), TREE_DEPTH)
        except UnicodeDecodeError:
            return source, BadRow(source, "the line is not UTF-8 text")
        except ValueError as error:
            return source, BadRow(source, f"the line is not JSON: {error}")

    # Blank lines have no ordinal, so that a ratio below 1 selects among rows.
    return Window(range(base, base + len(places)), row)


class _ParquetCursor:
    def __init__(self, path: Path, stretch: Stretch) -> None:
        self.path, self.row = path, stretch.first
        self._file = open_parquet(path)
        schema = self._file.schema_arrow
        self.packed = [f.name for f in schema if PACKED in (f.metadata or {})]
        groups = list(range(stretch.at, self._file.metadata.num_row_groups))
        self._batches: Iterator[Any] = self._file.iter_batches(256, row_groups=groups)
        self._rest: Any = None
        for _ in self._slices(stretch.size):  # skip the earlier rows
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
                raise unreadable_file(self.path, f"rows are missing or damaged: {error}") from error
            head = batch.slice(0, rows)
            self._rest = batch.slice(rows) if batch.num_rows > rows else None
            rows -= head.num_rows
            yield head

    def close(self) -> None:
        self._file.close()


class FileStore:
    """The files of one source. A start is the number of a window in its pass."""

    def __init__(
        self, paths: Sequence[Path], window: int, limit: int, salt: str, marks: bool
    ) -> None:
        """Index `paths`. `salt` seeds the orders; `marks`: collect the `data_source` names."""
        self._files = [index_file(p, n, window, limit, marks) for n, p in enumerate(paths)]
        self._labels = file_labels(paths)
        self._reader = WindowReader(self._files, self._labels)
        self._salt = salt
        self._orders: dict[int, list[Stretch]] = {}

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self._files)

    @property
    def span(self) -> int:
        return sum(file.span for file in self._files)

    def count(self) -> int:
        return self.rows

    @property
    def data_sources(self) -> frozenset[str]:
        return frozenset[str]().union(*(file.data_sources for file in self._files))

    def first(self, epoch: int, shuffled: bool) -> int:
        return 0

    def window(self, start: int, epoch: int, shuffled: bool) -> tuple[Window, int] | None:
        stretches = self._order(epoch if shuffled else -1)
        if start >= len(stretches):
            return None
        return self._reader.read(stretches[start]), start + 1

    def _order(self, epoch: int) -> list[Stretch]:
        """The stretches of all files in the order of a pass; -1: in file order."""
        if epoch not in self._orders:
            bundles = [bundle for file in self._files for bundle in file.bundles]
            if epoch >= 0:
                random.Random(f"{self._salt}/{epoch}/order").shuffle(bundles)
            self._orders = {epoch: [stretch for bundle in bundles for stretch in bundle]}
        return self._orders[epoch]

    def identity(self) -> list[list[str]]:
        pairs = zip(self._labels, self._files, strict=True)
        return [[label, file.checksum] for label, file in pairs]

    def check(self, identity: Any) -> None:
        before = {str(label): str(checksum) for label, checksum in identity}
        now = {label: file.checksum for label, file in zip(self._labels, self._files, strict=True)}
        changes = [
            *(f"'{name}' has changed" for name in now if before.get(name, now[name]) != now[name]),
            *(f"'{name}' is new" for name in now.keys() - before.keys()),
            *(f"'{name}' is missing" for name in before.keys() - now.keys()),
        ]
        if changes:
            more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
            raise DataError(
                f"The corpus has changed: {sorted(changes)[0]}{more}.",
                "The run would skip or repeat rows without notice.",
                "Restore the original files, or start a new run.",
            )


def file_labels(paths: Sequence[Path]) -> list[str]:
    """Names of the files in row keys: the file name if it is unique, else the path."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [path.as_posix() for path in paths]


def source_rows(path: str) -> Iterator[SourcedRow]:
    """Yield (`file:row`, row or BadRow) for all files that `path` names, in order.

    DataError for a Hub dataset, whose rows are not local.
    """
    if hub_address(path) is not None:
        raise DataError(
            f"'{path}' is not a local file, folder or pattern.",
            "This command compares row by row and needs local files.",
            "Check the path, or download the dataset and name its files.",
        )
    store = FileStore(source_files(path), 1024, 8 << 20, "", False)
    start = 0
    while (step := store.window(start, 0, False)) is not None:
        window, start = step
        yield from map(window.row, range(len(window)))


def write_clean(path: str, target: Path, left_out: Container[str]) -> int:
    """Write the rows of `path` whose keys are not in `left_out` as .jsonl; return their number.

    DataError if the file exists with other content, or if no row is left.
    """
    count = 0

    def lines() -> Iterator[Any]:
        nonlocal count
        for key, row in source_rows(path):
            if key not in left_out and not isinstance(row, BadRow):
                count += 1
                yield row

    write_lines(target, lines())
    return count
