"""What a source of conversations is told."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from soulkit.config import Settings, setting


class SourceSettings(Settings):
    path: str = setting(flag=None, help="File, glob, folder or hub id.")
    ratio: float = setting(1.0, gt=0, flag=None, help="1.5: one and a half passes an epoch.")
    side: str | None = setting(None, flag=None, help="human, assistant or a speaker's name.")
    name: str | None = setting(None, flag=None, help="What it is called in this run.")
    strip_system: bool | None = setting(None, flag=None, help="Without system prompts.")
    turns: int | None = setting(None, flag=None, help="The last so many turns.")

    @model_validator(mode="before")
    @classmethod
    def _written(cls, raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        path, colon, number = raw.rpartition(":")
        try:
            return {"path": path, "ratio": float(number)} if colon else {"path": raw}
        except ValueError:
            return {"path": raw}
