"""MirrorBench's rows, and ClariQ's and Qulac's conversations in the shape of such rows.

* MirrorBench `.jsonl` (or an array in `.json`): `task_description`, `turns`, `metadata`; the
  examples of other users' words, which stand inside `metadata`, become a column of their own.
* ClariQ with three questions (`initial_request`, `question1`, `answer1`, ...): request, then three
  rounds; the conversation is numbered as MirrorBench numbers it.
* ClariQ with one question (`initial_request`, `question`, `answer`): request, question, answer.
* Qulac `.json`, which is one object of columns: the assistant asks, the user answers. Its texts
  keep a backslash before every quotation mark; it is taken out.

The originals say what a person is after (a *facet*) and not how they write, so the description that
is put together here from the facet is about the aim alone. MirrorBench's own descriptions were
written by a model that saw the conversation.

A Qulac row: {"task_description": "... Their aim: Find rules on 403b plans. ...", "turns":
[{"role": "assistant", "content": "which year"}, {"role": "user", "content": "no, the rules"}],
"dataset": "qulac", "conversation_id": "qulac-55", "metadata": {"topic_id": 10, ...}}.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from soulkit.data.files import (
    BadRow,
    RawRow,
    parse_row_json,
    present,
    read_bytes,
    read_rows,
    unreadable,
)
from soulkit.data.literals import structure
from soulkit.data.turns import ChatMessage, alternate, blank_message, conversation
from soulkit.errors import DataError
from soulkit.tasks.importing import BadRecord, Imported, need, rows_from, wrong_shape
from soulkit.tasks.made import Row
from soulkit.tasks.mirrorbench.subsets import subset_of

LICENCES = {
    "chatbot_arena": "MirrorBench: Apache-2.0; prompts CC-BY-4.0, model outputs CC-BY-NC-4.0",
    "oasst1": "MirrorBench: Apache-2.0; conversations Apache-2.0",
    "clariq": "MirrorBench: Apache-2.0; ClariQ: none stated",
    "qulac": "MirrorBench: Apache-2.0; Qulac: MIT",
}
CLARIQ_LICENCE = "none stated (ClariQ)"
QULAC_LICENCE = "MIT (Qulac)"
ASKING_FIRST = (
    "This person turns to a search assistant. Their aim: {aim} They open with a short request that "
    "leaves most of it unsaid, and answer the questions that the assistant asks back."
)
ANSWERING = (
    "This person has asked a search assistant about {topic}. Their aim: {aim} The assistant asks "
    "back before it searches, and they answer in their own words."
)
_QULAC = ("topic_id", "facet_id", "topic", "facet_desc", "question", "answer")
_SHAPES = ("task_description with turns", "initial_request with question1 and answer1",
           "initial_request with question and answer", "Qulac's columns")  # fmt: skip


def import_mirrorbench(path: Path) -> Imported:
    """Rows of a MirrorBench, ClariQ or Qulac file; DataError for a file without conversations."""
    raw, bad = _records(path)
    make = _maker(path, raw)
    rows = rows_from(raw, bad, lambda record, index: {**make(record), "index": index})
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=_notes(rows))


def _maker(path: Path, raw: Sequence[RawRow]) -> Callable[[RawRow], Row]:
    names = {name for record in raw for name in record.fields}
    if {"task_description", "turns"} <= names:
        return _mirror
    if {"initial_request", "question1", "answer1"} <= names:
        return _clariq_rounds
    if {"initial_request", "question", "answer"} <= names:
        return lambda record: _clariq_once(record, path.stem)
    if set(_QULAC) <= names:
        return _qulac
    raise wrong_shape(path, _SHAPES, "Give a file with conversations; lists of topics or of "
                      "questions alone hold none.")  # fmt: skip


def _spoken(messages: list[ChatMessage]) -> list[ChatMessage]:
    place = blank_message(messages)
    if place is not None:
        raise BadRecord(f"message {place} of its conversation ({messages[place - 1]['role']}) is "
                        "blank")  # fmt: skip
    return messages


def _mirror(record: RawRow) -> Row:
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
        "turns": _spoken(turns),
        "few_shot_user_examples": record.fields.get("few_shot_user_examples", examples),
        **row,
        "metadata": metadata,
        "provenance": f"MirrorBench, {record.source}",
        "licence": LICENCES.get(subset_of(row) or "", "MirrorBench: Apache-2.0"),
    }


# -- ClariQ --------------------------------------------------------------------------------------


def _clariq_rounds(record: RawRow) -> Row:
    request, facet = need(record, "initial_request", "facet")
    rounds = [n for n in range(1, 10) if record.fields.keys() & {f"question{n}", f"answer{n}"}]
    questions = [str(record.fields.get(f"question{n}") or "") for n in rounds]
    answers = [str(record.fields.get(f"answer{n}") or "") for n in rounds]
    if not rounds:
        raise BadRecord("it asks the user nothing, so there is no conversation")
    number = record.fields.get("Unnamed: 0", record.source.rpartition(":")[2])
    return {
        "task_description": ASKING_FIRST.format(aim=_sentence(facet)),
        "turns": _spoken(alternate([request, *answers], questions)),
        "dataset": "clariq",
        "conversation_id": f"clariq-{number}",
        "metadata": {**_columns(record, "topic_id", "facet_id", "facet"), "language": "en",
                     "clarification_pairs": len(rounds)},
        "provenance": f"ClariQ, {record.source}",
        "licence": CLARIQ_LICENCE,
    }  # fmt: skip


def _clariq_once(record: RawRow, stem: str) -> Row:
    if not str(record.fields.get("question") or "").strip():
        raise BadRecord("it asks the user nothing, so there is no conversation")
    request, facet, question, answer = need(record, "initial_request", "facet_desc", "question",
                                       "answer")  # fmt: skip
    line = record.source.rpartition(":")[2]
    return {
        "task_description": ASKING_FIRST.format(aim=_sentence(facet)),
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
    """The records of a file: rows, or those of Qulac's {column: {row: value}} by their numbers."""
    if path.suffix.lower() != ".json":
        return read_rows(path)
    try:
        columns = parse_row_json(read_bytes(path).decode("utf-8-sig"))
    except ValueError as error:
        raise unreadable(path, f"not JSON: {error}") from error
    if isinstance(columns, list):
        return read_rows(path)
    if not isinstance(columns, Mapping) or not all(
        isinstance(columns.get(name), Mapping) for name in _QULAC
    ):
        raise wrong_shape(path, _SHAPES, "Give qulac.json as it was published.")
    places = {place for values in columns.values() for place in values}
    ordered = sorted(places, key=lambda place: (not place.isdecimal(), place.zfill(12)))
    records = [
        RawRow(
            present({name: values.get(place) for name, values in columns.items()}),
            f"{path.name}, row {place}",
        )
        for place in ordered
    ]
    return records, []


def _qulac(record: RawRow) -> Row:
    if not str(record.fields.get("question") or "").strip():
        raise BadRecord("it asks the user nothing, so there is no conversation")
    topic, facet, question, answer = map(_unescaped, need(record, "topic", "facet_desc", "question",
                                                     "answer"))  # fmt: skip
    about = _columns(record, "topic_id", "facet_id", "topic_type", "facet_type")
    described = _unescaped(str(record.fields.get("topic_desc") or ""))
    return {
        "task_description": ANSWERING.format(topic=f"“{topic}”", aim=_sentence(facet)),
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
    stripped = " ".join(text.split())
    return stripped if stripped.endswith((".", "?", "!", '"')) else f"{stripped}."


def _notes(rows: Sequence[Row]) -> tuple[str, ...]:
    subsets = [subset_of(row) or "unknown" for row in rows]
    counted = ", ".join(f"{subsets.count(name)} {name}" for name in dict.fromkeys(subsets))
    composed = sum(not row["provenance"].startswith("MirrorBench") for row in rows)
    notes: tuple[str, ...] = (f"{len(rows)} conversations: {counted}.",) if rows else ()
    if composed:
        notes += ("Their descriptions were put together from the facet: they tell what the person "
                  "is after, and nothing about how they write.",)  # fmt: skip
    return notes
