"""Import original benchmark files as flat rows, and recognise them where rows are expected.

Each benchmark brings its own importer, which its declaration names (`importer: importer:read`). It
keeps the texts and the published gold, and repairs only what is no part of either. A file is an
original where a record has a column that only the original has (`original: [prompting_type]`), or
where it holds no rows of the task and the importer knows its form.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.data.chats import ChatMessage, blank_message, holds_chats
from soulkit.data.files import BadRecord as BadRecord
from soulkit.data.files import BadRow, RawRow, UnusableFile, read_rows
from soulkit.data.rows import ColumnsError
from soulkit.errors import ConfigError, DataError
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.user_code import Hook

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Flat rows, the records that could not be one, and what the reader should know."""

    rows: tuple[Row, ...]
    bad: tuple[BadRow, ...] = ()
    notes: tuple[str, ...] = ()


class WrongShape(DataError):
    """A file that an importer does not know: it is of none of the forms that it reads."""


Make = Callable[[RawRow, int], Row | Iterable[Row | BadRow]]
"""A record and its place → its row, or its rows and the parts of it that are no row."""


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
    """The rows that `make` gives for each record of a file; none for a BadRecord.

    `fields` are the fields of a record. For a file that may have several shapes, `make` maps the
    fields of each shape to the function that makes its rows; the first shape that any record has is
    used. A row says its place, where it is from and its licence, where `make` does not. WrongShape
    when no record has the fields. `way_out` says which file to give; every error of a file has it.
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
    """Column → text of the field that `texts` names for it, and those of `kept` that there are.

    BadRecord when one of the texts is absent, blank or no text.
    """
    values = dict(zip(texts, need(record, *texts.values()), strict=True))
    return values | {name: record.fields[name] for name in kept if name in record.fields}


def need(row: RawRow, *names: str) -> tuple[str, ...]:
    """The text of the named fields; BadRecord when one is absent, blank or no text."""
    for name in names:
        value = row.fields.get(name)
        if not isinstance(value, str) or not value.strip():
            raise BadRecord(f"it has no text under '{name}'")
    return tuple(str(row.fields[name]) for name in names)


def without_blanks(messages: list[ChatMessage]) -> list[ChatMessage]:
    """The messages of a recorded conversation; BadRecord where one of them is blank."""
    place = blank_message(messages)
    if place is None:
        return messages
    raise BadRecord(f"message {place} of its conversation ({messages[place - 1]['role']}) is blank")


def wrong_shape(path: Path, fields: Iterable[str], way_out: str) -> WrongShape:
    return WrongShape(
        f"'{path}' is not of the original format.",
        f"None of its records has {', '.join(fields)}.",
        way_out,
    )


def is_release(task: Task, path: Path) -> bool:
    """Whether `path` is a folder that as a whole is the original release of `task`."""
    mark = task.spec.release_mark
    return bool(mark) and (path / mark).is_file()


def refuse_release(task: Task, path: Path) -> None:
    """OriginalFile where `path` is the folder of the original release, and rows are read."""
    if is_release(task, path):
        raise _original(
            task, str(path), f"It holds '{task.spec.release_mark}', and no released rows."
        )


class OriginalFile(DataError):
    """A file of the original release where rows of the task are read."""


def refuse_original_rows(task: Task, rows: Iterable[RawRow]) -> None:
    """OriginalFile where a row of a file that is not released has a column of the original."""
    released = {*task.spec.files.train, *task.spec.files.eval}
    for row in rows if task.spec.original else ():
        file, _, _ = row.source.rpartition(":")
        marks = [name for name in task.spec.original if name in row.fields]
        if marks and file not in released:
            raise _original(
                task, file or "FILE",
                f"{row.source} has '{marks[0]}', which is a column of the original release and of "
                "no row: an original holds more than the benchmark scores, or holds it in another "
                "form.",
            )  # fmt: skip


@contextmanager
def explaining_originals(task: Task, path: Path) -> Iterator[None]:
    """Add to errors of reading rows of `task` in `path` what to do with chats and originals."""
    try:
        yield
    except OriginalFile as error:
        raise _original(task, str(path), error.why) from error
    except (ColumnsError, UnusableFile) as error:
        if isinstance(error, ColumnsError) and (chats := chats_for_rows(task, path)):
            raise chats from error
        if task.spec.importer and path.exists():
            original = f"if it is an original file ({'; '.join(task.spec.formats)}), import it"
            error.way_out = f"{error.way_out.rstrip('.')}; {original}: {_import_of(task, path)}"
        raise


def chats_for_rows(task: Task | None, path: Path) -> DataError | None:
    """The error of recorded chats where rows of `task`, or of any, are read; else None."""
    needed = {
        alias
        for name, column in (task.spec.columns if task else {}).items()
        if column.required
        for alias in (name, *column.aliases)
    }
    # Rows in a folder may hold a conversation, too: they say whose they are.
    if not holds_chats(path, needed or ({"data_source"} if path.is_dir() else ())):
        return None
    file = shlex.quote(str(path))
    learn = f"soul train sft --model MODEL --data {file} --side human"
    if task is not None and task.spec.drafting:
        one_file = f"soul data dedupe {file} -o chats.jsonl, then " if path.is_dir() else ""
        source = "chats.jsonl" if path.is_dir() else file
        way_out = (
            f"Two models draft rows from chats: {one_file}soul data build {task.name} {source} "
            "--drafter endpoint:MODEL --filter endpoint:MODEL -o rows.jsonl; then give --data "
            f"rows.jsonl. To learn what the people write: {learn}"
        )
    else:
        way_out = (
            f"Learn from the chats themselves: {learn}; or have rows of another task drafted: "
            "soul data build --help"
        )
    return DataError(
        f"'{path}' holds chats, and {f'{task.name!r} is' if task else 'tasks are'} played on rows.",
        "A row says what is to be played and how it is scored; recorded chats do not.",
        way_out,
    )


def _original(task: Task, path: str, why: str) -> OriginalFile:
    return OriginalFile(
        f"'{path}' is of the original release of '{task.name}', and is no file of its rows.", why,
        f"Import it, and give --data the file that this writes: {_import_of(task, path)}",
    )  # fmt: skip


def _import_of(task: Task, path: str | Path) -> str:
    return f"soul data import {task.name} {shlex.quote(str(path))}"


def import_rows(task: Task, path: Path, options: Mapping[str, str] | None = None) -> Imported:
    """The rows of an original file of `task`; DataError when the whole file cannot be used.

    `options` are the task's own, as the command line gives them.
    """
    importer = task.spec.hook(task.name, "importer")
    if importer is None:
        raise ConfigError(
            f"There is no importer for '{task.name}'.",
            "Only original files of some benchmarks need importing; released rows are read as is.",
            "Tasks that have one say so in the column rows of: soul tasks list",
        )
    return _read(importer, path, options)


def build_rows(task: Task, path: Path, options: Mapping[str, str] | None = None) -> Imported:
    """Rows that are put together from several original files."""
    builder = task.spec.hook(task.name, "builder")
    if builder is None:
        raise ConfigError(
            f"Rows of '{task.name}' are not built from several files.",
            "Its declaration names no function that does it ('builder:').",
            f"For other original files: soul data import {task.name} FILE",
        )
    return _read(builder, path, options)


def _read(function: Hook, path: Path, options: Mapping[str, str] | None) -> Imported:
    imported: Imported = function(path, options=options)
    return imported
