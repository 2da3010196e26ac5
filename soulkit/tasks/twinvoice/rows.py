"""Rows of `twinvoice` made here, and rows whose wrong options a model drafts.

Made rows have invented people, each with one thing that gives them away. Six capabilities take
turns (opinion, memory, reasoning, words, tone, syntax), and so do the three dimensions. The history
shows the trait several times, and the four reactions differ in that trait alone.

Example: {"user_id": "p5-0", "dimension": "social", "capability": "words", "conversation_history":
["Rain again, blimey.", ...], "anchor_post": "What do you think of the new tram?", "answer_choices":
["Blimey, the new tram came up.", ...], "answer_idx": 0}.

Drafted rows: of a person's history (data.py) one exchange is taken out: what was said to them is
the anchor, and what they said is the right answer. The drafter writes what three other people would
have said. The filter sees the whole and rejects rows that can be answered without the history, and
those that cannot be answered with it. Rules look first: no reaction may be the person's own, and
the right one may not stand out by its length.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from soulkit.errors import DataError
from soulkit.judge.quoting import fence, utterance
from soulkit.judge.structured import VerdictShape
from soulkit.tasks.kit.made_rows import Drafts, Review, Row, Sketch, draft_question, review_question
from soulkit.tasks.kit.prompting import PromptFolder, Texts
from soulkit.tasks.twinvoice.data import Exchange, Speaker, read_people
from soulkit.text import words_only

_DIMENSIONS = ("social", "interpersonal", "narrative")
TOPICS = (
    "the new tram", "the street market", "the choir", "the long winter", "the school play",
    "the corner bakery", "the museum", "the harbour festival", "the library",
    "the football final",
)  # fmt: skip
_OPENERS = ("And you?", "What is new?", "Say something.", "Well, what have you got?")
_PLACES = ("by the fire", "on the stairs", "in the orchard", "at the long table", "on the ferry")
PET_WORDS = ("blimey", "mate", "honestly", "so to speak", "mark my words", "bless", "you know what")

TEXTS = Texts(__file__)

_SHAPES: dict[str, Callable[[str], str]] = {
    "lower": lambda t: f"{t} keeps coming up these days".lower(),
    "trail": lambda t: f"Well... {t}... it keeps coming up...",
    "ask": lambda t: f"{_start(t)} keeps coming up, doesn't it? Or is it just me?",
    "shout": lambda t: f"{t} KEEPS COMING UP!!".upper(),
}
_SIDES = (
    ("I am all for {t}, always was.", "On the side of {t}, as ever."),
    ("I was against {t} from the first day.", "Still not for {t}, as ever."),
    ("I could not care less about {t}.", "Shrugging about {t}, as ever."),
    ("I would back {t} only if it cost nothing.", "Counting what {t} costs, as ever."),
)
"""Opinions: as they were given once, and as they sound when asked again."""
CITIES = ("Porto", "Tartu", "Ghent", "Split", "Bergen", "Lucca", "Malmö", "Cork")
KIN = ("sister", "brother", "godmother", "cousin", "best friend")


@dataclass(frozen=True, slots=True)
class Case:
    """What somebody said, what they react to, and four reactions of which the first is theirs."""

    posts: tuple[str, ...]
    anchor: str
    reactions: tuple[str, ...]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_made_row(i, seed) for i in range(n)]


def _made_row(i: int, seed: int) -> dict[str, Any]:
    rng = random.Random(f"twinvoice/{seed}/{i}")
    capability = list(CASES)[i % len(CASES)]
    # Over eighteen rows every capability meets every dimension.
    dimension = _DIMENSIONS[(i + i // len(CASES)) % len(_DIMENSIONS)]
    case = CASES[capability](rng)
    reactions = list(case.reactions)
    rng.shuffle(reactions)
    return {
        "id": f"tv{seed}-{i}",
        "user_id": f"p{seed}-{i}",
        "dimension": dimension,
        "capability": capability,
        "conversation_history": [_dressed(dimension, text, rng) for text in case.posts],
        "anchor_post": case.anchor,
        "answer_choices": reactions,
        "answer_idx": reactions.index(case.reactions[0]),
        "index": i,
    }


def _dressed(dimension: str, text: str, rng: random.Random) -> str:
    """What was said as a post, as the answer in a chat, or as a line in a scene."""
    if dimension == "interpersonal":
        return f"Asked: {rng.choice(_OPENERS)} Replied: {text}"
    if dimension == "narrative":
        return f"Scene: The company sat {rng.choice(_PLACES)}. Said: {text}"
    return text


def _opinion(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 5)
    stance, *rest = rng.sample(_SIDES, 4)
    small = [f"{_start(other)} came up at breakfast." for other in others]
    posts = [
        *small,
        stance[0].format(t=topic),
        f"Asked about {topic} once more. I have not changed.",
    ]
    rng.shuffle(posts)
    return Case(tuple(posts), f"Where do you stand on {topic}?",
                tuple(side[1].format(t=topic) for side in (stance, *rest)))  # fmt: skip


def _memory(rng: random.Random) -> Case:
    kin, other = rng.sample(KIN, 2)
    home, decoy, *rest = rng.sample(CITIES, 4)
    topics = rng.sample(TOPICS, 3)
    posts = [f"My {kin} lives in {home}.", f"My {other} moved to {decoy}.",
            *(f"{_start(t)} came up at breakfast." for t in topics)]  # fmt: skip
    rng.shuffle(posts)
    return Case(tuple(posts), f"Remind me, where does your {kin} live?",
                tuple(f"In {city}, as ever." for city in (home, decoy, *rest)))  # fmt: skip


def _reasoning(rng: random.Random) -> Case:
    rule, cases = rng.choice(TEXTS["rules"])
    anchor = rng.choice(list(cases))
    rest = [reaction for case, reaction in cases.items() if case != anchor]
    small = [f"{_start(t)} came up at breakfast." for t in rng.sample(TOPICS, 4)]
    posts = [*small, rule]
    rng.shuffle(posts)
    return Case(tuple(posts), anchor, (cases[anchor], *rest))


def _pet_words(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 6)
    pet_word, *rest = rng.sample(PET_WORDS, 4)
    posts = tuple(f"{_start(pet_word)}, {other} came up." for other in others)
    reactions = tuple(f"{_start(word)}, {topic} came up." for word in (pet_word, *rest))
    return Case(posts, f"What do you think of {topic}?", reactions)


def _tone(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 6)
    habit, *rest = rng.sample(list(TEXTS["tones"]), 4)
    posts = tuple(_start(rng.choice(TEXTS["tones"][habit]).format(t=other)) for other in others)
    reactions = (
        _start(rng.choice(TEXTS["tones"][tone]).format(t=topic)) for tone in (habit, *rest)
    )
    return Case(posts, f"What do you think of {topic}?", tuple(reactions))


def _syntax(rng: random.Random) -> Case:
    topic, *others = rng.sample(TOPICS, 6)
    form, *rest = rng.sample(list(_SHAPES), 4)
    posts = tuple(_SHAPES[form](other) for other in others)
    return Case(posts, f"What do you think of {topic}?",
                tuple(_SHAPES[shape](topic) for shape in (form, *rest)))  # fmt: skip


def _start(text: str) -> str:
    return text[:1].upper() + text[1:]


CASES: dict[str, Callable[[random.Random], Case]] = {
    "opinion": _opinion,
    "memory": _memory,
    "reasoning": _reasoning,
    "words": _pet_words,
    "tone": _tone,
    "syntax": _syntax,
}
"""Capability → how a case of it is made."""


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
    sketches = [_sketch(person, place, prompts) for person, chosen in places for place in chosen]
    if not sketches:
        raise DataError(
            f"Nobody in '{path}' has said enough.",
            f"A row takes {LEAST_HISTORY} things that a person said elsewhere, and an answer of "
            f"{WORDS.start} to {WORDS.stop - 1} words to something that was said to them.",
            "Give more chats of each person, with the person's id in each record.",
        )
    silent = sum(not chosen for _, chosen in places)
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
        exchange
        for i, exchange in enumerate(person.exchanges)
        if i != place and exchange.reply and reply not in _plain(exchange.reply)
        and reply not in _plain(exchange.context) and _plain(exchange.context) != anchor
    ]  # fmt: skip
    return others[-SHOWN:]


def _length(text: str) -> int:
    return len(_WORD.findall(text))


@lru_cache(maxsize=4096)  # entries of a person are compared with each that is asked about
def _plain(text: str) -> str:
    return words_only(text.casefold())


def _written(person: Speaker, exchange: Exchange) -> str:
    """An entry of a history, as rows of its dimension have it."""
    if not exchange.context:
        return exchange.reply
    if person.dimension == "narrative":
        return f"Scene: {exchange.context}\n  Said: {exchange.reply}"
    return f"Asked: {exchange.context} Replied: {exchange.reply}"


def _sketch(person: Speaker, place: int, prompts: PromptFolder) -> Sketch:
    exchange, entries = person.exchanges[place], _history(person, place)
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
    """The row, with the right answer at a place that its key draws."""
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
