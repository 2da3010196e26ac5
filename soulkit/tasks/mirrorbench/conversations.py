"""Recorded conversations as they are played, and what a reply of the simulated user says.

    User: <think>short</think> where do bees live   →   where do bees live

Under `paper` every message that says something is played, except an assistant's last one, on which
nothing follows. `reference` plays the first ten messages, blank ones included, and leaves out what
is neither the user's nor the assistant's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from soulkit.data.turns import ChatMessage
from soulkit.judge.verdict import remove_think, spoken
from soulkit.types import Line, Protocol

USER, ASSISTANT = "user", "assistant"
_LABEL = re.compile(r"\s*user:\s*", re.IGNORECASE)


def played(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages that `paper` plays: said by somebody, and no assistant's at the end."""
    messages = [turn for turn in turns if turn["role"] in (USER, ASSISTANT)]
    messages = [message for message in messages if message["content"].strip()]
    while messages and messages[-1]["role"] == ASSISTANT:
        messages.pop()
    return messages


def first_messages(turns: Sequence[ChatMessage], most: int) -> list[ChatMessage]:
    """The messages that `reference` plays and judges: the first `most`, without an assistant's
    last one."""
    messages = list(turns[:most])
    if messages and messages[-1]["role"] == ASSISTANT:
        messages.pop()
    return messages


def as_lines(messages: Sequence[ChatMessage]) -> list[Line]:
    return [Line(message["role"], message["content"]) for message in messages]


def read_message(text: str, protocol: Protocol) -> tuple[str, str]:
    """(what the simulated user wrote, status): `ok`, `salvaged` where a label stood before it, or
    `empty`.

    `reference` takes a label away before it looks for thinking, and keeps unclosed thinking.
    """
    if protocol == "reference":
        label = _LABEL.match(text)
        message = remove_think(text[label.end() :] if label else text)
        return message, "ok" if message else "empty"
    answer = spoken(text, "paper")
    label = _LABEL.match(answer)
    message = answer[label.end() :].strip() if label else answer
    return message, "empty" if not message else "salvaged" if label else "ok"


def conversation_text(turns: Sequence[Mapping[str, object]]) -> str:
    """`ROLE: content` line by line, as `reference` shows conversations to its judge."""
    return "\n".join(f"{str(t.get('role', 'unknown')).upper()}: {t.get('content')}" for t in turns)
