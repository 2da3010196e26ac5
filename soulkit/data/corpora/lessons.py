"""Converts a row to a lesson: its messages, and which of them are learned.

    system S · user "hi" · assistant "hello" · user "bye"           (learned: the person)
    → system S · assistant "hi" (learned) · user "hello" · assistant "bye" (learned)

Learned messages get the role `assistant`, all others `user`. Tool calls, tool results and messages
without text (a picture alone) are never learned. Consecutive messages of one side are merged, and
messages after the last learned one are dropped. If the learned side opens a conversation without a
system prompt, OPENING is put first.

With more than `turns` messages, only the last ones are kept. The earlier ones are folded as text
into the first kept message's context, with a speaker label each and further lines indented.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from soulkit.data.corpora.settings import ASSISTANT, HUMAN
from soulkit.data.exports.datasets import (
    ROLES,
    branches_of,
    fields_of,
    message_words,
    person_in,
    speaker_words,
)
from soulkit.data.files import BadRecord
from soulkit.text import one_line
from soulkit.types import Segment


@dataclass(frozen=True, slots=True)
class ChatLine:
    """One message as stored in its row."""

    role: str
    speaker: str
    """The speaker's name, else the role."""
    names: frozenset[str]
    """All names of the speaker, case-folded."""
    text: str
    """The text parts of the message."""
    marks: tuple[str, ...] = ()
    """The kinds of its other parts: `image`, `audio`."""
    token_ids: tuple[int, ...] = ()
    trained: bool = True
    """False if the row excludes the message from training."""


@dataclass(frozen=True, slots=True)
class ChatRow:
    """The messages of one row and its metadata."""

    utterances: tuple[ChatLine, ...]
    data_source: str
    fact: str
    tokenizer: str
    evaluation_only: bool
    person: str = ""
    """Id of the person who talks to the assistant; empty if the row has none."""


def conversation_of(row: Any) -> ChatRow:
    """The conversation in one row of a file; BadRecord if there is none."""
    fields = fields_of(row)
    items = next(branches_of(fields)[1])
    utterances = (*_prompt(fields), *(u for item in items for u in _utterances(item)))
    if not utterances:
        raise BadRecord("its conversation is empty")
    return ChatRow(
        utterances,
        _text_field(fields, "data_source"),
        _text_field(fields, "fact"),
        _text_field(fields, "tokenizer"),
        str(fields.get("evaluation_only")).lower() in ("true", "1"),
        person_in(fields),
    )


def _prompt(fields: Mapping[str, Any]) -> Iterator[ChatLine]:
    text = _text_field(fields, "system").strip()
    if text:
        yield ChatLine("system", "system", frozenset({"system"}), text)


def _text_field(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    return value if isinstance(value, str) else ""


def _utterances(item: Any) -> Iterator[ChatLine]:
    words, role = speaker_words(item)
    shown = (one_line(word, 80) for word in words.values())  # as messages and hints name them
    names = frozenset(word.casefold() for word in (*words.values(), *shown))
    speaker = next(words[k] for k in ("name", "speaker", "author", "from", "role") if k in words)
    text, marks = message_words(item)
    if role in ("tool", "function_call"):
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
        raise BadRecord("its token_ids are not a list of ids")
    return tuple(ids)


def _is_trained(item: Mapping[str, Any]) -> bool:
    """False if the message opts out with `trained`, or with `weight` as in other layouts."""
    return item.get("trained") is not False and item.get("weight") != 0


def _calls(item: Mapping[str, Any]) -> Iterator[str]:
    calls = item.get("tool_calls")
    listed_calls = calls if isinstance(calls, list | tuple) else []
    for call in [*listed_calls, item.get("function_call")]:
        if not isinstance(call, Mapping):
            continue
        inner = call.get("function")
        function = inner if isinstance(inner, Mapping) else call
        arguments = function.get("arguments", "")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
        yield f"(the assistant calls {function.get('name', 'a tool')}) {shown}".strip()


def sides_of(line: ChatLine) -> set[str]:
    """Every value of --side that selects the speaker of this message."""
    side = {"user": HUMAN, "assistant": ASSISTANT}.get(line.role)
    name = one_line(line.speaker, 80)
    named = line.role not in ("tool", "system") and name.casefold() not in ROLES
    return {*([side] if side else []), *([name] if named else [])}


OPENING = "(Nobody has spoken yet. You begin.)"
"""The first user message when the learned side opens a conversation without a system prompt."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One conversation prepared for training: learned messages have the role `assistant`."""

    segments: tuple[Segment, ...]
    """In order. Segments with `token_ids` hold exactly the ids that were emitted, for `tokenizer`.
    """
    trained: tuple[bool, ...]
    """Per segment, whether it is a target. True only for `assistant`, and at least once."""
    source: str
    key: str
    """`file:row`."""
    fact: str = ""
    """Extra context that only an expert gets, in mixed contextual self-distillation."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer that `token_ids` belong to; empty without `token_ids`."""
    side: str = HUMAN
    """The learned side: `human`, `assistant`, or a speaker's name."""
    person: str = ""
    """Who wrote the learned messages: the row's person for the side `human`, the speaker for a
    name. Empty if unknown, and for the side `assistant`."""

    def speaker(self, segment: Segment) -> str:
        """The original speaker of a segment, as opposed to its role in the lesson."""
        if segment.role not in ("user", "assistant"):
            return segment.role
        if segment.text == OPENING:
            return "opening"
        own = {HUMAN: "person", ASSISTANT: "assistant"}.get(self.side, self.side)
        other = {HUMAN: "assistant", ASSISTANT: "person"}.get(self.side, "others")
        return own if segment.role == "assistant" else other


EARLIER = "(What was said before, oldest first:)"
FROM_HERE = "(It goes on from here:)"
YOU = "You"
"""Label of the learned side where its words are context."""
MARGIN = "    "


@dataclass(frozen=True, slots=True)
class LessonShape:
    """Settings for converting conversations to lessons."""

    side: str
    strip_system: bool = False
    turns: int | None = None
    """Number of messages to keep, from the end; None: all."""


@dataclass(frozen=True, slots=True)
class _Piece:
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class _Part:
    role: Literal["user", "assistant"]
    pieces: tuple[_Piece, ...]
    trained: bool = False
    token_ids: tuple[int, ...] = ()


def message_json(segment: Segment, *, trained: bool) -> dict[str, Any]:
    """A segment as a message of a conversation row; exact token ids are kept."""
    exact = {"token_ids": list(segment.token_ids)} if segment.token_ids else {}
    context = {"trained": False} if segment.role == "assistant" and not trained else {}
    return {"role": segment.role, "content": segment.text, **exact, **context}


def lesson_from(conversation: ChatRow, shape: LessonShape, source: str, key: str) -> Lesson:
    """The lesson of one conversation; BadRecord if nothing in it can be learned."""
    if conversation.evaluation_only:
        raise BadRecord("it is marked evaluation_only and must not be trained on")
    system, spoken = _system(conversation.utterances, shape.strip_system)
    parts = _joined([part for u in spoken if (part := _part(u, shape)) is not None])
    last = max((n for n, part in enumerate(parts) if part.trained), default=-1)
    if last < 0:
        raise BadRecord(_nobody(shape.side))
    labels = {piece.label for part in parts if part.role == "user" for piece in part.pieces}
    labelled = len(labels - {YOU}) > 1 and shape.side not in (HUMAN, ASSISTANT)
    segments, trained = _segments(parts[: last + 1], shape, labelled)
    if system:
        segments, trained = [Segment("system", system), *segments], [False, *trained]
    if trained[0]:
        segments, trained = [Segment("user", OPENING), *segments], [False, *trained]
    exact = any(segment.token_ids for segment in segments)
    tokenizer = conversation.tokenizer if exact else ""
    person = {HUMAN: conversation.person, ASSISTANT: ""}.get(shape.side, shape.side)
    return Lesson(
        tuple(segments), tuple(trained), source, key, conversation.fact, tokenizer, shape.side,
        person,
    )  # fmt: skip


def _system(utterances: Sequence[ChatLine], strip: bool) -> tuple[str, list[ChatLine]]:
    prompts: list[str] = []
    rest: list[ChatLine] = []
    for utterance in utterances:
        if utterance.role != "system":
            rest.append(utterance)
        elif utterance.text and not rest:
            prompts.append(utterance.text)
        elif utterance.text and not strip:
            rest.append(replace(utterance, role="tool", text=f"(system) {utterance.text}"))
    return ("" if strip else "\n\n".join(prompts)), rest


def _nobody(side: str) -> str:
    speaker = {HUMAN: "the person", ASSISTANT: "the assistant"}.get(side, f"'{side}'")
    return f"{speaker} says nothing that can be learned"


def _part(utterance: ChatLine, shape: LessonShape) -> _Part | None:
    """One utterance on its side; None if it is empty."""
    learned = is_learned(utterance, shape.side)
    marks = [f"(you sent {m})" if learned else f"({m})" for m in utterance.marks]
    if not learned or (marks and not utterance.text):
        seen = " ".join(filter(None, [utterance.text, *marks]))
        piece = _Piece(YOU if learned else _label(utterance, shape.side), seen)
        return _Part("user", (piece,)) if seen else None
    if not utterance.text and utterance.trained:
        raise BadRecord("a message to be learned has no text")
    if not utterance.text:
        return None
    ids = () if shape.side == HUMAN else utterance.token_ids
    return _Part("assistant", (_Piece(YOU, utterance.text),), utterance.trained, ids)


def is_learned(utterance: ChatLine, side: str) -> bool:
    """Whether an utterance is of this side; BadRecord if its row does not tell."""
    if side not in (HUMAN, ASSISTANT):
        return utterance.role != "tool" and side.strip().casefold() in utterance.names
    if not utterance.role:
        raise BadRecord("its speakers have names only; select the person with --side NAME")
    return utterance.role == ("user" if side == HUMAN else "assistant")


def _label(utterance: ChatLine, side: str) -> str:
    if side == HUMAN:
        return "Assistant"
    if side == ASSISTANT:
        return "User"
    name = one_line(utterance.speaker, 80).replace(":", " ")
    return name if name.casefold() != YOU.casefold() else "another"


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """Parts of one side in a row as one part: chat templates may refuse two of one role.

    Words of the learned side that are not learned become context beside words that are.
    """
    joined = _merged(parts)
    learned = [False, *(part.trained for part in joined), False]
    for place, part in enumerate(joined):
        beside = learned[place] or learned[place + 2]
        if beside and part.role == "assistant" and not (part.trained or part.token_ids):
            pieces = tuple(_Piece(YOU, f"(you wrote) {piece.text}") for piece in part.pieces)
            joined[place] = _Part("user", pieces)
    return _merged(joined)


def _merged(parts: Sequence[_Part]) -> list[_Part]:
    joined: list[_Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        if before is None or before.role != part.role or before.trained != part.trained:
            joined.append(part)
        elif before.token_ids or part.token_ids:
            raise BadRecord("it has two replies in a row, one of them with exact token ids")
        else:
            joined[-1] = replace(before, pieces=(*before.pieces, *part.pieces))
    return joined


def _segments(
    parts: Sequence[_Part], shape: LessonShape, labelled: bool
) -> tuple[list[Segment], list[bool]]:
    cut = max(len(parts) - shape.turns, 0) if shape.turns is not None else 0
    staying = parts[cut:]
    segments = [Segment(p.role, _words(p, labelled), token_ids=p.token_ids) for p in staying]
    trained = [part.trained for part in staying]
    if cut:
        past = folded_past(p for part in parts[:cut] for p in _speeches(part))
        if segments[0].role == "user":
            segments[0] = replace(segments[0], text=f"{past}\n{segments[0].text}")
        else:
            segments, trained = [Segment("user", past), *segments], [False, *trained]
    return segments, trained


def _words(part: _Part, labelled: bool) -> str:
    if labelled and part.role == "user":
        return "\n".join(labelled_line(piece.label, piece.text) for piece in part.pieces)
    return "\n".join(piece.text for piece in part.pieces)


def _speeches(part: _Part) -> list[tuple[str, str]]:
    """(label, text) pairs of a part; consecutive pieces with one label are merged."""
    speeches: list[tuple[str, str]] = []
    for piece in part.pieces:
        if speeches and speeches[-1][0] == piece.label:
            speeches[-1] = (piece.label, f"{speeches[-1][1]}\n{piece.text}")
        else:
            speeches.append((piece.label, piece.text))
    return speeches


def folded_past(speeches: Iterable[tuple[str, str]]) -> str:
    """Earlier (label, text) pairs as text, oldest first, between two marker lines."""
    return "\n".join([EARLIER, *(labelled_line(*speech) for speech in speeches), FROM_HERE])


def labelled_line(label: str, text: str) -> str:
    """`label: text` with further lines indented, so that only labels start at the margin."""
    first, *rest = text.splitlines() or [""]
    return "\n".join([f"{label}: {first}", *(f"{MARGIN}{line}" for line in rest)])
