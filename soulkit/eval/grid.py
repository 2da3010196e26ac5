"""Several models and system prompts on the same rows: a run folder for each combination.

    FOLDER/<model>--<prompt>/   an ordinary run      FOLDER/grid.json   the runs, the baseline first

The checkpoints of a training run are combinations as well: FOLDER/step_000050/.

Combinations play one after another, so --concurrency holds for all of them, and all spend one
budget. The same command resumes; with another model or prompt it keeps what is finished.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from soulkit.errors import CallError, ConfigError, ModelLoadError, RunError, UserError
from soulkit.eval.comparison.compare import Comparison, compare_runs
from soulkit.eval.config import EvalConfig
from soulkit.eval.planning import evaluation_plan
from soulkit.eval.results.summary import Summary
from soulkit.eval.run.provenance import start_folder
from soulkit.eval.run.run_lock import is_scored
from soulkit.eval.run.runner import prepare, run_eval
from soulkit.metrics.comparisons import holm
from soulkit.models.api.limits import Budget
from soulkit.models.api.probing import EndpointRefused
from soulkit.models.ledger.view import paid_so_far
from soulkit.models.local.loading import ADAPTER_CONFIG
from soulkit.play.plan import Plan, confirm_cost, in_turn
from soulkit.reporting import Reporter
from soulkit.runs.folder import Run, is_run, read_config, read_environment, refuse_other_files
from soulkit.runs.jsonl import read_object, write_json

GRID = "grid.json"


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
            raise ConfigError(
                f"Two combinations would have the run folder '{name}'.",
                "Runs are named by their model and the file of their system prompt.",
                "Remove one of the two, or rename the file.",
            )
        grid[name] = config
    return grid


def checkpoint_grid(
    run: Path, which: str, load: Callable[..., EvalConfig]
) -> dict[str, EvalConfig]:
    """Run folder → configuration of each checkpoint of a training run that `which` names: `all`,
    `last` or steps. Step 0 is the model before the training. RunError if one is not there."""
    saved = {int(path.name[5:]): path for path in (run / "checkpoints").glob("step_*")
             if path.name[5:].isdigit() and (path / "position.json").is_file()}  # fmt: skip
    command = str(read_environment(run).get("command", "")) if is_run(run) else ""
    if not command.startswith("train") or not saved:
        raise RunError(
            f"'{run}' has no checkpoints.",
            "It is a training run that has not saved any." if command.startswith("train")
            else "It is not the folder of a training run.",
            "Name the folder that `soul train` wrote, with --run RUN.",
        )  # fmt: skip
    steps: set[int] = set()
    for part in which.split(","):
        word = part.strip()
        named = {"all": set(saved), "last": {max(saved)}}.get(word)
        if named is None and not (word.isdecimal() and int(word) in {0, *saved}):
            raise RunError(
                f"'{run}' has no checkpoint '{word}'.",
                f"It has the steps {', '.join(map(str, sorted(saved)))}. A training deletes older "
                "checkpoints; --keep-last says how many it keeps.",
                "Write --checkpoints all, last, or steps such as 0,50,last (0: before training).",
            )
        steps |= {int(word)} if named is None else named
    before = read_config(run)
    made = run / "base"  # a random model is saved there
    place = start_folder(run) or Path()
    trained, adapter = (str(place / one) if one and (place / one).exists() else one
                        for one in (before["model"], before.get("adapter")))  # fmt: skip
    model = str(made) if made.is_dir() else trained
    weights: dict[int, dict[str, Any]] = {
        step: {"adapter": str(path)} if (path / ADAPTER_CONFIG).is_file() else
        {"model": str(path), "adapter": None} for step, path in saved.items()
    }  # fmt: skip
    weights[0] = {"adapter": adapter}
    return {f"step_{step:06d}": load(**{"model": model, **weights[step]})
            for step in sorted(steps)}  # fmt: skip


def grid_plan(grid: Mapping[str, EvalConfig], *, asking: bool = False) -> Plan:
    """The plan of all combinations, one after another; with `asking` after all checks."""
    ready = {name: prepare(one if asking else one.for_plan(), asking=asking)
             for name, one in grid.items()}  # fmt: skip
    return in_turn([evaluation_plan(*pair, label=name) for name, pair in ready.items()])


def run_grid(
    grid: Mapping[str, EvalConfig], out: Path | None, reporter: Reporter
) -> tuple[Path, list[tuple[EvalConfig, Run, Summary]]]:
    """Play all combinations and return their folder and the finished runs. The default folder
    follows from the settings of the first. A model that cannot be used does not stop the others."""
    first = next(iter(grid.values()))
    digest = hashlib.sha256(json.dumps(first.identity(), sort_keys=True).encode()).hexdigest()[:8]
    folder = out or Path("runs") / f"grid-{(first.suite or '+'.join(first.tasks))[:60]}-{digest}"
    if not (folder / GRID).is_file():
        refuse_other_files(folder)
    left = {name: one for name, one in grid.items() if not is_scored(folder / name)}
    plan = grid_plan(left, asking=True)
    if first.ledger != "replay":
        confirm_cost(plan, first, reporter, f"{len(left)} combinations")
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [run.name for run in grid_runs(folder) if run.name not in grid and run.is_dir()]
    write_json(folder / GRID, {"runs": [*grid, *earlier]})
    spent = sum(paid_so_far(folder / name)[0] or 0.0 for name in grid)
    budget = Budget(first.max_cost, spent) if first.max_cost else None
    played = []
    for number, (name, config) in enumerate(grid.items(), 1):
        reporter.note(f"run {number} of {len(grid)}: {name}")
        try:
            ended = run_eval(config.within(budget), folder / name, reporter=reporter)
            played.append((config, *ended))
        except (CallError, EndpointRefused, ModelLoadError) as error:
            reporter.warn(f"{name} failed, and the same command tries it again: {error}")
    return folder, played


def grid_runs(folder: Path) -> list[Path]:
    """The runs of the grid in `folder`, the baseline first; empty if it is none."""
    return [folder / str(name) for name in read_object(folder / GRID).get("runs", ())]


def grid_comparisons(folder: Path) -> tuple[list[Comparison], list[str]]:
    """Each run of a grid compared with the first one, and why some are not. Holm's p is corrected
    for all of them."""
    first, *others = grid_runs(folder)
    made, problems = [], []
    for run in others:
        try:
            made.append(compare_runs(first, run))
        except UserError as error:
            problems.append(f"{run.name}: {error.what}")
    adjusted = iter(holm([task.paired.p for one in made for task in one.tasks]))
    return [
        replace(one, tasks=tuple(replace(task, p_holm=next(adjusted)) for task in one.tasks))
        for one in made
    ], problems
