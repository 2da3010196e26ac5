"""The JSON files of a run: their schemas, and writing that survives a killed process.

    while a run plays   episodes.jsonl                     appended to, line by line
    when it is done     episodes.jsonl.gz                  as pandas, duckdb and datasets read it
    resumed             episodes.jsonl.gz, episodes.jsonl  new lines come after the packed ones

A file is packed aside and renamed, and only then is the plain one removed: a process that dies
between leaves lines twice, which readers of records take for one. The JSON Schemas ship with the
package, in `soulkit/schemas/`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from soulkit.errors import DataError, RunError

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")
SCHEMA = "schema"
"""The member under which a line, or a summary, says what it is."""
EPISODES_SCHEMA = "soulkit/episodes@1"
"""Of `episodes.jsonl` and `dev.jsonl`."""
CONTROLS_SCHEMA = "soulkit/controls@1"
METRICS_SCHEMA = "soulkit/metrics@1"
SUMMARY_SCHEMA = "soulkit/summary@1"
DISTILLATION_SCHEMA = "soulkit/distillation@1"
"""Of `distillation.json`, and of the member `distillation` of a summary."""
DOCTOR_SCHEMA = "soulkit/doctor@1"
"""Of what `soul doctor --json` prints."""

MEND_LINE = "Mend or delete that line, or start a new run."
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
        raise damaged(f"'{packed}' cannot be unpacked ({error}).") from error


def pack_lines(path: Path, least: int = PACK_FROM) -> bool:
    """Pack the lines of `path` when they are `least` bytes or there are packed ones already, and
    say whether. Nobody else may write meanwhile."""
    packed = packed_file(path)
    size = path.stat().st_size if path.is_file() else 0
    if not (size and packed.is_file()) and size < least:
        if packed.is_file():
            path.unlink(missing_ok=True)  # of a run that was taken up, and had nothing to add
        return False
    # One name for all processes: what a kill left is written over.
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


class JsonlWriter:
    """Appends JSON objects to a file, one a line, each on the disk before `write` returns.

    A torn last line of an earlier, killed process is moved to `<name>.torn` first. `compact` lines
    have no spaces between their members.
    """

    def __init__(self, path: Path, *, compact: bool = False) -> None:
        self.path, self._compact = Path(path), compact
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _mend_tail(self.path)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def offset(self) -> int:
        """Bytes written so far: what a checkpoint stores, and `cut_to` accepts."""
        return os.fstat(self._fd).st_size

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. ValueError for NaN and infinities: they are no JSON and no result."""
        self.write_all([record])

    def write_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append several lines with one sync at the end: all are on disk on return."""
        lines = b"".join(_line(record, self._compact) for record in records)
        start = self.offset
        try:
            _write_all(self._fd, lines)
            os.fsync(self._fd)
        except OSError:
            # Half a line (a full disk) would swallow the next one.
            os.ftruncate(self._fd, start)
            raise

    def cut_to(self, offset: int) -> None:
        """Forget what follows byte `offset`, which must end a line; it stays in `<name>.cut`."""
        if not 0 <= offset <= self.offset:
            raise DataError(
                f"{self.path} has {self.offset} bytes and cannot be cut to {offset}.",
                "The checkpoint belongs to a longer file than this one.",
                "Restore the file, or start a new run.",
            )
        if offset and os.pread(self._fd, 1, offset - 1) != b"\n":
            raise DataError(
                f"Byte {offset} of {self.path} is in the middle of a line.",
                "The checkpoint belongs to another file than this one.",
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_jsonl(path: Path, *, repair: bool = False) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, in order; none when the file does not exist yet.

    A torn last line (no line end, no valid object) is left out; with `repair` it is also moved to
    `<name>.torn`. DataError names file and line of anything else that is no JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    if repair:
        _mend_tail(path)
    return [value for _, value in placed_objects(path)]


def placed_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset, object) of every line, one at a time; a torn last line is left out.

    DataError names file and line of anything else that is no JSON object.
    """
    return placed_values(path, parsed_object)


def placed_values(path: Path, parse: Callable[[bytes], T | None]) -> Iterator[tuple[int, T]]:
    """As `placed_objects`, with what `parse` makes of a line: None for what is no JSON object.

    Of a file that is packed, offsets count the bytes of its lines.
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
    """The JSON object in a line; None for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _mend_tail(path: Path) -> None:
    with path.open("r+b") as stream:
        start, last = _last_line(stream)
        if not last:
            return
        if parsed_object(last) is not None:  # whole, only its line end is missing
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n")
            return
    _move_tail(path, start, ".torn")


def _last_line(stream: BinaryIO) -> tuple[int, bytes]:
    """Where the unfinished last line starts, and its bytes (empty when the file ends a line)."""
    end, tail, block = stream.seek(0, os.SEEK_END), b"", 1 << 16
    while end > 0 and b"\n" not in tail:
        step = min(block, end)
        end = stream.seek(end - step)
        tail = stream.read(step) + tail
    cut = tail.rfind(b"\n") + 1
    return end + cut, tail[cut:]


def _move_tail(path: Path, offset: int, suffix: str) -> None:
    """Append the bytes from `offset` on to `<name><suffix>`, then cut them off."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        with path.with_name(path.name + suffix).open("ab") as tail:
            tail.write(stream.read())
            tail.flush()
            os.fsync(tail.fileno())
        stream.truncate(offset)
        os.fsync(stream.fileno())


def _line(record: Mapping[str, Any], compact: bool) -> bytes:
    try:
        return _json(record, ascii_only=False, compact=compact).encode() + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair, as some servers send: only \u can hold it
        return _json(record, ascii_only=True, compact=compact).encode() + b"\n"


def _json(
    record: Mapping[str, Any], *, ascii_only: bool, compact: bool = False, indent: int | None = None
) -> str:
    return json.dumps(
        dict(record), ensure_ascii=ascii_only, allow_nan=False, indent=indent,
        separators=(",", ":") if compact else None,
    )  # fmt: skip


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_json(path: Path, obj: Mapping[str, Any]) -> None:
    """Write a JSON object aside and rename it: a reader sees the old file or the new one."""
    write_aside(Path(path), (_json(obj, ascii_only=True, indent=2) + "\n").encode())


def write_aside(path: Path, data: bytes) -> None:
    """Replace the file `path` by `data`, whole or not at all."""
    with aside(path) as stream:
        stream.write(data)


@contextmanager
def aside(path: Path, name: str = "") -> Iterator[BinaryIO]:
    """A stream that becomes the file `path` once it is complete; nothing of it stays otherwise.
    Until then it has a name of this process, unless another is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(name or f".{path.name}.{os.getpid()}.tmp")
    try:
        with part.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


# -- schemas and values ----------------------------------------------------------------------------


def refuse_other_schema(line: Mapping[str, Any], schema: str, where: str) -> None:
    """DataError unless `line` is of `schema`, or names none.

    `where` names the file, or the line in it, for the reader.
    """
    name = line.get(SCHEMA)
    if name is None or name == schema:
        return
    other_version = str(name).partition("@")[0] == schema.partition("@")[0]
    raise DataError(
        f"{where} is '{name}', and this soulkit reads '{schema}'.",
        "Another version of soulkit wrote it, and it could be read wrongly."
        if other_version
        else "It is another file than its name says, or was changed by another program.",
        "Read it with the version that wrote it: pip install --upgrade soulkit"
        if other_version
        else "Restore the file that `soul eval` or `soul train` wrote.",
    )


@cache
def form_of(kind: type[Any]) -> TypeAdapter[Any]:
    """What reads and writes values of a dataclass."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def read_value(kind: type[T], value: object, what: str) -> T:
    """A dataclass from plain JSON values; members that it does not have are passed over. DataError
    names `what` and the member that cannot be read."""
    from pydantic import ValidationError

    try:
        made: T = form_of(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        raise damaged(f"{what} cannot be read ({first_problem(error)}).") from error
    return made


def damaged(
    what: str, way_out: str = "Restore the file from where it was copied, or start a new run."
) -> DataError:
    """The error of a file that is not as soulkit wrote it."""
    why = "The file was edited, damaged, or written by another version of soulkit."
    return DataError(what, why, way_out)


def first_problem(error: ValidationError, whole: str = "the object") -> str:
    """`member: message` of the first thing that pydantic found, without what was written there;
    `whole` stands for a member where it is about all of it."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or whole
    return f"{where}: {first['msg']}"


def sparse(value: Any, always: Container[str] = ()) -> dict[str, Any]:
    """The members of a dataclass that differ from their defaults, and those that are `always`
    written."""
    return {
        one.name: getattr(value, one.name)
        for one in fields(value)
        if one.name in always or getattr(value, one.name) != _default(one)
    }


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run; empty where there is no file, RunError for a damaged
    one."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(loaded, dict):
        raise _damaged(path, "it holds no JSON object")
    return loaded


def _damaged(path: Path, detail: str) -> RunError:
    return RunError(
        f"'{path}' cannot be read ({detail}).",
        "The file was changed by hand or by another program.",
        "Restore it from where the run was copied, or start the run again with another --out.",
    )


def schema_file(schema: str) -> Path:
    """Where the JSON Schema of `schema` lies, in the package."""
    name, version = schema.removeprefix("soulkit/").split("@")
    return Path(__file__).parents[1] / "schemas" / f"{name}-{version}.json"
