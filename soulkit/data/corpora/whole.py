"""Files that are read as a whole: .json, .csv, .tsv, and chats that several records make up."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from soulkit.data.chats import REPLIES, TREE, read_chats
from soulkit.data.files import SourcedRow, read_rows
from soulkit.errors import DataError

WHOLE_FILE_LIMIT = 64 << 20
"""Bytes of such a file, at most."""


def is_scattered(columns: Collection[str]) -> bool:
    """Whether these are the columns of records of which several make one conversation."""
    names = frozenset(columns)
    return names >= REPLIES or names >= TREE


def check_whole(path: Path) -> None:
    """DataError when `path` is too large to be held in memory."""
    size = path.stat().st_size
    if size > WHOLE_FILE_LIMIT:
        raise DataError(
            f"'{path}' is too large to be read as a whole: {size >> 20} MiB.",
            f"Files of this layout are held in memory, up to {WHOLE_FILE_LIMIT >> 20} MiB.",
            "Write it as .jsonl or .parquet, one conversation a row, or as several files.",
        )


def whole_rows(path: Path) -> list[SourcedRow]:
    """Every row of a file, the unreadable ones last; several records of one chat as one row."""
    state = path.stat()
    return _read_whole(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1)
def _read_whole(path: Path, changed_ns: int, size: int) -> list[SourcedRow]:
    """The rows of the file as it was at that time: windows of one file are read in a row."""
    rows, bad = read_rows(path)
    names = frozenset(name for row in rows for name in row.fields)
    good: list[SourcedRow] = [(row.source, row.fields) for row in rows]
    if is_scattered(names):
        chats, bad = read_chats(path)
        good = [(chat.source, {**_mark(chat.fields), "messages": chat.messages}) for chat in chats]
    return [*good, *((row.source, row) for row in bad)]


def _mark(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"data_source": fields["data_source"]} if "data_source" in fields else {}
