"""The rows by which general ability is measured, and the settings under which they are played."""

from __future__ import annotations

from collections.abc import Sequence

from soulkit.data.files import RawRow
from soulkit.tasks.base import Task
from soulkit.tasks.loading import to_examples
from soulkit.tasks.made import make_rows
from soulkit.tasks.registry import load_registry
from soulkit.train.config import TrainConfig
from soulkit.train.material.sampling import TaskRows
from soulkit.types import Example

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
