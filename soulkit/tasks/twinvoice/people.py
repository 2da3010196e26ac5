"""Whose history a row of TwinVoice may be made of: persons, and what they replied to what.

* Recorded chats with a person's id (`data/chats.py`): what the assistant said, and the person's
  answer to it. What opened a chat answers nothing and is history alone.
* Rows with a `history` of texts `Context:... UserReply:...`, as dimension 2 is published.
* Dimension 3's profiles: a scene, and what the character said in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.data.chats import Chat, read_chats
from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.tasks.twinvoice.importer import LICENCE, PROFILES, profiles_in

_PAIR = re.compile(r"\s*Context:(?P<context>.*?)\s*UserReply:(?P<reply>.*)", re.DOTALL)
UNKNOWN = "not stated with the chats"


@dataclass(frozen=True, slots=True)
class Exchange:
    """Something that somebody said, and to what."""

    context: str
    """Empty where it answers nothing."""
    reply: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """One person and what they said, in order."""

    key: str
    dimension: str
    exchanges: tuple[Exchange, ...]
    source: str
    profile: str = ""
    licence: str = UNKNOWN
    published: bool = False
    """Whether it is one of a published set."""


def read_people(path: Path) -> tuple[list[Speaker], list[BadRow]]:
    """The persons of a file; DataError when it is none of the kinds above."""
    if path.name in PROFILES:
        return [_character(path, name, one) for name, one in profiles_in(path).items()], []
    raw, bad = read_rows(path)
    if any(isinstance(record.fields.get("history"), list) for record in raw):
        return _correspondents(raw, bad), bad
    chats, bad = read_chats(path)
    bad += [BadRow(chat.source, "it does not say whose chat it is") for chat in chats
            if not chat.person]  # fmt: skip
    return _chatters(chats), bad


def _character(path: Path, name: str, person: Mapping[str, Any]) -> Speaker:
    entries = [e for e in person.get("UtteranceHistory") or () if isinstance(e, Mapping)]
    entries.sort(key=lambda e: str(e.get("chunk_id")))
    return Speaker(
        key=name, dimension="narrative", source=f"{path.name}, {name}", licence=LICENCE,
        published=True,
        exchanges=tuple(_exchange(e.get("context"), e.get("utterance")) for e in entries),
    )  # fmt: skip


def _correspondents(raw: Sequence[RawRow], bad: list[BadRow]) -> list[Speaker]:
    speakers = []
    for record in raw:
        entries = [e for e in record.fields.get("history") or () if isinstance(e, str)]
        pairs = [_PAIR.fullmatch(entry) for entry in entries]
        exchanges = [
            _exchange(pair["context"], pair["reply"]) if pair else _exchange("", entry)
            for pair, entry in zip(pairs, entries, strict=True)
        ]
        if not exchanges:
            bad.append(BadRow(record.source, "it has no history of texts"))
            continue
        key = str(record.fields.get("user_id") or record.source)
        speakers.append(
            Speaker(key=key, dimension="interpersonal", source=record.source,
                    exchanges=tuple(exchanges), licence=LICENCE, published=True)
        )  # fmt: skip
    return speakers


def _chatters(chats: Iterable[Chat]) -> list[Speaker]:
    by_person: dict[str, list[Chat]] = {}
    for chat in chats:
        if chat.person:
            by_person.setdefault(chat.person, []).append(chat)
    return [
        Speaker(
            key=person, dimension="interpersonal", source=several[0].source,
            exchanges=tuple(one for chat in several for one in _in_chat(chat)),
            licence=str(several[0].fields.get("licence") or UNKNOWN),
        )
        for person, several in by_person.items()
    ]  # fmt: skip


def _in_chat(chat: Chat) -> list[Exchange]:
    before = ["", *(message["content"] for message in chat.messages)]
    return [
        _exchange(context, message["content"])
        for context, message in zip(before, chat.messages, strict=False)
        if message["role"] == "user"
    ]


def _exchange(context: Any, reply: Any) -> Exchange:
    return Exchange(str(context or "").strip(), str(reply or "").strip())
