"""Rows of `coser`: generated scenes of invented books, or CoSER's test set.

Generated: a book has a cast of four with different tempers and something to quarrel about; SCENES
consecutive rows belong to one book. The plot states each character's wish and the outcome.

Imported: each record is one scene of a book, kept as JSON text under `circumstance`:

    {"book": "...", "scenario": "...", "plot": {...}, "character_profiles": {"Ilka": "..."},
     "key_characters": [{"name": "Ilka", "thought": "..."}], "major_characters": ["Ilka"],
     "speaking_characters_w_env": ["Ilka", "Environment"], "tag": "ood", "dialogues":
     [{"character": "Ilka", "message": "[What now?] (stands up) Who is there?"}], ...}
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow
from soulkit.tasks.coser.scene import ENVIRONMENT, is_message
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need
from soulkit.tasks.kit.prompting import Texts
from soulkit.text import join_and

TEXTS = Texts(__file__)
SCENES = 4
"""Number of consecutive rows (scenes) per book."""

_FOR = ("open", "press", "tell", "offer", "warn", "doubt", "ask")
_AGAINST = ("ask", "refuse", "doubt", "tell", "warn", "offer", "press")


@dataclass(frozen=True, slots=True)
class _Person:
    name: str
    temper: str
    calling: str
    stands_for: bool
    """Whether the character is in favour of the proposal."""


@dataclass(frozen=True, slots=True)
class _Book:
    title: str
    matter: Mapping[str, str]
    """The subject of the quarrel: a thing, what each side would do with it, and why."""
    cast: tuple[_Person, ...]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(seed, i) for i in range(n)]


def _made_row(seed: int, index: int) -> dict[str, Any]:
    number = index // SCENES
    book = _book(random.Random(f"coser/{seed}/book/{number}"), number)
    scene = _scene(random.Random(f"coser/{seed}/scene/{index}"), book, index % SCENES)
    return {"circumstance": json.dumps(scene, ensure_ascii=False), "index": index}


def _book(rng: random.Random, number: int) -> _Book:
    names = [
        f"{first} {rng.choice(TEXTS['last_heads'])}{rng.choice(TEXTS['last_tails'])}"
        for first in rng.sample(TEXTS["first"], 4)
    ]
    tempers = rng.sample(tuple(TEXTS["tempers"]), 4)
    callings = rng.sample(TEXTS["callings"], 4)
    town = rng.choice(TEXTS["town_heads"]) + rng.choice(TEXTS["town_tails"])
    title = f"{rng.choice(TEXTS['titles'])}: A Chronicle of {town}, volume {number + 1}"
    cast = tuple(
        _Person(*person, stands_for=place % 2 == 0)
        for place, person in enumerate(zip(names, tempers, callings, strict=True))
    )
    return _Book(title, rng.choice(TEXTS["matters"]), cast)


def _scene(rng: random.Random, book: _Book, number: int) -> dict[str, Any]:
    # The first two of a cast take different sides, so that every scene has a quarrel.
    present = list(book.cast[: rng.choice((2, 2, 3, 4))])
    lines = _lines(rng, book, present)
    if rng.random() < 0.5:
        lines = _with_surroundings(rng, lines)
    counts = Counter(line["character"] for line in lines)
    names = [person.name for person in present]
    return {
        "scenario": _scenario(rng, book, names),
        "topic": f"What is to become of {book.matter['thing']}",
        "key_characters": [{"name": p.name, "thought": _motive(book, p)} for p in present],
        "dialogues": lines,
        "speaking_characters_w_env": [name for name, _ in counts.most_common()],
        "major_characters": names,
        "weight": round(rng.uniform(1, 9), 3),
        "plot": _plot(rng, book, present, number),
        "character_profiles": {
            p.name: f"{p.name} {p.calling}. {p.name.split()[0]} {TEXTS['manners'][p.temper]}."
            for p in book.cast
        },
        "book": book.title,
        "i_p": number,
        "i_c": 0,
        "tag": "made",
    }


# -- who says what -------------------------------------------------------------------------------


def _lines(rng: random.Random, book: _Book, present: Sequence[_Person]) -> list[dict[str, str]]:
    """Six to thirteen messages; everyone speaks, never twice in a row or with the same move."""
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
        if move == "tell":  # there is only one thing to tell, so only one character can tell it
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
        thing=matter["thing"],
        want=matter["do"] if speaker.stands_for else matter["leave"],
        worry=matter["fear"]
        if not speaker.stands_for
        else f"if we do nothing, not even {other.name} will sleep",
        clue=matter["clue"],
        other=other.name.split()[0],
    )
    thought = f"[{rng.choice(TEXTS['thoughts'][move])}] "
    gesture = f"({rng.choice(TEXTS['gestures'][speaker.temper])}) " if rng.random() < 0.6 else ""
    return {"character": speaker.name, "message": f"{thought}{gesture}{speech}"}


def _with_surroundings(rng: random.Random, lines: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Insert one Environment message at a random place, sometimes at the very beginning."""
    place = rng.choice((0, *range(2, len(lines))))
    message = {"character": ENVIRONMENT, "message": rng.choice(TEXTS["surroundings"])}
    return [*lines[:place], message, *lines[place:]]


# -- what is known of them -----------------------------------------------------------------------


def _scenario(rng: random.Random, book: _Book, names: Sequence[str]) -> str:
    met = join_and(names)
    return (
        f"{rng.choice(TEXTS['hours'])}. In {rng.choice(TEXTS['rooms'])}, {met} have met because of "
        f"{book.matter['thing']}, and not all of them came gladly."
    )


def _motive(book: _Book, person: _Person) -> str:
    matter = book.matter
    if person.stands_for:
        return f"I want us to {matter['do']}: {matter['hope']}. I must not show how much I need it."
    wish = f"I would rather {matter['leave']}: {matter['fear']}."
    return f"{wish} If I can, I will say so without a fight."


def _plot(
    rng: random.Random, book: _Book, present: Sequence[_Person], number: int
) -> dict[str, Any]:
    matter, first, second = book.matter, present[0], present[1]
    return {
        "summary": (
            f"What is to become of {matter['thing']}? {first.name} wants to {matter['do']}, "
            f"{second.name} would rather {matter['leave']}. In the quarrel it may come out that "
            f"{matter['clue']}; at last one of them gives way."
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


# -- imported ------------------------------------------------------------------------------------

LICENCE = (
    "not stated by the source; scenes and dialogue come from novels, most of them in copyright"
)


def import_coser(path: Path) -> Imported:
    """Rows of a file of scenes; DataError if no record is a scene."""
    return import_records(
        path, _imported_row, fields=("book", "scenario", "dialogues"),
        way_out="Give test_set.json, or its records as JSON lines.", licence=LICENCE, notes=_notes,
    )  # fmt: skip


def _imported_row(raw: RawRow, index: int) -> Row:
    book, _ = need(raw, "book", "scenario")
    _check_scene(raw.fields)
    circumstance = json.dumps(raw.fields, ensure_ascii=False)
    return {"circumstance": circumstance, "book": book, "tag": raw.fields.get("tag")}


def _check_scene(fields: Mapping[str, Any]) -> None:
    """BadRecord for a scene that cannot be played or compared."""
    plot, profiles = fields.get("plot"), fields.get("character_profiles")
    if not isinstance(plot, Mapping) or not isinstance(profiles, Mapping):
        raise BadRecord("its plot or its character_profiles is not an object")
    speaking = _names(fields.get("speaking_characters_w_env"))
    if not speaking or not _names(fields.get("major_characters")):
        raise BadRecord("it does not list the speakers and the major characters")
    lines = fields.get("dialogues")
    if not isinstance(lines, list) or not lines or not all(map(is_message, lines)):
        raise BadRecord("its dialogues are not a list of messages, each with a character")
    strangers = {line["character"] for line in lines} - set(speaking)
    if strangers:
        raise BadRecord(f"{', '.join(sorted(strangers))} speaks but is not listed as a speaker")


def _names(value: Any) -> list[str]:
    named = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
    return value if named else []


def _notes(rows: Sequence[Row], bad: Sequence[BadRow]) -> tuple[str, ...]:
    tags = Counter(str(row["tag"]) for row in rows if row["tag"])
    counted = ", ".join(f"{count} {tag}" for tag, count in sorted(tags.items())) or "no tags"
    books = len({row["book"] for row in rows})
    return (
        f"{len(rows)} scenes of {books} books ({counted}).",
        f"Licence: {LICENCE}. Use the rows only for evaluation on this machine. Do not publish "
        "them or train on them without permission.",
    )
