"""`soul report`, `soul compare` and `soul runs`: results, differences and lists of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of
from soulkit.errors import RunError

if TYPE_CHECKING:
    from soulkit.eval.comparison.compare import Comparison
    from soulkit.report.listing import ListedFolder
    from soulkit.report.load import RunData
    from soulkit.report.pages import ReportView
    from soulkit.report.suites import SuiteTable


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
    from soulkit.report.pages import ReportView

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
        _print_report(view)
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
        from soulkit.report.grid import parts_text

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


def _print_report(view: ReportView) -> None:
    from soulkit.cli.console import out
    from soulkit.report.episode_search import odd_cells

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


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run folder to compare with.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Run folder that may be better.")],
    metric: Annotated[
        str,
        typer.Option(help="A metric as the task calls it, such as accuracy, or a break-down of it, "
                     "accuracy/order=2; `headline`: what each task declares."),
    ] = "headline",
    suite: Annotated[
        str,
        typer.Option(metavar="SUITE", help="Only its tasks, with means over axes and all.",
                     autocompletion=COMPLETERS["suites"]),
    ] = "",
    gate: Annotated[
        list[str] | None,
        typer.Option(metavar="GATE", help="TASK/METRIC>=NUMBER: exit with 1 unless the interval of "
                     "B - A is there; may be repeated."),
    ] = None,
    force_mixed: Annotated[
        bool, typer.Option("--force-mixed", help="Compare all the same, and say what differs.")
    ] = False,
    shared_rows: Annotated[
        bool, typer.Option("--shared-rows", help="Compare on the rows that both evaluations have, "
                           "with the same content.")
    ] = False,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare two runs, paired example by example.

    Prints B minus A for each task, with its interval, its p-value, and Holm's beside it.
    """
    from soulkit.cli.console import print_json
    from soulkit.eval.comparison.compare import compare_runs
    from soulkit.eval.comparison.gates import parse_gate

    gates = [parse_gate(text) for text in gate or ()]
    comparison = compare_runs(
        a, b, metric, allow_mixed=force_mixed, suite=suite, gates=gates,
        registry=registry_of(tasks, trust=trust), trust=trust,
        only_shared_rows=shared_rows,
    )  # fmt: skip
    if as_json:
        print_json(comparison.as_dict())
    else:
        _print_comparison(comparison)
    if not comparison.passed:
        raise typer.Exit(1)


def _print_comparison(comparison: Comparison) -> None:
    from soulkit.cli.console import out
    from soulkit.report.comparison import comparison_parts

    for part in comparison_parts(comparison):
        out.print(part)


def runs_command(
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
        _print_runs(runs, folder)


def _print_runs(runs: Sequence[ListedFolder], folder: Path) -> None:
    from soulkit.cli.console import out, print_next, safe
    from soulkit.report.episode_search import shell_path
    from soulkit.report.listing import runs_table
    from soulkit.report.load import EPISODES, JUDGEMENTS
    from soulkit.runs.records import SAMPLES

    if not runs:
        out.print(f"no run in {safe(str(folder))}", soft_wrap=True)
        print_next("soul demo")
        return
    out.print(runs_table(runs, out.width))
    newest = next((run for run in runs if run.state != "damaged"), runs[0])
    path = shell_path(newest.path)
    files = [newest.path / name for name in (EPISODES, JUDGEMENTS, SAMPLES)]
    # Nothing was played in some supervised trainings, and in what has just begun.
    played = any(file.is_file() and file.stat().st_size for file in files)
    print_next(f"soul report {path}", *([f"soul show {path}"] if played else []))
