"""A task that has rows and no class: its entry in `tasks.yaml` names no `module`.

Its rows can be pulled, made, imported, checked, compared and audited like those of any other task,
because all of that needs only the columns. Playing or scoring one is refused. Evaluation and
training refuse earlier, with `Registry.refuse_rows_only`, before a model is loaded or a folder
made; the refusals here are for whoever calls a task directly.
"""

from __future__ import annotations

from typing import Any

from soulkit.data.literals import structure
from soulkit.models.base import Cast
from soulkit.tasks.base import Rollout, Task
from soulkit.tasks.registry import cannot_play
from soulkit.types import Episode, Example, Score, Segment


class RowsOnly(Task):
    """Binds rows; raises ConfigError when one is to be played or scored."""

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A column of type `any` holds a structure or its JSON text, and both are the same row."""
        columns = self.spec.columns
        return {
            name: structure(value) if columns[name].type == "any" else value
            for name, value in fields.items()
        }

    def preview(self, example: Example) -> tuple[Segment, ...]:
        """Nothing: there is no prompt without a class that writes one."""
        return ()

    def gold_text(self, example: Example) -> str:
        """The fields that only `gold` may read, where they hold text."""
        hidden = (example.fields.get(name) for name in self.gold_fields)
        return "\n".join(value for value in hidden if isinstance(value, str))

    async def play(self, example: Example, cast: Cast, rollout: Rollout) -> Episode:
        raise cannot_play([self.name])

    async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
        raise cannot_play([self.name])
