"""Recorded chats between one person and one assistant, as the tasks read them.

The layouts are those of `exports.datasets`. System prompts, tool calls and their results are left
out, and consecutive messages of one role are merged.

    {"conversation_id": "c1", "user_id": "u7", "messages": [{"role": "user", "content": "hi"}, ...]}
    → Chat(key="c1", person="u7", messages=({"role": "user", "content": "hi"}, ...), ...)
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from soulkit.data.exports.datasets import (
    COLUMNS,
    CONVERSATIONS,
    REPLIES,
    TREE,
    branches_of,
    chat_row,
    grouped,
    is_scattered,
    key_in,
    person_in,
)
from soulkit.data.exports.reading import is_export, recognise
from soulkit.data.files import ROW_SUFFIXES, BadRecord, BadRow, RawRow, read_rows
from soulkit.data.literals import structure
from soulkit.errors import DataError, RowError
from soulkit.text import one_line

MESSAGE_ROLES = ("user", "assistant", "system")
"""`system` is the instruction at the start of a recorded chat; no participant speaks it."""

ChatMessage = dict[str, str]


def conversation(value: Any, column: str) -> list[ChatMessage]:
    """`value` as messages. RowError unless it is a list of messages with a user message.

    A message may be blank, and one role may speak twice in a row: recorded chats contain both.
    """
    items = structure(value)
    if not isinstance(items, list | tuple) or not items:
        raise _no_conversation(column, f"It contains {type(items).__name__} {items!r:.60}.")
    messages: list[ChatMessage] = []
    for number, item in enumerate(items, 1):
        fields = item if isinstance(item, Mapping) else {}
        role, content = str(fields.get("role", "")).strip().lower(), fields.get("content")
        if role not in MESSAGE_ROLES or not isinstance(content, str):
            raise _no_conversation(column, f"Message {number} is {item!r:.60}.")
        messages.append({"role": role, "content": content})
    if not any(m["role"] == "user" and m["content"].strip() for m in messages):
        raise _no_conversation(column, "It has no user message with text.")
    return messages


def _no_conversation(column: str, why: str) -> RowError:
    what = f"row: '{column}' must be a conversation."
    return RowError(what, f"{why} Each message needs role and content.")


def alternate(user: Sequence[str], assistant: Sequence[str]) -> list[ChatMessage]:
    """Alternating messages, user first. The lists are equally long, or `user` has one more."""
    messages: list[ChatMessage] = []
    for place, text in enumerate(user):
        messages.append({"role": "user", "content": text})
        if place < len(assistant):
            messages.append({"role": "assistant", "content": assistant[place]})
    return messages


def blank_message(messages: Sequence[ChatMessage]) -> int | None:
    """The number (from 1) of the first blank message, or None."""
    return next((n for n, m in enumerate(messages, 1) if not m["content"].strip()), None)


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation between one person and one assistant."""

    key: str
    """The id in the file, else `file:row`."""
    person: str
    """Id of the person; empty if the file has none."""
    messages: tuple[ChatMessage, ...]
    """Alternating roles, none blank, at least one from the user."""
    source: str
    layout: str
    """`replies`, or one of CONVERSATIONS."""
    fields: Mapping[str, Any]
    """The complete record (the first one if the chat has several)."""

    @property
    def user_messages(self) -> list[str]:
        return [m["content"] for m in self.messages if m["role"] == "user"]


def read_chats(path: Path) -> tuple[list[Chat], list[BadRow]]:
    """The chats of a file, and the records without one. DataError if no record is a chat."""
    raw, bad = read_rows(path)
    names = frozenset(name for record in raw for name in record.fields)
    chats: list[Chat] = []
    for make in _groups(raw) if is_scattered(names) else (partial(chat_in, r) for r in raw):
        try:
            chats.append(make())
        except BadRecord as error:
            bad.append(BadRow(make.args[0].source, str(error)))
    if not chats:
        first = f"{bad[0].source}: {bad[0].why}." if bad else "The file has no records."
        raise DataError(
            f"'{path}' contains no chat between a person and an assistant.",
            first,
            f"Give each record a list of messages under one of {', '.join(COLUMNS)}. An export in "
            "another layout is converted by: soul data import chats FILE -o chats.jsonl",
        )
    return chats, bad


def holds_chats(path: Path, columns: Container[str] = ()) -> bool:
    """Whether the records of a file, or of the first file in a folder, are chats. False if a record
    has one of these `columns`, which belong to task rows."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    first = next((file for file in files if file.suffix.lower() in ROW_SUFFIXES), None)
    try:
        if path.exists() and is_export(path):
            return bool(recognise(path).parts)
        chats = read_chats(first)[0] if first else []
    except DataError:
        return False
    names = {name for chat in chats for name in chat.fields} - {*COLUMNS, *REPLIES, *TREE}
    return bool(chats) and not any(name in columns for name in names)


def _groups(raw: Sequence[RawRow]) -> Iterator[partial[Chat]]:
    rows = {id(record.fields): record for record in raw}
    for layout, first, branches in grouped([record.fields for record in raw]):
        yield partial(_chat, rows[id(first)], branches, layout)


def chat_in(record: RawRow) -> Chat:
    """The chat in one record; BadRecord if there is none."""
    form, branches = branches_of(record.fields, CONVERSATIONS)
    return _chat(record, branches, form)


def _chat(record: RawRow, branches: Iterator[Sequence[Any]], layout: str) -> Chat:
    row = chat_row(record.fields, next(branches))
    messages: list[ChatMessage] = []
    for message in row["messages"]:
        role, content = message.get("role"), message["content"]
        if role in ("system", "tool", "function_call") or ("tool_calls" in message and not content):
            continue
        if role not in ("user", "assistant"):
            speaker = role or message.get("speaker")
            raise BadRecord(f"the speaker of a message is neither user nor assistant: {speaker}")
        if not content:
            raise BadRecord(f"message {len(messages) + 1} of its conversation ({role}) is blank")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{content}"
        else:
            messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" for message in messages):
        raise BadRecord("it has no user message")
    key, person = row.get("id") or record.source, row.get("person", "")
    return Chat(key, person, tuple(messages), record.source, layout, record.fields)


def owner_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whom a conversation belongs to: its person, else itself, known by its id or its content."""
    if person := person_in(fields):
        return {"person": person}
    key = key_in(fields)
    return {"conversation": key} if key else fields


def people_on_both_sides(people: Iterable[str], other: str) -> str:
    """`people in both the training data and the NAME: 2 (p1, p2)`, with the command that separates
    them; empty without people."""
    names = sorted(people)
    shown = ", ".join(one_line(name, 40) for name in names[:5]) + ", …" * (len(names) > 5)
    line = f"people in both the training data and the {other}: {len(names)} ({shown})"
    return f"{line}; soul data split keeps a person on one side" if names else ""


def has_messages(fields: Mapping[str, Any]) -> bool:
    """Whether a record holds a list of messages, in any layout."""
    return any(isinstance(structure(fields.get(name)), list | tuple) for name in COLUMNS)
