"""`soul compare A B`: is B better than A on the episodes that both scored?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import COMPLETERS, Json, TaskFiles, Trust, registry_of

if TYPE_CHECKING:
    from soulkit.eval.compare import Comparison


def command(
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
    from soulkit.eval.compare import compare_runs
    from soulkit.eval.gates import parse_gate

    gates = [parse_gate(text) for text in gate or ()]
    comparison = compare_runs(
        a, b, metric, allow_mixed=force_mixed, suite=suite, gates=gates,
        registry=registry_of(tasks, trust=trust), trust=trust,
        only_shared_rows=shared_rows,
    )  # fmt: skip
    if as_json:
        print_json(comparison.as_dict())
    else:
        _print(comparison)
    if not comparison.passed:
        raise typer.Exit(1)


def _print(comparison: Comparison) -> None:
    from soulkit.cli.console import out
    from soulkit.report.differences import comparison_parts

    for part in comparison_parts(comparison):
        out.print(part)
