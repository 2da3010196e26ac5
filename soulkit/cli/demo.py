"""`soul demo`: train and evaluate a tiny model in minutes, or two scripted models in seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from soulkit.cli.console import (
    ConsoleReporter,
    console,
    err,
    print_json,
    print_next,
    warn_unsealed,
)
from soulkit.cli.options import Json
from soulkit.errors import MissingPackage
from soulkit.metrics.intervals import estimate_text
from soulkit.report.grid import Grid, GridRow, grid_parts
from soulkit.reporting import SILENT
from soulkit.text import duration

OUT, SCRIPTED_OUT = Path("runs/demo"), Path("runs/demo-scripted")


def command(
    out: Annotated[Path | None, typer.Option(metavar="FOLDER",
        help=f"Folder for all results. [default: {OUT}, or {SCRIPTED_OUT}]")] = None,
    seed: Annotated[int, typer.Option(metavar="N",
        help="Random seed; another seed makes other stories.")] = 0,
    steps: Annotated[int, typer.Option(metavar="N", min=1,
        help="Number of Ditto training steps.")] = 30,
    scripted: Annotated[bool, typer.Option("--scripted",
        help="Evaluate two scripted models instead: takes seconds and needs no PyTorch.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train and evaluate a tiny model end to end, and write a report.

    The demo fine-tunes a tiny model, trains it with Ditto, and evaluates it before and after. It
    takes about three minutes and needs no GPU, API key or network.
    """
    if scripted:
        _show_scripted(out or SCRIPTED_OUT, seed, as_json=as_json)
    else:
        _show_training(out or OUT, seed, steps, as_json=as_json)


def _show_training(out: Path, seed: int, steps: int, *, as_json: bool) -> None:
    if importlib.util.find_spec("torch") is None:
        raise MissingPackage("torch", "training (soul demo --scripted runs without it)")
    from soulkit.demo.training import ON_THE_RESULTS, Demo

    demo = Demo(out, seed, steps)
    results = demo.run(ConsoleReporter("demo"))
    warn_unsealed()
    results["report"] = _page(out, *ON_THE_RESULTS)
    demo.write_summary(results)
    if as_json:
        print_json(results)
        return
    _print(results, ON_THE_RESULTS)
    before, after = (_shell_path(out / name) for name in ("before", "after"))
    show = f"soul show {_shell_path(out / 'train')} --improved"
    print_next(show, f"soul compare {before} {after}")


def _show_scripted(out: Path, seed: int, *, as_json: bool) -> None:
    from soulkit.demo.scripted import WHAT_IT_IS, ScriptedDemo

    demo = ScriptedDemo(out, seed)
    results = demo.run(SILENT if as_json else ConsoleReporter("demo"))
    report = _page(out, WHAT_IT_IS)
    demo.write_summary({**results, "report": report})
    if as_json:
        print_json({**results, "report": report})
        return
    names = list(results)
    rows = []
    for task in results[names[0]]:
        cells = [results[name][task] for name in names]
        means = (estimate_text(c["mean"], *c["ci"]) for c in cells)
        counts = (f"({c['n_scored']}/{c['n']})" for c in cells)
        rows.append(GridRow.of(task, *map(" ".join, zip(means, counts, strict=True))))
    title = "two scripted models, scored by rules"
    for part in grid_parts(Grid(title=title, head=("task", *names), rows=tuple(rows))):
        console().print(part)
    console().print(WHAT_IT_IS)
    err.print(f"open the report: {report}", soft_wrap=True)
    careless, careful = (_shell_path(out / name) for name in names)
    print_next(f"soul show {careless} --worst 3", f"soul compare {careless} {careful}")


def _page(out: Path, *notes: str) -> str:
    from soulkit.report.load import load_runs
    from soulkit.report.pages import write_page

    return str(write_page(load_runs([out]), out / "report" / "index.html", notes=notes))


def _print(results: dict[str, Any], notes: Sequence[str]) -> None:
    columns = {"before": "before", "after": "after Ditto", "after_shuffled": "after control"}
    accuracies = (estimate_text(results[name], *results[f"{name}_ci"]) for name in columns)
    rows = [GridRow.of("all questions", *accuracies)]
    for name in results["beliefs_before"]:
        words = "true beliefs" if name == "no_tom" else "false beliefs"
        rows.append(GridRow.of(
            words, *(f"{results[f'beliefs_{one}'][name]:.3f}" for one in columns)
        ))  # fmt: skip
    where = console()
    head = ("accuracy on", *columns.values())
    for part in grid_parts(Grid(title="held-out stories", head=head, rows=tuple(rows))):
        where.print(part)
    where.print("control: the same training with feedback that belongs to another draft")
    where.print(
        f"at the first step, feedback raises the reward by {_gap(results, 'loo_gap')} over the "
        "other drafts of the row (leave-one-out gap, 95 % CI); the control's feedback by "
        f"{_gap(results, 'loo_gap_shuffled')}"
    )
    for line in notes:
        where.print(line)
    err.print(f"{duration(results['seconds'])}; open the report: {results['report']}")


def _shell_path(path: Path) -> str:
    from soulkit.report.episode_search import shell_path

    return shell_path(path)


def _gap(results: dict[str, Any], name: str) -> str:
    from soulkit.metrics.intervals import estimate_text, signed

    low, high = results[f"{name}_ci"]
    return estimate_text(results[name], low, high, signed)
