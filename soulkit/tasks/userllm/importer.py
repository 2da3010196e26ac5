"""Rows of `userllm` from NQ-open (intent adherence), CommonsenseQA (role adherence) and PRISM.

* NQ-open `.jsonl` (`question`, `answer`): the question is what the user wants. The benchmark's rows
  also hold a turn in which the assistant proposes something else, which NQ does not; it is written
  here from a template, chosen by a hash of the question, and the row's provenance says so.
* CommonsenseQA `.jsonl`, as on the Hugging Face Hub (`choices: {label, text}`) or as first released
  (`question: {stem, choices}`): the question is what the user wants, and the choices are what a
  user does not say. The conversation so far is the benchmark's: the user has asked with the choices
  listed, and the assistant, in words of a template, was unsure. The letter of the answer is kept
  for readers; nothing is scored by it.

* PRISM's `conversations.jsonl` or `utterances.jsonl` (prism.py): the published files do not say
  what a person was after. Records with an `intent` become rows; those without need a draft of one,
  which `soul data build` has a model write, and they are named.

    {"question": "who wrote the song", "answer": ["Ann Lee"]}
    → {"source": "natural_questions", "intent": "who wrote the song", "question": "who wrote the
       song", "assistant_suggestion_turn": "Have you ever thought about the planets? ...", ...}
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from soulkit.data.chats import read_chats
from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.errors import DataError
from soulkit.tasks.importing import BadRecord, Imported, need, wrong_shape
from soulkit.tasks.made import Row
from soulkit.tasks.userllm.prism import Turns, is_prism, recorded_intent, rows_of
from soulkit.tasks.userllm.quiz import quiz_history

NQ_LICENCE = "NQ-open: Apache-2.0 (Natural Questions CC-BY-SA-3.0)"
TEMPLATE = "the assistant's turn is a template of soulkit"
CSQA_LICENCE = "MIT (CommonsenseQA)"
NO_INTENT = "it does not say what its person was after; soul data build has a model draft it"
BROADER = (
    "Good question! Before I get to it, would you like an overview of the whole subject?",
    "There is a lot to say about this field in general. Shall I begin with how it all started?",
    "Many who ask this also want to know why it matters. Shall we talk about that first?",
    "Let me propose something wider: how do people look at this today, compared with the past?",
)
OTHER = (
    "I could tell you about {other} instead, which is just as interesting. How about that?",
    "Have you ever thought about {other}? Let us look at that first.",
    "Rather than that, may I show you something about {other}?",
    "People often enjoy hearing about {other}. Shall we go there?",
)
ELSEWHERE = (
    "famous shipwrecks", "how bread is made", "the history of chess", "animals of the deep sea",
    "how bridges are built", "the planets", "old card games", "how glass is blown",
)  # fmt: skip


def import_userllm(path: Path, *, turns: Turns = "all") -> Imported:
    """Rows of an NQ-open, CommonsenseQA or PRISM file; DataError for any other, and for PRISM's
    where no record says what its person was after. `turns` are those of PRISM's rows."""
    raw, bad = read_rows(path)
    if not any(map(is_question, raw)):
        return _conversations(path, turns)
    rows: list[Row] = []
    for record in raw:
        try:
            rows.append((_maker(record) or _unknown)(record))
        except BadRecord as error:
            bad.append(BadRow(record.source, str(error)))
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=_notes(rows))


def is_question(record: RawRow) -> bool:
    """Whether a record is laid out as one of NQ-open or CommonsenseQA."""
    return _maker(record) is not None


def _conversations(path: Path, turns: Turns) -> Imported:
    """Rows of PRISM's conversations whose intents are there."""
    try:
        chats, bad = read_chats(path)
    except DataError as error:
        raise _no_shape(path) from error
    if not any(map(is_prism, chats)):
        raise _no_shape(path)
    intents = {chat.source: recorded_intent(chat.fields) for chat in chats}
    bad += [BadRow(chat.source, NO_INTENT) for chat in chats if not intents[chat.source]]
    rows = [
        row for chat in chats if (intent := intents[chat.source])
        for row in rows_of(chat, intent, turns)
    ]  # fmt: skip
    if not rows:
        raise DataError(
            f"'{path}' holds {len(chats)} conversations, and none says what its person was after.",
            "Rows are played from an intent, and PRISM's files have none: a model has to draft it.",
            f"soul data build userllm {path} --drafter WHO --filter WHO",
        )
    return Imported(rows=tuple(rows), bad=tuple(bad))


def _no_shape(path: Path) -> DataError:
    shapes = ("question with answer", "question with choices and answerKey",
              "conversation_history with if_chosen")  # fmt: skip
    return wrong_shape(path, shapes, "Give a file of NQ-open, of CommonsenseQA or of PRISM.")


def _maker(record: RawRow) -> Callable[[RawRow], Row] | None:
    fields = record.fields
    if "choices" in fields or isinstance(fields.get("question"), Mapping):
        return _quiz
    return _search if "question" in fields and "answer" in fields else None


def _unknown(record: RawRow) -> Row:
    raise BadRecord("it is neither a question with answers nor one with choices")


def _search(record: RawRow) -> Row:
    (question,) = need(record, "question")
    wish = " ".join(question.split())
    return {
        "source": "natural_questions",
        "intent": wish,
        "question": wish,
        "assistant_suggestion_turn": suggestion(wish),
        "provenance": f"NQ-open, {record.source}; {TEMPLATE}",
        "licence": NQ_LICENCE,
    }


def _quiz(record: RawRow) -> Row:
    fields = record.fields
    question, choices = fields.get("question"), fields.get("choices")
    if isinstance(question, Mapping):
        choices = question.get("choices")
        question = question.get("stem")
    texts = _texts(choices)
    if not isinstance(question, str) or not question.strip():
        raise BadRecord("it has no text of a question")
    if len(texts) < 2 or not all(texts):
        raise BadRecord("it has fewer than two choices, or a blank one")
    return {
        "source": "commonsense_qa",
        "intent": " ".join(question.split()),
        "choices": texts,
        "conversation_history": quiz_history(question, texts),
        "answer_key": fields.get("answerKey") or None,
        "id": fields.get("id"),
        "provenance": f"CommonsenseQA, {record.source}; {TEMPLATE}",
        "licence": CSQA_LICENCE,
    }


def _texts(choices: Any) -> list[str]:
    options = choices.get("text") if isinstance(choices, Mapping) else choices
    items = options if isinstance(options, list | tuple) else ()
    texts = (item.get("text") if isinstance(item, Mapping) else item for item in items)
    return [text.strip() if isinstance(text, str) else "" for text in texts]


def suggestion(question: str) -> str:
    """What the assistant proposes instead of answering: always the same for one question."""
    draw = int(hashlib.sha256(question.casefold().encode()).hexdigest(), 16)
    draw, wider = divmod(draw, 2)
    draw, index = divmod(draw, len(BROADER))
    if wider:
        return BROADER[index]
    words = set(re.findall(r"\w+", question.casefold()))
    others = [other for other in ELSEWHERE if not words.intersection(other.split()[-1:])]
    return OTHER[index].format(other=others[draw % len(others)])


def _notes(rows: list[Row]) -> tuple[str, ...]:
    sources = Counter(row["source"] for row in rows)
    notes = {
        "natural_questions": "rows hold an assistant's proposal that was written from a template; "
        "the benchmark's own proposals are not part of NQ-open.",
        "commonsense_qa": "rows hold an assistant's answer that was written from a template; the "
        "benchmark's own are not part of CommonsenseQA.",
    }
    return tuple(f"{sources[name]} {note}" for name, note in notes.items() if sources[name])
