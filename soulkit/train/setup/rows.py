"""Which rows a step plays: a mixture of tasks, shuffled per epoch; rows of general ability.

Everything is drawn by (seed, step), so a resumed run plays the rows that an untouched one would.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from soulkit.data.files import RawRow
from soulkit.errors import DataError
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.types import Example

TaskRows = list[tuple[Task, Example]]


def mixture(
    tasks: Mapping[str, Task], examples: Mapping[str, Sequence[Example]],
    ratios: Mapping[str, float], seed: int, rows_per_task: int | None = None,
) -> TaskRows:  # fmt: skip
    """Every task's rows at its ratio: 0.5 a fixed half, 1.5 all and half of them once more.

    A ratio is one of `rows_per_task`, where that is given: tasks with equal ratios then have equal
    shares, and one with fewer rows has them repeated, as evenly as it goes.
    """
    pool: TaskRows = []
    for name, ratio in ratios.items():
        rows = sorted(examples[name], key=lambda e: e.id)
        random.Random(f"{seed}/{name}/mixture").shuffle(rows)
        size = max(1, round(ratio * (rows_per_task or len(rows)))) if rows else 0
        repeats = math.ceil(size / max(len(rows), 1))
        pool += [(tasks[name], row) for row in (rows * repeats)[:size]]
    if not pool:
        raise DataError(
            "There is no row to train on.",
            "Every task's training data is empty after filtering.",
            "Give rows with --data TASK=FILE, or generate some with --data TASK=synth:2000.",
        )
    return pool


def batch(pool: TaskRows, size: int, step: int, seed: int) -> TaskRows:
    """The `step`-th batch: epochs are shuffled separately and run into each other."""
    start = step * size
    chosen: TaskRows = []
    while len(chosen) < size:
        epoch, offset = divmod(start + len(chosen), len(pool))
        order = list(range(len(pool)))
        random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
        take = order[offset : offset + size - len(chosen)]
        chosen += [pool[i] for i in take]
    return chosen


GENERAL = "general"
"""The suite whose tasks stand for what a model can do beside what it is trained for."""


def general_rows() -> TaskRows:
    """Every row of the suite, each task's as many as it makes by itself."""
    registry = load_registry()
    tasks = [registry.task(name) for name in registry.suite(GENERAL)]
    return [(task, example) for task in tasks for example in _rows_of(task)]


def _rows_of(task: Task) -> Sequence[Example]:
    made = enumerate(make_rows(task, None, seed=0), 1)
    return to_examples(task, [RawRow(row, f"{GENERAL}:{i}") for i, row in made]).examples


def general_settings(config: TrainConfig) -> TrainConfig:
    """Those of a run, with replies as long as these tasks want them: the limit of what is trained
    on says nothing of them."""
    return config.model_copy(update={"max_tokens": config.retention_tokens})
