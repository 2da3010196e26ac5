"""`soul compare A B`: is B better than A on the episodes that both scored?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.options import Json

if TYPE_CHECKING:
    from soulkit.eval.compare import Comparison


def command(
    a: Annotated[Path, typer.Argument(metavar="A", help="Run folder to compare with.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Run folder that may be better.")],
    metric: Annotated[str, typer.Option(help="`value`, or another recorded metric.")] = "value",
    force_mixed: Annotated[
        bool, typer.Option("--force-mixed", help="Compare all the same, and say what differs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two runs, paired example by example.

    Prints B minus A for each task, with its interval and a p-value adjusted for their number.
    """
    from soulkit.cli.console import print_json
    from soulkit.eval.compare import compare_runs

    comparison = compare_runs(a, b, metric, allow_mixed=force_mixed)
    if as_json:
        print_json(comparison.as_dict())
    else:
        _print(comparison)


def _print(comparison: Comparison) -> None:
    from soulkit.cli.console import out
    from soulkit.report.differences import comparison_parts

    for part in comparison_parts(comparison):
        out.print(part)
