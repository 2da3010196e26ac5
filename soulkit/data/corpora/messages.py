"""The messages of a row, whatever its layout, as one plain shape: who speaks, and what is said.

    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    → [ChatLine(role="user", speaker="user", text="hi"), ChatLine(role="assistant", ...)]

Roles are `system`, `user`, `assistant`, `tool`, or empty where a name alone says who speaks. What
an assistant does with tools is words of the *surroundings*: a call and its answer each become an
utterance of the role `tool`, which nobody learns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from soulkit.data.chats import COLUMNS, chat_in
from soulkit.data.files import RawRow, flatten
from soulkit.data.literals import structure

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter", "person"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatbot", "bot", "ai"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "function_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
_SPEAKERS = ("role", "from", "speaker", "name", "author")
_WORDS = ("content", "value", "text")


class Unusable(Exception):
    """This row is no lesson; the message says why, in words that are the same for its like."""


@dataclass(frozen=True, slots=True)
class ChatLine:
    """One message as its row has it."""

    role: str
    speaker: str
    """The name that stands beside it, else its role."""
    names: frozenset[str]
    """Every word, in one case, by which its speaker goes."""
    text: str
    """Without parts that are no text."""
    marks: tuple[str, ...] = ()
    """The kinds of the parts that are no text: `image`, `audio`."""
    token_ids: tuple[int, ...] = ()
    trained: bool = True
    """False where the row says that nobody learns it."""


@dataclass(frozen=True, slots=True)
class ChatRow:
    """The utterances of one row, and what stands beside them."""

    utterances: tuple[ChatLine, ...]
    data_source: str
    fact: str
    tokenizer: str
    evaluation_only: bool
    """Whether the row says that nobody may train on it."""


def conversation_of(row: Any, place: str) -> ChatRow:
    """What one row of a file holds; Unusable where that is no conversation.

    `place` is `file:row`.
    """
    try:
        fields = flatten(row)
    except ValueError as error:
        raise Unusable(str(error)) from error
    utterances = (*_prompt(fields), *(u for i in _items(fields, place) for u in _utterances(i)))
    if not utterances:
        raise Unusable("its conversation is empty")
    return ChatRow(
        utterances,
        _text_field(fields, "data_source"),
        _text_field(fields, "fact"),
        _text_field(fields, "tokenizer"),
        str(fields.get("evaluation_only")).lower() in ("true", "1"),
    )


def _prompt(fields: Mapping[str, Any]) -> Iterator[ChatLine]:
    """A system prompt that stands beside the messages."""
    text = _text_field(fields, "system").strip()
    if text:
        yield ChatLine("system", "system", frozenset({"system"}), text)


def _text_field(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _items(fields: Mapping[str, Any], place: str) -> list[Any]:
    """The list of messages, through histories with branches and trees where it is none."""
    values = (structure(fields.get(name)) for name in COLUMNS)
    items = next((v for v in values if isinstance(v, list | tuple) and v), None)
    branches = items is not None and any(isinstance(i, Mapping) and "if_chosen" in i for i in items)
    if branches or (items is None and isinstance(structure(fields.get("prompt")), Mapping)):
        chat = chat_in(RawRow(dict(fields), place))
        if isinstance(chat, str):
            raise Unusable(chat)
        return list(chat.messages)
    if items is None:
        raise Unusable(f"it has no list of messages under {', '.join(COLUMNS)}")
    return list(items)


def _utterances(item: Any) -> Iterator[ChatLine]:
    if not isinstance(item, Mapping):
        raise Unusable("one of its messages is no object")
    words = {k: item[k].strip() for k in _SPEAKERS if isinstance(item.get(k), str)}
    names = frozenset(word.casefold() for word in words.values() if word)
    role = next((_ROLES[n] for k in _SPEAKERS if (n := words.get(k, "").lower()) in _ROLES), "")
    if not names:
        raise Unusable("one of its messages does not say who speaks")
    labels = (words.get(key) for key in ("name", "speaker", "author", "from", "role"))
    speaker = next((label for label in labels if label), "")
    text, marks = _words_of(item)
    if role in ("tool", "call"):
        act = f"({speaker} answers)" if role == "tool" else "(the assistant calls a tool)"
        yield ChatLine("tool", speaker, names, f"{act} {text}".strip())
        return
    calls = list(_calls(item))
    if text or marks or not calls:
        yield ChatLine(role, speaker, names, text, marks, _exact_ids(item), _is_trained(item))
    for call in calls:
        yield ChatLine("tool", "tool", frozenset({"tool"}), call)


def _exact_ids(item: Mapping[str, Any]) -> tuple[int, ...]:
    ids = item.get("token_ids")
    if ids is None:
        return ()
    if not isinstance(ids, list | tuple) or not all(type(i) is int and i >= 0 for i in ids):
        raise Unusable("its token_ids are no list of ids")
    return tuple(ids)


def _is_trained(item: Mapping[str, Any]) -> bool:
    """False where the message says so: by `trained`, or by the `weight` of other layouts."""
    return item.get("trained") is not False and item.get("weight") != 0


def _words_of(item: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The text of a message, and the kinds of its parts that are none."""
    for name in _WORDS:
        value = item.get(name)
        if isinstance(value, str):
            return value.strip(), ()
        if isinstance(value, list | tuple):
            return _parts(value)
    return "", ()


def _parts(parts: list[Any] | tuple[Any, ...]) -> tuple[str, tuple[str, ...]]:
    texts, marks = [], []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if isinstance(text, str):
            texts.append(text)
        elif isinstance(part, Mapping):
            marks.append(str(part.get("type") or "attachment").removesuffix("_url"))
    return "\n".join(text for text in texts if text).strip(), tuple(marks)


def _calls(item: Mapping[str, Any]) -> Iterator[str]:
    """What an assistant asks of its tools, in words."""
    calls = item.get("tool_calls")
    several = calls if isinstance(calls, list | tuple) else []
    for call in [*several, item.get("function_call")]:
        if not isinstance(call, Mapping):
            continue
        inner = call.get("function")
        about = inner if isinstance(inner, Mapping) else call
        arguments = about.get("arguments", "")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
        yield f"(the assistant calls {about.get('name', 'a tool')}) {shown}".strip()


# --- rows in a layout that is not read ------------------------------------------------------------

LAYOUTS = (
    f"A row has a list of messages under {', '.join(COLUMNS[:-1])}: "
    '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}.'
)
_ASKED = ("prompt", "question", "instruction", "input", "query", "user", "human")
_REPLIED = ("response", "answer", "output", "completion", "reply", "assistant", "chosen")


def nearest_layout(row: Any) -> str:
    """What to change in a row so that it is read as a conversation; empty where it is read."""
    try:
        row = flatten(row)
    except ValueError:
        return "This row is no object: put its messages under the name messages."
    names = {str(name).casefold(): name for name in row}
    column = next((name for name in COLUMNS if isinstance(structure(row.get(name)), list)), None)
    if column is not None:
        words = _messages_words(structure(row[column]))
        return f"Its list '{column}' is found: {words}" if words else ""
    listed = [name for name in row if isinstance(structure(row[name]), list) and row[name]]
    if listed:
        words = _messages_words(structure(row[listed[0]])) or "its entries are read as they are."
        return f"Its list '{listed[0]}' is the nearest: call it messages; {words}"
    asked = next((names[name] for name in _ASKED if name in names), None)
    replied = next((names[name] for name in _REPLIED if name in names), None)
    if asked is not None and replied is not None:
        return (f"'{asked}' and '{replied}' are one exchange: write them as two messages, of the "
                "roles user and assistant.")  # fmt: skip
    if any(name in names for name in _SPEAKERS) and any(name in names for name in _WORDS):
        return "This row is a single message: put all messages of a conversation into one row."
    columns = ", ".join(map(str, list(row)[:6])) or "none"
    return f"This row has no list; its columns are {columns}."


def _messages_words(items: Any) -> str:
    """What the entries of a list of messages need; empty where that is nothing."""
    first = next(iter(items), None)
    if not isinstance(first, Mapping):
        return "each entry is to be an object with role and content."
    spoken = any(isinstance(first.get(name), str) for name in _SPEAKERS)
    said = any(name in first for name in _WORDS)
    if spoken and said:
        return ""
    lacking = [*([] if spoken else ["role"]), *([] if said else ["content"])]
    return f"its entries have {', '.join(map(str, first))}, and need {' and '.join(lacking)}."
