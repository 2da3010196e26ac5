"""Original benchmark files as flat rows in the columns that `tasks.yaml` declares.

One module per benchmark. An importer keeps the story's words and the published gold; it repairs
only what is no part of either (stray marks, an instruction inside the story). To add one: write a
function `(path, half) -> Imported` and name it in `_IMPORTERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from soulkit.data.importers.base import HALVES, Half, Imported
from soulkit.data.importers.hitom import import_hitom
from soulkit.data.importers.tomi import import_paratomi, import_tomi
from soulkit.errors import ConfigError, did_you_mean

__all__ = ["HALVES", "Half", "Imported", "import_rows", "importable"]

_IMPORTERS: dict[str, Callable[[Path, Half], Imported]] = {
    "hitom": import_hitom,
    "paratomi": lambda path, _: import_paratomi(path),
    "tomi": lambda path, _: import_tomi(path),
}


def importable() -> tuple[str, ...]:
    """The tasks whose original files can be imported."""
    return tuple(_IMPORTERS)


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
