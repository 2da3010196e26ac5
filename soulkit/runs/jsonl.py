"""The JSON files of a run: their schemas, and writing that survives a killed process.

    while a run plays   episodes.jsonl                     appended line by line
    when it is done     episodes.jsonl.gz                  readable by pandas, duckdb and datasets
    resumed             episodes.jsonl.gz, episodes.jsonl  new lines follow the packed ones

The packed file is complete before the plain file is removed. If the process dies in between, lines
exist twice; readers skip the duplicates. The JSON Schemas are in `soulkit/schemas/`.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import stat
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, Field, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from soulkit.errors import DataError, RunError
from soulkit.parse import ParseError, open_regular, parse_json, read_limited
from soulkit.text import byte_size

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
SCHEMA = "schema"
"""The key with the schema name of a line or summary."""
EPISODES_SCHEMA = "soulkit/episodes@1"
"""Schema of `episodes.jsonl` and `dev.jsonl`."""
CONTROLS_SCHEMA = "soulkit/controls@1"
METRICS_SCHEMA = "soulkit/metrics@1"
SUMMARY_SCHEMA = "soulkit/summary@1"
CERTIFICATE_SCHEMA = "soulkit/certificate@1"
DISTILLATION_SCHEMA = "soulkit/distillation@2"
"""Schema of `distillation.json`, and of `distillation` in a summary."""
TASKS_SCHEMA = "soulkit/tasks@1"
"""Schema of tasks files."""
DOCTOR_SCHEMA = "soulkit/doctor@1"
"""Schema of the output of `soul doctor --json`."""

MEND_LINE = "Correct or delete that line, or start a new run."
MAX_LINE = 64_000_000
"""Maximum bytes of a line; one episode has at most a few million."""
PACK_FROM = 32_000_000
"""Minimum size in bytes of a file to pack."""


def packed_file(path: Path) -> Path:
    """The path of the packed file that belongs to `path`."""
    return path.with_name(path.name + ".gz")


def has_lines(path: Path) -> bool:
    """Whether `path` exists, as a plain or a packed file."""
    return path.is_file() or packed_file(path).is_file()


def newest_change(path: Path) -> int:
    """When `path` or its packed file was last changed, in nanoseconds; 0 if neither exists."""
    files = (path, packed_file(path))
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)


def lines_in(path: Path) -> Iterator[bytes]:
    """The lines of `path`, packed ones first. FileNotFoundError if there are none; DataError if the
    packed ones are damaged."""
    with ExitStack() as stack:
        plain: Iterable[bytes] = ()
        try:  # open it first: a process that packs meanwhile removes this file last
            plain = _limited(stack.enter_context(open_regular(path)), path)
        except FileNotFoundError:
            if not packed_file(path).is_file():
                raise
        except ParseError as error:
            raise damaged(f"'{path}' cannot be read ({error}).") from error
        if packed_file(path).is_file():
            yield from _packed_lines(packed_file(path))
        yield from plain


def _packed_lines(packed: Path) -> Iterator[bytes]:
    try:
        if not packed.stat().st_size:
            raise EOFError("it is empty")
        with gzip.open(packed, "rb") as stream:
            yield from _limited(stream, packed)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(f"'{packed}' cannot be unpacked ({error}).") from error


def _limited(stream: BinaryIO | gzip.GzipFile, path: Path) -> Iterator[bytes]:
    """The lines of a stream; DataError for one that is too long to be held in memory."""
    for line in iter(partial(stream.readline, MAX_LINE), b""):
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            raise damaged(f"'{path}' has a line of more than {byte_size(MAX_LINE)}.")
        yield line


def pack_lines(path: Path, least: int = PACK_FROM) -> bool:
    """Pack the lines of `path` if they have at least `least` bytes or packed ones exist, and return
    whether they were packed. No other process may write to `path` meanwhile."""
    packed = packed_file(path)
    size = path.stat().st_size if path.is_file() else 0
    if not (size and packed.is_file()) and size < least:
        if packed.is_file():
            path.unlink(missing_ok=True)  # empty file of a resumed run
        return False
    # The same name for all processes, so that the rest of a killed one is overwritten.
    with aside(packed, f".{packed.name}.tmp") as raw, gzip.GzipFile("", "wb", 6, raw, 0) as stream:
        stream.writelines(_once(lines_in(path)))
    path.unlink(missing_ok=True)
    return True


def _once(lines: Iterator[bytes]) -> Iterator[bytes]:
    seen: set[bytes] = set()
    for line in lines:
        digest = hashlib.sha256(line).digest()
        if line.endswith(b"\n") and digest not in seen:
            seen.add(digest)
            yield line


def open_unlinked(path: Path, flags: int) -> int:
    """A descriptor of a regular file, created if missing. RunError for a link, which would lead
    the writer to another file, and for a pipe, device or folder."""
    flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise _not_regular(path)


def _not_regular(path: Path) -> RunError:
    return RunError(
        f"'{path}' is a link, or not a regular file.",
        "soul writes this file, and would write to another one through a link.",
        "Remove it, or use another path, then run the same command again.",
    )


def unlinked(folder: Path, *parts: str) -> Path:
    """A path in a folder that soul writes to. RunError if a part of it is a link."""
    for part in parts:
        folder /= part
        if folder.is_symlink():
            raise _not_regular(folder)
    return folder


def append_to(path: Path) -> BinaryIO:
    """A stream that appends to a regular file; see `open_unlinked`."""
    return os.fdopen(open_unlinked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "ab")


class JsonlWriter:
    """Appends JSON objects to a file, one per line, each on disk before `write` returns.

    An incomplete last line left by a killed process is first moved to `<name>.torn`. `compact`
    omits spaces.
    """

    def __init__(self, path: Path, *, compact: bool = False) -> None:
        self.path, self._compact = Path(path), compact
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _mend_tail(self.path)
        self._fd = open_unlinked(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    @property
    def offset(self) -> int:
        """File size in bytes; checkpoints store it for `cut_to`."""
        return os.fstat(self._fd).st_size

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. ValueError for NaN and infinities, which are not valid JSON."""
        self.write_all([record])

    def write_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append several lines with one sync; all are on disk when it returns."""
        self.write_lines(b"".join(json_line(record, self._compact) for record in records))

    def write_lines(self, lines: bytes) -> None:
        """Append lines of `json_line` with one sync; all are on disk when it returns."""
        start, rest = self.offset, memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError:
            # Remove a partial line (full disk), which would merge with the next one.
            os.ftruncate(self._fd, start)
            raise

    def cut_to(self, offset: int) -> None:
        """Move everything after byte `offset`, which must end a line, to `<name>.cut`."""
        if not 0 <= offset <= self.offset:
            raise DataError(
                f"{self.path} has {self.offset} bytes and cannot be cut to {offset}.",
                "The checkpoint belongs to a longer file.",
                "Restore the file, or start a new run.",
            )
        if offset and os.pread(self._fd, 1, offset - 1) != b"\n":
            raise DataError(
                f"Byte {offset} of {self.path} is in the middle of a line.",
                "The checkpoint belongs to a different file.",
                "Restore the file, or start a new run.",
            )
        if offset < self.offset:
            _move_tail(self.path, offset, ".cut")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file in order; empty if the file does not exist.

    An incomplete last line (no line end, not a valid object) is skipped. DataError with file and
    line for any other invalid line.
    """
    return [value for _, value in placed_objects(path)] if path.exists() else []


def placed_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset, object) of every line, one at a time; an incomplete last line is skipped.

    DataError with file and line for any other invalid line.
    """
    return placed_values(path, parsed_object)


def placed_values(path: Path, parse: Callable[[bytes], T | None]) -> Iterator[tuple[int, T]]:
    """Like `placed_objects`, with `parse(line)` in place of objects (None for an invalid line).

    In a packed file, offsets count unpacked bytes.
    """
    offset = 0
    for number, line in enumerate(lines_in(path), start=1):
        value, start = parse(line), offset
        offset += len(line)
        if value is not None:
            yield start, value
        elif line.endswith(b"\n") and line.strip():
            raise damaged(f"{path}:{number} is not a JSON object.", MEND_LINE)


def parsed_object(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line; None if it is not one."""
    try:
        value = parse_json(line, strict=False)
    except ParseError:
        return None
    return value if isinstance(value, dict) else None


def _mend_tail(path: Path) -> None:
    with path.open("r+b") as stream:
        start, last = _last_line(stream)
        if not last:
            return
        if parsed_object(last) is not None:  # complete, only the line end is missing
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n")
            return
    _move_tail(path, start, ".torn")


def _last_line(stream: BinaryIO) -> tuple[int, bytes]:
    """Start and bytes of the incomplete last line (empty if the file ends with a line end)."""
    end, tail, block = stream.seek(0, os.SEEK_END), b"", 1 << 16
    while end > 0 and b"\n" not in tail:
        step = min(block, end)
        end = stream.seek(end - step)
        tail = stream.read(step) + tail
    cut = tail.rfind(b"\n") + 1
    return end + cut, tail[cut:]


def _move_tail(path: Path, offset: int, suffix: str) -> None:
    """Move the bytes from `offset` on to the end of `<name><suffix>`."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        with append_to(path.with_name(path.name + suffix)) as tail:
            tail.write(stream.read())
            tail.flush()
            os.fsync(tail.fileno())
        stream.truncate(offset)
        os.fsync(stream.fileno())


def json_line(record: Mapping[str, Any], compact: bool) -> bytes:
    """The line of an object. ValueError for NaN and infinities, which are not valid JSON."""
    try:
        return _json(record, ascii_only=False, compact=compact).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, as some servers send, needs a \u escape
        return _json(record, ascii_only=True, compact=compact).encode() + b"\n"


def _json(
    record: Mapping[str, Any], *, ascii_only: bool, compact: bool = False, indent: int | None = None
) -> str:
    return json.dumps(
        dict(record), ensure_ascii=ascii_only, allow_nan=False, indent=indent,
        separators=(",", ":") if compact else None,
    )  # fmt: skip


def write_json(path: Path, obj: Mapping[str, Any]) -> None:
    """Write a JSON object atomically: readers see either the old file or the new one."""
    write_aside(Path(path), (_json(obj, ascii_only=True, indent=2) + "\n").encode())


def write_aside(path: Path, data: bytes) -> None:
    """Replace the file `path` by `data` atomically."""
    with aside(path) as stream:
        stream.write(data)


def write_secret(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read."""
    with aside(path) as stream:
        os.chmod(stream.name, 0o600)
        stream.write(text.encode())


@contextmanager
def aside(path: Path, name: str = "") -> Iterator[BinaryIO]:
    """A stream to a temporary file that replaces `path` on success and is deleted on failure.
    `name` is the temporary name; default: one with this process id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(name or f".{path.name}.{os.getpid()}.tmp")
    if path.exists() and not path.is_file():
        raise _not_regular(path)
    part.unlink(missing_ok=True)  # the rest of a killed process, or a link to another file
    try:
        with part.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# -- schemas and values ----------------------------------------------------------------------------


def refuse_other_schema(line: Mapping[str, Any], schema: str, where: str) -> None:
    """DataError if `line` has a schema other than `schema`.

    `where` is the file, or the line in it, for the error message.
    """
    name = line.get(SCHEMA)
    if name is None or name == schema:
        return
    other_version = str(name).partition("@")[0] == schema.partition("@")[0]
    raise DataError(
        f"{where} has the schema '{name}', but this version of soulkit reads '{schema}'.",
        "Another version of soulkit wrote it, and its values may have other meanings."
        if other_version
        else "Its contents do not match its name, or another program changed it.",
        "Read it with the version that wrote it. If that is newer: pip install --upgrade soulkit"
        if other_version
        else "Restore the file that `soul eval` or `soul train` wrote.",
    )


@cache
def form_of(kind: type[Any]) -> TypeAdapter[Any]:
    """The cached pydantic adapter of a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read_value(kind: type[T], value: object, what: str) -> T:
    """A dataclass from plain JSON values; unknown keys are ignored. DataError with `what` and the
    first invalid key."""
    from pydantic import ValidationError

    try:
        made: T = form_of(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        raise damaged(f"{what} cannot be read ({first_problem(error)}).") from error
    return made


def damaged(
    what: str, way_out: str = "Restore the file from where it was copied, or start a new run."
) -> DataError:
    """The error for a damaged file."""
    why = "The file was edited, damaged, or written by another version of soulkit."
    return DataError(what, why, way_out)


def first_problem(error: ValidationError, whole: str = "the object") -> str:
    """`key: message` of pydantic's first error, without the invalid value; `whole` replaces the key
    if the error is about the whole object."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    return f"{where}: {first['msg']}"


def sparse(value: Any, always: Container[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, plus those in `always`."""
    return {
        one.name: getattr(value, one.name)
        for one in fields(value)
        if one.name in always or getattr(value, one.name) != _default(one)
    }


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def stored_json(path: Path) -> Any:
    """The JSON value in a file that soulkit wrote. OSError; ParseError, which is a ValueError."""
    return parse_json(read_limited(path), strict=False, finite=True)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run; empty if there is no file, RunError if it is damaged."""
    try:
        loaded = stored_json(path) if path.exists() else {}
        if not isinstance(loaded, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise RunError(
            f"'{path}' cannot be read ({error}).",
            "The file was changed by hand or by another program.",
            "Restore it from a copy of the run, or start the run again with another --out.",
        ) from error
    return loaded


def schema_file(schema: str) -> Path:
    """The path of the JSON Schema of `schema` in the package."""
    name, version = schema.removeprefix("soulkit/").split("@")
    return Path(__file__).parents[1] / "schemas" / f"{name}-{version}.json"
