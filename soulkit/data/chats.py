"""Reads recorded chats in any supported layout as lists of {"role": ..., "content": ...}.

* A list of messages per record (COLUMNS), with the usual names for roles and contents.
* A history with branches (entries with `turn`): the reply with `if_chosen`, else the best `score`.
* One reply per record (REPLIES): the same rule over several records.
* Trees, one message per record (TREE) or nested in `prompt`: from each root, take the best `rank`.

System prompts are left out. Consecutive messages of one role are merged.

    {"conversation_id": "c1", "user_id": "u7", "messages": [{"role": "user", "content": "hi"}, ...]}
    → Chat(key="c1", person="u7", messages=({"role": "user", "content": "hi"}, ...), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

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


Layout = Literal["messages", "branches", "replies", "tree"]
COLUMNS = ("messages", "conversation", "conversations", "turns", "conversation_history")
"""Columns that may hold the list of messages; the first one present is used."""
REPLIES = frozenset(("conversation_id", "user_prompt", "model_response"))
TREE = frozenset(("message_id", "parent_id", "role", "text"))
_KEYS = ("conversation_id", "conversation_hash", "message_tree_id", "id")
_PEOPLE = ("person", "user_id", "hashed_ip", "author")
_USER, _ASSISTANT = ("user", "human", "prompter"), ("assistant", "gpt", "model", "chatbot", "bot")


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
    layout: Layout
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
    for record, make in _groups(raw, names):
        try:
            chats.append(make(record))
        except BadRecord as error:
            bad.append(BadRow(record.source, str(error)))
    if not chats:
        first = f"{bad[0].source}: {bad[0].why}." if bad else "The file has no records."
        raise DataError(
            f"'{path}' contains no chat between a person and an assistant.",
            first,
            f"Give each record a list of messages under one of {', '.join(COLUMNS)}. For other "
            "layouts see docs/guides/get-data.md.",
        )
    return chats, bad


def holds_chats(path: Path, columns: Container[str] = ()) -> bool:
    """Whether the records of a file, or of the first file in a folder, are chats. False if a record
    has one of these `columns`, which belong to task rows."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    first = next((file for file in files if file.suffix.lower() in ROW_SUFFIXES), None)
    if first is None:
        return False
    try:
        chats, _ = read_chats(first)
    except DataError:
        return False
    names = {name for chat in chats for name in chat.fields} - {*COLUMNS, *REPLIES, *TREE}
    return not any(name in columns for name in names)


def _groups(
    raw: Sequence[RawRow], names: frozenset[str]
) -> Iterator[tuple[RawRow, Callable[[RawRow], Chat]]]:
    if names >= REPLIES:
        threads: dict[str, list[RawRow]] = {}
        for record in raw:
            threads.setdefault(str(record.fields.get("conversation_id")), []).append(record)
        for thread in threads.values():
            yield thread[0], partial(_replies, thread=thread)
    elif names >= TREE:
        children: dict[str, list[Mapping[str, Any]]] = {}
        for record in raw:
            children.setdefault(str(record.fields.get("parent_id") or ""), []).append(record.fields)
        for record in raw:
            if not record.fields.get("parent_id"):
                yield record, partial(_tree, root=record.fields, children=children)
    else:
        yield from ((record, chat_in) for record in raw)


def chat_in(record: RawRow) -> Chat:
    """The chat in one record; BadRecord if there is none."""
    root = structure(record.fields.get("prompt"))
    if isinstance(root, Mapping) and isinstance(root.get("replies"), list):
        return _tree(record, root, {})
    values = (structure(record.fields.get(name)) for name in COLUMNS)
    items = next((v for v in values if isinstance(v, list | tuple) and v), None)
    if items is None:
        raise BadRecord(f"it has no list of messages under {', '.join(COLUMNS)}")
    if any(isinstance(item, Mapping) and "if_chosen" in item for item in items):
        return _chat(record, _chosen(items), "branches")
    return _chat(record, items, "messages")


def _chosen(items: Iterable[Any]) -> list[Mapping[str, Any]]:
    turns: dict[tuple[Any, str], list[Mapping[str, Any]]] = {}
    for item in items:
        if not isinstance(item, Mapping):
            raise BadRecord(f"an entry of its history is not an object: {item!r:.60}")
        turns.setdefault((item.get("turn"), _role(item)), []).append(item)
    return [_best(replies) for replies in turns.values()]


def _best(replies: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The reply that the person continued with, else the best-rated one, else the first."""
    chosen = [item for item in replies if item.get("if_chosen")]
    return max(chosen or replies, key=lambda item: _number(item.get("score")))


def _number(value: Any, absent: float = float("-inf")) -> float:
    return float(value) if isinstance(value, int | float) else absent


def _replies(first: RawRow, thread: Sequence[RawRow]) -> Chat:
    turns: dict[float, list[Mapping[str, Any]]] = {}
    for record in thread:
        turns.setdefault(_number(record.fields.get("turn")), []).append(record.fields)
    messages: list[Mapping[str, Any]] = []
    for turn in sorted(turns):
        reply = _best(turns[turn])
        messages += [{"role": "user", "content": reply.get("user_prompt")},
                     {"role": "assistant", "content": reply.get("model_response")}]  # fmt: skip
    return _chat(first, messages, "replies")


def _tree(
    record: RawRow, root: Mapping[str, Any], children: Mapping[str, list[Mapping[str, Any]]]
) -> Chat:
    """From the root, follow the child with the lowest rank (the best one)."""
    path, node = [root], root
    while True:
        below = node.get("replies")
        replies = below if isinstance(below, list) else children.get(str(node.get("message_id")))
        replies = [reply for reply in replies or () if isinstance(reply, Mapping)]
        if not replies or len(path) > 1_000:  # no real tree is this deep: it is a cycle
            return _chat(record, path, "tree")
        node = min(replies, key=lambda reply: _number(reply.get("rank"), float("inf")))
        path.append(node)


# -- messages ------------------------------------------------------------------------------------


def _chat(record: RawRow, items: Iterable[Any], layout: Layout) -> Chat:
    messages: list[ChatMessage] = []
    for item in items:
        role, content = _role(item), _content(item)
        if not role:
            continue
        if not content:
            raise BadRecord(f"message {len(messages) + 1} of its conversation ({role}) is blank")
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] += f"\n{content}"
        else:
            messages.append({"role": role, "content": content})
    if not any(message["role"] == "user" for message in messages):
        raise BadRecord("it has no user message")
    fields = record.fields
    key = next((str(fields[name]) for name in _KEYS if fields.get(name)), record.source)
    return Chat(key, person_in(fields), tuple(messages), record.source, layout, fields)


def person_in(fields: Mapping[str, Any]) -> str:
    """The id of the person in a record; empty if it has none."""
    return next((str(fields[name]) for name in _PEOPLE if fields.get(name)), "")


def owner_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whom a conversation belongs to: its person, else itself, known by its id or its content."""
    if person := person_in(fields):
        return {"person": person}
    key = next((str(fields[name]) for name in _KEYS if fields.get(name)), "")
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


def _role(item: Any) -> str:
    """`user` or `assistant`; empty for a system prompt."""
    fields = item if isinstance(item, Mapping) else {}
    names = (fields.get(name) for name in ("role", "from", "speaker"))
    role = next((name.strip().lower() for name in names if isinstance(name, str)), "")
    if role in _USER:
        return "user"
    if role in _ASSISTANT:
        return "assistant"
    if role == "system":
        return ""
    raise BadRecord(f"the speaker of {item!r:.60} is unknown")


def _content(item: Mapping[str, Any]) -> str:
    for name in ("content", "value", "text"):
        value = item.get(name)
        if isinstance(value, str):
            return value.strip()
        if isinstance(value, list):
            parts = (part.get("text") if isinstance(part, Mapping) else part for part in value)
            return "\n".join(str(part) for part in parts if part).strip()
    return ""
