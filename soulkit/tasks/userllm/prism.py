"""PRISM's conversations as rows: the first turn, the second one, and the one that never came.

PRISM comes as `conversations.jsonl` (a history with branches) and `utterances.jsonl` (one reply a
record); of the replies that a person saw, the one they went on with is part of their conversation.
It does not say what the person was after, so a row needs an intent from elsewhere: from the record
itself (`intent`), or from a model that drafts it (build.py).

A conversation gives up to three rows, of which `is_last_turn` says whether the person was done:

* `first`: nothing has been said yet;
* `second`: the assistant has answered once, and the person did go on;
* `end`: everything has been said, and the person wrote nothing more.

So the end of a conversation is where the person left it. The paper's rows are first and second
turns; without `end` nothing would ever be over, and there would be no termination to score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from soulkit.data.chats import Chat
from soulkit.tasks.made import Row
from soulkit.tasks.spec import ORIGIN

Turns = Literal["all", "first", "second", "end"]
LICENCE = "PRISM: human text CC-BY-4.0, model text CC-BY-NC-4.0"
UNKNOWN = "not stated with the chats"


def is_prism(chat: Chat) -> bool:
    """Whether a chat is laid out as one of PRISM's two files."""
    return chat.layout in ("branches", "replies")


def from_prism(chat: Chat) -> bool:
    """Whether a chat is one of PRISM's: laid out like them, with the kind that each of them has."""
    return is_prism(chat) and bool(chat.fields.get("conversation_type"))


def turn_names(chat: Chat, turns: Turns) -> list[str]:
    """The rows that a chat gives."""
    messages = chat.messages
    users = len(chat.user_messages)
    there = {
        "first": messages[0]["role"] == "user",
        "second": users > 1 and len(messages) > 2 and messages[0]["role"] == "user",
        "end": len(messages) > 1 and messages[-1]["role"] == "assistant",
    }
    return [name for name, is_there in there.items() if is_there and turns in ("all", name)]


def rows_of(chat: Chat, intent: str, turns: Turns) -> list[Row]:
    """The rows of a chat whose person was after `intent`."""
    histories = {"first": 0, "second": 2, "end": len(chat.messages)}
    return [_row(chat, intent, name, histories[name]) for name in turn_names(chat, turns)]


def recorded_intent(fields: Mapping[str, Any]) -> str:
    """The intent that stands in the record itself; empty for none."""
    values = (fields.get(name) for name in ("intent", "intent_summary"))
    return next((v.strip() for v in values if isinstance(v, str) and v.strip()), "")


def _row(chat: Chat, intent: str, name: str, length: int) -> Row:
    history: Sequence[Mapping[str, str]] = chat.messages[:length]
    published = from_prism(chat)
    return {
        "id": f"{chat.key}-{name}",
        "source": "prism",
        "turn": name,
        "intent": intent,
        "opening_prompt": chat.user_messages[0],
        # A list, not tagged lines: what somebody wrote could look like a tag.
        "conversation_history": [dict(message) for message in history] if history else "",
        "is_last_turn": name == "end",
        **({"person": chat.person} if chat.person else {}),
        **({} if published else {ORIGIN: chat.source.rpartition(":")[0] or chat.source}),
        "provenance": f"{'PRISM' if published else 'recorded chat'}, {chat.source}",
        "licence": LICENCE if published else str(chat.fields.get("licence") or UNKNOWN),
    }
