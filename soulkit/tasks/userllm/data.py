"""Rows of `userllm`: generated, imported (NQ-open, CommonsenseQA, PRISM), or drafted from chats.

    {"question": "who wrote the song", "answer": ["Ann Lee"]}
    → {"source": "natural_questions", "intent": "who wrote the song", "question": "who wrote the
       song", "assistant_suggestion_turn": "Have you ever thought about the planets? ...", ...}

NQ-open and CommonsenseQA lack the assistant's turn, which comes from a template; provenance says
so. PRISM records with an `intent` become up to three rows per conversation: `first`, `second`, and
`end` (the person wrote nothing more). Models draft and filter an intent: for a recorded chat,
without the person's words; for CommonsenseQA, without the choices; for NQ-open, with the
assistant's turn.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from soulkit.data.chats import Chat, read_chats
from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.errors import DataError
from soulkit.judge.structured import VerdictShape
from soulkit.judge.verdict import fence, transcript
from soulkit.tasks.kit.importing import BadRecord, Imported, import_records, need, wrong_shape
from soulkit.tasks.kit.made_rows import (
    Drafts,
    Review,
    Row,
    Sketch,
    draft_problem,
    draft_question,
    review_question,
)
from soulkit.tasks.kit.prompting import PromptFolder, Texts
from soulkit.tasks.kit.spec import ORIGIN
from soulkit.tasks.userllm.fields import CSQA, NQ
from soulkit.tasks.userllm.metrics import choices_named
from soulkit.types import Line

TEXTS = Texts(__file__)


def quiz_history(question: str, choices: Sequence[str]) -> str:
    """Two tagged lines: the question with its choices, and an unsure reply by the assistant."""
    listed = " ".join(
        f"{chr(ord('A') + i)}) {_on_one_line(text)}" for i, text in enumerate(choices)
    )
    draw = int(hashlib.sha256(_on_one_line(question).casefold().encode()).hexdigest(), 16)
    unsure: Sequence[str] = TEXTS["unsure"]
    answer = unsure[draw % len(unsure)]
    return f"<user>: {_on_one_line(question)} {listed}\n<assistant>: {answer}"


def _on_one_line(text: str) -> str:
    """The text on one line: a line starting with a mark would become another speaker's."""
    return " ".join(text.split())


# -- generated -----------------------------------------------------------------------------------

PREAMBLE = "You are a user chatting with an assistant language model to: "


def rows(n: int, seed: int) -> list[Row]:
    """The first `n` rows; row i depends only on (seed, i)."""
    makers = (_made_quiz, _made_search, _made_prism)
    return [
        {**makers[i % 3](i // 3, random.Random(f"userllm/{seed}/{i}")), "id": f"m{seed}-{i}",
         "index": i}
        for i in range(n)
    ]  # fmt: skip


def _made_quiz(turn: int, rng: random.Random) -> Row:
    question, texts = rng.choice(TEXTS["quizzes"])
    place = _place(rng)
    shown = rng.sample(texts, len(texts))
    labels = list("ABCDE")
    wish = f"settle a quiz in {place}: {question}"
    return {
        "source": "commonsense_qa",
        "intent": _introduced(wish, turn),
        "choices": {"label": labels, "text": shown} if turn % 2 else shown,
        "answer_key": labels[shown.index(texts[0])],
        "conversation_history": quiz_history(question, shown),
    }


def _made_search(turn: int, rng: random.Random) -> Row:
    question, aside = rng.choice(TEXTS["searches"])
    query = question.format(place=_place(rng))
    strayed = rng.choice(TEXTS["straying"]).format(aside=aside)
    return {
        "source": "natural_questions",
        "intent": _introduced(query, turn),
        "question": query,
        "assistant_suggestion_turn": strayed,
        "conversation_history": f"<user>: {query}\n<assistant>: {strayed}",
    }


def _made_prism(turn: int, rng: random.Random) -> Row:
    wish, opening, settled, asked_back = rng.choice(TEXTS["wishes"])
    place = _place(rng)
    last = turn % 4 == 1
    answer = settled if last else asked_back
    later = f"<user>: {opening}\n<assistant>: {answer}"
    return {
        "source": "prism",
        "intent": _introduced(f"{wish}, in {place}", turn),
        "opening_prompt": opening,
        "conversation_history": later if turn % 2 else "",
        "is_last_turn": last,
        "turn": 1 + turn % 2,
    }


def _place(rng: random.Random) -> str:
    name = rng.choice(TEXTS["heads"]) + rng.choice(TEXTS["tails"])
    return f"{name} on the {rng.choice(TEXTS['rivers'])}"


def _introduced(wish: str, turn: int) -> str:
    return f"{PREAMBLE}{wish}" if turn % 3 == 2 else wish


Turns = Literal["all", "first", "second", "end"]
PRISM_LICENCE = "PRISM: human text CC-BY-4.0, model text CC-BY-NC-4.0"
UNKNOWN_LICENCE = "not stated with the chats"


def is_prism(chat: Chat) -> bool:
    """Whether a chat has the layout of one of PRISM's two files."""
    return chat.layout in ("branches", "replies")


def from_prism(chat: Chat) -> bool:
    """Whether a chat comes from PRISM: its layout, and a conversation type."""
    return is_prism(chat) and bool(chat.fields.get("conversation_type"))


TURNS_NEED: dict[Turns, str] = {
    "all": "a first message by the person, or a last message by the assistant",
    "first": "a first message by the person",
    "second": "a first message by the person, a reply and another message by the person",
    "end": "a reply by the assistant as its last message",
}


def turn_names(chat: Chat, turns: Turns) -> list[str]:
    """The names of the rows that can be made from a chat."""
    messages = chat.messages
    users = len(chat.user_messages)
    available = {
        "first": messages[0]["role"] == "user",
        "second": users > 1 and len(messages) > 2 and messages[0]["role"] == "user",
        "end": len(messages) > 1 and messages[-1]["role"] == "assistant",
    }
    return [name for name, is_there in available.items() if is_there and turns in ("all", name)]


def rows_of_chat(chat: Chat, intent: str, turns: Turns) -> list[Row]:
    """The rows made from a chat, all with this intent."""
    histories = {"first": 0, "second": 2, "end": len(chat.messages)}
    return [_prism_row(chat, intent, name, histories[name]) for name in turn_names(chat, turns)]


def recorded_intent(fields: Mapping[str, Any]) -> str:
    """The intent recorded with the chat; empty if there is none."""
    values = (fields.get(name) for name in ("intent", "intent_summary"))
    return next((v.strip() for v in values if isinstance(v, str) and v.strip()), "")


def _prism_row(chat: Chat, intent: str, name: str, length: int) -> Row:
    history: Sequence[Mapping[str, str]] = chat.messages[:length]
    published = from_prism(chat)
    return {
        "id": f"{chat.key}-{name}",
        "source": "prism",
        "turn": name,
        "intent": intent,
        "opening_prompt": chat.user_messages[0],
        # A list, not tagged lines: a person's text could look like a tag.
        "conversation_history": [dict(message) for message in history] if history else "",
        "is_last_turn": name == "end",
        **({"person": chat.person} if chat.person else {}),
        **({} if published else {ORIGIN: chat.source.rpartition(":")[0] or chat.source}),
        "provenance": f"{'PRISM' if published else 'recorded chat'}, {chat.source}",
        "licence": PRISM_LICENCE
        if published
        else str(chat.fields.get("licence") or UNKNOWN_LICENCE),
    }


# -- imported ------------------------------------------------------------------------------------

NQ_LICENCE = "NQ-open: Apache-2.0 (Natural Questions CC-BY-SA-3.0)"
TEMPLATE = "the assistant's turn is a template of soulkit"
CSQA_LICENCE = "MIT (CommonsenseQA)"
NO_INTENT = "it does not state the person's intent; soul data build lets a model draft it"


def import_userllm(path: Path, *, turns: Turns = "all") -> Imported:
    """Rows of an NQ-open, CommonsenseQA or PRISM file; DataError for any other file, and for
    PRISM without intents. `turns` selects PRISM's rows."""
    raw, bad = read_rows(path)
    if not any(map(is_question, raw)):
        return _conversations(path, turns)

    return import_records(path, _question_row, way_out="", read=lambda _: (raw, bad), notes=_notes)


def _question_row(record: RawRow, _: int) -> Row:
    make = _maker(record)
    if make is None:
        raise BadRecord("it is neither a question with answers nor a question with choices")
    return make(record)


def is_question(record: RawRow) -> bool:
    """Whether a record has the layout of NQ-open or CommonsenseQA."""
    return _maker(record) is not None


def _conversations(path: Path, turns: Turns) -> Imported:
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
        for row in rows_of_chat(chat, intent, turns)
    ]  # fmt: skip
    if not rows:
        raise DataError(
            f"'{path}' holds {len(chats)} conversations but no intents.",
            "Rows are played from an intent. PRISM's files have none, so a model has to draft it.",
            f"soul data build userllm {path} --drafter PLAYER --filter PLAYER",
        )
    return Imported(rows=tuple(rows), bad=tuple(bad))


def _no_shape(path: Path) -> DataError:
    shapes = ("question with answer", "question with choices and answerKey",
              "conversation_history with if_chosen")  # fmt: skip
    return wrong_shape(path, shapes, "Give a file of NQ-open, CommonsenseQA or PRISM.")


def _maker(record: RawRow) -> Callable[[RawRow], Row] | None:
    fields = record.fields
    if "choices" in fields or isinstance(fields.get("question"), Mapping):
        return _imported_quiz
    return _imported_search if "question" in fields and "answer" in fields else None


def _imported_search(record: RawRow) -> Row:
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


def _imported_quiz(record: RawRow) -> Row:
    fields = record.fields
    question, choices = fields.get("question"), fields.get("choices")
    if isinstance(question, Mapping):
        choices = question.get("choices")
        question = question.get("stem")
    texts = _choice_texts(choices)
    if not isinstance(question, str) or not question.strip():
        raise BadRecord("it has no question text")
    if len(texts) < 2 or not all(texts):
        raise BadRecord("it has fewer than two choices, or a blank choice")
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


def _choice_texts(choices: Any) -> list[str]:
    options = choices.get("text") if isinstance(choices, Mapping) else choices
    items = options if isinstance(options, list | tuple) else ()
    texts = (item.get("text") if isinstance(item, Mapping) else item for item in items)
    return [text.strip() if isinstance(text, str) else "" for text in texts]


def suggestion(question: str) -> str:
    """The assistant's proposal instead of an answer; the same question always gets the same one."""
    wider: Sequence[str] = TEXTS["wider"]
    draw = int(hashlib.sha256(question.casefold().encode()).hexdigest(), 16)
    draw, is_wider = divmod(draw, 2)
    draw, index = divmod(draw, len(wider))
    if is_wider:
        return wider[index]
    words = set(re.findall(r"\w+", question.casefold()))
    others = [other for other in TEXTS["elsewhere"] if not words.intersection(other.split()[-1:])]
    text: str = TEXTS["other"][index]
    return text.format(other=others[draw % len(others)])


def _notes(rows: Sequence[Row], _: Sequence[BadRow]) -> tuple[str, ...]:
    sources = Counter(row["source"] for row in rows)
    notes = {
        "natural_questions": "rows contain an assistant's proposal written from a template; the "
        "benchmark's own proposals are not part of NQ-open.",
        "commonsense_qa": "rows contain an assistant's answer written from a template; the "
        "benchmark's own answers are not part of CommonsenseQA.",
    }
    return tuple(f"{sources[name]} {note}" for name, note in notes.items() if sources[name])


# -- drafted -------------------------------------------------------------------------------------

MOST_SHARED_WORDS = 6
"""An intent must not share this many consecutive words with the person's text."""
INTENT_WORDS = range(3, 41)
"""Allowed number of words in an intent."""
DRAFT_PROMPTS = {
    "chat": ("drafting/draft_intent", "drafting/filter_intent"),
    NQ: ("drafting/draft_search", "drafting/filter_search"),
    CSQA: ("drafting/draft_quiz", "drafting/filter_intent"),
}
"""Kind of record → templates of (drafter, filter)."""


class Intent(VerdictShape):
    """A drafted intent."""

    intent: str = Field(min_length=1)


class SearchIntent(Intent):
    """An intent, and what an assistant says that leads away from it."""

    suggestion: str = Field(min_length=1)


class IntentReview(Review):
    """A filter's word on an intent."""

    fault: Literal[
        "none", "not_theirs", "too_vague", "gives_words", "gives_answer", "several_aims", "unsafe"
    ]


class SearchReview(Review):
    """A filter's word on an intent and on the proposal that leads away from it."""

    fault: Literal[
        "none", "not_theirs", "too_vague", "gives_answer", "no_detour", "suggestion_answers",
        "unsafe",
    ]  # fmt: skip


def intent_drafts(path: Path, prompts: PromptFolder, *, turns: Turns = "all") -> Drafts:
    """The sketches of a file of chats, NQ-open or CommonsenseQA; DataError for any other file."""
    raw, _ = read_rows(path)
    if any(is_question(record) for record in raw):
        imported = import_userllm(path)
        sketches = [_question_sketch(row, f"{path.name}, row {i}", prompts)
                    for i, row in enumerate(imported.rows, 1)]  # fmt: skip
        return Drafts(sketches=tuple(sketches), bad=imported.bad, prompts=_hashes(prompts))
    chats, bad = read_chats(path)
    sketches = [_chat_sketch(chat, prompts, turns) for chat in chats if turn_names(chat, turns)]
    short = [chat for chat in chats if not turn_names(chat, turns)]
    bad += [BadRow(chat.source, f"the chat has no turn '{turns}'") for chat in short]
    if not sketches:
        raise DataError(
            f"No chat in '{path}' gives a row for --turns {turns}.",
            f"A chat needs {TURNS_NEED[turns]}. {bad[0].source}: {bad[0].why}.",
            "Use --turns all, or another file.",
        )
    return Drafts(sketches=tuple(sketches), bad=tuple(bad), prompts=_hashes(prompts))


def _hashes(prompts: PromptFolder) -> dict[str, str]:
    return prompts.hashes(*sorted({name for pair in DRAFT_PROMPTS.values() for name in pair}))


def _chat_sketch(chat: Chat, prompts: PromptFolder, turns: Turns) -> Sketch:
    lines = [Line(message["role"], message["content"]) for message in chat.messages]
    shown = transcript(lines, {"user": "Person", "assistant": "Assistant"})
    draft_prompt, filter_prompt = DRAFT_PROMPTS["chat"]

    def review(draft: Intent) -> Any:
        prompt = prompts.render(filter_prompt, material=shown, intent=fence(draft.intent, "intent"))
        return review_question(prompt, IntentReview)

    return Sketch(
        key=chat.key,
        source=chat.source,
        draft=draft_question(
            prompts.render(draft_prompt, material=shown),
            Intent,
            _intent_problem(chat.user_messages),
        ),
        review=review,
        rows=lambda draft: rows_of_chat(chat, " ".join(draft.intent.split()), turns),
        count=len(turn_names(chat, turns)),
        published=from_prism(chat),
    )


def _question_sketch(row: Row, source: str, prompts: PromptFolder) -> Sketch:
    """A sketch of an imported question; the texts from templates are drafted anew."""
    draft_prompt, filter_prompt = DRAFT_PROMPTS[row["source"]]
    question, choices = str(row["intent"]), tuple(row.get("choices", ()))
    material = fence(question, "question")
    listed = fence("\n".join(choices), "choices") if choices else ""
    is_search = row["source"] == NQ

    def review(draft: Any) -> Any:
        about = {"suggestion": fence(draft.suggestion, "suggestion")} if is_search else {}
        prompt = prompts.render(
            filter_prompt, material=material, intent=fence(draft.intent, "intent"), **about
        )
        return review_question(prompt, SearchReview if is_search else IntentReview)

    values = {} if is_search else {"choices": listed}
    return Sketch(
        key=f"{row['source']}/{row.get('id') or question}",
        source=source,
        draft=draft_question(
            prompts.render(draft_prompt, material=material, **values),
            SearchIntent if is_search else Intent,
            _intent_problem([question], choices),
        ),
        review=review,
        rows=lambda draft: [_with_draft(row, draft)],
        published=True,
    )


def _with_draft(row: Row, draft: Intent) -> Row:
    origin = str(row["provenance"])
    drafted: Row = {**row, "intent": " ".join(draft.intent.split())}
    if isinstance(draft, SearchIntent):
        drafted["assistant_suggestion_turn"] = draft.suggestion.strip()
        origin = origin.partition(";")[0]  # no longer written from a template
    return {**drafted, "provenance": origin}


def _intent_problem(originals: list[str], choices: tuple[str, ...] = ()) -> Callable[[Intent], str]:
    def problem(draft: Intent) -> str:
        text = draft.intent
        if trouble := draft_problem("intent", text, INTENT_WORDS, originals, MOST_SHARED_WORDS):
            return trouble
        named = choices_named(choices, text, "paper")
        return f"the intent names a choice: “{named[0]}”" if named else ""

    return problem
