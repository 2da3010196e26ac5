"""`soul report RUN...`: what runs recorded, as a table, Markdown, JSON or one HTML file."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from soulkit.report.load import RunData


class Format(StrEnum):
    """How to print."""

    terminal = "terminal"
    md = "md"
    json = "json"
    html = "html"


def command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder of runs.")
    ],
    format_: Annotated[
        Format, typer.Option("--format", help="How to print the report.")
    ] = Format.terminal,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write. HTML goes to RUN/report/index.html without it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Show what runs recorded. Nothing is scored again."""
    from soulkit.report.load import load_runs

    chosen = Format.json if as_json else format_
    loaded_runs = load_runs(runs, episodes=chosen is Format.html)
    if chosen is Format.html:
        from soulkit.report import html

        typer.echo(str(html.write_page(loaded_runs, out or runs[0] / "report" / "index.html")))
    elif out is None and chosen is Format.terminal:
        _print(loaded_runs)
    else:
        _write_text(_text(loaded_runs, chosen), out)


def _text(runs: list[RunData], chosen: Format) -> str:
    from soulkit.report import table

    if chosen is Format.md:
        return table.markdown(runs)
    if chosen is Format.json:
        return json.dumps(table.merged(runs), indent=2) + "\n"
    return table.terminal_text(runs)


def _print(runs: list[RunData]) -> None:
    from soulkit.cli.console import out
    from soulkit.report.hints import odd_cells
    from soulkit.report.table import report_parts

    for part in report_parts(runs):
        out.print(part)
    for line in (line for run in runs if run.summary for line in odd_cells(run.summary, run.path)):
        out.print(line, markup=False, soft_wrap=True)


def _write_text(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8", errors="replace")
    typer.echo(str(out))
