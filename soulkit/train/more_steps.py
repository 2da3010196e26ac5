"""More steps for a run that is there: `--steps` may be raised, whether it has ended or not.

Everything else must be as it was, and what was trained stays. Two things depend on the number: a
cosine schedule ends at the new last step, and the usual warm-up of supervised training stays that
of the old number. Both are said in one line, and the run's folder records the change. Fewer steps
are refused: a step that was taken cannot be taken back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from soulkit.errors import RunError
from soulkit.reporting import Reporter
from soulkit.runs.folder import (
    Run,
    change_settings,
    is_run,
    plain_config,
    read_config,
    read_environment,
)
from soulkit.train.config import TrainConfig


def steps_before(path: Path) -> int | None:
    """The steps that the run in folder `path` was to take; None where there is no run."""
    steps = read_config(path).get("steps") if is_run(path) else None
    return steps if isinstance(steps, int) else None


def with_more_steps(config: TrainConfig, path: Path) -> TrainConfig:
    """`config` for the run in `path`: with its warm-up, unless another one was asked for.

    RunError when fewer steps are asked for than the run was begun with.
    """
    before = steps_before(path)
    if before is None or before == config.steps:
        return config
    if read_environment(path).get("command") != f"train {config.method}":  # refused anyway
        return config
    if config.steps < before:
        raise RunError(
            f"{path} was begun with {before} steps, and now --steps is {config.steps}.",
            "Steps of a run can be raised and not lowered: its schedule and its results are those "
            "of the larger number.",
            f"Write --steps {before} or more, or give another folder with --out.",
        )
    warm_up = read_config(path).get("warmup_steps")
    if warm_up is None or "warmup_steps" in config.model_fields_set:
        return config
    return config.model_copy(update={"warmup_steps": warm_up})


def identity_before(config: TrainConfig, path: Path) -> dict[str, Any]:
    """What makes the run in `path` this one: the settings of `config`, with its number of steps."""
    before = steps_before(path)
    return {**config.identity(), **({} if before is None else {"steps": before})}


def take_more_steps(run: Run, config: TrainConfig, reporter: Reporter) -> None:
    """Record the new number of steps where it was raised, and say what depended on the old one.

    The old summary moves aside: the run is unfinished until the new one is written.
    """
    before = steps_before(run.path)
    if before is None or before >= config.steps:
        return
    reporter.note(more_steps_words(config, before, run.path))
    if run.summary_path.is_file():
        os.replace(run.summary_path, run.path / f"summary_{before}_steps.json")
    change_settings(run, plain_config(config.identity()), {"steps": [before, config.steps]})


def more_steps_words(config: TrainConfig, before: int, path: Path) -> str:
    """`steps raised from 40 to 80: …`, with what depended on the old number."""
    facts = []
    if config.lr_schedule == "cosine":
        facts.append(
            f"the learning rate follows a cosine that now ends at step {config.steps}; steps up to "
            f"{before} followed one that ended there"
        )
    if config.warmup_steps:
        facts.append(f"the warm-up stays {config.warmup_steps} steps")
    if any((folder / "ablation.json").is_file() for folder in path.resolve().parents[:2]):
        facts.append("this run is part of a comparison: give the others as many steps with "
                     "soul train ablate --steps")  # fmt: skip
    told = "; ".join(facts) or "nothing else depends on their number"
    return f"steps raised from {before} to {config.steps}: {told}"
