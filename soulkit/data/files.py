"""Finds, reads and writes row files (.jsonl, .json, .parquet, .csv, .tsv).

Each reader returns the readable rows with their source (`file:number`: the line in text files, else
the row), and the unreadable ones with a reason. None, NaN and an empty CSV cell mean *absent*.

Released files keep the real row in the struct `extra_info` (or its JSON, or under `raw` in it) and
a dummy `prompt` next to it. The readers flatten this layout and keep `data_source`.

Without `--data`, released files are read from `$SOULKIT_DATA` or `./data`, where `soul data pull`
stores them. `tasks.yaml` lists the files of each task.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import difflib
import filecmp
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from soulkit.data.parquet import PACKED, parquet_rows
from soulkit.errors import DataError
from soulkit.parse import DEPTH, ParseError, decoded, open_regular, parse_json, read_limited
from soulkit.text import byte_size

RELEASED = frozenset(
    ("prompt", "data_source", "extra_info", "ability", "reward_model", "agent_name", "index", "uid")
)
"""Columns that a file in the released layout may have besides the row itself."""

MAX_BYTES = 4_000_000_000
"""Maximum size of a file that is read as a whole (.json, .csv)."""
MAX_LINE = 100_000_000
"""Maximum bytes of one line of a text file."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """One flat row as stored in its file; columns are not yet bound or checked."""

    fields: dict[str, Any]
    source: str


@dataclass(frozen=True, slots=True)
class BadRow:
    """An unusable row and the reason."""

    source: str
    why: str


class BadRecord(Exception):
    """This record is not a row, chat or lesson; the message gives the reason."""


class UnusableFile(DataError):
    """A file that is missing, damaged, empty, or not a list of rows."""


def read_rows(path: Path) -> tuple[list[RawRow], list[BadRow]]:
    """All rows of a file, in file order. DataError if the file as a whole is unusable."""
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        check_file(path)
        raise UnusableFile(
            f"'{path}' is not in a supported row format.",
            f"The suffix selects the format, and '{path.suffix}' is unknown.",
            f"Rename or convert the file to one of {', '.join(_READERS)}.",
        )
    good: list[RawRow] = []
    bad: list[BadRow] = []
    for source, value in reader(path):
        if isinstance(value, BadRow):
            bad.append(value)
            continue
        try:
            good.append(RawRow(flatten(value), source))
        except ValueError as error:
            bad.append(BadRow(source, str(error)))
    if not good and not bad:
        raise empty_file(path)
    return good, bad


def row_address(path: Path) -> tuple[Path, int | None]:
    """Split `rows.jsonl:3` into file and row number; the path and None without a number."""
    name, _, number = str(path).rpartition(":")
    if not name or not number.isdecimal() or path.exists():
        return path, None
    return Path(name), int(number)


def row_number(source: str) -> int:
    """The number in `file:row`, counted from 1: the line in text files, else the record."""
    return int(source.rpartition(":")[2])


def numbered_row(path: Path, number: int | None) -> RawRow:
    """Row `number` of a file; without a number, the first readable row.

    DataError, with the valid numbers, if the row is missing or unreadable.
    """
    rows, bad = read_rows(path)
    if number is None and rows:
        return rows[0]
    every: list[RawRow | BadRow] = [*bad, *rows]
    places = {row_number(row.source): row for row in every}
    there = places.get(row_number(bad[0].source) if number is None else number)
    if isinstance(there, RawRow):
        return there
    numbers = [row_number(row.source) for row in rows]
    way_out = "Fix the file first."
    if numbers:
        way_out = f"Set --row to a number from {numbers[0]} to {numbers[-1]}."
    if there is not None:
        raise DataError(f"{there.source} cannot be read as a row.", f"{there.why}.", way_out)
    header = path.suffix.lower() in (".csv", ".tsv")
    raise DataError(
        f"'{path}' has no row {number}.",
        f"It has {len(rows)} readable rows and {len(bad)} unreadable ones, counted from 1"
        f"{', including the header line' if header else ''}.",
        way_out,
    )


def empty_file(path: Path) -> UnusableFile:
    return UnusableFile(
        f"'{path}' contains no rows.",
        "The command needs at least one row.",
        "Check that the file was written completely, or give another file.",
    )


def check_file(path: Path) -> None:
    """DataError unless `path` is an existing file."""
    if path.is_dir():
        raise UnusableFile(
            f"'{path}' is a folder, not a file.",
            "Rows are read from a single file.",
            "Give the path of a file in this folder.",
        )
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, n=1)
        state = "does not contain it" if siblings else "is empty or missing"
        raise UnusableFile(
            f"The file '{path}' does not exist.",
            f"The folder '{path.parent}' {state}.",
            f"Did you mean '{near[0]}'?" if near else "Check the path.",
        )
    if not path.is_file():
        raise unreadable_file(path, "it is a pipe, device or socket, not a regular file")


def read_bytes(path: Path) -> bytes:
    """The content of a file; DataError if it is missing or unreadable."""
    check_file(path)
    try:
        return read_limited(path, MAX_BYTES)
    except OSError as error:
        raise unreadable_file(path, str(error.strerror)) from error
    except ParseError as error:
        raise unreadable_file(path, str(error)) from error


def read_text(path: Path) -> str:
    """The UTF-8 text of a file; DataError if it is missing or unreadable."""
    try:
        return decoded(read_bytes(path))
    except ParseError as error:
        raise unreadable_file(path, str(error)) from error


def unreadable_file(path: Path, why: str) -> UnusableFile:
    return UnusableFile(
        f"'{path}' cannot be read.",
        f"The reader reports: {' '.join(why.split()).rstrip('.')}.",
        "Copy or download the file again, and check that its suffix matches its format.",
    )


def text_lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Pairs (line number from 1, text without line end); None for a line that is not UTF-8."""
    check_file(path)
    try:
        with open_regular(path) as stream:
            # Lines end at newlines only: JSON strings may contain Unicode line separators.
            for number, line in enumerate(iter(partial(stream.readline, MAX_LINE), b""), 1):
                if len(line) == MAX_LINE:
                    raise ParseError(f"line {number} is longer than {byte_size(MAX_LINE)}")
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    yield number, None
                else:
                    yield number, text.removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise unreadable_file(path, str(error.strerror)) from error
    except ParseError as error:
        raise unreadable_file(path, str(error)) from error


def read_json(path: Path) -> Any:
    """The parsed content of a JSON file; UnusableFile if it is not JSON."""
    content = read_bytes(path)
    try:
        return parse_row_json(content)
    except ParseError as error:
        raise unreadable_file(path, f"not JSON: {error}") from error


def parse_row_json(text: str | bytes, depth: int = DEPTH) -> Any:
    """Parse the JSON of a row, reading NaN as None; ParseError for anything else."""
    return parse_json(text, depth=depth, nan_is_null=True)


# -- one reader per format: (source, row or BadRow) ----------------------------------------------

SourcedRow = tuple[str, Any]


def _read_jsonl(path: Path) -> Iterator[SourcedRow]:
    for number, line in text_lines(path):
        source = f"{path.name}:{number}"
        if line is None:
            yield source, BadRow(source, "the line is not UTF-8 text")
        elif line.strip():
            try:
                yield source, parse_row_json(line)
            except ParseError as error:
                yield source, BadRow(source, f"the line is not JSON: {error}")


def _read_json(path: Path) -> Iterator[SourcedRow]:
    value = read_json(path)
    rows = value.get("data") if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise UnusableFile(
            f"'{path}' is not a list of rows.",
            'A .json file must be an array of objects, or {"data": [...]}.',
            "Wrap the rows in an array, or write one object per line and name the file .jsonl.",
        )
    for number, row in enumerate(rows, 1):
        yield f"{path.name}:{number}", row


def _read_parquet(path: Path) -> Iterator[SourcedRow]:
    check_file(path)
    try:
        with open_regular(path) as stream:
            for number, row in enumerate(parquet_rows(stream), 1):
                source = f"{path.name}:{number}"
                yield source, BadRow(source, str(row)) if isinstance(row, ParseError) else row
    except (OSError, ParseError) as error:
        raise unreadable_file(path, str(error)) from error


def _read_csv(path: Path) -> Iterator[SourcedRow]:
    text = read_text(path)
    csv.field_size_limit(2**31 - 1)  # stories exceed the csv module's default limit
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        source = f"{path.name}:{reader.line_num + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield source, BadRow(source, f"the record is not valid CSV: {error}")
            continue
        if header is None:
            header = _header(path, cells)
        elif cells:
            yield source, _record(header, cells, source)


def _header(path: Path, cells: Sequence[str]) -> list[str]:
    names = [cell.strip() for cell in cells]
    if not names or len(set(names)) < len(names):
        raise UnusableFile(
            f"The first line of '{path}' is not a valid header.",
            f"It reads: {', '.join(names) or '(empty)'}.",
            "Put a line with one unique name per column first.",
        )
    return names


def _record(header: Sequence[str], cells: Sequence[str], source: str) -> dict[str, str] | BadRow:
    if len(cells) != len(header):
        return BadRow(source, f"it has {len(cells)} cells, but the header has {len(header)}")
    return {name: cell for name, cell in zip(header, cells, strict=True) if cell}


_READERS: dict[str, Callable[[Path], Iterator[SourcedRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
ROW_SUFFIXES = tuple(_READERS)


# -- flattening ----------------------------------------------------------------------------------


def flatten(row: Any, levels: int = DEPTH) -> dict[str, Any]:
    """A row without the released wrapping and absent values. ValueError if it is not an object."""
    if not isinstance(row, Mapping):
        kinds = {str: "text", list: "a list", type(None): "null"}
        raise ValueError(
            f"it is {kinds.get(type(row), 'a single value')}, not a row of named fields"
        )
    fields = without_absent(row, levels)
    inner = fields.get("extra_info")
    if isinstance(inner, str):
        inner = _unpack(inner, must=set(fields) <= RELEASED)
    if not isinstance(inner, Mapping):
        return fields
    flat = _with_raw(inner)
    if "data_source" in fields:
        flat["data_source"] = fields["data_source"]
    # Files that mix both layouts keep their other columns; only the wrapping is dropped.
    return {**{k: v for k, v in fields.items() if k not in RELEASED}, **without_absent(flat)}


def _with_raw(inner: Mapping[str, Any]) -> dict[str, Any]:
    raw = inner.get("raw")
    if isinstance(raw, str):
        raw = _unpack(raw, must=False)
    if not isinstance(raw, Mapping):
        return dict(inner)
    return {**{k: v for k, v in inner.items() if k != "raw"}, **raw}


def _unpack(text: str, must: bool) -> Mapping[str, Any] | None:
    """The object in a JSON string. Without one: None, or ValueError if it `must` be there."""
    why = "it is not a JSON object"
    if text.lstrip().startswith("{"):
        try:
            value = parse_row_json(text)
            return value if isinstance(value, Mapping) else None
        except ValueError as error:
            why = str(error)
    if must:
        raise ValueError(f"extra_info cannot be parsed: {why}")
    return None


_AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)


def without_absent(value: Any, levels: int = DEPTH) -> Any:
    """`value` without keys whose value is None or NaN; in lists such values become None.

    Dates, decimals and bytes become text. ValueError for values that JSON cannot store.
    """
    if isinstance(value, str):  # the most common case
        return value
    if not levels:
        raise ParseError(f"it is nested too deeply (more than {DEPTH} levels)")
    if isinstance(value, Mapping):
        values = {}
        for key, item in value.items():
            if (item := without_absent(item, levels - 1)) is not None:
                values[str(key)] = item
        return values
    if isinstance(value, list | tuple):
        return list(map(without_absent, value, repeat(levels - 1)))  # one frame per level
    if isinstance(value, bytes):
        return decoded(value)
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return None
        raise ParseError("it has an infinite number")
    return str(value) if isinstance(value, _AS_TEXT) else value


# -- writing -------------------------------------------------------------------------------------


Writer = Callable[[Path, Sequence[Mapping[str, Any]]], None]


def refuse_same(source: Path, target: Path) -> None:
    """DataError if `target` is the file being read."""
    if target.exists() and source.exists() and target.samefile(source):
        raise DataError(
            f"'{target}' is also the input file.",
            "Writing the result there would overwrite the input.",
            "Choose another output file with -o.",
        )


def check_target(path: Path, suffixes: Iterable[str] = (".jsonl", ".parquet")) -> None:
    """DataError if `path` is a folder or has another suffix. Call it before any work starts."""
    if path.suffix.lower() not in suffixes or path.is_dir():
        endings = " or ".join(suffixes)
        raise DataError(
            f"Cannot write to '{path}'.",
            f"This command writes {endings} files, and the suffix selects the format.",
            f"Choose a file name that ends in {endings}.",
        )


def write_rows(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    data_source: str = "",
    replace: bool = True,
) -> int:
    """Write flat rows as .jsonl or .parquet and return their number.

    Writes to a temporary file, then renames it. `data_source` marks rows without one. DataError if
    there are no rows, for another suffix, or (without `replace`) if the file has other content.
    """
    check_target(path)
    marked = [{**({"data_source": data_source} if data_source else {}), **row} for row in rows]
    if not marked:
        raise DataError(
            f"There are no rows to write to '{path}'.",
            "The next command would fail on an empty file.",
            "Check the options of this command, and the unreadable rows it listed, if any.",
        )
    write = _WRITERS[path.suffix.lower()]
    _write_aside(path, lambda aside: write(aside, marked), replace)
    return len(marked)


def write_objects(path: Path, lines: Iterable[Mapping[str, Any]], *, replace: bool) -> int:
    """Write objects that are not rows as JSON lines, like `write_rows`; the list may be empty."""
    check_target(path, (".jsonl",))
    objects = list(lines)
    _write_aside(path, lambda aside: _write_jsonl(aside, objects), replace)
    return len(objects)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines while they are produced, then rename the temporary file.

    Values without a JSON form (dates) are written as text. DataError if the file exists with other
    content, or if there are no rows.
    """
    check_target(path, (".jsonl",))

    def write(aside: Path) -> None:
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            if not file.tell():
                raise empty_file(path)

    _write_aside(path, write, replace=False)


def _write_aside(path: Path, write: Callable[[Path], None], replace: bool) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(aside)
            if not replace:
                _refuse_other(path, aside)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"'{path}' cannot be written.",
            f"The system reports: {error.strerror or error}.",
            "Check the folder and the free disk space, or choose another file name.",
        ) from error


def _refuse_other(path: Path, aside: Path) -> None:
    if path.exists() and not filecmp.cmp(path, aside, shallow=False):
        raise DataError(
            f"'{path}' already exists with different content.",
            "Writing would overwrite it, and it may be the only copy.",
            "Choose another file name, or delete the file first.",
        )


def _write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = dict.fromkeys(name for row in rows for name in row)
    columns, fields = [], []
    for name in names:
        values = [row.get(name) for row in rows]
        column = _column(values)
        packed = column is None
        if column is None:
            column = pa.array([None if v is None else json.dumps(v) for v in values])
        columns.append(column)
        fields.append(pa.field(name, column.type, metadata={PACKED: b"json"} if packed else None))
    pq.write_table(pa.Table.from_arrays(columns, schema=pa.schema(fields)), path)


def _column(values: Sequence[Any]) -> Any:
    """An Arrow array of `values`; None if Parquet has no single type for them."""
    import pyarrow as pa

    try:
        column = pa.array(values)
    except (pa.ArrowException, TypeError):
        return None
    return None if "struct<>" in str(column.type) else column


_WRITERS: dict[str, Writer] = {
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}


DATA_FOLDER = "SOULKIT_DATA"
DEFAULT_FOLDER = "data"


def data_folder() -> Path:
    """The folder in SOULKIT_DATA, else `data` in the working folder; it may not exist."""
    return Path(os.environ.get(DATA_FOLDER) or DEFAULT_FOLDER)


def released_files(task: str, names: Sequence[str], folder: str | None = None) -> list[Path]:
    """The released files `names` of a task: all of them, or an empty list.

    `folder` is the value of `--data`. DataError if only some files are present, because a mean over
    part of the rows could be mistaken for the full result.
    """
    place = Path(folder) if folder is not None else data_folder()
    paths = [place / name for name in names if (place / name).is_file()]
    if paths and len(paths) < len(names):
        absent = ", ".join(name for name in names if place / name not in paths)
        raise DataError(
            f"'{place}' contains only {len(paths)} of the {len(names)} files of task '{task}'.",
            f"Missing: {absent}. A result on part of the rows could be mistaken for a full result.",
            f"Download the rest with: soul data pull --task {task}, or give one file with --data.",
        )
    return paths


def data_files(task: str, names: Sequence[str], source: str | None) -> list[Path]:
    """The file given with `--data`, or the `released_files` in the folder given there."""
    if source is not None and not Path(source).is_dir():
        return [Path(source)]
    return released_files(task, names, source)


def folder_note() -> str:
    """The folder for pulled rows and where that setting comes from."""
    from_environment = bool(os.environ.get(DATA_FOLDER))
    unset = f"the default, because {DATA_FOLDER} is not set"
    origin = f"from {DATA_FOLDER}" if from_environment else unset
    return f"the folder '{data_folder()}' ({origin})"


def search_note(names: Sequence[str], folder: str | None = None) -> str:
    """Where `released_files` looked, and for which files."""
    place = f"the folder '{folder}'"
    if folder is None:
        place = f"no --data was given, and {folder_note()}"
    if not names:
        return f"{place} was not searched, because the task has no released files"
    return f"{place} does not contain {' or '.join(names)}"
