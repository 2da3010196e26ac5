"""`soul report RUN...`: what runs recorded, as a table, Markdown, LaTeX, CSV, JSON or one page."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import COMPLETERS, TaskFiles, Trust
from soulkit.errors import RunError

if TYPE_CHECKING:
    from soulkit.report.load import RunData
    from soulkit.report.suites import SuiteTable
    from soulkit.report.views import ReportView


class Format(StrEnum):
    """How to print."""

    terminal = "terminal"
    table = "table"
    md = "md"
    latex = "latex"
    csv = "csv"
    json = "json"
    html = "html"


def command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder of runs.")
    ],
    format_: Annotated[
        Format, typer.Option("--format", help="How to print; `table` is the terminal's.")
    ] = Format.terminal,
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite", help="Show the runs as this suite: its members, axis means, mean.",
            autocompletion=COMPLETERS["suites"],
        ),
    ] = None,
    playable: Annotated[
        bool, typer.Option("--playable", help="Of the suite only the members that were played.")
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Every metric and break-down, not headlines alone.")
    ] = False,
    tasks: TaskFiles = None,
    trust: Trust = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write. HTML goes to RUN/report/index.html without it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:  # fmt: skip
    """Show what runs recorded. Nothing is scored again."""
    from soulkit.report.load import folder_notes, load_runs
    from soulkit.report.views import ReportView

    chosen = Format.json if as_json else format_
    if _of_distillation(runs, chosen, out):
        return
    loaded_runs = load_runs(runs, episodes=chosen is Format.html, light=True)
    view = ReportView(
        loaded_runs, _suite_table(loaded_runs, suite, chosen, tasks, trust),
        playable=playable, details=details, notes=folder_notes(runs),
    )  # fmt: skip
    if chosen is Format.html:
        typer.echo(str(view.page(out or runs[0] / "report" / "index.html")))
    elif out is None and chosen in (Format.terminal, Format.table):
        _print(view)
    else:
        _write_text(_text(view, chosen), out)


def _of_distillation(runs: list[Path], chosen: Format, out: Path | None) -> bool:
    """Show the distillation that is named; whether one was. RunError for one among other runs."""
    from soulkit.report.distillation import distillation_parts, read_for_report
    from soulkit.report.distillation import write_distillation_page as write_page

    results = [result for path in runs if (result := read_for_report(path)) is not None]
    if not results:
        return False
    if len(runs) > 1:
        raise _not_beside(runs)
    (result,) = results
    if chosen is Format.html:
        typer.echo(str(write_page(result, out.parent if out else runs[0] / "report")))
    elif chosen is Format.json:
        from soulkit.distill.report import distillation_values

        values = distillation_values(result)
        _write_text(json.dumps(values, indent=2) + "\n", out)
    elif out is None and chosen in (Format.terminal, Format.table):
        from soulkit.cli.console import out as console

        for part in distillation_parts(result):
            console.print(part)
    else:
        from soulkit.report.table import parts_text

        _write_text(parts_text(distillation_parts(result)), out)
    return True


def _not_beside(runs: list[Path]) -> RunError:
    return RunError(
        "A distillation and other runs cannot stand in one table.",
        "It has base, experts and generalist side by side, and no single score.",
        f"Report it alone, or name what it measured: {runs[0]}/measured/generalist",
    )


def _suite_table(
    runs: list[RunData], suite: str | None, chosen: Format, files: list[Path] | None, trust: bool
) -> SuiteTable | None:
    """The runs as a suite: the one that is asked for, else the one that all of them played."""
    from soulkit.cli.options import registry_of
    from soulkit.report.suites import common_suite, suite_table

    registry = registry_of(files, trust=trust)
    name = suite or common_suite(runs, registry)
    flat = chosen in (Format.latex, Format.csv)  # these have nothing else to show
    wide = chosen not in (Format.terminal, Format.table, Format.html)
    return suite_table(runs, name, registry, all_context=wide) if name or flat else None


def _text(view: ReportView, chosen: Format) -> str:
    if chosen is Format.md:
        return view.markdown()
    if chosen is Format.json:
        return json.dumps(view.values(), indent=2) + "\n"
    if chosen is Format.latex:
        return view.latex()
    return view.csv() if chosen is Format.csv else view.text()


def _print(view: ReportView) -> None:
    from soulkit.cli.console import out
    from soulkit.report.hints import odd_cells

    for part in view.parts():
        out.print(part)
    for run in view.runs:
        for line in odd_cells(run.summary, run.path) if run.summary else ():
            out.print(line, markup=False, soft_wrap=True)


def _write_text(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8", errors="replace")
    typer.echo(str(out))
