"""`soul judge sheet|import|correct`: people rate a part of what a judge has rated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import err, one_line, out, print_json, safe
from soulkit.cli.console import table as new_table
from soulkit.cli.options import Json
from soulkit.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    from soulkit.judge.sheets import FilledSheets

SHOWN = 10
"""Bad rows printed one by one; --json has all of them."""

RatedRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of an evaluation with a judge.")
]


def sheet(
    run: RatedRun,
    sample: Annotated[
        int, typer.Option("--sample", min=1, help="Clusters of each task; all if there are fewer.")
    ] = 50,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw and of every order.")] = 0,
    raters: Annotated[
        int, typer.Option("--raters", min=1, max=50, help="Sheets, each in its own order.")
    ] = 1,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Which of two drafts of a row is better, instead.")
    ] = False,
    checks: Annotated[int, typer.Option("--checks", min=0, help="Hidden attention checks.")] = 2,
    dimension: Annotated[
        list[str] | None,
        typer.Option("--dimension", help="Rate only this; may be repeated. [default: all]"),
    ] = None,
    scale: Annotated[
        list[str] | None,
        typer.Option(
            "--scale", metavar="NAME=0:10", help="A scale the run does not tell; may be repeated."
        ),
    ] = None,
    guide: Annotated[
        Path | None,
        typer.Option(
            "--guide",
            metavar="FILE",
            help="Text for raters, shown above the cards.",
            readable=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder to write. [default: RUN-sheet]")
    ] = None,
) -> None:
    """Write a blinded rating sheet: a page and a table for each rater.

    The page needs no network. Clusters of rows are drawn at random, and all that was judged in them
    is on the sheet. key.json says which episode a row stands for: keep it, and hand out the raters'
    folders alone.
    """
    from soulkit.eval.rating import SheetRequest, draw_sheet, sheet_folder, write_tables
    from soulkit.report.sheet import write_sheet_page

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
        _say(f"{task}: {counts['drawn']} of {counts['clusters']} clusters are drawn")
    _say(f"keep {target / 'key.json'}; then: soul judge import FILE... --run {run}")


def _guide(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The guide '{file}' cannot be read.", str(error), "Name a file of UTF-8 text."
        ) from error


def import_labels(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="SHEET", help="Filled sheets, CSV or JSON.", readable=False),
    ],
    run: Annotated[
        Path | None, typer.Option("--run", help="The run that the sheet was written for.")
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="Its key. [default: RUN-sheet/key.json]", readable=False),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Labels to write. [default: labels.jsonl beside the key]", readable=False
        ),
    ] = None,
    drop_failed: Annotated[
        bool, typer.Option("--drop-failed", help="Leave out raters who failed an attention check.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read filled sheets, of any number of raters, as labels.

    Rows of no card, with a label off its scale or given twice are bad: they are named and left out.
    """
    from soulkit.eval.rating import LABELS, import_sheets, read_sheet_key, write_labels

    place = _key_of(run, key)
    filled = import_sheets(files, read_sheet_key(place))
    labels = filled.without(filled.failed) if drop_failed else filled.labels
    if not labels:
        raise DataError(
            "No label is left.",
            f"All raters failed an attention check: {', '.join(filled.failed)}.",
            "Read the sheets without --drop-failed, or have them filled in again.",
        )
    path = target or place.with_name(LABELS)
    write_labels(labels, path)
    if as_json:
        print_json(_imported(filled, labels, path))
    else:
        out.print(f"{len(labels)} labels → {safe(str(path))}", soft_wrap=True)
    _say_imported(filled, drop_failed)
    if run is not None:
        _say(f"next: soul judge correct {run}" + ("" if target is None else f" --labels {path}"))


def _key_of(run: Path | None, key: Path | None) -> Path:
    from soulkit.eval.rating import KEY, sheet_folder

    if key is None and run is None:
        raise ConfigError(
            "Neither --run nor --key is given.",
            "Rows of a sheet are blind: only its key says which episode each stands for.",
            "Write soul judge import FILE --run RUN.",
        )
    if key is not None or run is None:
        return key or Path(KEY)
    if not run.is_dir():
        raise RunError(
            f"There is no run '{run}'.",
            "The key of its sheet is looked for beside it.",
            "Name the folder of the run, or the key with --key.",
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
        end = "left out" if drop_failed else "counted all the same; leave them out: --drop-failed"
        wrong = len(answers) - sum(answers)
        _say(f"{rater} failed {wrong} of {len(answers)} attention checks and is {end}")
    for row in filled.bad[:SHOWN]:
        _say(f"{row.source}: {row.why}")
    if filled.bad[SHOWN:]:
        _say(f"and {len(filled.bad) - SHOWN} more bad rows; --json has all of them")
    if filled.unrated:
        _say(f"{filled.unrated} rows are without an answer")


def correct(
    run: RatedRun,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels", metavar="FILE", help="[default: RUN-sheet/labels.jsonl]", readable=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Correct the judge's means by what people said of a part.

    The corrected mean is what people would say of all, with a 95 % interval that is valid however
    wrong the judge is (prediction-powered inference); the labelled clusters must be a random part,
    as soul judge sheet draws them. Nobody is asked.
    """
    from soulkit.eval.correction import correct_run
    from soulkit.eval.rating import KEY, LABELS, read_sheet_key, sheet_folder

    path = labels or sheet_folder(run) / LABELS
    key = path.with_name(KEY)
    report = correct_run(run, path, read_sheet_key(key) if key.is_file() else None)
    if as_json:
        print_json(report)
    else:
        for task, cells in report["tasks"].items():
            _print(task, cells)
    for remark in report["remarks"]:
        _say(remark)


def _print(task: str, report: Mapping[str, Any]) -> None:
    if report["dimensions"]:
        means = new_table("dimension", ">judge", ">people [95% CI]", ">corrected [95% CI]",
                          title=safe(task))  # fmt: skip
        errors = new_table("dimension", ">judge − people [95% CI]", ">lambda", ">labelled",
                           ">clusters")  # fmt: skip
        for name, cell in report["dimensions"].items():
            means.add_row(safe(name), *_means(cell))
            errors.add_row(safe(name), *_errors(cell))
        for made in (means, errors):  # in one, a line has no room for eleven numbers
            made.columns[0].overflow = "fold"
            out.print(made)
    agreement = new_table("dimension", "alpha of", ">n", ">alpha [95% CI]", ">equal", "allows")
    agreement.columns[3].no_wrap = True
    for name, who, cell in _agreements(report):
        made_cells = (_estimate(cell["alpha"]), _figure(cell["exact"]["value"]))
        agreement.add_row(safe(name), who, str(cell["n"]), *made_cells, str(cell["trust"]))
    if agreement.row_count:
        out.print(agreement)
    pairs = report.get("pairs")
    if pairs and pairs["first_preferred"] is not None:
        share = 100 * pairs["first_preferred"]
        out.print(f"{pairs['n']} pairs; the first side shown was preferred in {share:.0f} %")


def _means(cell: Mapping[str, Any]) -> list[str]:
    measured = map(_estimate, (cell["labelled"], cell["corrected"]))
    return [_figure(cell["judged"]["value"]), *measured]


def _errors(cell: Mapping[str, Any]) -> list[str]:
    counts = (str(cell["labelled"]["n"]), f"{cell['labelled_clusters']} of {cell['clusters']}")
    return [_estimate(cell["bias"]), f"{cell['lambda']:.2f}", *counts]


def _agreements(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(dimension, who with whom, figures); the names that a dimension counts share theirs."""
    pairs = report.get("pairs")
    cells = {name.partition("=")[0]: cell for name, cell in report["dimensions"].items()}
    for name, cell in {**cells, **({pairs["dimension"]: pairs} if pairs else {})}.items():
        if cell.get("between_raters"):
            yield name, "raters", cell["between_raters"]
        if cell.get("judge_and_people"):
            yield name, "judge and people", cell["judge_and_people"]


def _figure(value: object) -> str:
    from soulkit.metrics.intervals import number

    return number(value)


def _estimate(cell: Mapping[str, Any]) -> str:
    from soulkit.metrics.intervals import estimate_text

    return estimate_text(cell["value"], cell["ci_low"], cell["ci_high"])


def _say(remark: str) -> None:
    err.print(safe(one_line(remark, 400)), soft_wrap=True)
