"""Convert original benchmark files into rows, and recognise such files where rows are expected.

A task names its importer in `tasks.yaml` (`importer: importer:read`). Importers keep the texts and
the published gold answers unchanged. A file counts as an original if a record has a column that
only the original has (`original: [prompting_type]`), or if it holds no rows of the task and the
importer knows its format.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.data.chats import ChatMessage, blank_message, holds_chats, read_chats
from soulkit.data.exports.reading import is_export
from soulkit.data.files import BadRecord as BadRecord
from soulkit.data.files import BadRow, RawRow, UnusableFile, read_rows
from soulkit.data.rows import ColumnsError
from soulkit.errors import ConfigError, DataError
from soulkit.tasks.kit.base import Task

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Imported rows, unusable records, and notes for the user."""

    rows: tuple[Row, ...]
    bad: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()


class WrongShape(DataError):
    """A file whose format the importer does not know."""


Make = Callable[[RawRow, int], Row | Iterable[Row | BadRow]]
"""(record, index) → its row; or its rows, with a BadRow for every unusable part."""


def import_records(
    path: Path,
    make: Make | Mapping[tuple[str, ...], Make],
    *,
    fields: Sequence[str] = (),
    way_out: str,
    origin: str = "",
    licence: str = "",
    notes: Callable[[Sequence[Row], Sequence[BadRow]], Iterable[str]] = lambda rows, bad: (),
    read: Callable[[Path], tuple[list[RawRow], list[BadRow]]] = read_rows,
) -> Imported:
    """The rows that `make` returns for each record of a file; a BadRecord makes no row.

    `fields` are the fields that a record must have. For a file with several possible shapes, `make`
    maps the fields of each shape to its function; the first shape that any record has is used.
    Place, provenance and licence are added to rows that lack them. WrongShape if no record has the
    fields. `way_out` says which file to give; every error about the file shows it as the fix.
    """
    try:
        raw, bad = read(path)
    except UnusableFile as error:
        if path.is_file():
            error.way_out = f"{way_out} {error.way_out}"
        raise
    shapes = make if isinstance(make, Mapping) else {tuple(fields): make}
    fitting = (n for n in shapes if not n or any(row.fields.keys() >= set(n) for row in raw))
    names = next(fitting, None)
    if names is None:
        raise wrong_shape(path, ["; or ".join(", ".join(n) for n in shapes)], way_out)
    rows: list[Row] = []
    for index, record in enumerate(raw):
        source = f"{origin}, {record.source}" if origin else record.source
        about: Row = {"index": index, "provenance": source}
        about |= {"licence": licence} if licence else {}
        try:
            made = shapes[names](record, index)
            parts: list[Row | BadRow] = [made] if isinstance(made, dict) else list(made)
        except BadRecord as error:
            parts = [BadRow(record.source, str(error))]
        bad += [part for part in parts if isinstance(part, BadRow)]
        rows += [row | {k: v for k, v in about.items() if k not in row}
                 for row in parts if isinstance(row, dict)]  # fmt: skip
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=tuple(notes(rows, bad)))


def mapped_columns(record: RawRow, texts: Mapping[str, str], kept: Iterable[str] = ()) -> Row:
    """A row: the text of the field that `texts` names for each column, plus the `kept` fields that
    exist.

    BadRecord if one of the texts is missing, blank or not text.
    """
    values = dict(zip(texts, need(record, *texts.values()), strict=True))
    return values | {name: record.fields[name] for name in kept if name in record.fields}


def need(row: RawRow, *names: str) -> tuple[str, ...]:
    """The texts of the named fields; BadRecord if one is missing, blank or not text."""
    for name in names:
        value = row.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BadRecord(f"it has no text under '{name}'")
    return tuple(str(row.fields[name]) for name in names)


def without_blanks(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages of a recorded conversation; BadRecord if one of them is blank."""
    place = blank_message(messages)
    if place is None:
        return messages
    raise BadRecord(f"message {place} of its conversation ({messages[place - 1]['role']}) is blank")


def wrong_shape(path: Path, fields: Iterable[str], way_out: str) -> WrongShape:
    return WrongShape(
        f"'{path}' does not have the original format.",
        f"None of its records has {', '.join(fields)}.",
        way_out,
    )


def is_release(task: Task, path: Path) -> bool:
    """Whether `path` is the folder of the original release of `task`."""
    mark = task.spec.release_mark
    return bool(mark) and (path / mark).is_file()


def refuse_release(task: Task, path: Path) -> None:
    """OriginalFile if `path` is the folder of the original release instead of rows."""
    if is_release(task, path):
        raise _original(
            task, str(path), f"It holds '{task.spec.release_mark}' but no released rows."
        )


class OriginalFile(DataError):
    """A file of the original release was given instead of rows."""


def refuse_original_rows(task: Task, rows: Iterable[RawRow]) -> None:
    """OriginalFile if a row of an unreleased file has a column of the original release."""
    released = {*task.spec.files.train, *task.spec.files.eval}
    for row in rows if task.spec.original else ():
        file, _, _ = row.source.rpartition(":")
        marks = [name for name in task.spec.original if name in row.fields]
        if marks and file not in released:
            raise _original(
                task, file or "FILE",
                f"{row.source} has the column '{marks[0]}', which only the original release has. "
                "Original files contain rows that the benchmark does not score, or use another "
                "format.",
            )  # fmt: skip


@contextmanager
def explaining_originals(task: Task, path: Path) -> Iterator[None]:
    """Extend errors about rows of `task` in `path` with advice on chats and original files."""
    try:
        yield
    except OriginalFile as error:
        raise _original(task, str(path), error.why) from error
    except (ColumnsError, UnusableFile) as error:
        if chats := chats_for_rows(task, path):
            raise chats from error
        if task.spec.importer and path.exists():
            original = f"if it is an original file ({'; '.join(task.spec.formats)}), import it"
            error.way_out = f"{error.way_out.rstrip('.')}; {original}: {_import_of(task, path)}"
        raise


def chats_for_rows(task: Task | None, path: Path) -> DataError | None:
    """The error for chats in a place where rows are expected; None if `path` holds no chats."""
    needed = {
        alias
        for name, column in (task.spec.columns if task else {}).items()
        if column.required
        for alias in (name, *column.aliases)
    }
    # Rows in a folder may hold a conversation, too, but they name their task.
    if not holds_chats(path, needed or ({"data_source"} if path.is_dir() else ())):
        return None
    file = shlex.quote(str(path))
    learn = f"soul train sft --model MODEL --data {file} --side human"
    verb = "" if _is_file_of_chats(path) else "import chats" if is_export(path) else "dedupe"
    one_file = f"soul data {verb} {file} -o chats.jsonl, then " if verb else ""
    if task is not None and task.spec.drafting:
        source = "chats.jsonl" if verb else file
        way_out = (
            f"Let two models draft rows: {one_file}soul data build {task.name} {source} "
            "--drafter endpoint:MODEL --filter endpoint:MODEL -o rows.jsonl; then give --data "
            f"rows.jsonl. To train on the people's messages instead: {learn}"
        )
    else:
        way_out = (
            f"Train on the chats themselves: {learn}; or let models draft rows of a task: "
            f"{one_file}soul data build --help"
        )
    return DataError(
        f"'{path}' holds chats, but {f'{task.name!r} needs' if task else 'tasks need'} rows.",
        "A row defines an episode and how to score it; recorded chats do not.",
        way_out,
    )


def _is_file_of_chats(path: Path) -> bool:
    try:
        return bool(read_chats(path))
    except DataError:
        return False


def _original(task: Task, path: str, why: str) -> OriginalFile:
    return OriginalFile(
        f"'{path}' is a file of the original release of '{task.name}', not a file of rows.", why,
        f"Import it, then give --data the file that this command writes: {_import_of(task, path)}",
    )  # fmt: skip


def _import_of(task: Task, path: str | Path) -> str:
    return f"soul data import {task.name} {shlex.quote(str(path))}"


def import_rows(task: Task, path: Path, options: Mapping[str, str] | None = None) -> Imported:
    """The rows of an original file of `task`; DataError if the file is unusable as a whole.

    `options` are the importer's own options, as typed on the command line.
    """
    importer = task.spec.hook(task.name, "importer")
    if importer is None:
        raise ConfigError(
            f"There is no importer for '{task.name}'.",
            "Its released rows need no import, or its declaration names no importer.",
            "For tasks with an importer, see the column rows of: soul tasks list",
        )
    return importer.made(Imported, path, options=options)


def build_rows(task: Task, path: Path, options: Mapping[str, str] | None = None) -> Imported:
    """Rows that a task builds from several original files."""
    builder = task.spec.hook(task.name, "builder")
    if builder is None:
        raise ConfigError(
            f"'{task.name}' cannot build rows from several files.",
            "Its declaration names no function for it ('builder:').",
            f"To import an original file: soul data import {task.name} FILE",
        )
    return builder.made(Imported, path, options=options)
