"""`soul demo`: the whole road in minutes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import console, duration, err, print_json, progress, say_unsealed, table
from soulkit.cli.onward import say_next
from soulkit.cli.train import step_shower
from soulkit.errors import MissingPackage

if TYPE_CHECKING:
    from soulkit.train.state.lines import StepLine


def command(
    out: Annotated[Path, typer.Option(help="Where everything goes.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Another seed tells other stories.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Ditto steps.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the results.")] = False,
) -> None:
    """Warm up a tiny model, train it with Ditto, measure before and after, write a report."""
    from soulkit.demo import Demo
    from soulkit.report.html import write_page
    from soulkit.report.load import load_runs

    if importlib.util.find_spec("matplotlib") is None:  # minutes before the report would say so
        raise MissingPackage("matplotlib", "the learning curves of the report")
    demo = Demo(out, seed, steps)
    with _Stages() as stages:
        results = demo.run(stages.begin)
    say_unsealed()
    page = write_page(load_runs([out]), out / "report" / "index.html")
    results["report"] = str(page)
    demo.write_summary(results)
    if as_json:
        print_json(results)
    else:
        _print(results)
        _say_next(out)


class _Stages:
    """One progress bar after the other."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> _Stages:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin(self, name: str, steps: int) -> Callable[[StepLine], None]:
        self._stack.close()
        return step_shower(self._stack.enter_context(progress(steps, name)))


def _print(results: dict[str, Any]) -> None:
    shown = table("", ">before", ">after Ditto", title="held-out stories")
    shown.add_row("accuracy", *(_with_ci(results, name) for name in ("before", "after")))
    for name, before in results["beliefs_before"].items():
        words = "true beliefs" if name == "no_tom" else "false beliefs"
        shown.add_row(words, f"{before:.3f}", f"{results['beliefs_after'][name]:.3f}")
    where = console()
    where.print(shown)
    where.print(
        f"feedback lifts the other drafts' reward by {_gap(results, 'loo_gap')} "
        f"(leave-one-out, 95 % CI); somebody else's feedback by {_gap(results, 'loo_gap_shuffled')}"
    )
    err.print(f"{duration(results['seconds'])}; open the report: {results['report']}")


def _say_next(out: Path) -> None:
    from soulkit.report.hints import shell_path, show_command

    before, after = shell_path(out / "before"), shell_path(out / "after")
    say_next(f"{show_command(out / 'train')} --improved", f"soul compare {before} {after}")


def _with_ci(results: dict[str, Any], name: str) -> str:
    low, high = results[f"{name}_ci"]
    return f"{results[name]:.3f} [{low:.3f}, {high:.3f}]"


def _gap(results: dict[str, Any], name: str) -> str:
    low, high = results[f"{name}_ci"]
    return f"{results[name]:+.3f} [{low:+.3f}, {high:+.3f}]"
