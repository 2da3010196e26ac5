"""What people wrote in recorded conversations, turn by turn.

A turn is one learned message of a lesson (see `data/corpora/lessons.py`), with everything the
person had read before it. Turns belong to persons: splits, folds and intervals go by person. A
conversation whose person is unknown counts as a person of its own.

    user "hi" · assistant "hello" · user "bye"   (side human)
    → place 0: context (OPENING), text "hi"; place 1: context ("hi", "hello"), text "bye"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from soulkit.data.corpora.lessons import Lesson
from soulkit.data.corpora.settings import HUMAN, AnySource
from soulkit.data.corpora.stream import read_lessons
from soulkit.reporting import SILENT, Reporter
from soulkit.types import Segment


@dataclass(frozen=True, slots=True)
class PersonTurn:
    """One message of a person in a conversation."""

    person: str
    chat: str
    """`file:row` of the conversation."""
    source: str
    """Name of the source, or the row's `data_source`: the kind of conversation."""
    place: int
    """Number of earlier turns of the person in this conversation."""
    turns: int
    """Number of all turns of the person in this conversation."""
    context: tuple[Segment, ...]
    """What was said before, in the roles of training: the person's messages are `assistant`."""
    text: str

    @property
    def is_last(self) -> bool:
        """Whether the person wrote nothing after it."""
        return self.place == self.turns - 1


def turns_in(lesson: Lesson) -> Iterator[PersonTurn]:
    """The turns of the person whose side the lesson teaches, in order."""
    places = [place for place, learned in enumerate(lesson.trained) if learned]
    for number, place in enumerate(places):
        yield PersonTurn(
            person=lesson.person or lesson.key, chat=lesson.key, source=lesson.source,
            place=number, turns=len(places), context=lesson.segments[:place],
            text=lesson.segments[place].text,
        )  # fmt: skip


def read_turns(
    source: AnySource, side: str | None = HUMAN, reporter: Reporter = SILENT
) -> list[PersonTurn]:
    """All turns on one side of the conversations in `source`, in file order.

    DataError if the source has no usable conversation.
    """
    lessons = read_lessons(source, side=side, reporter=reporter)
    return [turn for lesson in lessons for turn in turns_in(lesson)]


def by_person(turns: Iterable[PersonTurn]) -> dict[str, list[PersonTurn]]:
    """Person → their turns, persons in the order of their first turn."""
    return _grouped(turns, lambda turn: turn.person)


def by_chat(turns: Iterable[PersonTurn]) -> dict[str, list[PersonTurn]]:
    """Conversation → the person's turns in it, in order."""
    return _grouped(turns, lambda turn: turn.chat)


def _grouped(
    turns: Iterable[PersonTurn], key: Callable[[PersonTurn], str]
) -> dict[str, list[PersonTurn]]:
    groups: dict[str, list[PersonTurn]] = defaultdict(list)
    for turn in turns:
        groups[key(turn)].append(turn)
    return dict(groups)
