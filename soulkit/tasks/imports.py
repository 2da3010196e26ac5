"""Original benchmark files as flat rows in the columns that `tasks.yaml` declares.

Each benchmark brings its own importer, which its declaration names (`importer: importer:read`). An
importer keeps the texts and the published gold; it repairs only what is no part of either (stray
marks, an instruction inside the story).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from soulkit.errors import ConfigError
from soulkit.tasks.base import Task
from soulkit.tasks.hooks import Hook
from soulkit.tasks.importing import Imported


def is_release(task: Task, path: Path) -> bool:
    """Whether `path` is a folder that as a whole is the original release of `task`."""
    mark = task.spec.release_mark
    return bool(mark) and (path / mark).is_file()


def import_rows(task: Task, path: Path, options: Mapping[str, str] | None = None) -> Imported:
    """The rows of an original file of `task`; DataError when the file as a whole cannot be used.

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
