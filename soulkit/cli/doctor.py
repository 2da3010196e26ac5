"""`soul doctor`: look, print, and say by the exit code whether something is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import ask_user, console, err, print_json, safe
from soulkit.cli.console import table as new_table
from soulkit.cli.options import Json, Trust

if TYPE_CHECKING:
    from rich.table import Table

    from soulkit.doctor.checkup import CheckLine, Checkup, PlayerCheck
    from soulkit.doctor.needs import Needs

STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


def command(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]", readable=False, show_default=False,
            help="A run's config.yaml or folder, or a file for --config: its players are asked.",
        ),
    ] = None,
    intended: Annotated[
        str | None,
        typer.Option("--for", metavar="COMMAND", help="What a file of your own is for: eval api, "
                     "eval local, train METHOD, distill."),
    ] = None,
    load: Annotated[
        bool, typer.Option("--load", help="Load checkpoints to ask them, too.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Confirm what the questions will cost.")
    ] = False,
    vllm_python: Annotated[
        str | None,
        typer.Option("--vllm-python", metavar="PATH", help="The Python interpreter that has vLLM."),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Look at what is here; with CONFIG ask each of its players one real question.

    Nothing is written or downloaded. Exit code 1: something that is needed is wrong.
    """
    from soulkit.doctor.checkup import Checkup
    from soulkit.doctor.look import look_around, settings_needs

    needs = (
        None
        if config is None
        else settings_needs(config, intended, yes=yes, trust=trust, vllm_python=vllm_python)
    )
    checkup = Checkup(lines=list(look_around(needs, vllm_python)))
    if not as_json:
        _print_lines(checkup.lines)
    if needs is not None:
        checkup.players += _ask(needs, load=load)
        if not as_json and checkup.players:
            console().print(player_table(checkup.players))
    if as_json:
        print_json(checkup.as_dict())
    _say_result(checkup)
    if checkup.problems:
        raise typer.Exit(1)


def _ask(needs: Needs, *, load: bool) -> list[PlayerCheck]:
    from soulkit.doctor.trial import ask_players

    return ask_players(needs.parts, load=load, say=_say, ask=ask_user())


def _say(remark: str) -> None:
    err.print(safe(remark), soft_wrap=True)


def _say_result(checkup: Checkup) -> None:
    number = checkup.problems
    _say("no problem" if not number else "1 problem" if number == 1 else f"{number} problems")


# -- tables ----------------------------------------------------------------------------------------


def _print_lines(lines: Iterable[CheckLine]) -> None:
    table = new_table("", "what", "how it is")
    for one in lines:
        table.add_row(_health(one.health), safe(one.name), _with_way(one.words, one.way))
    console().print(table)


def player_table(players: Iterable[PlayerCheck]) -> Table:
    """Who answered what; with time, tokens and cost."""
    table = new_table("", "role", "who", "answer")
    table.columns[2].overflow = "fold"  # of an address no part may be missing
    for one in players:
        words = "; ".join(filter(None, (f"in {one.task}: {one.words}", call_figures(one))))
        table.add_row(_health(one.health), one.role, safe(one.who), _with_way(words, one.way))
    return table


def call_figures(one: PlayerCheck) -> str:
    """`2 calls, 1.3 s, 410 + 60 tokens, $0.0004`; empty where nobody was asked."""
    from soulkit.play.costs import dollars

    if not one.calls:
        return ""
    calls = f"{one.calls} calls, " if one.calls > 1 else ""
    cost = f", {dollars(one.cost)}" if one.cost is not None else ""
    return f"{calls}{one.seconds:.1f} s, {one.prompt_tokens} + {one.completion_tokens} tokens{cost}"


def _health(health: str) -> str:
    return f"[{STYLES[health]}]{health}[/]"


def _with_way(words: str, way: str) -> Any:
    from soulkit.keys import printable

    return safe(printable(words + (f"\n→ {way}" if way else "")))
