"""Recorded conversations as one plain shape: a list of {"role": ..., "content": ...}.

Files hold them as such, as JSON text, or with more in every message (labels, ids) that a union of
structs fills with None. Only who spoke and what was said makes a conversation, so only that is
kept, and equal conversations stay equal rows.

    '[{"role": "User", "content": "hi", "metadata": {}}]'  →  [{"role": "user", "content": "hi"}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.data.literals import structure
from soulkit.errors import DataError

MESSAGE_ROLES = ("user", "assistant", "system")
"""`system` is an instruction that a recorded chat began with: part of it, and said by nobody."""

ChatMessage = dict[str, str]


def conversation(value: Any, column: str, source: str = "") -> list[ChatMessage]:
    """`value` as messages; DataError unless it is a list of them in which the user says something.

    A message may be blank, and one role may speak twice in a row: both occur in recorded chats.
    """
    items = structure(value)
    if not isinstance(items, list | tuple) or not items:
        raise _no_conversation(column, source, f"It holds {type(items).__name__} {items!r:.60}.")
    messages = [_message(item, number, column, source) for number, item in enumerate(items, 1)]
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise _no_conversation(column, source, "Its user says nothing.")
    return messages


def _message(item: Any, number: int, column: str, source: str) -> ChatMessage:
    fields = item if isinstance(item, Mapping) else {}
    role, content = str(fields.get("role", "")).strip().lower(), fields.get("content")
    if role not in MESSAGE_ROLES or not isinstance(content, str):
        why = f"Message {number} is {item!r:.60}."
        raise _no_conversation(column, source, why)
    return {"role": role, "content": content}


def _no_conversation(column: str, source: str, why: str) -> DataError:
    return DataError(
        f"{source or 'row'}: '{column}' should hold a conversation.",
        why,
        "Write a list of messages, each with role (user or assistant) and content.",
    )


def alternate(user: Sequence[str], assistant: Sequence[str]) -> list[ChatMessage]:
    """Messages in turns, the user first; the lists are equally long, or `user` has one more."""
    messages: list[ChatMessage] = []
    for place, text in enumerate(user):
        messages.append({"role": "user", "content": text})
        if place < len(assistant):
            messages.append({"role": "assistant", "content": assistant[place]})
    return messages


def blank_message(messages: Sequence[ChatMessage]) -> int | None:
    """The place (from 1) of the first message without words, None when there is none."""
    return next((n for n, m in enumerate(messages, 1) if not m["content"].strip()), None)
