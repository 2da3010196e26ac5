"""Where released files lie when no `--data` names them: one folder, asked here and nowhere else.

    $SOULKIT_DATA/hitom_val.parquet     else     ./data/hitom_val.parquet

`soul data pull` fills that folder, `soul eval` and `soul train` look in it. The file names of a
task stand in `tasks.yaml`; every file is read on its own, because files joined into one table get
the struct keys of all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from soulkit.errors import DataError

DATA_FOLDER = "SOULKIT_DATA"
"""The environment variable that names the folder with the released files."""
DEFAULT_FOLDER = "data"


def data_folder() -> Path:
    """The folder that SOULKIT_DATA names, else `data` in the working folder; it may not exist."""
    return Path(os.environ.get(DATA_FOLDER) or DEFAULT_FOLDER)


def released_files(task: str, names: Sequence[str], folder: str | None = None) -> list[Path]:
    """The released files `names` of a task, all of them or an empty list.

    `folder` is the one that `--data` named. DataError when only some of the files are there: a
    mean over a part would pass for a mean over all.
    """
    place = Path(folder) if folder is not None else data_folder()
    paths = [place / name for name in names if (place / name).is_file()]
    if paths and len(paths) < len(names):
        absent = ", ".join(name for name in names if place / name not in paths)
        raise DataError(
            f"'{place}' holds only {len(paths)} of the {len(names)} files of the task '{task}'.",
            f"Not there: {absent}. A result on a part of the rows would pass for one on all.",
            f"Download the rest with: soul data pull --task {task}, or name one file with --data.",
        )
    return paths


def data_files(task: str, names: Sequence[str], source: str | None) -> list[Path]:
    """The one file that `--data` gave, or the `released_files` in the folder that it gave."""
    if source is not None and not Path(source).is_dir():
        return [Path(source)]
    return released_files(task, names, source)


def folder_note() -> str:
    """The folder where pulled rows lie, and who says so."""
    from_environment = bool(os.environ.get(DATA_FOLDER))
    unset = f"the default, as {DATA_FOLDER} is not set"
    origin = f"from {DATA_FOLDER}" if from_environment else unset
    return f"the folder '{data_folder()}' ({origin})"


def search_note(names: Sequence[str], folder: str | None = None) -> str:
    """Where `released_files` looked for what, in words."""
    place = f"the folder '{folder}'"
    if folder is None:
        place = f"no --data was given, and {folder_note()}"
    if not names:
        return f"{place} was not searched: the task has no released file to look for"
    return f"{place} does not hold {' or '.join(names)}"
