"""What a run trains on, and which rows a step plays: a mixture of tasks, shuffled per epoch.

Everything is drawn by (seed, step), so a resumed run plays the rows that an untouched one would.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from soulkit.data.files import RawRow
from soulkit.errors import DataError
from soulkit.eval.results.batch_statistics import parts_remark
from soulkit.play.requirements import left_out_lines
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.loading import to_examples
from soulkit.tasks.kit.made_rows import make_rows
from soulkit.tasks.kit.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective
from soulkit.train.setup.conversations import Corpus
from soulkit.types import Example

TaskRows = list[tuple[Task, Example]]


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on."""

    tasks: Mapping[str, Task]
    pool: TaskRows
    dev: TaskRows
    config: TrainConfig
    """The settings with everybody in their seats."""
    objective: Objective | None = None
    """The method, made once; None in supervised training."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Task of the suite → why it is not trained on here."""
    corpus: Corpus | None = None
    """The conversations that are learned in the place of tasks."""
    measured: TrainingData | None = None
    """What supervised training is measured on: rows, players and settings of a reinforcement."""
    players: tuple[str, ...] = ()
    """A line for each default player that differs from evaluation's."""
    coaches: tuple[str, ...] = ()
    """Lines on default coaches that are no model: a plan has them as well."""

    def remarks(self) -> list[str]:
        """Lines printed before the start: tasks left out, other players than in evaluation, rows
        that are repeated, and headlines of which the dev rows lack a part."""
        share = self.config.rows_per_task
        lines = [*left_out_lines(self.config.suite, self.left_out), *self.players]
        lines += self.measured.players if self.measured else ()
        lines += self.coaches
        lines += self.corpus.remarks() if self.corpus else []
        for task in self.tasks.values():
            held_out = [row for owner, row in self.dev if owner is task]
            lines.append(parts_remark(task, held_out, dev=True))
        for task in self.tasks.values() if share else ():
            taken = [row.id for owner, row in self.pool if owner is task]
            if (distinct := len(set(taken))) < len(taken):
                lines.append(
                    f"{task.name} has {distinct} training rows: they are repeated up to "
                    f"{len(taken)}, so that the tasks keep their shares"
                )
        return [line for line in lines if line]


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


def no_gold_words(task: str) -> tuple[str, str, str]:
    """The error of a task that cannot be imitated."""
    return (
        f"The task '{task}' has no gold episodes to imitate.",
        "Supervised training needs the perfect answer of each row.",
        "Train it with grpo or ditto, or define gold() in the task.",
    )


GENERAL = "general"
"""The suite whose tasks stand for what a model can do beside what it is trained for."""


def general_rows() -> TaskRows:
    """Every row of the suite, each task's as many as it makes by itself."""
    registry = load_registry()
    tasks = [registry.task(name) for name in registry.suite(GENERAL)]
    pool: TaskRows = []
    for task in tasks:
        made = enumerate(make_rows(task, None, seed=0), 1)
        rows = [RawRow(row, f"{GENERAL}:{i}") for i, row in made]
        pool += [(task, example) for example in to_examples(task, rows).examples]
    return pool


def general_settings(config: TrainConfig) -> TrainConfig:
    """Those of a run, with replies as long as these tasks want them: the limit of what is trained
    on says nothing of them."""
    return config.model_copy(update={"max_tokens": config.retention_tokens})
