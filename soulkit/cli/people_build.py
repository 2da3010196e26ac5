"""`soul people build`: from an export of chats to a measured model, in one command."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.console import print_next, print_note
from soulkit.errors import ConfigError
from soulkit.option_texts import given_twice

if TYPE_CHECKING:
    from soulkit.people.build import RoadStep


def build_road(
    context: typer.Context,
    chats: Annotated[Path, typer.Argument(metavar="CHATS", readable=False,
        help="Export of chats: a file, folder or .zip for `soul data import chats`.")],
    model: Annotated[str, typer.Option("--model", metavar="MODEL",
        help="Model to train: a local folder, a Hub id or tiny.")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", readable=False,
        help="Folder for everything. The same command resumes it.")],
    side: Annotated[str, typer.Option("--side", metavar="human|NAME",
        help="Side to learn; in chats between people, a speaker's name.")] = "human",
    share: Annotated[float, typer.Option("--share", metavar="X",
        help="Share of the persons to set aside for the measure of closeness.")] = 0.2,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1,
        help="Training steps; three checkpoints are measured.")] = 300,
    canaries: Annotated[int | None, typer.Option("--canaries", metavar="N", min=1,
        help="Number of secrets to plant. [default: 20]")] = None,
    no_plant: Annotated[bool, typer.Option("--no-plant",
        help="Plant no secrets, as in a model to share. Its twin with secrets is its "
        "audit.")] = False,
    allow_private: Annotated[bool, typer.Option("--allow-private",
        help="Learn from the chats as they are, without redaction.")] = False,
) -> None:  # fmt: skip
    """Train a model on people's chats and measure it, in one command.

    Imports, redacts and deduplicates the chats, sets persons aside, plants secrets, trains, and
    measures what the model remembers and how close it is to the persons set aside. Every step is
    printed as a command of its own; finished steps are skipped. Other options, such as --full and
    --lr, are those of soul train sft.
    """
    from soulkit.people.build import SECRETS, Road, road_steps

    if no_plant and canaries:
        raise given_twice("What to plant", how="with --canaries and with --no-plant")
    if not chats.exists():
        raise ConfigError(
            f"'{chats}' does not exist.", "The first step imports an export of chats.",
            "Give the file, folder or .zip file that another program has exported.",
        )  # fmt: skip
    road = Road(out, lambda: road_steps(
        chats, out, ("--model", model, *context.args), side=side, share=share, steps=steps,
        canaries=0 if no_plant else canaries or SECRETS, allow_private=allow_private,
    ))  # fmt: skip
    road.refuse_changes()
    for place in range(len(road.steps)):
        step = road.steps[place]
        done = road.is_done(step)
        print_note(f"step {place + 1} of {len(road.steps)}{', done' * done}: {step.line}")
        if not done:
            road.begin(step)
            _run(step)
            road.finish(step)
    print_next(f"soul report {road.steps[-1].words[1]}")


def _run(step: RoadStep) -> None:
    """Run a step in this process; its error or exit code ends the whole command."""
    from soulkit.cli.app import run_words

    report = step.report.open("w", encoding="utf-8") if step.report else nullcontext(sys.stdout)
    try:
        with report as stream, redirect_stdout(stream):
            code: object = run_words(step.words)
    except SystemExit as end:  # a training with several processes has ended
        code = end.code
    except Exception:
        print_note(f"failed: {step.line}")
        raise
    if code:
        if code != 130:  # not interrupted
            print_note(f"failed with exit code {code}: {step.line}")
        raise typer.Exit(code if isinstance(code, int) else 1)
