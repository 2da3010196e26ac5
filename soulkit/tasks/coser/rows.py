"""Rows of `coser`: scenes of invented books, in the layout of the released rows.

A book has a cast of four, each with a temper of their own, and a thing they quarrel about; SCENES
rows in a row belong to one book. In a scene two to four of them talk, six to fourteen messages
long, with the Environment among the speakers in about half of the rows. Who speaks for what, and
how it ends, stands in the plot; how each would say it, in the profiles.

    {"circumstance": "{\\"book\\": \\"Ashlar\\", \\"dialogues\\": [...], ...}", "index": 0}
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)
SCENES = 4
"""Scenes in a row that belong to the same book."""
ENVIRONMENT = "Environment"

_FOR = ("open", "press", "tell", "offer", "warn", "doubt", "ask")
_AGAINST = ("ask", "refuse", "doubt", "tell", "warn", "offer", "press")


@dataclass(frozen=True, slots=True)
class Matter:
    """What a book turns on: a thing, what one side would do with it and the other, and why."""

    thing: str
    do: str
    leave: str
    hope: str
    fear: str
    clue: str


@cache
def matters() -> tuple[Matter, ...]:
    return tuple(Matter(**matter) for matter in TEXTS["matters"])


@dataclass(frozen=True, slots=True)
class _Person:
    name: str
    temper: str
    calling: str
    stands_for: bool
    """Whether they are for doing it, or for leaving it."""


@dataclass(frozen=True, slots=True)
class _Book:
    title: str
    matter: Matter
    cast: tuple[_Person, ...]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(seed, i) for i in range(n)]


def _row(seed: int, index: int) -> dict[str, Any]:
    number = index // SCENES
    book = _book(random.Random(f"coser/{seed}/book/{number}"), number)
    scene = _scene(random.Random(f"coser/{seed}/scene/{index}"), book, index % SCENES)
    return {"circumstance": json.dumps(scene, ensure_ascii=False), "index": index}


def _book(rng: random.Random, number: int) -> _Book:
    names = [f"{first} {_surname(rng)}" for first in rng.sample(TEXTS["first"], 4)]
    tempers = rng.sample(tuple(TEXTS["tempers"]), 4)
    callings = rng.sample(TEXTS["callings"], 4)
    town = rng.choice(TEXTS["town_heads"]) + rng.choice(TEXTS["town_tails"])
    title = f"{rng.choice(TEXTS['titles'])}: A Chronicle of {town}, volume {number + 1}"
    cast = tuple(
        _Person(*person, stands_for=place % 2 == 0)
        for place, person in enumerate(zip(names, tempers, callings, strict=True))
    )
    return _Book(title, rng.choice(matters()), cast)


def _surname(rng: random.Random) -> str:
    return rng.choice(TEXTS["last_heads"]) + rng.choice(TEXTS["last_tails"])


def _scene(rng: random.Random, book: _Book, number: int) -> dict[str, Any]:
    # The first two of a cast are on different sides, so that every scene has a quarrel.
    present = list(book.cast[: rng.choice((2, 2, 3, 4))])
    lines = _lines(rng, book, present)
    if rng.random() < 0.5:
        lines = _with_surroundings(rng, lines)
    counts = Counter(line["character"] for line in lines)
    names = [person.name for person in present]
    return {
        "scenario": _scenario(rng, book, names),
        "topic": f"What is to become of {book.matter.thing}",
        "key_characters": [{"name": p.name, "thought": _motive(book, p)} for p in present],
        "dialogues": lines,
        "speaking_characters_w_env": [name for name, _ in counts.most_common()],
        "major_characters": names,
        "weight": round(rng.uniform(1, 9), 3),
        "plot": _plot(rng, book, present, number),
        "character_profiles": {p.name: _profile(p) for p in book.cast},
        "book": book.title,
        "i_p": number,
        "i_c": 0,
        "tag": "made",
    }


# -- who says what -------------------------------------------------------------------------------


def _lines(rng: random.Random, book: _Book, present: Sequence[_Person]) -> list[dict[str, str]]:
    """Six to thirteen messages; everybody speaks, and nobody twice running or with a move twice."""
    moves = {p.name: list(_FOR if p.stands_for else _AGAINST) for p in present}
    lines: list[dict[str, str]] = []
    last, silent = None, list(present)
    for _ in range(rng.randint(4, 11)):
        able = [p for p in silent or present if p is not last and moves[p.name]]
        if not able:
            break
        last = present[0] if last is None else rng.choice(able)
        silent = [p for p in silent if p is not last]
        move = moves[last.name].pop(0)
        if move == "tell":  # there is one thing to tell, so only one of them can
            moves = {name: [m for m in left if m != "tell"] for name, left in moves.items()}
        lines.append(_line(rng, book, last, move, present))
    others = [p for p in present if p is not last]
    loser = rng.choice(others)
    winner = rng.choice([p for p in present if p is not loser])
    lines.append(_line(rng, book, loser, "yield", present))
    return [*lines, _line(rng, book, winner, "close", present)]


def _line(
    rng: random.Random, book: _Book, speaker: _Person, move: str, present: Sequence[_Person]
) -> dict[str, str]:
    matter = book.matter
    other = rng.choice([p for p in present if p is not speaker])
    speech = TEXTS["tempers"][speaker.temper][move].format(
        thing=matter.thing,
        want=matter.do if speaker.stands_for else matter.leave,
        worry=matter.fear
        if not speaker.stands_for
        else f"if we do nothing, not even {other.name} will sleep",
        clue=matter.clue,
        other=other.name.split()[0],
    )
    thought = f"[{rng.choice(TEXTS['thoughts'][move])}] "
    gesture = f"({rng.choice(TEXTS['gestures'][speaker.temper])}) " if rng.random() < 0.6 else ""
    return {"character": speaker.name, "message": f"{thought}{gesture}{speech}"}


def _with_surroundings(rng: random.Random, lines: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """One message of the Environment at a place of its own, now and then at the very beginning."""
    place = rng.choice((0, *range(2, len(lines))))
    message = {"character": ENVIRONMENT, "message": rng.choice(TEXTS["surroundings"])}
    return [*lines[:place], message, *lines[place:]]


# -- what is known of them -----------------------------------------------------------------------


def _scenario(rng: random.Random, book: _Book, names: Sequence[str]) -> str:
    met = f"{', '.join(names[:-1])} and {names[-1]}"
    return (
        f"{rng.choice(TEXTS['hours'])}. In {rng.choice(TEXTS['rooms'])}, {met} have met because of "
        f"{book.matter.thing}, and not all of them came gladly."
    )


def _motive(book: _Book, person: _Person) -> str:
    matter = book.matter
    if person.stands_for:
        return f"I want us to {matter.do}: {matter.hope}. I must not show how much I need it."
    return f"I would rather {matter.leave}: {matter.fear}. If I can, I will say so without a fight."


def _profile(person: _Person) -> str:
    first, manner = person.name.split()[0], TEXTS["manners"][person.temper]
    return f"{person.name} {person.calling}. {first} {manner}."


def _plot(
    rng: random.Random, book: _Book, present: Sequence[_Person], number: int
) -> dict[str, Any]:
    matter, first, second = book.matter, present[0], present[1]
    return {
        "summary": (
            f"What is to become of {matter.thing}? {first.name} wants to {matter.do}, "
            f"{second.name} would rather {matter.leave}. In the quarrel it may come out that "
            f"{matter.clue}; at last one of them gives way."
        ),
        "key_characters": [
            {
                "name": person.name,
                "description": f"Somebody who {person.calling}.",
                "summary": f"{person.name} {TEXTS['manners'][person.temper]}.",
            }
            for person in present
        ],
        "chapter": f"Chapter {number * 3 + rng.randint(1, 3)}",
        "prominence": rng.randint(40, 95),
        "state": "finished",
        "i_chunk": number,
        "i_p": number,
    }
