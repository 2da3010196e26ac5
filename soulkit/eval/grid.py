"""Several models and system prompts on the same rows: a run folder for each combination.

    FOLDER/<model>--<prompt>/   an ordinary run      FOLDER/grid.json   the runs, the baseline first

Combinations play one after another, so --concurrency holds for all of them, and all spend one
budget. The same command resumes; with another model or prompt it keeps what is finished.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from soulkit.errors import CallError, UserError
from soulkit.eval.comparison.compare import compare_runs
from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.results.summary import Summary, headline, summary_line
from soulkit.eval.run.run_lock import is_scored
from soulkit.eval.run.runner import prepare, run_eval
from soulkit.metrics.comparisons import PairedDifference, holm
from soulkit.models.api.limits import Budget
from soulkit.models.api.probing import EndpointRefused
from soulkit.models.ledger.view import paid_so_far
from soulkit.option_texts import given_twice
from soulkit.play.plan import Plan, confirm_cost, in_turn, pays
from soulkit.reporting import Reporter
from soulkit.runs.conditions import prompt_in
from soulkit.runs.folder import Run, refuse_other_files
from soulkit.runs.jsonl import read_object, write_json

GRID = "grid.json"
Grid = Mapping[str, EvalConfig]
"""Run folder → its configuration."""


def combinations(
    models: Sequence[str], prompts: Sequence[str], load: Callable[..., EvalConfig]
) -> dict[str, EvalConfig]:
    """Run folder → configuration; `load` gets None for a model or prompt that is not named here."""
    grid: dict[str, EvalConfig] = {}
    for model, prompt in product(models or (None,), prompts or (None,)):
        config = load(model=model, system_prompt=prompt)
        label = config.system_prompt.name if config.system_prompt else ""
        name = re.sub(r"[^\w.+=-]+", "-", f"{model or config.model}--{label}").strip("-.")
        if name in grid:
            raise given_twice(f"'{name}'", how="as a model with a system prompt")
        grid[name] = config
    return grid


def grid_plan(grid: Grid) -> Plan:
    """The plan of all combinations, one after another."""
    ready = {name: prepare(one.for_plan(), asking=False) for name, one in grid.items()}
    return in_turn([evaluation_plan(*pair, label=name) for name, pair in ready.items()])


def run_grid(
    grid: Grid, out: Path | None, reporter: Reporter
) -> tuple[Path, list[tuple[EvalConfig, Run, Summary]]]:
    """Play all combinations and return their folder and the finished runs. The default folder
    follows from the settings of the first. A model whose server fails does not stop the others."""
    first = next(iter(grid.values()))
    names = [part.task.name for one in grid.values() for part in prepare(one)[1]]
    digest = hashlib.sha256(json.dumps(first.identity(), sort_keys=True).encode()).hexdigest()[:8]
    folder = out or Path("runs") / f"grid-{'+'.join(dict.fromkeys(names))[:60]}-{digest}"
    if not (folder / GRID).is_file():
        refuse_other_files(folder)
    left = {name: one for name, one in grid.items() if not is_scored(folder / name)}
    if first.ledger != "replay" and any(map(pays, left.values())):
        confirm_cost(grid_plan(left), first, reporter, f"{len(left)} combinations")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / GRID, {"runs": list(grid)})
    spent = sum(paid_so_far(folder / name)[0] or 0.0 for name in grid)
    budget = Budget(first.max_cost, spent) if first.max_cost else None
    played = []
    for number, (name, config) in enumerate(grid.items(), 1):
        reporter.note(f"combination {number} of {len(grid)}: {name}")
        try:
            ended = run_eval(config.within(budget), folder / name, reporter=reporter)
            played.append((config, *ended))
        except (CallError, EndpointRefused) as error:
            reporter.warn(f"{name} failed, and the same command tries it again: {error}")
    return folder, played


def grid_rows(folder: Path) -> list[dict[str, Any]]:
    """The results of the grid in `folder` by task and run, as plain values, with the paired
    difference of each run from the first; empty if it is no grid."""
    names = [str(name) for name in read_object(folder / GRID).get("runs", ())]
    lines = {name: summary_line(folder / name) for name in names}
    runs = {name: Summary.from_json(line) for name, line in lines.items()}
    pairs: dict[tuple[str, str], PairedDifference] = {}
    problems = {name: "" if line else f"{name} is unfinished" for name, line in lines.items()}
    for name in (name for name in names[1:] if not problems[name]):
        try:
            tasks = compare_runs(folder / names[0], folder / name).tasks
            pairs |= {(name, one.task): one.paired for one in tasks}
        except UserError as error:
            problems[name] = f"{name}: {error.what}"
    adjusted = dict(zip(pairs, holm([pair.p for pair in pairs.values()]), strict=True))
    return [
        {
            "task": task, "run": name, "system_prompt": prompt_in(lines[name]), "cost": run.cost,
            **{one: getattr(cell, one) for one in ("mean", "ci_low", "ci_high", "n_scored", "n")},
            **{f"difference{end}": getattr(pair, part, None) for end, part in
               (("", "difference"), ("_low", "ci_low"), ("_high", "ci_high"))},
            "p_holm": adjusted.get((name, task)), "problem": problems[name],
        }
        for task in dict.fromkeys(task for run in runs.values() for task in run.tasks)
        for name, run in runs.items()
        for cell, pair in [(headline(run.tasks.get(task, {})), pairs.get((name, task)))]
    ]  # fmt: skip
