"""Options that several commands share: their sentences, how tasks and rows are written, and what
their values are completed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.mistakes import given_twice
from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.roles.settings import PANELS

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


def ratios(text: str) -> dict[str, float]:
    """`a,b:0.5` → task → mixing ratio."""
    mixture: dict[str, float] = {}
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
        if mixture.get(name, ratio) != ratio:
            raise given_twice("A mixing ratio", how=f"for '{name}'")
        mixture[name] = ratio
    return mixture


def values_by_task(texts: Sequence[str] | None, tasks: str) -> dict[str, str]:
    """`TASK=FILE` options → task → file; a bare FILE is meant for the only task there is."""
    names = list(ratios(tasks)) if tasks else []
    rows: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals and len(names) == 1:
            name, value = names[0], text
        elif not equals:
            raise ConfigError(
                f"'{text}' does not say which task it is for.",
                f"There are {len(names)} tasks.",
                f"Write --data TASK={text} for each task.",
            )
        if name in rows:
            raise given_twice("--data", how=f"for '{name}'")
        rows[name] = value
    return rows


def row_sources(texts: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """`TASK=WHERE` options as task → where; a bare WHERE is meant for every (other) task."""
    rows: dict[str, str] = {}
    for text in texts:
        name, equals, where = text.partition("=")
        named = bool(equals) and (name in tasks or name.isidentifier())
        key, value = (name, where) if named else ("*", text)
        if key in rows:
            raise ConfigError(
                f"--data is given twice for {'every task' if key == '*' else repr(key)}.",
                "Only one of them could be evaluated.",
                "Write --data TASK=FILE once for each task.",
            )
        if named and tasks and name not in tasks:
            raise ConfigError(
                f"--data has rows for '{name}', which is not evaluated here.",
                "They would be ignored.",
                did_you_mean(name, tasks),
            )
        rows[key] = value
    return rows


def players_written(role: str, texts: Sequence[str] | str, flag: str) -> dict[str, Any]:
    """`WHO` and `TASK=WHO` options of a role as settings: for all tasks, and for single ones."""
    everywhere: list[str] = []
    alone: dict[str, list[str]] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        task, equals, who = text.partition("=")
        # A path or an address may hold an =, a name before it is never a form of player.
        if equals and task.isidentifier():
            alone.setdefault(task, []).append(who)
        else:
            everywhere.append(text)
    settings = {f"task_players.{task}.{role}": who for task, who in alone.items()}
    settings |= {role: everywhere} if everywhere else {}
    if role in PANELS:
        return settings
    for name, several in settings.items():
        if len(several) > 1:
            raise given_twice(flag, how="" if name == role else f"for '{name.split('.')[1]}'")
    return {name: who for name, (who,) in settings.items()}


def adapters_written(setting: str, texts: Sequence[str], flag: str) -> dict[str, Any]:
    """`ADAPTER` and `TASK=ADAPTER` options as settings: for all tasks, and for single ones.

    A folder that is there is one, whatever its name looks like.
    """
    settings: dict[str, Any] = {}
    alone: dict[str, str] = {}
    for text in texts:
        task, equals, adapter = text.partition("=")
        if equals and task.isidentifier() and not Path(text).exists():
            if task in alone:
                raise given_twice(flag, how=f"for '{task}'")
            alone[task] = adapter
        else:
            if settings:
                raise given_twice(flag)
            settings[setting] = text
    return settings | ({f"{setting}s": alone} if alone else {})
