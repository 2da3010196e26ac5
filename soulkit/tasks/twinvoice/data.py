"""TwinVoice's files (a dimension each, and each of another shape), and the people in them.

* Dimension 1 (`social`): `anchor_post`, `choices`, `ground_truth_index`, `user_id`. Published
  *result* files lack the history, without which nothing tells who the person is: bad records.
* Dimension 2 (`interpersonal`): `context`, `choices`, `answer_idx`, and a `history` of texts
  `Context:... UserReply:...`. Records whose distractors are placeholders are bad.
* Dimension 3 (`narrative`): `mcq` with lettered options, beside a file of profiles (one JSON
  object, also where it is called `profiles.jsonl`); a character's `UtteranceHistory` holds the
  asked utterance itself, which is taken out of the row's history.

What a model answered (`predicted_index`, `lmut_reply`, `reasoning`) is no part of a row.

Rows can be drafted (rows.py) for people in recorded chats with a person's id, in rows with a
`history` as in dimension 2, and in dimension 3's profiles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from soulkit.data.chats import Chat, read_chats
from soulkit.data.files import (
    BadRow,
    RawRow,
    read_json,
    read_rows,
    unreadable_file,
)
from soulkit.errors import DataError
from soulkit.tasks.kit.importing import BadRecord, Imported, Make, import_records, need
from soulkit.tasks.kit.made_rows import Row

LICENCE = "none stated"
PROFILES = ("dimension_3_profiles.json", "profiles.json", "profiles.jsonl")
_PLACEHOLDER = re.compile(r"\[[^\]]*distractor[^\]]*\]", re.IGNORECASE)
_QUOTED_WORDS = 5
"""A gold of this many words that stands in another entry of the history gives itself away."""

Person = Mapping[str, Any]


def import_twinvoice(path: Path) -> Imported:
    """Rows of one dimension's file of choices; DataError when it is another kind of file."""
    if path.name in PROFILES:
        raise _not_choices(path)
    people = lru_cache(partial(read_profiles, path))
    shapes: dict[tuple[str, ...], Make] = {
        ("mcq",): lambda record, _: _narrative(record, people()),
        ("anchor_post", "choices"): _social,
        ("context", "choices", "answer_idx"): _interpersonal,
    }
    return import_records(
        path, shapes, origin="TwinVoice", licence=LICENCE, notes=_notes,
        way_out="Give a file of choices of the TwinVoice release.",
    )  # fmt: skip


def _social(record: RawRow, _: int) -> Row:
    (anchor,) = need(record, "anchor_post")
    fields = record.fields
    history = fields.get("conversation_history") or fields.get("history")
    gold = fields.get("ground_truth_index", fields.get("answer_idx"))
    return {
        "dimension": "social",
        "conversation_history": _history(history),
        "anchor_post": anchor,
        **_four(fields.get("choices"), gold),
        "user_id": str(fields["user_id"]) if "user_id" in fields else None,
        "index": fields.get("line_idx"),
    }


def _interpersonal(record: RawRow, _: int) -> Row:
    (context,) = need(record, "context")
    fields = record.fields
    return {
        "dimension": "interpersonal",
        "conversation_history": _history(fields.get("history")),
        "anchor_post": context,
        **_four(fields.get("choices"), fields.get("answer_idx")),
        "index": fields.get("line_idx"),
    }


def _history(value: Any) -> list[str]:
    entries = [str(item).strip() for item in value or () if item is not None and str(item).strip()]
    if not entries:
        raise BadRecord("it has no history, so that nothing tells who the person is")
    return entries


def _four(choices: Any, gold: Any) -> Row:
    """`answer_choices` and `answer_idx`; BadRecord unless they are four texts and a place."""
    texts = [c.strip() for c in choices or () if isinstance(c, str) and c.strip()]
    if not isinstance(choices, list) or len(choices) != 4 or len(texts) != 4:
        raise BadRecord("its choices are not four texts")
    if any(_PLACEHOLDER.fullmatch(text) for text in texts):
        raise BadRecord("some of its choices are placeholders")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < 4:
        raise BadRecord("its answer is none of its choices")
    if texts.count(texts[gold]) > 1:
        raise BadRecord("its answer stands twice among its choices")
    return {"answer_choices": texts, "answer_idx": gold}


# -- dimension 3 ---------------------------------------------------------------------------------


def read_profiles(choices: Path) -> dict[str, Person]:
    """Canonical name → character, from the profiles beside a file of choices.

    DataError when there is no such file or it is no object with a `characterList`.
    """
    profiles = next((p for name in PROFILES if (p := choices.with_name(name)).is_file()), None)
    if profiles is None:
        raise DataError(
            f"Beside '{choices}' there is no file of profiles.",
            "The choices of dimension 3 name a character; what it said before stands in "
            f"{PROFILES[0]}.",
            "Copy that file into the same folder.",
        )
    return profiles_in(profiles)


def profiles_in(profiles: Path) -> dict[str, Person]:
    """Canonical name → character of a file of profiles; DataError when it is none."""
    value = read_json(profiles)
    listed = value.get("characterList") if isinstance(value, Mapping) else None
    if not isinstance(listed, Mapping):
        raise unreadable_file(profiles, "it has no characterList")
    people = [p for p in listed.values() if isinstance(p, Mapping)]
    return {str(p.get("NameCanonical")): p for p in people}


def _narrative(record: RawRow, people: Mapping[str, Person]) -> Row:
    context, name, utterance = need(record, "context", "speaker_match_key", "utterance")
    if name not in people:
        raise BadRecord(f"its character '{name:.40}' has no profile")
    mcq = record.fields.get("mcq")
    options = mcq.get("options") if isinstance(mcq, Mapping) else None
    letter = mcq.get("answer") if isinstance(mcq, Mapping) else None
    if not isinstance(options, Mapping) or letter not in options:
        raise BadRecord("its answer is none of its options")
    letters = sorted(options)
    person = people[name]
    return {
        "dimension": "narrative",
        "conversation_history": _lines(
            person, str(record.fields.get("chunk_id")), utterance, context
        ),
        "anchor_post": context,
        **_four([options[x] for x in letters], letters.index(letter)),
        "profile": _profile(person),
        "user_id": f"{record.fields.get('source_novel', '')}/{name}",
        "index": record.fields.get("chunk_id"),
    }


def _lines(person: Person, chunk: str, utterance: str, context: str) -> list[str]:
    """What a character said elsewhere, in the order of the story, without the asked utterance."""
    entries = [e for e in person.get("UtteranceHistory") or () if isinstance(e, Mapping)]
    lines = [
        f"Scene: {str(e.get('context') or '').strip()}\n  Said: {str(e['utterance']).strip()}"
        for e in sorted(entries, key=lambda e: str(e.get("chunk_id")))
        if e.get("utterance") and not _gives_away(e, chunk, utterance, context)
    ]
    if not lines:
        raise BadRecord("nothing else that its character said is known")
    return lines


def _gives_away(entry: Mapping[str, Any], chunk: str, utterance: str, context: str) -> bool:
    """Whether an entry is the asked utterance, its scene, or quotes it."""
    scene = str(entry.get("context") or "")
    if str(entry.get("chunk_id")) == chunk or scene.strip() == context.strip():
        return True
    gold, other = _same(utterance), _same(str(entry["utterance"]))
    if other == gold:
        return True
    return len(gold.split()) >= _QUOTED_WORDS and (gold in _same(scene) or gold in other)


@lru_cache(maxsize=4096)  # scenes of a character are compared with each of its questions
def _same(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _profile(person: Person) -> str:
    """Who a character is: name, traits, aims and what else the profile tells."""
    details = person.get("Additional Details")
    details_by_label = {
        "Name": person.get("NameCanonical"),
        "Traits": person.get("Personality Traits"),
        "Aims": person.get("Motivation and Goals"),
        **(details if isinstance(details, Mapping) else {}),
    }
    return "\n".join(f"{key}: {_listed(v)}" for key, v in details_by_label.items() if _listed(v))


def _listed(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{k}: {_listed(v)}" for k, v in value.items() if v)
    if isinstance(value, list):
        return ", ".join(_listed(item) for item in value if item is not None)
    return "" if value is None else str(value).strip()


def _notes(rows: Sequence[Row], _: Sequence[BadRow]) -> tuple[str, ...]:
    quoted = sum(
        len(gold.split()) >= _QUOTED_WORDS and gold in _same(row["anchor_post"])
        for row in rows
        if (gold := _same(row["answer_choices"][row["answer_idx"]]))
    )
    if not quoted:
        return ()
    return (f"In {quoted} of {len(rows)} rows the anchor holds the right answer word for word; the "
            "published file has it so.",)  # fmt: skip


def _not_choices(path: Path) -> DataError:
    return DataError(
        f"'{path}' holds profiles, not choices.",
        "Profiles tell what characters said before; they ask nothing.",
        "Give dimension_3_choices.jsonl, with the profiles beside it.",
    )


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
        return [_character(path, name, profile) for name, profile in profiles_in(path).items()], []
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
            key=person, dimension="interpersonal", source=chats_of_person[0].source,
            exchanges=tuple(exchange for chat in chats_of_person for exchange in _in_chat(chat)),
            licence=str(chats_of_person[0].fields.get("licence") or UNKNOWN),
        )
        for person, chats_of_person in by_person.items()
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
