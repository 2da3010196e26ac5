"""Edited prompts: templates that go before a task's own when its recorded episodes are judged.

    DIR/judge.md            for every task of the run that has a judge.md
    DIR/TASK/judge.md       for one task

A run that was judged with some keeps a copy of them in its folder, where the next rescoring finds
them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from soulkit.errors import ConfigError, did_you_mean
from soulkit.tasks.base import Task
from soulkit.types import Example

PROMPTS = "prompts"
"""The folder of edited templates in a rescored run."""


def templates_in(folder: Path) -> list[Path]:
    """The templates of a folder of prompts, those for single tasks included."""
    return sorted([*folder.glob("*.md"), *folder.glob("*/*.md")]) if folder.is_dir() else []


def distinct_tasks(rows: Mapping[str, tuple[Task, Example]]) -> list[Task]:
    """The tasks of rows by id, each once."""
    return list({id(task): task for task, _ in rows.values()}.values())


def put_prompts(tasks: Iterable[Task], folder: Path) -> None:
    """Have the tasks render the templates in `folder` before their own; nothing without any."""
    if templates_in(folder):
        for task in tasks:
            task.prompts = task.prompts.over(folder)


def copy_prompts(source: Path, run: Path) -> None:
    """Copy the templates in `source` into the folder of a run; those of equal names go."""
    place = run / PROMPTS
    for path in templates_in(source) if source.resolve() != place.resolve() else ():
        copy = place / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def refuse_empty(folder: Path) -> None:
    """ConfigError for a folder without any template."""
    if not templates_in(folder):
        raise ConfigError(
            f"There is no edited prompt in '{folder}'.",
            "--prompts names a folder with templates: judge.md, or TASK/judge.md for one task.",
            "Copy a task's judge.md from its folder of prompts there, and edit it.",
        )


def refuse_unused(tasks: Iterable[Task], folder: Path) -> None:
    """ConfigError for an edited template that was not rendered: it was meant to change something.

    To be called when every question of the episodes has been put into words.
    """
    opened = {path.resolve() for task in tasks for path in task.prompts.opened}
    unused = [path for path in templates_in(folder) if path.resolve() not in opened]
    if unused:
        names = [path.relative_to(folder).as_posix() for path in unused]
        raise ConfigError(
            f"No question to a judge of these episodes uses {', '.join(names)}.",
            "What the actor saw is recorded and stays; only the prompts of judges are put anew.",
            did_you_mean(unused[0].name, sorted({path.name for path in opened})),
        )
