"""`soul doctor`: check this machine and the requirements of a settings file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import ConsoleReporter, console, print_json, print_note, safe
from soulkit.cli.options import Json, Trust
from soulkit.doctor.checks import (
    CheckLine,
    hub_line,
    key_lines,
    machine_lines,
    package_lines,
    rows_lines,
    vllm_line,
)
from soulkit.report.grid import plain_table
from soulkit.tasks.kit.registry import load_registry
from soulkit.text import counted, dollars

if TYPE_CHECKING:
    from rich.table import Table

    from soulkit.doctor.checks import PlayerCheck
    from soulkit.doctor.needs import Needs


def settings_needs(
    path: Path, intended: str | None, *, yes: bool, trust: bool, vllm_python: str | None = None
) -> Needs:
    """The requirements of the settings in `path`, a file or a run folder; see `needs_of`."""
    from soulkit.doctor.needs import needs_of, settings_file

    flags: dict[str, Any] = {"yes": True if yes else None, "vllm_python": vllm_python}
    return needs_of(settings_file(path), flags, intended, trust=trust)


def check_lines(needs: Needs | None = None, vllm_python: str | None = None) -> Iterator[CheckLine]:
    """The check lines for this machine, and for unmet `needs`."""
    yield from package_lines(needs.extras if needs else ())
    named = needs.config.vllm_python if needs and needs.config else None
    yield vllm_line(vllm_python or named)
    yield from machine_lines(connections=needs.connections if needs else 0)
    yield from key_lines(needs.keys if needs else ())
    yield hub_line()
    if needs is None:
        yield from rows_lines(load_registry())
    else:
        yield from needs.lines


STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


def command(
    config: Annotated[Path | None, typer.Argument(
        metavar="[CONFIG]", readable=False, show_default=False,
        help="Run folder, its config.yaml, or a file for --config. Each model in it is asked one "
        "question.")] = None,
    intended: Annotated[str | None, typer.Option("--for", metavar="COMMAND",
        help="Command that CONFIG is for: eval api, eval local, train METHOD or distill. Needed "
        "for your own files.")] = None,
    load: Annotated[bool, typer.Option("--load",
        help="Also load and ask local checkpoints.")] = False,
    yes: Annotated[bool, typer.Option("--yes",
        help="Skip the cost confirmation.")] = False,
    vllm_python: Annotated[str | None, typer.Option("--vllm-python", metavar="PATH",
        help="Python interpreter that has vLLM installed.")] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Check this machine and your keys; with CONFIG, also ask each of its models one question.

    Nothing is written or downloaded. The exit code is 1 if a requirement is not met.
    """
    from soulkit.doctor.checks import Checkup

    needs = (
        None
        if config is None
        else settings_needs(config, intended, yes=yes, trust=trust, vllm_python=vllm_python)
    )
    checkup = Checkup(lines=list(check_lines(needs, vllm_python)))
    if not as_json:
        _print_lines(checkup.lines)
    if needs is not None:
        from soulkit.doctor.trial import ask_players

        checkup.players += ask_players(needs.parts, load=load, reporter=ConsoleReporter("doctor"))
        if not as_json and checkup.players:
            console().print(player_table(checkup.players))
    if as_json:
        print_json(checkup.as_dict())
    print_note(counted(checkup.problems, "problem") if checkup.problems else "no problems")
    if checkup.problems:
        raise typer.Exit(1)


# -- tables ----------------------------------------------------------------------------------------


def _print_lines(lines: Iterable[CheckLine]) -> None:
    table = plain_table("", "check", "result")
    for one in lines:
        table.add_row(_health(one.health), safe(one.name), _with_way(one.words, one.way))
    console().print(table)


def player_table(players: Iterable[PlayerCheck]) -> Table:
    """A table of the models' replies, with time, tokens and cost."""
    table = plain_table("", "role", "model", "result")
    table.columns[2].overflow = "fold"  # addresses must stay complete
    for one in players:
        words = "; ".join(filter(None, (f"in {one.task}: {one.words}", call_figures(one))))
        table.add_row(_health(one.health), one.role, safe(one.who), _with_way(words, one.way))
    return table


def call_figures(one: PlayerCheck) -> str:
    """`2 calls, 1.3 s, 410 prompt + 60 reply tokens, $0.0004`; empty without calls."""
    if not one.calls:
        return ""
    calls = f"{one.calls} calls, " if one.calls > 1 else ""
    cost = f", {dollars(one.cost)}" if one.cost is not None else ""
    tokens = f"{one.prompt_tokens} prompt + {one.completion_tokens} reply tokens"
    return f"{calls}{one.seconds:.1f} s, {tokens}{cost}"


def _health(health: str) -> str:
    return f"[{STYLES[health]}]{health}[/]"


def _with_way(words: str, way: str) -> Any:
    from soulkit.api_keys import printable

    return safe(printable(words + (f"\n→ {way}" if way else "")))
