"""Tasks: shared code (`kit/`), a folder for each benchmark, and the names that custom tasks import.

from soulkit.tasks import ChoiceTask, Rollout
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soulkit.tasks.kit.base import Control, Rollout, Task
    from soulkit.tasks.kit.choice import ChoiceTask, LetteredTask
    from soulkit.tasks.kit.dialogue import (
        Conversation,
        DialogueTask,
        Stage,
        others_view,
        partner_reply,
        partner_words,
        play_out,
    )
    from soulkit.tasks.kit.importing import (
        BadRecord,
        Imported,
        import_records,
        mapped_columns,
        need,
    )
    from soulkit.tasks.kit.prompting import Texts
    from soulkit.tasks.kit.row_checks import Agreement, DisputedLabel, LabelAudit
    from soulkit.tasks.kit.scoring import mean_of

_HOMES = {
    "base": ("Control", "Rollout", "Task"),
    "choice": ("ChoiceTask", "LetteredTask"),
    "dialogue": ("Conversation", "DialogueTask", "Stage", "others_view", "partner_reply",
                 "partner_words", "play_out"),
    "importing": ("BadRecord", "Imported", "import_records", "mapped_columns", "need"),
    "prompting": ("Texts",),
    "row_checks": ("Agreement", "DisputedLabel", "LabelAudit"),
    "scoring": ("mean_of",),
}  # fmt: skip

__all__ = [
    "Agreement", "BadRecord", "ChoiceTask", "Control", "Conversation", "DialogueTask",
    "DisputedLabel", "Imported", "LabelAudit", "LetteredTask", "Rollout", "Stage", "Task", "Texts",
    "import_records", "mapped_columns", "mean_of", "need", "others_view", "partner_reply",
    "partner_words", "play_out",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'soulkit.tasks' has no attribute '{name}'")
    return getattr(import_module(f"soulkit.tasks.kit.{home}"), name)
