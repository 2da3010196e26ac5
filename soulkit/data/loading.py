"""The examples of a task, wherever its rows come from: made here, a row file, an original release.

Example: `examples_from(tomi, "synth:20")` makes twenty rows, `examples_from(tomi, "rows.jsonl")`
reads a row file, and `examples_from(tomi, "Percept-ToMi.csv")` finds that the file has other
columns and goes through the importer. An evaluation is stricter (it imports nothing on its own);
this is for commands that look at data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from soulkit.data.files import ROW_SUFFIXES, BadRow, RawRow, read_rows
from soulkit.data.folder import looked_for, released_files
from soulkit.data.importers import import_rows, importable, original_folder
from soulkit.data.rows import Loaded, to_examples
from soulkit.data.synth import MADE, made_rows
from soulkit.errors import DataError

if TYPE_CHECKING:
    from soulkit.tasks.base import Task


def examples_from(task: Task, given: str, seed: int = 0, *, forms: bool = True) -> Loaded:
    """The examples of `task` in `given`, at least one.

    That is `synth:N`, a row file, a folder with the released evaluation files, or a file (for some
    tasks: a folder) of the original release. Without `forms` every row is one example, as it is
    written.

    DataError when nothing in it can be used as this task, ConfigError for a `synth:` without a
    count or a task that has no generator.
    """
    found = _loaded(task, given, seed, forms)
    if not found.examples:
        others = ", ".join(f"{name} ({n} rows)" for name, n in found.skipped.items())
        first = f"{found.bad[0].source}: {found.bad[0].why.rstrip('.')}" if found.bad else ""
        raise DataError(
            f"No row of '{given}' can be used as a row of '{task.name}'.",
            f"{first or f'They belong to {others}'}.",
            f"See: soul data check {given}" if found.bad else "Name the task of these rows.",
        )
    return found


def _loaded(task: Task, given: str, seed: int, forms: bool) -> Loaded:
    if given.startswith(MADE):
        return to_examples(task, made_rows(task.name, given, seed, "test"), forms=forms)
    path = Path(given)
    if path.is_dir():
        release = original_folder(task.name, path)
        return _imported(task, path, forms) if release else _released(task, given, forms)
    original = task.name in importable()
    if path.suffix.lower() not in ROW_SUFFIXES and original:
        return _imported(task, path, forms)
    try:
        rows, bad = read_rows(path)
        return to_examples(task, rows, bad=bad, forms=forms)
    except DataError:  # no list of rows, or rows of other columns: the importer may know it
        if not original:
            raise
        return _imported(task, path, forms)


def _released(task: Task, folder: str, forms: bool) -> Loaded:
    names = task.spec.files.eval
    paths = released_files(task.name, names, folder)
    if not paths:
        raise DataError(
            f"There are no rows of the task '{task.name}' in '{folder}'.",
            f"Rows were looked for: {looked_for(names, folder)}.",
            "Name a file, or the folder that holds the released ones.",
        )
    good: list[RawRow] = []
    bad: list[BadRow] = []
    for path in paths:
        rows, broken = read_rows(path)
        good += rows
        bad += broken
    return to_examples(task, good, bad=bad, forms=forms)


def _imported(task: Task, path: Path, forms: bool) -> Loaded:
    found = import_rows(task.name, path)
    if not found.rows and found.bad:
        raise DataError(
            f"No record of '{path}' can be a row of '{task.name}'.",
            f"{found.bad[0].source}: {found.bad[0].why.rstrip('.')}.",
            f"To see all: soul data import {task.name} {path}",
        )
    rows = [RawRow(row, f"{path.name}, record {i}") for i, row in enumerate(found.rows, 1)]
    return to_examples(task, rows, bad=found.bad, forms=forms)


def marked(
    rows: Sequence[RawRow], names: dict[str, str], task: str | None
) -> tuple[list[tuple[str, RawRow]], list[BadRow]]:
    """(task, row) in the order of the rows, and the rows that belong to no known task.

    `names`: data_source → task. `task` is for rows that do not say where they belong.
    """
    found: list[tuple[str, RawRow]] = []
    bad: list[BadRow] = []
    for row in rows:
        mark = str(row.fields.get("data_source") or "")
        owner = names.get(mark) if mark else task
        if owner is None:
            why = f"unknown data_source '{mark}'" if mark else "it has no data_source; give --task"
            bad.append(BadRow(row.source, why))
        else:
            found.append((owner, row))
    return found, bad
