"""The records of one file of an export: JSON, JSON lines, CSV or Parquet, read as a stream."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from soulkit.data.exports.layouts import SAMPLE, ExportFile, ReadOptions
from soulkit.data.files import BadRecord, BadRow, SourcedRow, parse_row_json, unreadable_file

_BOM = b"\xef\xbb\xbf"
LISTS = ("data", "conversations", "rows", "records", "items", "results", "chats", "threads",
         "traces", "observations", "runs", "tickets")  # fmt: skip
"""Names under which an object may hold the list of its records."""
_MESSAGE = frozenset(("role", "from", "sender", "author", "speaker"))


def records(file: ExportFile, at: str | None = None) -> Iterator[SourcedRow]:
    """(`file:number`, record or BadRow) for all records of a file, one at a time.

    The records are lines of JSON, rows of a table, the entries of an array, or the entries of the
    list that an object has under one of LISTS; any other object is one record. `at` names another
    place in ijson's form: `chats.list.item`. UnusableFile if the file is damaged.
    """
    form = _form(file)
    if at is None and form == "table":
        values: Iterable[Any] = _table(file)
    elif at is None and form == "lines":
        yield from _lines(file)
        return
    else:
        values = _streamed(file, _place(file) if at is None else at)
    for number, value in enumerate(values, 1):
        source = f"{file.name}:{number}"
        yield source, BadRow(source, value.why) if isinstance(value, BadRow) else value


@lru_cache(maxsize=4)
def sample_of(file: ExportFile) -> Sequence[Any]:
    """The first SAMPLE records, read from the head; what the head cuts is kept as far as it goes.

    Empty for a file without records.
    """
    form = _form(file)
    if form == "table":
        try:
            return [row for row in islice(_table(file), SAMPLE) if not isinstance(row, BadRow)]
        except (UnicodeError, ValueError, OSError):
            return []
    if form == "lines":
        lines = [line for line in file.head.removeprefix(_BOM).split(b"\n") if line.strip()]
        values = [_partial(line) for line in lines[:SAMPLE]]
        return [value for value in values if value is not None]
    value = _partial(file.head.removeprefix(_BOM))
    name = _list_name(value)
    inner = value[name] if name else value
    return inner[:SAMPLE] if isinstance(inner, list) else [] if inner is None else [inner]


def converted(
    files: Sequence[ExportFile],
    convert: Callable[[Any, ReadOptions], Iterable[dict[str, Any]]],
    options: ReadOptions,
    at: str | None = None,
) -> Iterator[dict[str, Any] | BadRow]:
    """The rows that `convert` makes of every record; a BadRecord makes a BadRow."""
    for file in files:
        for source, record in records(file, at):
            if isinstance(record, BadRow):
                yield record
                continue
            try:
                yield from convert(record, options)
            except BadRecord as error:
                yield BadRow(source, str(error))


# -- forms of files ------------------------------------------------------------------------------


def _form(file: ExportFile) -> str:
    """`table`, `lines` or `json`; other text counts as JSON that cannot be parsed."""
    name = file.name.lower()
    if name.endswith((".parquet", ".csv", ".tsv")):
        return "table"
    head = file.head.removeprefix(_BOM).lstrip()
    if not head.startswith(b"{"):
        return "json"
    first, _, rest = head.partition(b"\n")
    if name.endswith((".jsonl", ".ndjson")):
        return "lines"
    return "lines" if rest.lstrip().startswith(b"{") and _is_json(first) else "json"


def _is_json(line: bytes) -> bool:
    try:
        parse_row_json(line.decode("utf-8"))
    except ValueError:
        return False
    return True


def _partial(text: bytes) -> Any:
    """The JSON value in `text`, as far as it goes; None if it starts with something else."""
    import ijson

    if text.lstrip()[:1] not in (b"{", b"["):
        return None
    builder = ijson.ObjectBuilder()
    try:
        for event, value in ijson.basic_parse(io.BytesIO(text), use_float=True):
            builder.event(event, value)
    except ijson.JSONError:
        pass  # the head ends here
    return getattr(builder, "value", None)


def _list_name(value: Any) -> str | None:
    """The name of LISTS under which an object holds its records."""
    for name in LISTS if isinstance(value, Mapping) else ():
        entries = value.get(name)
        if isinstance(entries, list) and entries and isinstance(entries[0], Mapping):
            return None if _MESSAGE & entries[0].keys() else name
    return None


def is_plain(file: ExportFile) -> bool:
    """Whether a file has the form of a row file: .json with an array, or with a list `data`."""
    return not file.name.lower().endswith(".json") or (
        _form(file) == "json" and _place(file) in ("item", "data.item")
    )


def _place(file: ExportFile) -> str:
    head = file.head.removeprefix(_BOM)
    if head.lstrip().startswith(b"["):
        return "item"
    name = _list_name(_partial(head))
    return f"{name}.item" if name else ""


def _streamed(file: ExportFile, at: str) -> Iterator[Any]:
    import ijson

    with file.opener() as stream:
        if file.head.startswith(_BOM):
            stream.read(len(_BOM))
        try:
            yield from ijson.items(stream, at, use_float=True)
        except ijson.JSONError as error:
            raise unreadable_file(Path(file.name), f"not JSON: {error}") from error


def _lines(file: ExportFile) -> Iterator[SourcedRow]:
    with file.opener() as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            source = f"{file.name}:{number}"
            try:
                yield source, parse_row_json(line.decode("utf-8-sig"))
            except ValueError as error:
                yield source, BadRow(source, f"the line is not JSON: {error}")


def _table(file: ExportFile) -> Iterator[Any]:
    with file.opener() as stream:
        if file.name.lower().endswith(".parquet"):
            yield from _parquet(file, stream)
            return
        csv.field_size_limit(2**31 - 1)
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        head = file.head.decode("utf-8", "replace").partition("\n")[0]
        mark = max("\t;,", key=head.count) if file.size else ","
        for cells in csv.DictReader(text, delimiter=mark, restkey="", restval=None):
            odd = "" in cells and cells.pop("")
            yield BadRow("", "it has more cells than the header") if odd else cells


def _parquet(file: ExportFile, stream: BinaryIO) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(stream) as table:
            for batch in table.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise unreadable_file(Path(file.name), f"not a valid Parquet file: {error}") from error
