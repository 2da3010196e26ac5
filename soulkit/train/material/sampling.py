"""Which examples a step plays: a mixture of tasks, shuffled per epoch, keyed by (seed, step)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from soulkit.errors import DataError
from soulkit.tasks.base import Task
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
