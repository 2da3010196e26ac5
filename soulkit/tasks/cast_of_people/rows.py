"""Made rows of cast_of_people: a person with three cues, a question, and the reply by the rule.

    job  ── rule ──▶ greeting      judge ──▶ jokingly ──▶ Hey!
    town ── rule ──▶ topic         Lyon  ──▶ weather  ──▶ Heard about the rain?
    pet  ── rule ──▶ farewell      hen   ──▶ gladly   ──▶ Cheers.

The rule pairs every cue with a way; `world` is its seed, and no prompt contains it. Two kinds of
rows:

    people    What does this person say? The ways follow the rule.
    lessons   What a model must know before it can learn from feedback. Two in five ask for the cues
              of a person. The others ask what a person says whose ways are random in every row, so
              only the feedback tells.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any, Literal

from soulkit.errors import ConfigError
from soulkit.tasks.kit.prompting import Texts

Row = dict[str, Any]
Values = tuple[int, ...]
"""The number of a value for each of the three cues, or of the three ways."""

TEXTS = Texts(__file__)
CUES = ("job", "town", "pet")
PARTS = ("greeting", "topic", "farewell")
MOST = 7
"""Maximum number of values per cue."""
REPLY, FACTS = "{}! Heard about the {}? {}.", "{}, {}, {}."
"""The forms of a reply, and of the answer to a question about the cues."""


def rows(
    n: int, seed: int, *, kind: Literal["people", "lessons"] = "people", values: int = MOST,
    world: int = 0,
) -> list[Row]:  # fmt: skip
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more.

    Each block of `values`³ rows of `people` has every combination of cues once. ConfigError unless
    2 <= values <= 7.
    """
    if not 2 <= values <= MOST:
        raise ConfigError(
            f"A cue cannot have {values} values.",
            f"There are words for 2 to {MOST} values.",
            f"Give --values a number from 2 to {MOST}.",
        )
    make = _lesson if kind == "lessons" else _person
    return [make(i, seed, values, world) for i in range(n)]


@cache
def rule_of(world: int, values: int) -> tuple[Values, ...]:
    """For job, town and pet: the way of each of its values."""
    rng = random.Random(f"rule/{world}/{values}")
    return tuple(tuple(rng.sample(range(values), values)) for _ in CUES)


def _person(index: int, seed: int, values: int, world: int) -> Row:
    cues = _cues_of(index, seed, values)
    ways = tuple(rule[cue] for rule, cue in zip(rule_of(world, values), cues, strict=True))
    names = TEXTS["names"]
    first = random.Random(f"name/{seed}/{cues}").randrange(len(names))
    return _row(names[(first + index // values**3) % len(names)], cues, ways)


def _cues_of(index: int, seed: int, values: int) -> Values:
    """The combination of row `index`: steps of a fixed stride through all of them."""
    size = values**3
    rng = random.Random(f"people/{seed}/{values}")
    start = rng.randrange(size)
    stride = rng.choice([step for step in range(1, size) if math.gcd(step, size) == 1])
    place = (start + stride * index) % size
    return place // values**2, place // values % values, place % values


def _lesson(index: int, seed: int, values: int, world: int) -> Row:
    rng = random.Random(f"lessons/{seed}/{index}")
    cues, ways = (tuple(rng.randrange(values) for _ in CUES) for _ in range(2))
    row = _row(rng.choice(TEXTS["names"]), cues, ways)
    if index % 5 >= 2:
        return row
    question = f"Your job, town and pet, {row['name']}?"
    reply = FACTS.format(*(row[cue] for cue in CUES))
    return {**row, "question": question, "kind": "facts", "ways": None, "reply": reply}


def _row(name: str, cues: Values, ways: Values) -> Row:
    chosen = [list(TEXTS["ways"][part])[way] for part, way in zip(PARTS, ways, strict=True)]
    words = [TEXTS["ways"][part][way] for part, way in zip(PARTS, chosen, strict=True)]
    return {
        "name": name,
        **{cue: TEXTS["cues"][cue][value] for cue, value in zip(CUES, cues, strict=True)},
        "question": f"How are things, {name}?",
        "kind": "person",
        "ways": " ".join(chosen),
        "reply": REPLY.format(*words),
    }
