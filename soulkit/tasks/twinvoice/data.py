"""TwinVoice's files (one format per dimension), the people in them, and drafted rows.

* Dimension 1 (`social`): `anchor_post`, `choices`, `ground_truth_index`, `user_id`.
* Dimension 2 (`interpersonal`): `context`, `choices`, `answer_idx`, and a `history` of texts
  `Context:... UserReply:...`. Records with placeholders as distractors are bad.
* Dimension 3 (`narrative`): `mcq` with lettered options, next to a file of profiles.

Drafted rows: one exchange is removed from a person's history. The drafter writes the reactions of
three other people. The filter rejects rows that can be answered without the history, or not even
with it. No drafted reaction may repeat the person's own, and the right one must not stand out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from soulkit.data.chats import Chat, read_chats
from soulkit.data.files import (
    BadRow,
    RawRow,
    read_json,
    read_rows,
    unreadable_file,
)
from soulkit.errors import DataError
from soulkit.judge.structured import VerdictShape
from soulkit.judge.verdict import fence, utterance
from soulkit.tasks.kit.importing import BadRecord, Imported, Make, import_records, need
from soulkit.tasks.kit.made_rows import Drafts, Review, Row, Sketch, draft_question, review_question
from soulkit.tasks.kit.prompting import PromptFolder
from soulkit.text import words_only

LICENCE = "none stated"
PROFILES = ("dimension_3_profiles.json", "profiles.json", "profiles.jsonl")
_PLACEHOLDER = re.compile(r"\[[^\]]*distractor[^\]]*\]", re.IGNORECASE)
_QUOTED_WORDS = 5
"""A gold of this many words that another history entry contains would reveal the answer."""

Person = Mapping[str, Any]


def import_twinvoice(path: Path) -> Imported:
    """Rows of one dimension's file of choices; DataError for another kind of file."""
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
        way_out="Give a file of choices from the TwinVoice release.",
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
        raise BadRecord("it has no history, so nothing characterises the person")
    return entries


def _four(choices: Any, gold: Any) -> Row:
    """`answer_choices` and `answer_idx`; BadRecord unless they are four texts and an index."""
    texts = [c.strip() for c in choices or () if isinstance(c, str) and c.strip()]
    if not isinstance(choices, list) or len(choices) != 4 or len(texts) != 4:
        raise BadRecord("its choices are not four texts")
    if any(_PLACEHOLDER.fullmatch(text) for text in texts):
        raise BadRecord("some of its choices are placeholders")
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < 4:
        raise BadRecord("its answer is not one of its choices")
    if texts.count(texts[gold]) > 1:
        raise BadRecord("its answer occurs twice among its choices")
    return {"answer_choices": texts, "answer_idx": gold}


# -- dimension 3 ---------------------------------------------------------------------------------


def read_profiles(choices: Path) -> dict[str, Person]:
    """Canonical name → character, from the profiles next to a file of choices.

    DataError if there is no such file, or if it is not an object with a `characterList`.
    """
    profiles = next((p for name in PROFILES if (p := choices.with_name(name)).is_file()), None)
    if profiles is None:
        raise DataError(
            f"There is no file of profiles next to '{choices}'.",
            f"The choices of dimension 3 name a character; its earlier lines are in {PROFILES[0]}.",
            "Copy that file into the same folder.",
        )
    return profiles_in(profiles)


def profiles_in(profiles: Path) -> dict[str, Person]:
    """Canonical name → character from a file of profiles; DataError for another file."""
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
        raise BadRecord("its answer is not one of its options")
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
    """A character's other lines, in story order, without the utterance in question."""
    entries = [e for e in person.get("UtteranceHistory") or () if isinstance(e, Mapping)]
    lines = [
        f"Scene: {str(e.get('context') or '').strip()}\n  Said: {str(e['utterance']).strip()}"
        for e in sorted(entries, key=lambda e: str(e.get("chunk_id")))
        if e.get("utterance") and not _gives_away(e, chunk, utterance, context)
    ]
    if not lines:
        raise BadRecord("the profile has no other line of its character")
    return lines


def _gives_away(entry: Mapping[str, Any], chunk: str, utterance: str, context: str) -> bool:
    """Whether an entry is the utterance in question, its scene, or quotes it."""
    scene = str(entry.get("context") or "")
    if str(entry.get("chunk_id")) == chunk or scene.strip() == context.strip():
        return True
    gold, other = _same(utterance), _same(str(entry["utterance"]))
    if other == gold:
        return True
    return len(gold.split()) >= _QUOTED_WORDS and (gold in _same(scene) or gold in other)


@lru_cache(maxsize=4096)  # a character's scenes are compared with each of its questions
def _same(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _profile(person: Person) -> str:
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
    return (f"In {quoted} of {len(rows)} rows the anchor contains the right answer word for word, "
            "as in the published file.",)  # fmt: skip


def _not_choices(path: Path) -> DataError:
    return DataError(
        f"'{path}' holds profiles, not choices.",
        "Profiles contain the characters' earlier lines but no questions.",
        "Give dimension_3_choices.jsonl, with the profiles next to it.",
    )


_PAIR = re.compile(r"\s*Context:(?P<context>.*?)\s*UserReply:(?P<reply>.*)", re.DOTALL)
UNKNOWN = "not stated with the chats"


@dataclass(frozen=True, slots=True)
class Exchange:
    """A person's reply and its context."""

    context: str
    """Empty if it replies to nothing."""
    reply: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """A person's replies, in order."""

    key: str
    dimension: str
    exchanges: tuple[Exchange, ...]
    source: str
    profile: str = ""
    licence: str = UNKNOWN
    published: bool = False
    """Whether it comes from a published data set."""


def read_people(path: Path) -> tuple[list[Speaker], list[BadRow]]:
    """The people in a file; DataError if its format is unknown."""
    if path.name in PROFILES:
        return [_character(path, name, profile) for name, profile in profiles_in(path).items()], []
    raw, bad = read_rows(path)
    if any(isinstance(record.fields.get("history"), list) for record in raw):
        return _correspondents(raw, bad), bad
    chats, bad = read_chats(path)
    bad += [BadRow(chat.source, "it does not name the chat's person") for chat in chats
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


PROMPTS = ("drafting/draft_reactions", "drafting/filter_reactions")
SHOWN = 30
"""History entries per row: as many as the task's prompt shows."""
LEAST_HISTORY = 4
"""Minimum number of history entries besides the question; fewer do not characterise a person."""
WORDS = range(3, 121)
"""Allowed number of words in a reply that is asked about."""
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
"""A word, or a single character of a script without spaces."""
STRETCH = 2.0
"""A reaction may be up to this many times longer or shorter than the right one."""


class Reactions(VerdictShape):
    """What three other people would have said."""

    reactions: list[str] = Field(min_length=3, max_length=3)


class ReactionReview(Review):
    """A filter's word on four reactions."""

    fault: Literal[
        "none", "fits_too", "not_told", "stands_out", "off_anchor", "same", "language", "unsafe"
    ]  # fmt: skip


def reaction_drafts(path: Path, prompts: PromptFolder, *, per_person: int = 3) -> Drafts:
    """The sketches of a file of people, at most `per_person` each; DataError if no person has a
    long enough history."""
    people, bad = read_people(path)
    places = [(person, _chosen(person, per_person)) for person in people]
    sketches = [_sketch(person, place, prompts) for person, chosen in places for place in chosen]
    if not sketches:
        raise DataError(
            f"No person in '{path}' has said enough.",
            f"A row needs {LEAST_HISTORY} other messages of the person, and a reply of "
            f"{WORDS.start} to {WORDS.stop - 1} words to another message.",
            "Give more chats of each person, with the person's id in each record.",
        )
    silent = sum(not chosen for _, chosen in places)
    notes = (f"{silent} of {len(people)} people have said too little.",) if silent else ()
    return Drafts(
        sketches=tuple(sketches), bad=tuple(bad), prompts=prompts.hashes(*PROMPTS), notes=notes
    )


def _chosen(person: Speaker, most: int) -> list[int]:
    drawn = sorted(range(len(person.exchanges)), key=lambda place: _draw(person, place))
    fit = (place for place in drawn if _is_fit(person, place, person.exchanges[place]))
    return list(islice(fit, most))


def _is_fit(person: Speaker, place: int, exchange: Exchange) -> bool:
    if not exchange.context or _length(exchange.reply) not in WORDS:
        return False
    return len(_entries_beside(person, place)) >= LEAST_HISTORY


def _draw(person: Speaker, place: int) -> str:
    return hashlib.sha256(f"{person.key}/{place}".encode()).hexdigest()


def _entries_beside(person: Speaker, place: int) -> list[Exchange]:
    """The person's latest other exchanges: without the one asked about, and without entries that
    repeat its answer or its anchor."""
    asked_about = person.exchanges[place]
    reply, anchor = _plain(asked_about.reply), _plain(asked_about.context)
    others = [
        exchange
        for i, exchange in enumerate(person.exchanges)
        if i != place and exchange.reply and reply not in _plain(exchange.reply)
        and reply not in _plain(exchange.context) and _plain(exchange.context) != anchor
    ]  # fmt: skip
    return others[-SHOWN:]


def _length(text: str) -> int:
    return len(_WORD.findall(text))


@lru_cache(maxsize=4096)  # a person's entries are compared with each one that is asked about
def _plain(text: str) -> str:
    return words_only(text.casefold())


def _written(person: Speaker, exchange: Exchange) -> str:
    if not exchange.context:
        return exchange.reply
    if person.dimension == "narrative":
        return f"Scene: {exchange.context}\n  Said: {exchange.reply}"
    return f"Asked: {exchange.context} Replied: {exchange.reply}"


def _sketch(person: Speaker, place: int, prompts: PromptFolder) -> Sketch:
    exchange, entries = person.exchanges[place], _entries_beside(person, place)
    lines = [utterance(_written(person, entry)) for entry in entries]
    values = {
        "history": fence("\n".join(lines), "history"),
        "anchor": fence(exchange.context, "anchor"),
        "reply": fence(exchange.reply, "reply"),
    }
    draft_prompt, filter_prompt = PROMPTS

    def review(draft: Reactions) -> Any:
        others = fence("\n".join(map(utterance, draft.reactions)), "others")
        prompt = prompts.render(filter_prompt, **values, others=others)
        return review_question(prompt, ReactionReview)

    return Sketch(
        key=f"{person.key}/{place}",
        source=person.source,
        draft=draft_question(
            prompts.render(draft_prompt, **values), Reactions, _problem(exchange.reply)
        ),
        review=review,
        rows=lambda draft: [_drafted_row(person, place, entries, draft)],
        published=person.published,
    )  # fmt: skip


def _drafted_row(person: Speaker, place: int, entries: Sequence[Exchange], draft: Reactions) -> Row:
    answer = int(_draw(person, place), 16) % 4
    choices = [" ".join(reaction.split()) for reaction in draft.reactions]
    choices.insert(answer, " ".join(person.exchanges[place].reply.split()))
    return {
        "id": f"{person.key}/{place}",
        "user_id": person.key,
        "dimension": person.dimension,
        "conversation_history": [_written(person, entry) for entry in entries],
        "anchor_post": person.exchanges[place].context,
        "answer_choices": choices,
        "answer_idx": answer,
        "provenance": f"history of one person, {person.source}",
        "licence": person.licence,
    }


def _problem(reply: str) -> Callable[[Reactions], str]:
    length = _length(reply)

    def problem(draft: Reactions) -> str:
        texts = [_plain(text) for text in draft.reactions]
        if not all(texts):
            return "one of the reactions is blank"
        if len({*texts, _plain(reply)}) < 4:
            return "two of the four reactions are the same"
        counts = [_length(text) for text in draft.reactions]
        if any(not length / STRETCH - 1 <= count <= length * STRETCH + 1 for count in counts):
            return f"the reactions have {counts} words, and the person's own has {length}"
        if all(count < length for count in counts) or all(count > length for count in counts):
            return "the person's own reaction is the longest or the shortest of the four"
        return ""

    return problem
