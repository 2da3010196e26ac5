"""`soul runs [FOLDER]`: which runs there are, how far they came and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import Json
from soulkit.text import one_line

if TYPE_CHECKING:
    from rich.text import Text

    from soulkit.report.listing import ListedFolder

HEADLINES = 3
"""Of one run that are shown; --json has all of them."""
NAME_WIDTH = 36
"""Columns in which names of runs stay whole, however narrow the terminal is."""
WIDE, WIDE_ONLY = 100, ("command", "started")
"""Columns of a terminal from which on these are shown; --json has them always."""
STYLES = {"finished": "", "running": "green", "unfinished": "yellow", "damaged": "red"}


def command(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="A folder of runs.", show_default=False)
    ] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List the runs of a folder, the newest first: status, headline, cost.

    A run is unfinished when its command was stopped; the same command takes it up again.
    """
    from soulkit.cli.console import print_json
    from soulkit.report.listing import list_runs

    runs = list_runs(folder)
    if as_json:
        print_json([run.as_dict() for run in runs])
    else:
        _print(runs, folder)


def _print(runs: Sequence[ListedFolder], folder: Path) -> None:
    from soulkit.cli.console import out, safe
    from soulkit.cli.onward import say_next
    from soulkit.report.hints import shell_path
    from soulkit.report.progress import EPISODES, JUDGEMENTS
    from soulkit.runs.records import SAMPLES

    if not runs:
        out.print(f"no run in {safe(str(folder))}", soft_wrap=True)
        say_next("soul demo")
        return
    show_runs(runs)
    newest = next((run for run in runs if run.state != "damaged"), runs[0])
    path = shell_path(newest.path)
    files = [newest.path / name for name in (EPISODES, JUDGEMENTS, SAMPLES)]
    # Nothing was played in some supervised trainings, and in what has just begun.
    played = any(file.is_file() and file.stat().st_size for file in files)
    say_next(f"soul report {path}", *([f"soul show {path}"] if played else []))


def show_runs(runs: Sequence[ListedFolder]) -> None:
    """Print the table of `soul runs`."""
    from soulkit.cli.console import out, table

    heads = ("run", "command", "model", "status", "headline", ">cost", "started")
    shown = [i for i, head in enumerate(heads) if out.width >= WIDE or head not in WIDE_ONLY]
    made = table(*(heads[i] for i in shown))
    for column in made.columns:
        column.overflow = "fold"
    # A name in pieces cannot be copied into the next command.
    made.columns[0].no_wrap = max(len(one_line(run.name)) for run in runs) <= NAME_WIDTH
    for run in runs:
        # No interval is cut in two: on a narrow terminal each begins a line.
        cells = _row(run, " [" if out.width >= WIDE else "\n[")
        made.add_row(*(cells[i] for i in shown))
    out.print(made)


def _row(run: ListedFolder, bracket: str) -> tuple[Text, ...]:
    from rich.text import Text

    from soulkit.report.listing import cost_text, headline_texts, started_text, state_text

    names = (Text(one_line(text)) for text in (run.name, run.command, run.model))
    return (
        *names,
        Text(one_line(state_text(run)), STYLES[run.state]),
        Text("\n".join(headline_texts(run, HEADLINES)).replace(" [", bracket)),
        Text(cost_text(run)),
        Text(started_text(run)),
    )
