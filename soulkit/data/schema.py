"""The shape of a task's rows, as `tasks.yaml` declares it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Column(BaseModel):
    """One field of a row: what it holds, what else it may be called, and who may see it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "list", "int", "number", "bool", "any"] = "text"
    """`list` also accepts a JSON or Python literal of a list (read without evaluating it)."""
    required: bool = True
    aliases: tuple[str, ...] = ()
    """Other names under which files carry this column, tried in order after its own."""
    audience: tuple[str, ...]
    """Seats that may see it, or the readers `judge`, `coach`, `gold`; empty: bookkeeping only."""
    identity: bool = True
    """Whether the value is part of the content hash that names the row."""
    max_words: int | None = Field(default=None, gt=0)
    """Word budget: longer values are cut here, for every model alike, and the cut is recorded."""
    train_words: int | None = Field(default=None, gt=0)
    """The budget in training, where it is another one."""
    keep: Literal["first", "last"] = "first"
    """Which words of a longer value stay."""
    entity: str = ""
    """What kind of thing the value names (persona, character, scenario): training and evaluation
    rows that share one are not independent, and `soul data contamination` says so."""
