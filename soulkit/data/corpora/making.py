"""From a conversation to a lesson: whose words are learned, and what stands before them.

    system S · user "hi" · assistant "hello" · user "bye"           (learned: the person)
    → system S · assistant "hi" (learned) · user "hello" · assistant "bye" (learned)

What is learned stands under `assistant`, everybody else under `user`; the system prompt stays. Who
opens a conversation without a system prompt is told so (OPENING), because a model needs something
to reply to. Messages of one side in a row are one message. After the last learned word nothing
stands: no target would see it.

Of a conversation with more than `turns` messages the last ones stay; the ones before them become
words in the context before the first that stays, a speaker's label before each. Lines after the
first of a message are indented there, and so are those of several speakers of the other side: a
label stands at the margin, and no message can write one there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from soulkit.data.corpora.lesson import OPENING, Lesson
from soulkit.data.corpora.messages import ChatLine, ChatRow, Unusable
from soulkit.data.corpora.table import ASSISTANT, HUMAN
from soulkit.text import one_line
from soulkit.types import Segment

EARLIER = "(What was said before, oldest first:)"
FROM_HERE = "(It goes on from here:)"
MARGIN = "    "


@dataclass(frozen=True, slots=True)
class LessonShape:
    """How conversations become lessons."""

    side: str
    """`human`, `assistant`, or the name of a speaker."""
    strip_system: bool = False
    turns: int | None = None
    """So many messages stay, from the end; None: all."""


@dataclass(frozen=True, slots=True)
class _Piece:
    label: str
    text: str


@dataclass(frozen=True, slots=True)
class _Part:
    """What one side says in a row."""

    role: Literal["user", "assistant"]
    pieces: tuple[_Piece, ...]
    trained: bool = False
    token_ids: tuple[int, ...] = ()


def lesson_from(conversation: ChatRow, shape: LessonShape, source: str, key: str) -> Lesson:
    """The lesson of one conversation; Unusable where nothing can be learned from it."""
    if conversation.evaluation_only:
        raise Unusable("it is marked evaluation_only: nobody trains on it")
    system, spoken = _system(conversation.utterances, shape.strip_system)
    parts = _joined([part for u in spoken if (part := _part(u, shape)) is not None])
    last = max((n for n, part in enumerate(parts) if part.trained), default=-1)
    if last < 0:
        raise Unusable(_nobody(shape.side))
    crowd = len({piece.label for part in parts if part.role == "user" for piece in part.pieces}) > 1
    labelled = crowd and shape.side not in (HUMAN, ASSISTANT)
    segments, trained = _segments(parts[: last + 1], shape, labelled)
    if system:
        segments, trained = [Segment("system", system), *segments], [False, *trained]
    if trained[0]:
        segments, trained = [Segment("user", OPENING), *segments], [False, *trained]
    exact = any(segment.token_ids for segment in segments)
    tokenizer = conversation.tokenizer if exact else ""
    return Lesson(
        tuple(segments), tuple(trained), source, key, conversation.fact, tokenizer, shape.side
    )


def _system(utterances: Sequence[ChatLine], strip: bool) -> tuple[str, list[ChatLine]]:
    """The system prompt, and everything else; a later one is words of the surroundings."""
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
    who = {HUMAN: "the person", ASSISTANT: "the assistant"}.get(side, f"'{side}'")
    return f"{who} says nothing that could be learned"


def _part(utterance: ChatLine, shape: LessonShape) -> _Part | None:
    """One utterance on its side; None where it says nothing that anybody must hear."""
    if not _is_learned(utterance, shape.side):
        seen = " ".join(filter(None, [utterance.text, *(f"({m})" for m in utterance.marks)]))
        piece = _Piece(_label(utterance, shape.side), seen)
        return _Part("user", (piece,)) if seen else None
    if not utterance.text and utterance.trained:
        only = f": it is only {utterance.marks[0]}" if utterance.marks else ""
        raise Unusable(f"a message that is to be learned has no words{only}")
    if not utterance.text:
        return None
    ids = () if shape.side == HUMAN else utterance.token_ids
    return _Part("assistant", (_Piece("You", utterance.text),), utterance.trained, ids)


def _is_learned(utterance: ChatLine, side: str) -> bool:
    if side not in (HUMAN, ASSISTANT):
        return utterance.role != "tool" and side.strip().casefold() in utterance.names
    if not utterance.role:
        raise Unusable("its speakers have names, and none says who is the person: --side NAME")
    return utterance.role == ("user" if side == HUMAN else "assistant")


def _label(utterance: ChatLine, side: str) -> str:
    if side == HUMAN:
        return "Assistant"
    if side == ASSISTANT:
        return "User"
    name = one_line(utterance.speaker, 80).replace(":", " ")
    return name if name.casefold() != "you" else "another"


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """Neighbours of one side as one; what has exact ids stays as it was emitted."""
    joined: list[_Part] = []
    for part in parts:
        before = joined[-1] if joined else None
        if before is None or before.role != part.role or before.trained != part.trained:
            joined.append(part)
        elif before.token_ids or part.token_ids:
            raise Unusable("two replies in a row, and one of them has exact ids")
        else:
            joined[-1] = replace(before, pieces=(*before.pieces, *part.pieces))
    return joined


def _segments(
    parts: Sequence[_Part], shape: LessonShape, labelled: bool
) -> tuple[list[Segment], list[bool]]:
    """The messages that stay, what came before them folded into the first."""
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
    """(label, text) of a part: neighbours under one label are one speech."""
    speeches: list[tuple[str, str]] = []
    for piece in part.pieces:
        if speeches and speeches[-1][0] == piece.label:
            speeches[-1] = (piece.label, f"{speeches[-1][1]}\n{piece.text}")
        else:
            speeches.append((piece.label, piece.text))
    return speeches


def folded_past(speeches: Iterable[tuple[str, str]]) -> str:
    """Earlier (label, text) as words, oldest first, between two lines that say so."""
    return "\n".join([EARLIER, *(labelled_line(*speech) for speech in speeches), FROM_HERE])


def labelled_line(label: str, text: str) -> str:
    """`label: text`, every further line indented: only labels stand at the margin."""
    first, *rest = text.splitlines() or [""]
    return "\n".join([f"{label}: {first}", *(f"{MARGIN}{line}" for line in rest)])
