"""Options that several commands share: their sentences, how tasks and rows are written, and what
their values are completed from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from soulkit.tasks.registry import Registry

OUT = "Run folder; the same command resumes it. [default: a new one under runs/]"
CONFIG = "A YAML file with settings, a run's config.yaml for example; options win over it."
SET = "Any other setting; may be repeated."
TRUST = "Act on settings of a run that is not yours."
DRY_RUN = "Print calls, tokens, cost, memory and time; start nothing."
JSON = "Print one JSON document and nothing else on stdout."
Trust = Annotated[bool, typer.Option("--trust", help=TRUST)]
Json = Annotated[bool, typer.Option("--json", help=JSON)]
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


def names_from(kind: str) -> Callable[..., list[str]]:
    """What completes `tasks`, `suites` or `methods`; in a list with commas, its last name."""

    def complete(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in _names(kind) if name.startswith(last)]

    return complete


def _names(kind: str) -> Sequence[str]:
    if kind == "engines":
        from soulkit.models.vllm.settings import ENGINES

        return ENGINES
    if kind == "methods":
        from soulkit.train.objectives.registry import built_in

        return list(built_in())
    from soulkit.tasks.registry import load_registry

    registry = load_registry()
    return list(registry.specs if kind == "tasks" else registry.suites)


COMPLETERS = {kind: names_from(kind) for kind in ("tasks", "suites", "methods", "engines")}
