"""`soul demo`: train and evaluate a tiny model in minutes, or two scripted models in seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from soulkit.metrics.intervals import estimate_text, number
from soulkit.report.grid import Grid, GridRow, grid_parts
from soulkit.reporting import SILENT
from soulkit.text import duration

if TYPE_CHECKING:
    from soulkit.demo.training import Demo

OUT, SCRIPTED_OUT = Path("runs/demo"), Path("runs/demo-scripted")
LABELS = {
    "warmup": "before", "ditto": "Ditto", "shuffled": "shuffled feedback", "grpo": "GRPO",
}  # fmt: skip
"""Part of the training demo → name in its table."""


def command(
    out: Annotated[Path | None, typer.Option(metavar="FOLDER",
        help=f"Folder for all results. [default: {OUT}, or {SCRIPTED_OUT}]")] = None,
    seed: Annotated[int, typer.Option(metavar="N",
        help="Random seed; another seed makes another rule and other people.")] = 0,
    steps: Annotated[int, typer.Option(metavar="N", min=1,
        help="Number of training steps of every arm.")] = 24,
    scripted: Annotated[bool, typer.Option("--scripted",
        help="Evaluate two scripted models instead: takes seconds and needs no PyTorch.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train and evaluate a tiny model end to end, and write a report.

    The demo warms up a tiny model and trains it three times: with Ditto, with Ditto and shuffled
    feedback, and with GRPO. It evaluates all of them on held-out people. It takes about three
    minutes on two cores and needs no GPU, API key or network.
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
    _print(demo, results["arms"])
    err.print(f"{duration(results['seconds'])}; open the report: {results['report']}",
              soft_wrap=True)  # fmt: skip
    before, ditto, after = (_shell_path(out / name) for name in ("before", "ditto", "after_ditto"))
    print_next(f"soul show {ditto} --improved", f"soul compare {before} {after}")


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

    runs = load_runs([out], episodes=False)
    return str(write_page(runs, out / "report" / "index.html", notes=notes))


def _print(demo: Demo, arms: Mapping[str, Any]) -> None:
    from soulkit.demo.training import REWARD_ALONE

    rows = []
    for name, words in LABELS.items():
        exact, right, in_form = demo.cells(name).values()
        shares = (estimate_text(cell.mean, cell.ci_low, cell.ci_high) for cell in (exact, right))
        rows.append(GridRow.of(words, *shares, number(in_form.mean)))
    head = ("held-out people", "exactly right", "words right", "in form")
    for part in grid_parts(Grid(head=head, rows=tuple(rows))):
        console().print(part)
    console().print(finding(arms))
    console().print(REWARD_ALONE)


def finding(arms: Mapping[str, Any]) -> str:
    """One sentence on the result of `soul demo`."""
    ditto, *controls = (arms[name]["exact"] for name in ("ditto", "shuffled", "grpo"))
    shuffled, grpo = map(number, controls)
    shares = f"{number(ditto)} of its replies are exactly right, against {shuffled} with feedback "
    shares += f"on other drafts and {grpo} with the reward alone."
    above = all(arms["ditto"]["ci"][0] > arms[name]["ci"][1] for name in ("shuffled", "grpo"))
    if above:
        return f"Ditto learned the rule from feedback that never gives the whole reply: {shares}"
    return f"In this run, Ditto is not clearly better than its controls: {shares}"


def _shell_path(path: Path) -> str:
    from soulkit.report.episode_search import shell_path

    return shell_path(path)
