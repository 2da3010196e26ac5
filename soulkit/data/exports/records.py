"""The records of one file of an export: JSON, JSON lines, CSV or Parquet, read as a stream."""

from __future__ import annotations

import csv
import html
import io
import mimetypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from soulkit.data.exports.layouts import SAMPLE, ExportFile, ReadOptions
from soulkit.data.files import BadRecord, BadRow, SourcedRow, parse_row_json, unreadable_file
from soulkit.data.parquet import parquet_rows
from soulkit.parse import ParseError

Row = dict[str, Any]
Convert = Callable[[Any, ReadOptions], Iterable[Row]]
_BOM = b"\xef\xbb\xbf"
LISTS = ("data", "conversations", "rows", "records", "items", "results", "chats", "threads",
         "runs", "tickets")  # fmt: skip
"""Names under which an object may hold the list of its records."""
TREE_DEPTH = 700
"""Maximum levels of a line: a tree of replies has two for each reply."""
_MESSAGE = frozenset(("role", "from", "sender", "author", "speaker"))


def records(file: ExportFile, at: str | None = None) -> Iterator[SourcedRow]:
    """(`file:number`, record or BadRow) for all records of a file, one at a time.

    The records are lines of JSON, rows of a table, the entries of an array, or the entries of the
    list that an object has under one of LISTS; any other object is one record. `at` names another
    place in ijson's form: `chats.list.item`. UnusableFile if the file is damaged.
    """
    form = _form(file) if at is None else "json"
    if form == "lines":
        yield from _lines(file)
        return
    values = _table(file) if form == "table" else _streamed(file, _place(file, at))
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
    convert: Convert, files: Sequence[ExportFile], options: ReadOptions
) -> Iterator[Row | BadRow]:
    """The rows that `convert` makes of every record of the files."""
    for file in files:
        yield from converted_records(records(file), convert, options)


def converted_records(
    sourced: Iterable[SourcedRow], convert: Convert, options: ReadOptions
) -> Iterator[Row | BadRow]:
    """The rows that `convert` makes of every record; one in another form makes a BadRow."""
    for source, record in sourced:
        try:
            if isinstance(record, BadRow):
                yield record
            else:
                yield from convert(record, options)
        except BadRecord as error:
            yield BadRow(source, str(error))
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            yield BadRow(source, f"it has another form: {type(error).__name__}: {error}")


# -- parts of messages ---------------------------------------------------------------------------


def spoken_message(
    side: str, who: Any, text: Any, time: Any = None, kinds: Iterable[str] = (), **more: Any
) -> Row | None:
    """A message whose `side` is `role` or `speaker`; None if it is empty."""
    speaker, content, marks = str(who or "").strip(), str(text or "").strip(), list(kinds)
    if not (content or marks or more.get("tool_calls")):
        return None
    if not speaker:
        raise BadRecord("a message has no speaker")
    fields = {"time": iso_time(time), "attachments": marks, **more}
    filled = {name: value for name, value in fields.items() if value not in ("", [])}
    return {side: speaker, "content": content, **filled}


def attachment_kind(name: Any) -> str:
    """`image`, `video`, `audio` or `file`, by a media type or the name of a file."""
    names = (str(name), mimetypes.guess_type(str(name))[0] or "")
    kinds = (word for word in names if word.startswith(("image/", "video/", "audio/")))
    return next(kinds, "file/").partition("/")[0]


def html_words(text: str) -> str:
    """The words of HTML, one paragraph per line."""
    broken = re.sub(r"(?i)\s*(?:<br\s*/?>|</(?:p|div|li|h\d|tr)>)\s*", "\n", text)
    return html.unescape(re.sub(r"<[^<>]+>", "", broken)).replace("\xa0", " ").strip()


def iso_time(value: Any) -> str:
    """A time in ISO 8601, also from seconds (or a thousandth) since 1970; empty if it is none."""
    try:
        if not re.fullmatch(r"(?!\d{8}$)\d+(\.\d+)?", str(value)):  # eight digits are a date
            return datetime.fromisoformat(str(value)).isoformat()
        seconds = float(value)
        while seconds > 1e11:
            seconds /= 1000
        return datetime.fromtimestamp(seconds, UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return ""


def epoch_seconds(time: str) -> float:
    """A time in ISO 8601 in seconds; without a zone it counts as UTC."""
    moment = datetime.fromisoformat(time)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# -- forms of files ------------------------------------------------------------------------------


def _form(file: ExportFile) -> str:
    """`table`, `lines` or `json`; other text counts as JSON that cannot be parsed."""
    name = file.name.lower()
    if name.endswith((".parquet", ".csv", ".tsv")):
        return "table"
    head = file.head.removeprefix(_BOM).lstrip()
    several = name.endswith((".jsonl", ".ndjson")) or re.match(rb"[^\n]*\}\s*\n\s*\{", head)
    return "lines" if several and head.startswith(b"{") else "json"


def _partial(text: bytes) -> Any:
    """The JSON value in `text`, as far as it goes; None if it starts with something else."""
    import ijson

    if text.lstrip()[:1] not in (b"{", b"["):
        return None
    builder = ijson.ObjectBuilder()
    try:
        for event, value in ijson.basic_parse(io.BytesIO(text), use_float=True):
            builder.event(event, value)
    except (ijson.JSONError, UnicodeDecodeError):
        pass  # the head ends here
    return getattr(builder, "value", None)


def _list_name(value: Any) -> str | None:
    """The name of LISTS under which an object holds its records."""
    for name in LISTS if isinstance(value, Mapping) else ():
        entries = value.get(name)
        if isinstance(entries, list) and entries and isinstance(entries[0], Mapping):
            return None if _MESSAGE & entries[0].keys() else name
    return None


def has_keys(file: ExportFile, *keys: str) -> bool:
    """Whether all these keys (patterns) of JSON objects are in the head of a file."""
    return all(re.search(rb'"%s"\s*:' % key.encode(), file.head) for key in keys)


def is_plain(file: ExportFile) -> bool:
    """Whether a file has the form of a row file: .json with an array, or with a list `data`."""
    return not file.name.lower().endswith(".json") or (
        _form(file) == "json" and _place(file) in ("item", "data.item")
    )


def _place(file: ExportFile, at: str | None = None) -> str:
    if at is not None:
        return at
    head = file.head.removeprefix(_BOM)
    if head.lstrip().startswith(b"["):
        return "item"
    name = _list_name(_partial(head))
    return f"{name}.item" if name else ""


@contextmanager
def json_stream(file: ExportFile) -> Iterator[BinaryIO]:
    """A JSON file, opened behind its byte order mark; UnusableFile if it proves to be damaged."""
    import ijson

    with file.opener() as stream:
        stream.read(len(_BOM) if file.head.startswith(_BOM) else 0)
        try:
            yield stream
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise unreadable_file(Path(file.name), f"not JSON: {error}") from error


def _streamed(file: ExportFile, at: str) -> Iterator[Any]:
    import ijson

    with json_stream(file) as stream:
        yield from ijson.items(stream, at, use_float=True, buf_size=1 << 22)


def _lines(file: ExportFile) -> Iterator[SourcedRow]:
    with file.opener() as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            source = f"{file.name}:{number}"
            try:
                yield source, parse_row_json(line.decode("utf-8-sig"), TREE_DEPTH)
            except ValueError as error:
                yield source, BadRow(source, f"the line is not JSON: {error}")


def _table(file: ExportFile) -> Iterator[Any]:
    with file.opener() as stream:
        if file.name.lower().endswith(".parquet"):
            try:
                for row in parquet_rows(stream):
                    yield BadRow("", str(row)) if isinstance(row, ParseError) else row
            except ParseError as error:
                raise unreadable_file(Path(file.name), str(error)) from error
            return
        csv.field_size_limit(2**31 - 1)
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        head = file.head.decode("utf-8", "replace").partition("\n")[0]
        mark = max("\t;,", key=head.count) if file.size else ","
        for cells in csv.DictReader(text, delimiter=mark, restkey="", restval=None):
            odd = "" in cells and cells.pop("")
            yield BadRow("", "it has more cells than the header") if odd else cells
