"""What a model drafts for rows of TwinVoice: what three other people would have said instead.

Of a person's history (people.py) one exchange is taken out: what was said to them is the anchor,
and what they said is the right answer. The drafter writes three other reactions to the same anchor,
as alike as can be but for what the history tells about this person. The filter sees the whole and
rejects rows that can be answered without the history, and those that cannot be answered with it.
Rules look first: no reaction may be the person's own, and the right one may not stand out by its
length, which a model that never read the history would find.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from soulkit.errors import DataError
from soulkit.judge.fence import fence, utterance
from soulkit.judge.structured import VerdictShape
from soulkit.tasks.drafting import Drafts, Review, Sketch, drafted, reviewed
from soulkit.tasks.made import Row
from soulkit.tasks.prompting import PromptFolder
from soulkit.tasks.twinvoice.people import Exchange, Speaker, read_people
from soulkit.text import words_only

PROMPTS = ("drafting/draft_reactions", "drafting/filter_reactions")
SHOWN = 30
"""Entries of a history in a row: as many as the task's own prompt shows."""
LEAST_HISTORY = 4
"""Entries that a history has beside what is asked; fewer tell nothing about a person."""
WORDS = range(3, 121)
"""Of a reply that is asked about."""
_WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)
"""A word, or one sign of a script that is written without blanks."""
STRETCH = 2.0
"""A reaction may be so many times as long as the right one, or as short."""


class Reactions(VerdictShape):
    """What three other people would have said."""

    reactions: list[str] = Field(min_length=3, max_length=3)


class ReactionReview(Review):
    """A filter's word on four reactions."""

    fault: Literal[
        "none", "fits_too", "not_told", "stands_out", "off_anchor", "same", "language", "unsafe"
    ]  # fmt: skip


def reaction_drafts(path: Path, prompts: PromptFolder, *, per_person: int = 3) -> Drafts:
    """The sketches of a file of persons, `per_person` of each at most; DataError when nobody in it
    has a history that is long enough."""
    people, bad = read_people(path)
    places = [(person, _chosen(person, per_person)) for person in people]
    sketches = [_sketch(person, place, prompts) for person, several in places for place in several]
    if not sketches:
        raise DataError(
            f"Nobody in '{path}' has said enough.",
            f"A row takes {LEAST_HISTORY} things that a person said elsewhere, and an answer of "
            f"{WORDS.start} to {WORDS.stop - 1} words to something that was said to them.",
            "Give more chats of each person, with the person's id in each record.",
        )
    silent = sum(not several for _, several in places)
    notes = (f"{silent} of {len(people)} persons have said too little.",) if silent else ()
    return Drafts(
        sketches=tuple(sketches), bad=tuple(bad), prompts=prompts.hashes(*PROMPTS), notes=notes
    )


def _chosen(person: Speaker, most: int) -> list[int]:
    """The places of the exchanges that are asked about, the same ones at every call."""
    drawn = sorted(range(len(person.exchanges)), key=lambda place: _draw(person, place))
    fit = (place for place in drawn if _is_fit(person, place, person.exchanges[place]))
    return list(islice(fit, most))


def _is_fit(person: Speaker, place: int, exchange: Exchange) -> bool:
    if not exchange.context or _length(exchange.reply) not in WORDS:
        return False
    return len(_history(person, place)) >= LEAST_HISTORY


def _draw(person: Speaker, place: int) -> str:
    return hashlib.sha256(f"{person.key}/{place}".encode()).hexdigest()


def _history(person: Speaker, place: int) -> list[Exchange]:
    """What else the person said, the last of it: without the exchange that is asked about, and
    without entries that repeat its answer or its anchor."""
    asked_about = person.exchanges[place]
    reply, anchor = _plain(asked_about.reply), _plain(asked_about.context)
    others = [
        one
        for i, one in enumerate(person.exchanges)
        if i != place and one.reply and reply not in _plain(one.reply)
        and reply not in _plain(one.context) and _plain(one.context) != anchor
    ]  # fmt: skip
    return others[-SHOWN:]


def _length(text: str) -> int:
    return len(_WORD.findall(text))


@lru_cache(maxsize=4096)  # entries of a person are compared with each that is asked about
def _plain(text: str) -> str:
    return words_only(text.casefold())


def _written(person: Speaker, one: Exchange) -> str:
    """An entry of a history, as rows of its dimension have it."""
    if not one.context:
        return one.reply
    if person.dimension == "narrative":
        return f"Scene: {one.context}\n  Said: {one.reply}"
    return f"Asked: {one.context} Replied: {one.reply}"


def _sketch(person: Speaker, place: int, prompts: PromptFolder) -> Sketch:
    exchange, entries = person.exchanges[place], _history(person, place)
    lines = [utterance(_written(person, one)) for one in entries]
    values = {
        "history": fence("\n".join(lines), "history"),
        "anchor": fence(exchange.context, "anchor"),
        "reply": fence(exchange.reply, "reply"),
    }
    draft_prompt, filter_prompt = PROMPTS

    def review(draft: Reactions) -> Any:
        others = fence("\n".join(map(utterance, draft.reactions)), "others")
        prompt = prompts.render(filter_prompt, **values, others=others)
        return reviewed(prompt, ReactionReview)

    return Sketch(
        key=f"{person.key}/{place}",
        source=person.source,
        draft=drafted(
            prompts.render(draft_prompt, **values), Reactions, _problem(exchange.reply)
        ),
        review=review,
        rows=lambda draft: [_row(person, place, entries, draft)],
        published=person.published,
    )  # fmt: skip


def _row(person: Speaker, place: int, entries: Sequence[Exchange], draft: Reactions) -> Row:
    """The row, with the right answer at a place that its key draws."""
    answer = int(_draw(person, place), 16) % 4
    choices = [" ".join(reaction.split()) for reaction in draft.reactions]
    choices.insert(answer, " ".join(person.exchanges[place].reply.split()))
    return {
        "id": f"{person.key}/{place}",
        "user_id": person.key,
        "dimension": person.dimension,
        "conversation_history": [_written(person, one) for one in entries],
        "anchor_post": person.exchanges[place].context,
        "answer_choices": choices,
        "answer_idx": answer,
        "provenance": f"history of one person, {person.source}",
        "licence": person.licence,
    }


def _problem(reply: str) -> Callable[[Reactions], str]:
    """What is wrong with three reactions, in words for their author."""
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
