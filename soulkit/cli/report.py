"""`soul report`, `soul compare` and `soul runs`: results, differences and lists of runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import COMPLETERS, JUNIT, Json, TaskFiles, Trust, registry_of
from soulkit.cli.parse_errors import RUNS, missing_run_error
from soulkit.errors import ConfigError, RunError
from soulkit.runs.jsonl import unlinked, write_aside
from soulkit.text import one_line

if TYPE_CHECKING:
    from soulkit.report.figures import Chart
    from soulkit.report.listing import ListedFolder
    from soulkit.report.load import RunData
    from soulkit.report.pages import ReportView
    from soulkit.report.suites import SuiteTable


class Format(StrEnum):
    """Output formats of `soul report`."""

    terminal = "terminal"
    table = "table"
    md = "md"
    latex = "latex"
    csv = "csv"
    json = "json"
    html = "html"
    episodes_csv = "episodes-csv"
    episodes_parquet = "episodes-parquet"
    eee = "eee"


_FILES = {Format.episodes_csv: "episodes.csv", Format.episodes_parquet: "episodes.parquet",
          Format.eee: "eee"}  # fmt: skip
"""Formats for other programs → the file or folder in RUN/report."""
_NAMED = {"": Format.html, ".html": Format.html, ".htm": Format.html, ".md": Format.md,
          ".json": Format.json, ".tex": Format.latex}  # fmt: skip
"""Suffix of --out → the format without --format."""


def command(
    runs: Annotated[list[Path] | None, typer.Argument(metavar="RUN...",
        help="Run folders, or a folder of runs. [default: runs]")] = None,
    format_: Annotated[Format, typer.Option("--format", metavar="|".join(Format),
        help="Output format; with --out, its suffix decides, too.")] = Format.terminal,
    suite: Annotated[str | None, typer.Option(
        "--suite", metavar="SUITE", autocompletion=COMPLETERS["suites"],
        help="Show the runs as results of this suite: its tasks, axis means and overall "
        "mean.")] = None,
    playable: Annotated[bool, typer.Option("--playable",
        help="Show a suite although some of its tasks were not run.")] = False,
    details: Annotated[bool, typer.Option("--details",
        help="Show all metrics and breakdowns, not only the headline metrics.")] = False,
    tasks: TaskFiles = None,
    trust: Trust = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE",
        help="File to write; for eee a folder. HTML, episodes and eee default to RUN/report. HTML "
        "in a folder keeps the texts in files next to index.html.")] = None,
    watch: Annotated[bool, typer.Option("--watch",
        help="Write the HTML page again and again until all runs are finished.")] = False,
    every: Annotated[int | None, typer.Option("--every", metavar="SECONDS", min=1,
        help="With --watch: seconds between two pages. [default: 10]")] = None,
    figures: Annotated[Path | None, typer.Option("--figures", metavar="DIR",
        help="Also write each figure to this folder as PDF and SVG, at the column width of a "
        "paper.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:  # fmt: skip
    """Show the recorded results of runs as tables, figures or one HTML page.

    Nothing is scored again. Without RUN, the command shows the run in ./runs, or lists the runs
    there if there are several.
    """
    from soulkit.report.load import folder_notes, load_runs
    from soulkit.report.pages import ReportView

    chosen = _chosen(Format.json if as_json else format_, out, watch=watch)
    other = as_json and format_ not in (chosen, Format.terminal)
    options = {"suite": suite, "playable": playable, "details": details} if chosen in _FILES else {}
    _refuse_ignored({"every": every and not watch, "json": other, **options})
    runs = runs or _only_run(chosen)
    arguments = (runs, chosen, out, figures)
    if not runs or _exported(*arguments) or _of_distillation(*arguments):
        return

    def view_now() -> ReportView:
        loaded = load_runs(runs, episodes=False)
        table = _suite_table(loaded, suite, chosen, tasks, trust)
        table = table and replace(table, playable=playable, details=details)
        return ReportView(loaded, table, details=details, notes=folder_notes(runs))

    view = view_now()
    _write_figures(view.charts, figures, chosen, out)
    if watch:
        _watch(view, view_now, out or _inside(runs[0], "index.html"), every or 10)
    elif chosen is Format.html:
        typer.echo(str(view.page(out or _inside(runs[0], "index.html"))))
    elif out is None and chosen in (Format.terminal, Format.table):
        _print_report(view)
    else:
        _write_text(_text(view, chosen), out)


def _inside(run: Path, *file: str) -> Path:
    """The folder of a run's reports, or a file there; never a link."""
    return unlinked(run, "report", *file)


_WHY_IGNORED = {"every": "It sets the pause of --watch.", "json": "It means --format json."}


def _refuse_ignored(options: Mapping[str, object]) -> None:
    """ConfigError for the first option that is set and would be ignored."""
    for option in filter(options.get, options):
        raise ConfigError(
            f"--{option} has no effect on this report.",
            _WHY_IGNORED.get(option, "This format exports every episode."),
            f"Leave out --{option}.",
        )


def _write_figures(
    charts: Callable[[], list[Chart]], folder: Path | None, chosen: Format, out: Path | None
) -> None:
    """Write the figures and print their paths; to standard error if the report itself goes to
    standard output as data. RunError without a figure."""
    if folder is None:
        return
    from soulkit.report.figures import write_figures

    paths = write_figures(charts(), folder)
    if not paths:
        raise RunError(
            "There is no figure to write.",
            "The runs have no mean and no training step yet.",
            "Run the command again later, or without --figures.",
        )
    data = out is None and chosen not in (Format.terminal, Format.table, Format.html)
    for path in paths:
        typer.echo(str(path), err=data)


def _only_run(chosen: Format) -> list[Path]:
    """The run in ./runs; if there are several, lists them and returns none. ConfigError without a
    run, or if `chosen` is a format for files."""
    from soulkit.report.listing import list_runs

    found = list_runs(RUNS) if RUNS.is_dir() else []
    if len(found) == 1:
        return [found[0].path]
    if not found or chosen not in (Format.terminal, Format.table):
        raise missing_run_error("soul report")
    _print_runs(found)
    return []


def _chosen(asked: Format, out: Path | None, *, watch: bool) -> Format:
    """The format; ConfigError if --watch cannot write it."""
    if watch and asked not in (Format.terminal, Format.html):
        raise ConfigError(
            f"--watch does not work with --format {asked}.",
            "It writes an HTML page again and again.",
            "Leave out --watch, or use --format html.",
        )
    if out is None or asked is not Format.terminal:
        return Format.html if watch else asked
    return Format.html if watch or out.is_dir() else _NAMED.get(out.suffix.lower(), asked)


def _watch(view: ReportView, view_now: Callable[[], ReportView], page: Path, every: int) -> None:
    """Write the page every few seconds until all runs are finished. It reloads itself, except for
    the last one. Prints its path once, and the progress whenever it changes."""
    from soulkit.cli.console import err, print_note, safe

    said = ""
    with err.status("") as status:
        try:
            while any(run.progress for run in view.runs):
                path = view.page(page, reload=every)
                if not said:
                    typer.echo(str(path))
                line = _progress_text(view.runs)
                status.update(f"{time.strftime('%H:%M:%S')} {safe(line)}")
                if line != said and not err.is_terminal:
                    print_note(f"{time.strftime('%H:%M:%S')} {line}")
                said = line
                time.sleep(every)
                view = view_now()
        finally:
            path = view.page(page)
    if not said:
        typer.echo(str(path))
    print_note(f"{time.strftime('%H:%M:%S')} {_progress_text(view.runs)}")


def _progress_text(runs: Sequence[RunData]) -> str:
    """`before: finished; ditto: 12 of 44 steps`; a run that no process writes to is `stopped`."""
    from soulkit.eval.run.run_lock import is_locked

    texts = []
    for run in runs:
        stopped = run.progress is not None and not is_locked(run.path)
        text = run.progress.text() if run.progress else "finished"
        texts.append(f"{one_line(run.name)}: {text}{' (stopped)' if stopped else ''}")
    return "; ".join(texts)


def _exported(runs: list[Path], chosen: Format, out: Path | None, figures: Path | None) -> bool:
    """Write episodes or records, print the paths, and return whether `chosen` is such a format.

    Runs without an EEE record are named; RunError if none has one.
    """
    from soulkit.cli.console import print_note
    from soulkit.report.exports.eee import unfit_reason, write_record
    from soulkit.report.exports.episodes import write_episodes
    from soulkit.report.load import EPISODES, load_runs, named_runs

    if chosen not in _FILES:
        return False
    if figures is not None:
        raise ConfigError(
            f"--figures does not work with --format {chosen}.",
            "This format is written from the episodes; figures are drawn from the results.",
            f"Run the command twice: once with --figures {figures}, once with --format {chosen}.",
        )
    out = out or _inside(runs[0], _FILES[chosen])
    if chosen is not Format.eee:
        files = [(name, path / EPISODES) for name, path in named_runs(runs)]
        typer.echo(str(write_episodes(files, out, parquet=chosen is Format.episodes_parquet)))
        return True
    loaded = load_runs(runs, episodes=False)
    unfit = {run.name: why for run in loaded if (why := unfit_reason(run))}
    if len(unfit) == len(loaded):
        name, why = next(iter(unfit.items()))
        raise RunError(
            f"There is no EEE record of {name}: {why}.",
            "A record describes a finished evaluation with a score.",
            "Give a folder that soul eval wrote.",
        )
    for name, why in unfit.items():
        print_note(f"no record of {name}: {why}")
    for run in loaded:
        if run.name not in unfit:
            typer.echo(str(write_record(run, out)))
    return True


def _of_distillation(
    runs: list[Path], chosen: Format, out: Path | None, figures: Path | None
) -> bool:
    """Show the distillation among `runs` and return whether there is one.

    RunError for a distillation together with other runs.
    """
    from soulkit.report.distillation import (
        distillation_charts,
        distillation_parts,
        read_for_report,
    )
    from soulkit.report.distillation import write_distillation_page as write_page

    results = [result for path in runs if (result := read_for_report(path)) is not None]
    if not results:
        return False
    if len(runs) > 1:
        raise RunError(
            "A distillation and other runs cannot be shown in one table.",
            "A distillation has scores for base, experts and generalist, not one score.",
            f"Report it on its own, or report its evaluation: {runs[0]}/measured/generalist",
        )
    (result,) = results
    _write_figures(lambda: distillation_charts(result), figures, chosen, out)
    if chosen is Format.html:
        typer.echo(str(write_page(result, out or _inside(runs[0]))))
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


def _suite_table(
    runs: list[RunData], suite: str | None, chosen: Format, files: list[Path] | None, trust: bool
) -> SuiteTable | None:
    """The runs as a suite: the one in `suite`, else the one that all of them ran."""
    from soulkit.report.suites import common_suite, suite_table

    registry = registry_of(files, trust=trust)
    name = suite or common_suite(runs, registry)
    flat = chosen in (Format.latex, Format.csv)  # these formats show nothing else
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
    write_aside(out, text.encode("utf-8", "replace"))
    typer.echo(str(out))


def compare_command(
    a: Annotated[Path, typer.Argument(metavar="A",
        help="Run folder of the baseline.")],
    b: Annotated[Path, typer.Argument(metavar="B",
        help="Run folder to compare with the baseline.")],
    metric: Annotated[str, typer.Option(metavar="METRIC",
        help="Metric to compare, such as accuracy, or a breakdown such as accuracy/order=2. "
        "`headline` is each task's main metric.")] = "headline",
    suite: Annotated[str, typer.Option(metavar="SUITE", autocompletion=COMPLETERS["suites"],
        help="Compare only the tasks of this suite, with axis means and the overall mean.")] = "",
    gate: Annotated[list[str] | None, typer.Option(metavar="GATE",
        help="Condition TASK/METRIC>=NUMBER: exit with code 1 unless the whole interval of B - A "
        "satisfies it. Repeatable.")] = None,
    gates: Annotated[Path | None, typer.Option(metavar="FILE",
        help="File with more gates, one per line or as a YAML list.")] = None,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help=JUNIT.help)] = None,
    force_mixed: Annotated[bool, typer.Option("--force-mixed",
        help="Compare runs that were measured differently, and list the differences.")] = False,
    shared_rows: Annotated[bool, typer.Option("--shared-rows",
        help="Compare only on rows that both evaluations contain with the same content.")] = False,
    tasks: TaskFiles = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compare two runs example by example.

    Prints the paired difference B - A of each task with its confidence interval, its p-value and
    the p-value after Holm's correction for several tasks.
    """
    from soulkit.cli.console import out as console
    from soulkit.cli.console import print_json
    from soulkit.eval.comparison.compare import compare_runs
    from soulkit.eval.gates import gates_in, parse_gate, write_junit
    from soulkit.metrics.intervals import signed
    from soulkit.report.findings import comparison_blocks
    from soulkit.report.tables import report_parts

    texts = [*(gate or ()), *(gates_in(gates) if gates else ())]
    comparison = compare_runs(
        a, b, metric, allow_mixed=force_mixed, suite=suite, gates=[*map(parse_gate, texts)],
        registry=registry_of(tasks, trust=trust), trust=trust,
        only_shared_rows=shared_rows,
    )  # fmt: skip
    if as_json:
        print_json(comparison.as_dict())
    else:
        for part in report_parts(comparison_blocks(comparison)):
            console.print(part)
    if junit:
        write_junit(junit, "soul compare", {one.line(signed): one for one in comparison.gates})
    if not comparison.passed:
        raise typer.Exit(1)


def runs_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", show_default=False,
        help="Folder of runs. [default: runs]")] = RUNS,
    as_json: Json = False,
) -> None:  # fmt: skip
    """List the runs of a folder, newest first, with status, headline score and cost.

    An unfinished run was stopped; the same command resumes it.
    """
    from soulkit.cli.console import print_json
    from soulkit.report.listing import list_runs

    runs = list_runs(folder)
    if as_json:
        print_json([run.as_dict() for run in runs])
        return
    if not runs:
        raise RunError(
            f"There is no run in '{folder}'.",
            "soul eval, soul train and soul demo write their runs there.",
            "Make a run: soul demo; or name another folder: soul runs FOLDER",
        )
    _print_runs(runs)


def _print_runs(runs: Sequence[ListedFolder]) -> None:
    from soulkit.cli.console import out, print_next
    from soulkit.report.episode_search import shell_path
    from soulkit.report.listing import runs_table
    from soulkit.report.load import EPISODES, JUDGEMENTS
    from soulkit.runs.records import SAMPLES

    out.print(runs_table(runs, out.width))
    newest = next((run for run in runs if run.state != "damaged"), runs[0])
    path = shell_path(newest.path)
    files = [newest.path / name for name in (EPISODES, JUDGEMENTS, SAMPLES)]
    # Some supervised trainings and runs that have just started have no episodes.
    played = any(file.is_file() and file.stat().st_size for file in files)
    print_next(f"soul report {path}", *([f"soul show {path}"] if played else []))
