"""Large files of JSON lines, packed when nothing more is to come: `episodes.jsonl.gz`.

    while a run plays   episodes.jsonl                     appended to, line by line
    when it is done     episodes.jsonl.gz                  as pandas, duckdb and datasets read it
    taken up again      episodes.jsonl.gz, episodes.jsonl  new lines come after the packed ones

A file is packed aside and renamed, and only then is the plain one removed: a process that dies
between leaves lines twice, which readers of records take for one.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from soulkit.errors import DataError

PACK_FROM = 32_000_000
"""Bytes from which a file of lines is packed; what is smaller stays plain."""


def packed_file(path: Path) -> Path:
    """Where the lines of `path` lie when they are packed."""
    return path.with_name(path.name + ".gz")


def has_lines(path: Path) -> bool:
    """Whether there is a file of lines `path`, packed or plain."""
    return path.is_file() or packed_file(path).is_file()


def newest_change(path: Path) -> int:
    """When the lines of `path` last changed, in nanoseconds; 0 where there are none."""
    files = (path, packed_file(path))
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)


def lines_in(path: Path) -> Iterator[bytes]:
    """The lines of `path`, the packed ones first. FileNotFoundError where there are none;
    DataError when the packed ones are damaged."""
    with ExitStack() as stack:
        try:  # before the packed ones: who packs meanwhile removes this file last
            plain = stack.enter_context(path.open("rb"))
        except FileNotFoundError:
            if not packed_file(path).is_file():
                raise
            yield from _packed_lines(packed_file(path))
            return
        if packed_file(path).is_file():
            yield from _packed_lines(packed_file(path))
        yield from plain


def _packed_lines(packed: Path) -> Iterator[bytes]:
    try:
        if not packed.stat().st_size:
            raise EOFError("it is empty")
        with gzip.open(packed, "rb") as stream:
            yield from stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"'{packed}' cannot be unpacked ({error}).",
            "The file was cut, damaged in copying, or written by another program.",
            "Restore the file from where it was copied, or start a new run.",
        ) from error


def pack_lines(path: Path, least: int = PACK_FROM) -> bool:
    """Pack the lines of `path` when they are `least` bytes or there are packed ones already, and
    say whether. Nobody else may write meanwhile."""
    packed = packed_file(path)
    size = path.stat().st_size if path.is_file() else 0
    if not (size and packed.is_file()) and size < least:
        if packed.is_file():
            path.unlink(missing_ok=True)  # of a run that was taken up, and had nothing to add
        return False
    aside = path.with_name(f".{packed.name}.tmp")  # one that a kill left is written over
    try:
        with aside.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, 0) as stream:
            stream.writelines(_once(lines_in(path)))
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(packed)
    finally:
        aside.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return True


def _once(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The whole lines, equal ones once."""
    seen: set[bytes] = set()
    for line in lines:
        digest = hashlib.sha256(line).digest()
        if line.endswith(b"\n") and digest not in seen:
            seen.add(digest)
            yield line
