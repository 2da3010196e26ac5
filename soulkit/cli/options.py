"""Options that several commands share: how tasks and data files are written on a command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.errors import ConfigError

if TYPE_CHECKING:
    from soulkit.tasks.registry import Registry

TRUST = "Act on settings of a run that is not yours."
Trust = Annotated[bool, typer.Option("--trust", help=TRUST)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
TaskFiles = Annotated[
    list[Path] | None,
    # Not checked by the parser here or at other files: their readers say more, in three lines.
    typer.Option("--tasks", metavar="FILE", help="Your own tasks file.", readable=False),
]


def registry_of(files: Sequence[Path] | None, *, trust: bool) -> Registry:
    """The tasks of soulkit and of one's own files; TrustError for a file in a run's folder, whose
    code nobody vouches for, unless `trust`."""
    from soulkit.tasks.registry import load_registry
    from soulkit.trust import inside_runs, refuse_foreign

    for file in files or ():
        if inside_runs({"tasks_file": file}) and not trust:
            refuse_foreign(file, {"tasks_file": str(file)})
    return load_registry(*(files or ()))


def ratios(text: str) -> dict[str, float]:
    """`hitom,paratomi:0.5` → task → mixing ratio."""
    found: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, colon, number = part.partition(":")
        try:
            ratio = float(number) if colon else 1.0
        except ValueError:
            ratio = -1.0
        if not 0 < ratio < math.inf:
            raise ConfigError(
                f"'{part}' is not a task with a mixing ratio.",
                "A ratio is a positive number after a colon: 0.5 takes half of the rows.",
                f"Write {name} or {name}:0.5.",
            )
        found[name] = ratio
    return found


def pairs(given: Sequence[str] | None, tasks: str) -> dict[str, str]:
    """`TASK=FILE` options → task → file; a bare FILE is meant for the only task there is."""
    names = list(ratios(tasks)) if tasks else []
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals and len(names) == 1:
            name, value = names[0], text
        elif not equals:
            raise ConfigError(
                f"'{text}' does not say which task it is for.",
                f"There are {len(names)} tasks.",
                f"Write --data TASK={text} for each task.",
            )
        found[name] = value
    return found
