"""`soul judge`: can the judge of an evaluation be trusted? The people's part: `judge_people.py`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import (
    ask_user,
    err,
    one_line,
    out,
    print_json,
    progress,
    safe,
    say_unsealed,
    starting,
)
from soulkit.cli.console import table as new_table
from soulkit.cli.derive import Derived, build_command, options_for, settings_from
from soulkit.cli.judge_people import correct, import_labels, sheet
from soulkit.cli.mistakes import CommandTable, without_run
from soulkit.cli.onward import say_next
from soulkit.cli.options import Json
from soulkit.written import row_sources

if TYPE_CHECKING:
    from rich.table import Table

    from soulkit.eval.judge_check import CheckConfig

CHECK = """Judge a run's episodes again and measure how far verdicts agree.

By dimension: with themselves, with another judge, with people where the rows carry their labels,
and with the length of the text. Drafts of the same row are compared in both orders.
"""


class Checks(Derived):
    """`check` has the options of CheckConfig."""

    def sentences(self) -> Mapping[str, str]:
        return {"check": CHECK}

    def build(self, name: str) -> Any:
        if name != "check":
            return None
        from soulkit.eval.judge_check import CheckConfig

        options = options_for(CheckConfig, frozenset({"check"}))

        def body(values: dict[str, Any]) -> None:
            flags = settings_from(options, values, row_sources)
            run = values["run"]
            if run is None and values["config"] is None and not os.environ.get("SOULKIT_RUN"):
                raise without_run("soul judge check")
            flags |= {} if run is None else {"run": str(run)}
            config = CheckConfig.load(values["config"], flags=flags, trust=values["trust"])
            if values["dry_run"]:
                _dry_run(config, values["json"], values["trust"])
            else:
                _check(config, values["out"], values["json"], values["trust"])

        return build_command(name, CHECK, options, body, RUN)


RUN = inspect.Parameter(
    "run", inspect.Parameter.KEYWORD_ONLY, default=None,
    annotation=Annotated[
        Path | None, typer.Argument(metavar="RUN", help="Folder of an evaluation.")
    ],
)  # fmt: skip

app = CommandTable(cls=Checks, rich_markup_mode=None)

DASH = "–"


def _dry_run(config: CheckConfig, as_json: bool, trust: bool) -> None:
    from soulkit.eval.judge_check import Check

    plan = Check.of(config, trust=trust).plan()
    if as_json:
        print_json(plan)
        return
    out.print(
        f"{plan['episodes']} episodes, {plan['judges']} judge{'s' * (plan['judges'] != 1)}: "
        f"{plan['judgements']} judgements and {plan['pairs']} pairs, {plan['calls']} calls at "
        "most; a verdict that cannot be read is asked for once more"
    )


@app.command()
def show(
    check: Annotated[Path, typer.Argument(metavar="CHECK", help="Folder of a judge check.")],
    as_json: Json = False,
) -> None:
    """Print what a check found. Nobody is asked."""
    from soulkit.eval.judge_check import read_report

    _print(read_report(check), as_json)


app.command()(sheet)
app.command("import")(import_labels)
app.command()(correct)


def _check(config: CheckConfig, folder: Path | None, as_json: bool, trust: bool) -> None:
    from soulkit.eval.judge_check import check_judge

    run, report = check_judge(
        config,
        folder,
        trust=trust,
        bars=lambda n: progress(n, "judge check"),
        say=_say,
        ask=ask_user(),
        starts=starting,
    )
    say_unsealed()
    _print(report, as_json)
    if not as_json:
        _say_next(config, run.path)
    missing = sum(
        reading["no_answer"]
        for task_report in report["tasks"].values()
        for reading in task_report["reading"].values()
    )
    if missing:
        _say(
            f"{missing} judgements got no answer from their server; the same command with "
            f"--out {run.path} asks for them again"
        )
        raise typer.Exit(1)


def _say_next(config: CheckConfig, check: Path) -> None:
    from soulkit.report.hints import shell_path, show_command

    shown = [f"{show_command(Path(config.run))} --worst 10"] if config.run else []
    say_next(f"soul judge show {shell_path(check)}", *shown)


def _say(remark: str) -> None:
    err.print(safe(one_line(remark, 400)), soft_wrap=True)


def _print(report: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
    else:
        for task, task_report in report["tasks"].items():
            _print_task(task, task_report)
        _say_thresholds(report["thresholds"])
    for task, task_report in report["tasks"].items():
        for judge, reading in task_report["reading"].items():
            for reason, count in reading["reasons"].items():
                _say(f"{task}, {judge}: no verdict {count} times: {reason}")
        for remark in _left_out(task_report):
            _say(f"{task}: {remark}")
    for remark in report["remarks"]:
        _say(remark)


def _left_out(report: Mapping[str, Any]) -> list[str]:
    """What of a task's episodes and human labels entered no figure."""
    remarks = []
    if report.get("by_rules"):
        remarks.append(
            f"{report['by_rules']} episodes were scored by rules without asking the judge, and say "
            "nothing about it"
        )
    for name in report.get("unmatched_labels", ()):
        remarks.append(f"people labelled '{name}', and no verdict has such a dimension")
    for name, dimension in report["dimensions"].items():
        lost = max((c.get("no_numbers", 0) for c in dimension["people"].values()), default=0)
        if lost:
            remarks.append(f"{lost} human labels of '{name}' are no numbers, and are left out")
    return remarks


# -- tables --------------------------------------------------------------------------------------


def _print_task(task: str, report: Mapping[str, Any]) -> None:
    agreement = _agreement(task, report["dimensions"])
    if agreement.row_count:
        out.print(agreement)
    if any("length" in dimension for dimension in report["dimensions"].values()):
        out.print(_length(report["dimensions"]))
    out.print(_judges(report["reading"], report["position"]))


def _agreement(task: str, dimensions: Mapping[str, Any]) -> Table:
    table = new_table(
        "dimension", "agreement", ">n", "clusters", ">alpha [95% CI]", ">ICC", ">rho", ">equal",
        ">gap", "what it allows", title=safe(task),
    )  # fmt: skip
    for name, dimension in dimensions.items():
        for label, cell in _comparisons(dimension):
            figures = [cell.get(k) for k in ("icc", "spearman", "exact", "mean_gap")]
            table.add_row(
                safe(name), safe(label), str(cell["n"]), _clusters(cell["alpha"]),
                _estimate(cell["alpha"]), *map(_number, figures),
                _trust(cell),
            )  # fmt: skip
    return table


def _trust(cell: Mapping[str, Any]) -> str:
    """The word on alpha, and the one on the lower end of its interval where that is another."""
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


def _length(dimensions: Mapping[str, Any]) -> Table:
    table = new_table(
        "dimension", "judge", ">n", "clusters", ">rho with words [95% CI]",
        ">at equal turns [95% CI]", ">points per 100 words [95% CI]",
    )  # fmt: skip
    for name, dimension in dimensions.items():
        for judge, cell in dimension.get("length", {}).items():
            figures = [cell["spearman"], cell["at_equal_turns"], cell["points_per_100_words"]]
            table.add_row(
                safe(name), safe(judge), str(cell["spearman"]["n"]), _clusters(cell["spearman"]),
                *map(_estimate, figures),
            )  # fmt: skip
    return table


def _judges(reading: Mapping[str, Any], position: Mapping[str, Any]) -> Table:
    table = new_table(
        "judge", ">judgements", ">unreadable", ">asked again", ">pairs", "clusters",
        ">flips [95% CI]", ">first preferred [95% CI]",
    )  # fmt: skip
    for judge, cell in reading.items():
        pair = position.get(judge)
        shown = [DASH] * 4
        if pair is not None:
            flips, first = pair["flips"], pair["prefers_first"]
            shown = [
                str(pair["pairs"]), _clusters(flips), _estimate(flips, _share),
                _estimate(first, _share),
            ]  # fmt: skip
        table.add_row(
            safe(judge), str(cell["judgements"]), _share(cell["unreadable"]["value"]),
            _share(cell["asked_again"]), *shown,
        )  # fmt: skip
    return table


def _number(cell: Mapping[str, Any] | None) -> str:
    return _figure(cell["value"] if cell is not None else None)


def _figure(value: object) -> str:
    from soulkit.metrics.intervals import number

    return number(value, 2)


def _estimate(cell: Mapping[str, Any], shown: Callable[[object], str] = _figure) -> str:
    from soulkit.metrics.intervals import estimate_text

    return estimate_text(cell["value"], cell["ci_low"], cell["ci_high"], shown)


def _clusters(cell: Mapping[str, Any]) -> str:
    """`32`, `7: few`; checks of earlier versions do not say."""
    from soulkit.metrics.intervals import FEW_CLUSTERS

    n = cell.get("n_clusters", 0)
    return (f"{n}: few" if n < FEW_CLUSTERS else str(n)) if n else DASH


def _share(value: object) -> str:
    from soulkit.metrics.intervals import percent

    return percent(value)


def _say_thresholds(limits: Mapping[str, float]) -> None:
    _say(
        f"Krippendorff's alpha: from {limits['reliable']:g} on reliable, from "
        f"{limits['tentative']:g} tentative, below: do not rank models by it (Krippendorff 2004). "
        "rho is Spearman's; gap is the mean difference in points; flips: the verdict on a pair is "
        "another one when the two change places. No interval: too few rows, or they hardly differ."
    )
