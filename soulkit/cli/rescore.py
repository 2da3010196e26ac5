"""`soul rescore RUN`: apply changed parsers and metrics to recorded episodes, without a call."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import Json, Trust

if TYPE_CHECKING:
    from soulkit.eval.rescore import Change, Recorded, Rescored


class Missing(StrEnum):
    """What to do with episodes whose judge was never asked what it is asked now."""

    stop = "stop"
    unscored = "unscored"


def command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of an evaluation or training.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--out", help="New run folder; else one under runs/.")
    ] = None,
    missing: Annotated[
        Missing,
        typer.Option("--missing", help="Episodes with unrecorded replies: stop, or unscored."),
    ] = Missing.stop,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Score recorded episodes again without asking any model.

    Judges answer from the run's ledger. The scores go into a new run folder.
    """
    from soulkit.cli.console import print_json, say_unsealed
    from soulkit.eval.rescore import rescore

    done = rescore(_recorded(run, trust), folder, missing.value)
    say_unsealed()
    if as_json:
        print_json(done.as_dict())
    else:
        _print(done)
        _say_next(run, Path(done.path))


def _recorded(run: Path, trust: bool) -> Recorded:
    from soulkit.errors import RunError
    from soulkit.eval.rescore import command_of, recorded_eval

    command = command_of(run)
    if command.startswith("eval"):
        return recorded_eval(run, trust=trust)
    if command.startswith("train"):
        from soulkit.train.state.recorded import recorded_training

        return recorded_training(run, trust=trust)
    raise RunError(
        f"{run} was made by 'soul {command}'.",
        "Only the episodes of an evaluation or a training can be scored again.",
        "Name the folder of a soul eval or soul train run.",
    )


def _print(done: Rescored) -> None:
    from soulkit.cli.console import out, safe, table

    made = table("task", "metric", ">old mean", ">new mean", ">changed", ">scored", "unscored now")
    for change in done.changes:
        made.add_row(*(safe(text) for text in _row(change)))
    out.print(made)
    misses = f", {done.misses} of them for want of a recorded reply" if done.misses else ""
    out.print(
        safe(f"{done.changed} of {done.episodes} episodes have another score now{misses}; "
             f"new scores in {done.path}"),
        soft_wrap=True,
    )  # fmt: skip


def _say_next(old: Path, new: Path) -> None:
    from soulkit.cli.onward import say_next
    from soulkit.report.hints import shell_path

    say_next(f"soul report {shell_path(old)} {shell_path(new)}", f"soul show {shell_path(new)}")


def _row(change: Change) -> tuple[str, ...]:
    why = ", ".join(f"{reason} {count}" for reason, count in change.unscored.items())
    scored = f"{change.new_scored}/{change.n}"
    if change.new_scored != change.old_scored:
        scored = f"{change.old_scored} -> {scored}"
    figures = (_number(change.old), _number(change.new), str(change.changed), scored)
    return change.task, change.metric, *figures, why


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
