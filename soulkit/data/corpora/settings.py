"""One source of conversations, as options and YAML name it.

chats.jsonl              the same as {path: chats.jsonl}
chats.jsonl:1.5          {path: chats.jsonl, ratio: 1.5}
shards/                  train_shard_*, train-*, train/, or what has `train` in its name
data/*.parquet           every file that the pattern matches
owner/name@1f2e/en:train a data set of the hub: [@revision][/configuration][:split]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

from pydantic import field_validator, model_validator

from soulkit.config import Settings, setting

_RATIO = re.compile(r"(?P<path>.*[^:]):(?P<ratio>\d+(?:\.\d*)?|\.\d+)", re.DOTALL)


class SourceSettings(Settings):
    """Where conversations lie, how much of them is used, and who in them is learned."""

    path: str = setting(help="A file, a pattern, a folder of shards, or owner/name of the hub.")
    ratio: float = setting(
        1.0, gt=0, help="Passes of this source in one pass of the mixture; below 1 a fixed part."
    )
    side: str | None = setting(
        None, help="human, assistant, or a speaker's name.", unset="as corpora.yaml says"
    )
    name: str | None = setting(
        None, help="What it is called here.", unset="the data_source of a row, else the file's name"
    )
    strip_system: bool | None = setting(
        None, help="Leave the system prompts out.", unset="as for the run"
    )
    turns: int | None = setting(
        None, ge=1, help="Messages that stay of a long conversation.", unset="as for the run"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        """Text is a path, perhaps with a ratio after its last colon."""
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if not isinstance(value, str):
            return value
        match = _RATIO.fullmatch(value)
        if match is None or Path(value).exists():
            return {"path": value}
        return {"path": match["path"], "ratio": float(match["ratio"])}

    @field_validator("path", "side", "name")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("it is blank")
        return value


AnySource = SourceSettings | Mapping[str, Any] | str | Path


def source_settings(value: AnySource) -> SourceSettings:
    """`value`, or the settings that a path, a text or a mapping spells."""
    if isinstance(value, SourceSettings):
        return value
    return SourceSettings.model_validate(value)
