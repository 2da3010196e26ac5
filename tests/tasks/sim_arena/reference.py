"""Published functions of SimulatorArena that no command runs: what vectors alone check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, str]


def public_chat(assistant_chat: Sequence[Message], first_query: str | None) -> list[Message]:
    """The assistant's conversation without instructions; what the user says before its first reply
    becomes the bare first query, where there is one."""
    shown: list[Message] = []
    answered = False
    for message in assistant_chat:
        if message["role"] == "system":
            continue
        answered = answered or message["role"] == "assistant"
        wrapped = not answered and first_query is not None
        shown.append({**message, "content": first_query} if wrapped and first_query else message)
    return shown


def unwrap(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row: those of `extra_info`, and over them those of the text `raw`."""
    inner = data.get("extra_info")
    fields = dict(inner) if isinstance(inner, Mapping) else dict(data)
    raw = fields.get("raw")
    return {**fields, **json.loads(raw)} if isinstance(raw, str) else fields
