"""soulkit: evaluate, train and understand human simulators.

    import soulkit as sk

    summary = sk.evaluate("runs/ditto/model", "TASK", data={"TASK": "synth:200"})

The names below are loaded when they are first used: importing soulkit imports nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from soulkit.version import __version__

if TYPE_CHECKING:
    from soulkit.face import (
        aevaluate,
        atrain_model,
        compare,
        evaluate,
        load_run,
        load_task,
        train_model,
    )
    from soulkit.tasks.base import Task
    from soulkit.tasks.choice import ChoiceTask
    from soulkit.tasks.dialogue import DialogueTask
    from soulkit.types import Episode, Example, Score


__all__ = [
    "ChoiceTask", "DialogueTask", "Episode", "Example", "Score", "Task", "__version__",
    "aevaluate", "atrain_model", "compare", "evaluate", "load_run", "load_task", "train_model",
]  # fmt: skip

_HOMES = {
    "Task": "soulkit.tasks.base",
    "ChoiceTask": "soulkit.tasks.choice",
    "DialogueTask": "soulkit.tasks.dialogue",
    "Example": "soulkit.types",
    "Episode": "soulkit.types",
    "Score": "soulkit.types",
    "evaluate": "soulkit.face",
    "train_model": "soulkit.face",
    "aevaluate": "soulkit.face",
    "atrain_model": "soulkit.face",
    "compare": "soulkit.face",
    "load_run": "soulkit.face",
    "load_task": "soulkit.face",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'soulkit' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
