"""`soul tasks new`: a folder with a task that runs, to be changed into one's own."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from soulkit.cli.console import out, safe


def new(
    name: Annotated[str, typer.Argument(help="The task's name: letters, digits, underscores.")],
    kind: Annotated[
        str,
        typer.Option("--kind", help="What it begins as: choice, judged, dialogue or scene."),
    ] = "choice",
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write; default: one with its name.", readable=False),
    ] = None,
) -> None:
    """Write the folder of a new task, complete and small.

    It has a declaration, a class, prompts, rows and a function that makes more; the folder is laid
    out as those of the built-in tasks are. What to do next is printed.
    """
    from soulkit.tasks.scaffold import template, write_task

    place = folder if folder is not None else Path(name)
    files = write_task(name, kind, place)
    out.print(f"{len(files)} files → {safe(str(place))}: {', '.join(files)}", soft_wrap=True)
    out.print("next:")
    for line in _next(name, place, template(kind).players):
        out.print(f"  {safe(line)}", soft_wrap=True)


def _next(name: str, folder: Path, players: str) -> list[str]:
    declared, rows = quote(str(folder / "tasks.yaml")), quote(str(folder / "rows.jsonl"))
    return [
        f"soul tasks check {name} --tasks {declared}",
        f"soul data synth {name} -n 20 --tasks {declared}",
        f"soul eval api --tasks {declared} --task {name} --data {name}={rows} --model MODEL "
        f"--base-url URL {players}".rstrip(),
    ]
