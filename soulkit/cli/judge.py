"""`soul judge`: check a judge, collect human ratings, and correct a run's means with them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import (
    ConsoleReporter,
    one_line,
    out,
    print_json,
    print_next,
    print_note,
    safe,
    warn_unsealed,
)
from soulkit.cli.options import GroupFromSettings, Json, build_command, options_for, settings_from
from soulkit.cli.parse_errors import CommandTable, missing_run_error
from soulkit.errors import ConfigError, DataError, RunError
from soulkit.metrics.intervals import DASH, FEW_CLUSTERS, estimate_text, number, percent
from soulkit.option_texts import row_sources
from soulkit.parse import ParseError, decoded, read_limited
from soulkit.report.grid import Grid, GridRow, grid_parts, plain_table

if TYPE_CHECKING:
    from soulkit.eval.judges.check import CheckConfig
    from soulkit.judge.rating_sheets import FilledSheets


SHOWN = 10
"""Bad rows printed one by one; --json has all of them."""

RatedRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run folder of an evaluation with a judge.")
]


def sheet(
    run: RatedRun,
    sample: Annotated[int, typer.Option("--sample", metavar="N", min=1,
        help="Number of clusters to sample per task; all if there are fewer.")] = 50,
    seed: Annotated[int, typer.Option("--seed", metavar="N",
        help="Random seed of the sample and of the order of the cards.")] = 0,
    raters: Annotated[int, typer.Option("--raters", metavar="N", min=1, max=50,
        help="Number of raters. Each gets a sheet in a different order.")] = 1,
    pairs: Annotated[bool, typer.Option("--pairs",
        help="Ask which of two drafts of a row is better, instead of asking for ratings.")] = False,
    checks: Annotated[int, typer.Option("--checks", metavar="N", min=0,
        help="Number of hidden attention checks per sheet.")] = 2,
    dimension: Annotated[list[str] | None, typer.Option("--dimension", metavar="NAME",
        help="Rate only this dimension. Repeatable. [default: all]")] = None,
    scale: Annotated[list[str] | None, typer.Option("--scale", metavar="NAME=0:10",
        help="Scale of a dimension, if the run does not record it. Repeatable.")] = None,
    guide: Annotated[Path | None, typer.Option("--guide", metavar="FILE", readable=False,
        help="Text file with instructions, shown above the cards.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", metavar="FOLDER",
        help="Folder to write. [default: RUN-sheet]")] = None,
) -> None:  # fmt: skip
    """Write a blinded rating sheet for human raters.

    Each rater gets an HTML page, which works offline, and a CSV table. They contain all judged
    texts of a random sample of row clusters. key.json maps the rows of the sheet to episodes: keep
    it, and send the raters only their folders.
    """
    from soulkit.eval.judges.rating import SheetRequest, draw_sheet, sheet_folder, write_tables
    from soulkit.report.pages import write_sheet_page

    text = _guide(guide)
    drawn = draw_sheet(
        SheetRequest(run=run, sample=sample, seed=seed, raters=raters, pairs=pairs, checks=checks,
                     dimensions=tuple(dimension or ()), scales=tuple(scale or ()))
    )  # fmt: skip
    target = folder or sheet_folder(run)
    for one, place in zip(drawn.sheets, write_tables(drawn, target), strict=True):
        write_sheet_page(one, place / "sheet.html", text)
        out.print(f"{safe(str(place))}: {len(one.cards)} texts", soft_wrap=True)
    for task, counts in drawn.key["clusters"].items():
        print_note(f"{task}: {counts['drawn']} of {counts['clusters']} clusters sampled")
    print_note(f"keep {target / 'key.json'}; then: soul judge import FILE... --run {run}")


def _guide(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return decoded(read_limited(file))
    except (OSError, ParseError) as error:
        raise ConfigError(
            f"The guide '{file}' cannot be read.", str(error), "Use a UTF-8 text file."
        ) from error


def import_labels(
    files: Annotated[list[Path], typer.Argument(metavar="SHEET", readable=False,
        help="Filled-in sheets: CSV or JSON.")],
    run: Annotated[Path | None, typer.Option("--run", metavar="RUN",
        help="Run folder that the sheet was made from.")] = None,
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", readable=False,
        help="Key file of the sheet. [default: RUN-sheet/key.json]")] = None,
    target: Annotated[Path | None, typer.Option("--out", metavar="FILE", readable=False,
        help="File to write. [default: labels.jsonl next to the key]")] = None,
    drop_failed: Annotated[bool, typer.Option("--drop-failed",
        help="Leave out raters who failed an attention check.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Import filled-in rating sheets as labels.

    Rows that match no card, have a label off the scale or appear twice are reported and left out.
    """
    from soulkit.eval.judges.rating import LABELS, import_sheets, read_sheet_key, write_labels

    place = _key_of(run, key)
    filled = import_sheets(files, read_sheet_key(place))
    labels = filled.without(filled.failed) if drop_failed else filled.labels
    if not labels:
        raise DataError(
            "No label is left.",
            f"All raters failed an attention check: {', '.join(filled.failed)}.",
            "Import without --drop-failed, or have the sheets filled in again.",
        )
    path = target or place.with_name(LABELS)
    write_labels(labels, path)
    if as_json:
        print_json(_imported(filled, labels, path))
    else:
        out.print(f"{len(labels)} labels → {safe(str(path))}", soft_wrap=True)
    _say_imported(filled, drop_failed)
    if run is not None:
        print_note(
            f"next: soul judge correct {run}" + ("" if target is None else f" --labels {path}")
        )


def _key_of(run: Path | None, key: Path | None) -> Path:
    from soulkit.eval.judges.rating import KEY, sheet_folder

    if key is None and run is None:
        raise ConfigError(
            "Neither --run nor --key is given.",
            "The sheet is blinded: only its key maps rows to episodes.",
            "Write soul judge import FILE --run RUN.",
        )
    if key is not None or run is None:
        return key or Path(KEY)
    if not run.is_dir():
        raise RunError(
            f"There is no run '{run}'.",
            "The key of the sheet is expected next to the run folder.",
            "Give the run folder, or the key with --key.",
        )
    return sheet_folder(run) / KEY


def _imported(filled: FilledSheets, labels: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    return {
        "labels": len(labels), "out": str(path), "raters": filled.raters, "failed": filled.failed,
        "checks": {rater: {"right": sum(answers), "n": len(answers)}
                   for rater, answers in sorted(filled.checks.items())},
        "unrated": filled.unrated,
        "bad": [{"source": row.source, "why": row.why} for row in filled.bad],
    }  # fmt: skip


def _say_imported(filled: FilledSheets, drop_failed: bool) -> None:
    for rater in filled.failed:
        answers = filled.checks[rater]
        end = "left out" if drop_failed else "still counted; --drop-failed leaves the rater out"
        wrong = len(answers) - sum(answers)
        print_note(f"{rater} failed {wrong} of {len(answers)} attention checks and is {end}")
    for row in filled.bad[:SHOWN]:
        print_note(one_line(f"{row.source}: {row.why}", 400))
    if filled.bad[SHOWN:]:
        print_note(f"and {len(filled.bad) - SHOWN} more bad rows; --json has all of them")
    if filled.unrated:
        print_note(f"{filled.unrated} rows have no answer")


def correct(
    run: RatedRun,
    labels: Annotated[Path | None, typer.Option("--labels", metavar="FILE", readable=False,
        help="Labels from `soul judge import`. [default: RUN-sheet/labels.jsonl]")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Correct the judge's means with human labels of a random sample.

    The corrected mean estimates the human mean over all episodes, with a 95 % interval that is
    valid for any quality of the judge (prediction-powered inference). The labelled clusters must
    be a random sample, as drawn by soul judge sheet. No model is called.
    """
    from soulkit.eval.judges.correction import correct_run
    from soulkit.eval.judges.rating import KEY, LABELS, read_sheet_key, sheet_folder

    path = labels or sheet_folder(run) / LABELS
    key = path.with_name(KEY)
    report = correct_run(run, path, read_sheet_key(key) if key.is_file() else None)
    if as_json:
        print_json(report)
    else:
        for task, cells in report["tasks"].items():
            _print_correction(task, cells)
    for remark in report["remarks"]:
        print_note(remark)


def _print_correction(task: str, report: Mapping[str, Any]) -> None:
    if report["dimensions"]:
        means = plain_table("dimension", ">judge", ">people [95% CI]", ">corrected [95% CI]",
                          title=safe(task))  # fmt: skip
        errors = plain_table("dimension", ">judge − people [95% CI]", ">lambda", ">labelled",
                           ">clusters")  # fmt: skip
        for name, cell in report["dimensions"].items():
            measured = map(_estimate, (cell["labelled"], cell["corrected"]))
            means.add_row(safe(name), number(cell["judged"]["value"]), *measured)
            errors.add_row(
                safe(name), _estimate(cell["bias"]), f"{cell['lambda']:.2f}",
                str(cell["labelled"]["n"]), f"{cell['labelled_clusters']} of {cell['clusters']}",
            )  # fmt: skip
        for made in (means, errors):  # two tables: eleven numbers do not fit on one line
            made.columns[0].overflow = "fold"
            out.print(made)
    agreement = plain_table("dimension", "alpha of", ">n", ">alpha [95% CI]", ">equal", "allows")
    agreement.columns[3].no_wrap = True
    for name, who, cell in _agreements(report):
        made_cells = (_estimate(cell["alpha"]), number(cell["exact"]["value"]))
        agreement.add_row(safe(name), who, str(cell["n"]), *made_cells, str(cell["trust"]))
    if agreement.row_count:
        out.print(agreement)
    pairs = report.get("pairs")
    if pairs and pairs["first_preferred"] is not None:
        share = 100 * pairs["first_preferred"]
        out.print(f"{pairs['n']} pairs; the first side shown was preferred in {share:.0f} %")


def _agreements(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(dimension, who with whom, figures); the names that a dimension counts share theirs."""
    pairs = report.get("pairs")
    cells = {name.partition("=")[0]: cell for name, cell in report["dimensions"].items()}
    for name, cell in {**cells, **({pairs["dimension"]: pairs} if pairs else {})}.items():
        if cell.get("between_raters"):
            yield name, "raters", cell["between_raters"]
        if cell.get("judge_and_people"):
            yield name, "judge and people", cell["judge_and_people"]


CHECK = """Judge a run's episodes again and measure the agreement.

        Per dimension: agreement of a judge with itself, with another judge, with human
        labels if the rows have them, and correlation with text length. Drafts of the same row are
        compared in both orders.
        """


class Checks(GroupFromSettings):
    """The options of `check` are made from CheckConfig."""

    def sentences(self) -> Mapping[str, str]:
        return {"check": CHECK}

    def build(self, name: str) -> Any:
        if name != "check":
            return None
        from soulkit.eval.judges.check import CheckConfig

        options = options_for(CheckConfig, frozenset({"check"}))

        def body(values: dict[str, Any]) -> None:
            flags = settings_from(options, values, row_sources)
            run = values["run"]
            if run is None and values["config"] is None and not os.environ.get("SOULKIT_RUN"):
                raise missing_run_error("soul judge check")
            flags |= {} if run is None else {"run": str(run)}
            config = CheckConfig.load(values["config"], flags=flags, trust=values["trust"])
            from soulkit.cli.plan import show_plan

            if values["dry_run"]:
                from soulkit.eval.judges.check import Check

                check = Check.of(config, trust=values["trust"])
                show_plan(check.cost_plan(), values["json"], bounds=values["bounds"])
                print_note(check.words())
            else:
                _check(config, values["out"], values["json"], values["trust"])

        return build_command(name, CHECK, options, body, RUN)


RUN = inspect.Parameter(
    "run", inspect.Parameter.KEYWORD_ONLY, default=None,
    annotation=Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Run folder of an evaluation.")
    ],
)  # fmt: skip

app = CommandTable(cls=Checks, rich_markup_mode=None)


@app.command()
def show(
    check: Annotated[Path, typer.Argument(metavar="CHECK",
        help="Folder written by `soul judge check`.")],
    as_json: Json = False,
) -> None:  # fmt: skip
    """Print the results of a judge check."""
    from soulkit.eval.judges.check import read_report

    _print(read_report(check), as_json)


app.command()(sheet)
app.command("import")(import_labels)
app.command()(correct)


def _check(config: CheckConfig, folder: Path | None, as_json: bool, trust: bool) -> None:
    from soulkit.eval.judges.check import check_judge

    reporter = ConsoleReporter("judge check")
    run, report = check_judge(config, folder, trust=trust, reporter=reporter)
    warn_unsealed()
    _print(report, as_json)
    if not as_json:
        _say_next(config, run.path)
    missing = sum(
        reading["no_answer"]
        for task_report in report["tasks"].values()
        for reading in task_report["reading"].values()
    )
    if missing:
        print_note(
            f"{missing} judgements got no reply from the server; the same command with "
            f"--out {run.path} retries them"
        )
        raise typer.Exit(1)


def _say_next(config: CheckConfig, check: Path) -> None:
    from soulkit.report.episode_search import shell_path, show_command

    shown = [f"{show_command(Path(config.run))} --worst 10"] if config.run else []
    print_next(f"soul judge show {shell_path(check)}", *shown)


def _print(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        for task, task_report in report["tasks"].items():
            _print_task(task, task_report)
        limits = report["thresholds"]
        print_note(
            f"Krippendorff's alpha: {limits['reliable']:g} or more is reliable, "
            f"{limits['tentative']:g} or more tentative; below that, do not rank models by it "
            "(Krippendorff 2004). "
            "rho: Spearman correlation; gap: mean difference in points; flips: pairs whose verdict "
            "changes with the order. No interval: too few rows, or too little variation."
        )
    for task, task_report in report["tasks"].items():
        for judge, reading in task_report["reading"].items():
            for reason, count in reading["reasons"].items():
                print_note(f"{task}, {judge}: no verdict {count} times: {reason}")
        for remark in _left_out(task_report):
            print_note(f"{task}: {remark}")
    for remark in report["remarks"]:
        print_note(remark)


def _left_out(report: Mapping[str, Any]) -> list[str]:
    """Lines about episodes and human labels that no figure includes."""
    remarks = []
    if report.get("by_rules"):
        remarks.append(
            f"{report['by_rules']} episodes were scored by rules without the judge and are not "
            "counted"
        )
    for name in report.get("unmatched_labels", ()):
        remarks.append(f"the judge has no dimension '{name}', for which there are human labels")
    for name, dimension in report["dimensions"].items():
        lost = max((c.get("no_numbers", 0) for c in dimension["people"].values()), default=0)
        if lost:
            remarks.append(f"{lost} human labels of '{name}' are not numbers and are left out")
    return remarks


# -- tables --------------------------------------------------------------------------------------


def _print_task(task: str, report: Mapping[str, Any]) -> None:
    grids = [_agreement(task, report["dimensions"]), _length(report["dimensions"]),
             _judges(report["reading"], report["position"])]  # fmt: skip
    for grid in grids:
        for part in grid_parts(grid) if grid.rows else ():
            out.print(part)


short = partial(number, digits=2)
"""Formats a figure of agreement."""


def _agreement(task: str, dimensions: Mapping[str, Any]) -> Grid:
    rows = []
    for name, dimension in dimensions.items():
        for label, cell in _comparisons(dimension):
            figures = [cell.get(k) for k in ("icc", "spearman", "exact", "mean_gap")]
            rows.append(GridRow.of(
                one_line(name), one_line(label), str(cell["n"]), _clusters(cell["alpha"]),
                _estimate(cell["alpha"], short), *(short(one and one["value"]) for one in figures),
                _trust(cell),
            ))  # fmt: skip
    head = ("dimension", "agreement", "n", "clusters", "alpha [95% CI]", "ICC", "rho", "equal",
            "gap", "rating")  # fmt: skip
    words = ("agreement", "clusters", "rating")
    return Grid(title=task, head=head, words=words, n_names=2, n_below=3, rows=tuple(rows))


def _trust(cell: Mapping[str, Any]) -> str:
    """The rating of alpha, and the rating of its lower bound if it differs."""
    if cell["alpha"]["value"] is None or cell["trust"] == cell["at_worst"]:
        return str(cell["trust"])
    if cell["alpha"]["ci_low"] is None:
        return f"{cell['trust']}, but no interval"
    return f"{cell['trust']}; at worst: {cell['at_worst']}"


def _comparisons(dimension: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """(who with whom, the figures) of one dimension."""
    again = [(f"{judge} again", cell) for judge, cell in dimension["retest"].items() if cell]
    people = [(f"{judge} and people", cell) for judge, cell in dimension["people"].items()]
    return [*again, *dimension["between"].items(), *people]


def _length(dimensions: Mapping[str, Any]) -> Grid:
    rows = []
    for name, dimension in dimensions.items():
        for judge, cell in dimension.get("length", {}).items():
            figures = [cell["spearman"], cell["at_equal_turns"], cell["points_per_100_words"]]
            rows.append(GridRow.of(
                one_line(name), one_line(judge), str(cell["spearman"]["n"]),
                _clusters(cell["spearman"]), *(_estimate(one, short) for one in figures),
            ))  # fmt: skip
    head = ("dimension", "judge", "n", "clusters", "rho with words [95% CI]",
            "at equal turns [95% CI]", "points per 100 words [95% CI]")  # fmt: skip
    return Grid(head=head, words=("judge", "clusters"), n_names=2, n_below=2, rows=tuple(rows))


def _judges(reading: Mapping[str, Any], position: Mapping[str, Any]) -> Grid:
    rows = []
    for judge, cell in reading.items():
        pair = position.get(judge)
        shown = [DASH] * 4
        if pair is not None:
            flips, first = pair["flips"], pair["prefers_first"]
            shown = [
                str(pair["pairs"]), _clusters(flips), _estimate(flips, percent),
                _estimate(first, percent),
            ]  # fmt: skip
        rows.append(GridRow.of(
            one_line(judge), str(cell["judgements"]), percent(cell["unreadable"]["value"]),
            percent(cell["asked_again"]), *shown,
        ))  # fmt: skip
    head = ("judge", "judgements", "unreadable", "asked again", "pairs", "clusters",
            "flips [95% CI]", "first preferred [95% CI]")  # fmt: skip
    return Grid(head=head, words=("clusters",), rows=tuple(rows))


def _estimate(cell: Mapping[str, Any], shown: Callable[[object], str] = number) -> str:
    return estimate_text(cell["value"], cell["ci_low"], cell["ci_high"], shown)


def _clusters(cell: Mapping[str, Any]) -> str:
    """`32`, `7: few`."""
    n = cell["n_clusters"]
    return (f"{n}: few" if n < FEW_CLUSTERS else str(n)) if n else DASH
