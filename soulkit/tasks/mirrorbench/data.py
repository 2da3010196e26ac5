"""Rows of `mirrorbench`: generated, imported (MirrorBench, ClariQ, Qulac), or drafted from chats.

    {"task_description": "A welder of 40 turns to an assistant about sourdough bread. ...",
     "turns": [{"role": "assistant", "content": "are you asking which flour to buy"}, ...],
     "dataset": "qulac", "conversation_id": "qulac-9000-1", "metadata": {...}, "index": 3}

Generated: invented people with one request to an assistant, cycling through the four subsets. Every
fifth row lacks `dataset`, so its subset follows only from its id. ClariQ and Qulac state a person's
aim but not the writing style, so their descriptions cover only the aim. Drafted: a model describes
the person in a recorded chat without using their words; a filter checks the description.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from pydantic import Field

from soulkit.data.chats import Chat, ChatMessage, alternate, conversation, read_chats
from soulkit.data.files import (
    BadRow,
    RawRow,
    read_json,
    read_rows,
    without_absent,
)
from soulkit.data.literals import structure
from soulkit.errors import DataError
from soulkit.judge.structured import VerdictShape
from soulkit.judge.verdict import fence, transcript
from soulkit.tasks.kit.importing import (
    BadRecord,
    Imported,
    Make,
    import_records,
    need,
    without_blanks,
    wrong_shape,
)
from soulkit.tasks.kit.made_rows import (
    VOICES,
    Drafts,
    Review,
    Row,
    Sketch,
    Voice,
    draft_problem,
    draft_question,
    review_question,
)
from soulkit.tasks.kit.prompting import PromptFolder, Texts
from soulkit.tasks.mirrorbench.conversations import subset_of
from soulkit.text import with_stop
from soulkit.types import Line

TEXTS = Texts(__file__)


@dataclass(frozen=True, slots=True)
class Wish:
    """A person's question about a subject, and their writing style."""

    number: int
    subject: str
    aim: str
    others: tuple[str, ...]
    who: str
    voice: Voice
    rng: random.Random

    def user(self, text: str) -> ChatMessage:
        return {"role": "user", "content": self.voice.write(text)}


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(i, seed) for i in range(n)]


def _made_row(i: int, seed: int) -> Row:
    rng = random.Random(f"mirrorbench/{seed}/{i}")
    subset = list(_MAKERS)[i % len(_MAKERS)]
    subject = rng.choice(sorted(TEXTS["subjects"]))
    aim, *others = rng.sample(TEXTS["subjects"][subject], len(TEXTS["subjects"][subject]))
    person = f"A {rng.choice(TEXTS['jobs'])} of {rng.randint(19, 88)}"
    number = 9000 + sorted(TEXTS["subjects"]).index(subject)
    wish = Wish(number, subject, aim, tuple(others), person, rng.choice(VOICES), rng)
    key, metadata, turns = _MAKERS[subset](wish, i)
    named = {} if i % 5 == 4 else {"dataset": subset}
    return {
        "task_description": f"{person} turns to an assistant about {subject} and wants to know "
        f"{aim}. This person {wish.voice.trait}.",
        "turns": turns,
        **named,
        "conversation_id": key,
        "metadata": {"language": "en", **metadata},
        "few_shot_user_examples": _examples(wish, subset),
        "index": i,
    }


_Recording = tuple[str, Row, list[ChatMessage]]


def _made_clariq(wish: Wish, i: int) -> _Recording:
    turns = [wish.user(f"Tell me about {wish.subject}.")]
    for place, other in enumerate(wish.others):
        turns.append(_clarification(other))
        last = place == len(wish.others) - 1
        turns.append(
            wish.user(f"No, just {wish.aim}." if last else wish.rng.choice(TEXTS["refusals"]))
        )
    about = {"topic_id": str(wish.number), "facet": _question(wish.aim),
             "clarification_pairs": len(wish.others)}  # fmt: skip
    return f"clariq-{wish.number}-{i}", about, turns


def _made_qulac(wish: Wish, i: int) -> _Recording:
    hit = wish.rng.random() < 0.3
    facet = wish.aim if hit else wish.rng.choice(wish.others)
    answer = f"Yes, I want to know {wish.aim}." if hit else f"No, I want to know {wish.aim}."
    about = {"topic": wish.subject, "topic_id": wish.number, "facet_desc": _question(wish.aim)}
    return f"qulac-{wish.number}-{i}", about, [_clarification(facet), wish.user(answer)]


def _made_arena(wish: Wish, i: int) -> _Recording:
    key = f"{wish.rng.getrandbits(128):032x}"
    turns = _open_talk(wish, wish.rng.choice((1, 1, 1, 2)))
    return f"{key}::made-model-{i % 3}", {"question_id": key, "arena_winner": "tie"}, turns


def _made_oasst(wish: Wish, i: int) -> _Recording:
    turns = _open_talk(wish, wish.rng.choice((1, 2, 3)))
    if wish.rng.random() < 0.35:
        turns.append(wish.user(wish.rng.choice(TEXTS["thanks"])))
    user_turns = sum(turn["role"] == "user" for turn in turns)
    key = str(UUID(int=wish.rng.getrandbits(128), version=4))
    return key, {"num_user_turns": user_turns, "num_turns": len(turns)}, turns


_MAKERS: dict[str, Callable[[Wish, int], _Recording]] = {
    "chatbot_arena": _made_arena,
    "clariq": _made_clariq,
    "oasst1": _made_oasst,
    "qulac": _made_qulac,
}
"""Subset → the function that generates its conversations."""


def _open_talk(wish: Wish, rounds: int) -> list[ChatMessage]:
    facets = [wish.aim, *wish.others][:rounds]
    turns: list[ChatMessage] = []
    for place, facet in enumerate(facets):
        lead = "Can you tell me" if place == 0 else wish.rng.choice(("And", "Next question:"))
        turns.append(wish.user(f"{lead} {facet}? It is about {wish.subject}."))
        answer = f"As for {facet}: it depends on the case, so {wish.rng.choice(TEXTS['tips'])}."
        turns.append({"role": "assistant", "content": answer})
    return turns


def _clarification(facet: str) -> ChatMessage:
    return {"role": "assistant", "content": f"are you asking {facet}"}


def _question(facet: str) -> str:
    return f"{facet[:1].upper()}{facet[1:]}?"


def _examples(wish: Wish, subset: str) -> list[Row]:
    others = wish.rng.sample(sorted(set(TEXTS["subjects"]) - {wish.subject}), 2)
    return [
        {"conversation_id": f"{subset}-made-{n}", "utterance": f"Tell me about {name}.",
         "similarity": f"0.{wish.rng.randint(1000, 9999)}"}
        for n, name in enumerate(others)
    ]  # fmt: skip


# -- imported ------------------------------------------------------------------------------------

LICENCES = {
    "chatbot_arena": "MirrorBench: Apache-2.0; prompts CC-BY-4.0, model outputs CC-BY-NC-4.0",
    "oasst1": "MirrorBench: Apache-2.0; conversations Apache-2.0",
    "clariq": "MirrorBench: Apache-2.0; ClariQ: none stated",
    "qulac": "MirrorBench: Apache-2.0; Qulac: MIT",
}
CLARIQ_LICENCE = "none stated (ClariQ)"
QULAC_LICENCE = "MIT (Qulac)"
_QULAC = ("topic_id", "facet_id", "topic", "facet_desc", "question", "answer")
_WAY_OUT = "Give a file with conversations, not a list of topics or questions."


def import_mirrorbench(path: Path) -> Imported:
    """Rows of a MirrorBench, ClariQ or Qulac file; DataError for a file without conversations."""
    shapes: dict[tuple[str, ...], Make] = {
        ("task_description", "turns"): _mirror,
        ("initial_request", "question1", "answer1"): _clariq_rounds,
        ("initial_request", "question", "answer"): partial(_clariq_once, path.stem),
        _QULAC: _qulac,
    }
    return import_records(path, shapes, way_out=_WAY_OUT, notes=_notes, read=_records)


def _mirror(record: RawRow, _: int) -> Row:
    (description,) = need(record, "task_description")
    try:
        turns = conversation(record.fields.get("turns"), "turns")
    except DataError as error:
        raise BadRecord(f"{error.what} {error.why}") from error
    about = structure(record.fields.get("metadata"))
    metadata = dict(about) if isinstance(about, Mapping) else {}
    examples = metadata.pop("few_shot_user_examples", None)
    row = _columns(record, "dataset", "conversation_id")
    return {
        "task_description": description.strip(),
        "turns": without_blanks(turns),
        "few_shot_user_examples": record.fields.get("few_shot_user_examples", examples),
        **row,
        "metadata": metadata,
        "provenance": f"MirrorBench, {record.source}",
        "licence": LICENCES.get(subset_of(row) or "", "MirrorBench: Apache-2.0"),
    }


# -- ClariQ --------------------------------------------------------------------------------------


def _clariq_rounds(record: RawRow, _: int) -> Row:
    request, facet = need(record, "initial_request", "facet")
    rounds = [n for n in range(1, 10) if record.fields.keys() & {f"question{n}", f"answer{n}"}]
    questions = [str(record.fields.get(f"question{n}") or "") for n in rounds]
    answers = [str(record.fields.get(f"answer{n}") or "") for n in rounds]
    if not rounds:
        raise BadRecord("the assistant asks no question in it, so there is no conversation")
    number = record.fields.get("Unnamed: 0", record.source.rpartition(":")[2])
    return {
        "task_description": TEXTS["asking_first"].format(aim=_sentence(facet)),
        "turns": without_blanks(alternate([request, *answers], questions)),
        "dataset": "clariq",
        "conversation_id": f"clariq-{number}",
        "metadata": {**_columns(record, "topic_id", "facet_id", "facet"), "language": "en",
                     "clarification_pairs": len(rounds)},
        "provenance": f"ClariQ, {record.source}",
        "licence": CLARIQ_LICENCE,
    }  # fmt: skip


def _clariq_once(stem: str, record: RawRow, _: int) -> Row:
    if not str(record.fields.get("question") or "").strip():
        raise BadRecord("the assistant asks no question in it, so there is no conversation")
    request, facet, question, answer = need(record, "initial_request", "facet_desc", "question",
                                       "answer")  # fmt: skip
    line = record.source.rpartition(":")[2]
    return {
        "task_description": TEXTS["asking_first"].format(aim=_sentence(facet)),
        "turns": alternate([request, answer], [question]),
        "dataset": "clariq",
        "conversation_id": f"clariq-{stem}-{line}",
        "metadata": {
            **_columns(record, "topic_id", "facet_id", "topic_desc", "question_id"),
            "facet": facet, "clarification_need": record.fields.get("clarification_need"),
            "language": "en", "clarification_pairs": 1,
        },
        "provenance": f"ClariQ, {record.source}",
        "licence": CLARIQ_LICENCE,
    }  # fmt: skip


# -- Qulac ---------------------------------------------------------------------------------------


def _records(path: Path) -> tuple[list[RawRow], list[BadRow]]:
    """The records of a file: rows, or Qulac's {column: {row: value}} regrouped by row."""
    if path.suffix.lower() != ".json":
        return read_rows(path)
    columns = read_json(path)
    if isinstance(columns, list):
        return read_rows(path)
    if not isinstance(columns, Mapping) or not all(
        isinstance(columns.get(name), Mapping) for name in _QULAC
    ):
        raise wrong_shape(path, _QULAC, "Give qulac.json in its published format.")
    places = {place for values in columns.values() for place in values}
    ordered = sorted(places, key=lambda place: (not place.isdecimal(), place.zfill(12)))
    records = [
        RawRow(
            without_absent({name: values.get(place) for name, values in columns.items()}),
            f"{path.name}, row {place}",
        )
        for place in ordered
    ]
    return records, []


def _qulac(record: RawRow, _: int) -> Row:
    if not str(record.fields.get("question") or "").strip():
        raise BadRecord("the assistant asks no question in it, so there is no conversation")
    topic, facet, question, answer = map(_unescaped, need(record, "topic", "facet_desc", "question",
                                                     "answer"))  # fmt: skip
    about = _columns(record, "topic_id", "facet_id", "topic_type", "facet_type")
    described = _unescaped(str(record.fields.get("topic_desc") or ""))
    return {
        "task_description": TEXTS["answering"].format(topic=f"“{topic}”", aim=_sentence(facet)),
        "turns": [{"role": "assistant", "content": question}, {"role": "user", "content": answer}],
        "dataset": "qulac",
        "conversation_id": f"qulac-{record.source.rpartition(' ')[2]}",
        "metadata": {"topic": topic, **about, "facet_desc": facet, "topic_desc": described,
                     "language": "en"},
        "provenance": f"Qulac, {record.source}",
        "licence": QULAC_LICENCE,
    }  # fmt: skip


def _unescaped(text: str) -> str:
    return text.replace("\\'", "'").replace('\\"', '"')


# -- all -----------------------------------------------------------------------------------------


def _columns(record: RawRow, *names: str) -> Row:
    return {name: record.fields[name] for name in names if name in record.fields}


def _sentence(text: str) -> str:
    return with_stop(" ".join(text.split()), (".", "?", "!", '"'))


def _notes(rows: Sequence[Row], _: Sequence[BadRow]) -> tuple[str, ...]:
    subsets = [subset_of(row) or "unknown" for row in rows]
    counted = ", ".join(f"{subsets.count(name)} {name}" for name in dict.fromkeys(subsets))
    composed = sum(not row["provenance"].startswith("MirrorBench") for row in rows)
    notes: tuple[str, ...] = (f"{len(rows)} conversations: {counted}.",) if rows else ()
    if composed:
        notes += ("Their descriptions were composed from the facet: they state the person's aim, "
                  "but not the writing style.",)  # fmt: skip
    return notes


# -- drafted -------------------------------------------------------------------------------------

MOST_SHARED_WORDS = 8
"""A description must not share this many consecutive words with the person's messages."""
WORDS = range(15, 161)
"""Allowed number of words in a description."""
DRAFT_PROMPTS = ("drafting/draft_description", "drafting/filter_description")
OTHER_SUBSET = "recorded"
"""The subset of chats that belong to no published subset."""
UNKNOWN_LICENCE = "not stated with the chats"


class Description(VerdictShape):
    """A drafted description."""

    task_description: str = Field(min_length=1)


class DescriptionReview(Review):
    """A filter's word on a description."""

    fault: Literal[
        "none", "invents", "misses_aim", "quotes", "gives_answer", "no_manner", "unsafe"
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation from which a row is drafted."""

    key: str
    source: str
    turns: tuple[ChatMessage, ...]
    row: Row
    """The row without its description and turns."""
    aim: str = ""
    """The person's aim as stated in the file."""
    published: bool = False
    """Whether it comes from a published data set."""


def description_drafts(path: Path, prompts: PromptFolder) -> Drafts:
    """The sketches of a file of conversations; DataError if it has none."""
    recordings, bad = _recordings(path)
    return Drafts(
        sketches=tuple(_sketch(recording, prompts) for recording in recordings),
        prompts=prompts.hashes(*DRAFT_PROMPTS),
        bad=tuple(bad),
    )


def _recordings(path: Path) -> tuple[list[Recording], list[BadRow]]:
    try:
        imported = import_mirrorbench(path)
    except DataError:  # not a file for the importer: chats in another layout, or none at all
        chats, bad = read_chats(path)
        return [_recording_of_chat(chat) for chat in chats], bad
    recordings = [
        _recording_of_row(row, f"{path.name}, row {row['index'] + 1}") for row in imported.rows
    ]
    return recordings, list(imported.bad)


def _recording_of_row(row: Row, source: str) -> Recording:
    own = row["provenance"].startswith("MirrorBench")
    rest = {k: v for k, v in row.items() if k not in ("task_description", "turns", "index")}
    key = str(row.get("conversation_id") or source)
    aim = "" if own else str(row["task_description"])
    return Recording(key, source, tuple(row["turns"]), rest, aim, published=True)


def _recording_of_chat(chat: Chat) -> Recording:
    about = {name: chat.fields[name] for name in ("dataset", "conversation_id", "metadata")
             if chat.fields.get(name) is not None}  # fmt: skip
    row: Row = {"conversation_id": chat.key, **about}
    # Only one published set uses trees; similar ids occur in many other files.
    published = bool(about.get("dataset")) or chat.layout == "tree"
    if not published or subset_of(row) is None:
        row["dataset"] = OTHER_SUBSET
    row |= {"person": chat.person} if chat.person else {}
    licence = chat.fields.get("licence") or LICENCES.get(subset_of(row) or "", UNKNOWN_LICENCE)
    row |= {"provenance": f"recorded chat, {chat.source}", "licence": str(licence)}
    return Recording(chat.key, chat.source, chat.messages, row, published=published)


def _sketch(recording: Recording, prompts: PromptFolder) -> Sketch:
    lines = [Line(turn["role"], turn["content"]) for turn in recording.turns]
    shown = transcript(lines, {"user": "User", "assistant": "Assistant"})
    aim = fence(recording.aim, "aim") if recording.aim else ""
    draft_prompt, filter_prompt = DRAFT_PROMPTS

    def problem(draft: Description) -> str:
        originals = [turn["content"] for turn in recording.turns if turn["role"] == "user"]
        text = draft.task_description
        return draft_problem("description", text, WORDS, originals, MOST_SHARED_WORDS)

    def review(draft: Description) -> Any:
        described = fence(draft.task_description, "description")
        prompt = prompts.render(filter_prompt, material=shown, description=described)
        return review_question(prompt, DescriptionReview)

    def rows(draft: Description) -> list[Row]:
        description = " ".join(draft.task_description.split())
        turns = [dict(turn) for turn in recording.turns]
        return [{"task_description": description, "turns": turns, **recording.row}]

    return Sketch(
        key=recording.key,
        source=recording.source,
        draft=draft_question(
            prompts.render(draft_prompt, material=shown, aim=aim),
            Description,
            problem,
        ),
        review=review,
        rows=rows,
        published=recording.published,
    )
