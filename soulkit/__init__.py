"""soulkit: evaluate and train language models as human simulators.

    import soulkit as sk

    summary = sk.evaluate("runs/ditto/model", "TASK", data={"TASK": "synth:200"})

The names below are imported on first use, so `import soulkit` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from soulkit.version import __version__

if TYPE_CHECKING:
    from soulkit.api import (
        aevaluate,
        atrain_model,
        compare,
        evaluate,
        load_run,
        load_task,
        train_model,
    )
    from soulkit.tasks.kit.base import Task
    from soulkit.tasks.kit.choice import ChoiceTask
    from soulkit.tasks.kit.dialogue import DialogueTask
    from soulkit.types import Episode, Example, Score


__all__ = [
    "ChoiceTask", "DialogueTask", "Episode", "Example", "Score", "Task", "__version__",
    "aevaluate", "atrain_model", "compare", "evaluate", "load_run", "load_task", "train_model",
]  # fmt: skip

_HOMES = {
    "Task": "soulkit.tasks.kit.base",
    "ChoiceTask": "soulkit.tasks.kit.choice",
    "DialogueTask": "soulkit.tasks.kit.dialogue",
    "Example": "soulkit.types",
    "Episode": "soulkit.types",
    "Score": "soulkit.types",
    "evaluate": "soulkit.api",
    "train_model": "soulkit.api",
    "aevaluate": "soulkit.api",
    "atrain_model": "soulkit.api",
    "compare": "soulkit.api",
    "load_run": "soulkit.api",
    "load_task": "soulkit.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'soulkit' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
