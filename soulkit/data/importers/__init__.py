"""Original benchmark files as flat rows in the columns that `tasks.yaml` declares.

One module per benchmark. An importer keeps the story's words and the published gold; it repairs
only what is no part of either (stray marks, an instruction inside the story). To add one: write a
function `(path, half) -> Imported` and name it in `_IMPORTERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from soulkit.data.importers.alignx import SPLITS as ALIGNX
from soulkit.data.importers.alignx import importer as alignx
from soulkit.data.importers.base import HALVES, Half, Imported
from soulkit.data.importers.coser import import_coser
from soulkit.data.importers.fantom import import_fantom
from soulkit.data.importers.hitom import import_hitom
from soulkit.data.importers.humanual import TASKS as HUMANUAL
from soulkit.data.importers.humanual import import_humanual
from soulkit.data.importers.mirrorbench import import_mirrorbench
from soulkit.data.importers.mistakes import import_mistakes
from soulkit.data.importers.sim_arena import import_documents, import_lessons
from soulkit.data.importers.socsci210 import import_socsci210
from soulkit.data.importers.sotopia import PAIRS, import_sotopia
from soulkit.data.importers.tombench import import_tombench
from soulkit.data.importers.tomi import import_paratomi, import_tomi
from soulkit.data.importers.twinvoice import import_twinvoice
from soulkit.data.importers.userllm import import_userllm
from soulkit.errors import ConfigError, did_you_mean

__all__ = [
    "HALVES",
    "Half",
    "Imported",
    "build_rows",
    "import_rows",
    "importable",
    "original_folder",
]

_IMPORTERS: dict[str, Callable[[Path, Half], Imported]] = {
    "fantom": lambda path, _: import_fantom(path),
    **{split: alignx(split) for split in ALIGNX},
    "coser": lambda path, _: import_coser(path),
    "hitom": import_hitom,
    **dict.fromkeys(HUMANUAL, lambda path, _: import_humanual(path)),
    "mistakes": lambda path, _: import_mistakes(path),
    "mirrorbench": lambda path, _: import_mirrorbench(path),
    "paratomi": lambda path, _: import_paratomi(path),
    "sim_doc": lambda path, _: import_documents(path),
    "sim_math": lambda path, _: import_lessons(path),
    "sotopia": lambda path, _: import_sotopia(path),
    "tombench": lambda path, _: import_tombench(path),
    "tomi": lambda path, _: import_tomi(path),
    "twinvoice": lambda path, _: import_twinvoice(path),
    "userllm": lambda path, _: import_userllm(path),
    "socsci210": lambda path, _: import_socsci210(path),
}


def importable() -> tuple[str, ...]:
    """The tasks whose original files can be imported."""
    return tuple(_IMPORTERS)


def original_folder(task: str, path: Path) -> bool:
    """Whether `path` is a folder that as a whole is the original release of `task`."""
    return task == "sotopia" and (path / PAIRS).is_file()


def import_rows(task: str, path: Path, half: str | None = None) -> Imported:
    """The rows of an original file of `task`; DataError when the file as a whole cannot be used.

    `half` is Hi-ToM's: `cotp` (the default), `vp` or `all`.
    """
    if task not in _IMPORTERS:
        raise ConfigError(
            f"There is no importer for '{task}'.",
            "Only original files of some benchmarks need importing; released rows are read as is.",
            did_you_mean(task, _IMPORTERS),
        )
    if half is not None and (task != "hitom" or half not in HALVES):
        raise ConfigError(
            f"'--half {half}' does not fit the task '{task}'.",
            "Only Hi-ToM's file holds two halves, which ask the same questions with other golds.",
            f"Give one of {', '.join(HALVES)} with hitom, or leave it out.",
        )
    chosen: Half = next((h for h in HALVES if h == half), "cotp")
    return _IMPORTERS[task](path, chosen)


def build_rows(task: str, path: Path, names: Path | None = None) -> Imported:
    """Rows that are put together from several original files; so far those of `mistakes`.

    `names` is the file with the names of what `path` numbers, by default the one beside it.
    """
    if task != "mistakes":
        raise ConfigError(
            f"Rows of '{task}' are not built from several files.",
            "Only the questions of mistakes and the names of its misconceptions stand apart.",
            f"For other original files: soul data import {task} FILE",
        )
    return import_mistakes(path, names)
