"""Rows of the six Humanual domains: invented people, what they saw, and what they wrote about it.

A persona tells what the person thinks of such things and how they write; both show in the
completion, so that it can be predicted from the row, as far as a human's words ever can. PER_PERSON
rows in a row are by the same person.

    {"persona": "A tram driver of 41 from an island ... Writes ...", "prompt": "[{\\"role\\":
     \\"poster\\", \\"content\\": \\"AITA for ...\\"}]", "completion": "NTA. It is your car, ...",
     "id": "made-opinion-0-7", "dataset": "forum", "category": "work", "index": 7}
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)
_DOMAINS = ("book", "chat", "email", "news", "opinion", "politics")
TASKS = tuple(f"humanual_{domain}" for domain in _DOMAINS)
PER_PERSON = 2
"""Rows in a row that are by the same person."""


@dataclass(frozen=True, slots=True)
class Stance:
    """A trait, in the words of a description, and two ways of saying what follows from it."""

    trait: str
    says: tuple[tuple[str, str], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class _Topic:
    """What the person saw (role, text), and what the sayings of a stance are filled with."""

    category: str
    seen: tuple[tuple[str, str], ...]
    words: dict[str, str]


@dataclass(frozen=True, slots=True)
class Domain:
    dataset: str
    stances: tuple[Stance, ...]
    topics: tuple[_Topic, ...]


@cache
def domain_of(name: str) -> Domain:
    """One of DOMAINS, with its texts."""
    table = TEXTS["domains"][name]
    stances = tuple(Stance(**stance) for stance in table["stances"])
    return Domain(table["dataset"], stances, tuple(_Topic(**topic) for topic in table["topics"]))


@dataclass(frozen=True, slots=True)
class _Habit:
    """How somebody writes: in words, and as what it does to the two sentences of a saying."""

    description: str
    write: Callable[[str, str], str]


HABITS = (
    _Habit("Writes in full sentences and leaves it at two.", lambda a, b: f"{a} {b}"),
    _Habit("Writes everything in small letters.", lambda a, b: f"{a} {b}".lower()),
    _Habit("Says one thing and stops.", lambda a, b: a),
    _Habit("Starts a new line for every thought.", lambda a, b: f"{a}\n\n{b}"),
    _Habit("Begins with an apology for butting in.", lambda a, b: f"Sorry to butt in. {a} {b}"),
    _Habit("Ends on three dots.", lambda a, b: f"{a} {b.rstrip('.!?')}..."),
)


@dataclass(frozen=True, slots=True)
class _Person:
    text: str
    stance: Stance
    habit: _Habit


def rows(n: int, seed: int, *, task: str) -> list[dict[str, Any]]:
    """`n` rows of one of TASKS; row i depends on (seed, i) alone, so fewer are a prefix of more."""
    domain = task.removeprefix("humanual_")
    return [_row(domain, seed, index) for index in range(n)]


def _row(domain: str, seed: int, index: int) -> dict[str, Any]:
    number, turn = divmod(index, PER_PERSON)
    rng = random.Random(f"humanual/{domain}/{seed}/{number}")
    person = _person(rng, domain)
    # Drawn together, so that nobody writes twice about the same thing.
    topic = rng.sample(domain_of(domain).topics, PER_PERSON)[turn]
    first, second = rng.choices(person.stance.says, k=PER_PERSON)[turn]
    written = person.habit.write(first.format(**topic.words), second.format(**topic.words))
    return {
        "persona": person.text,
        "prompt": json.dumps(_messages(topic), ensure_ascii=False),
        "completion": written,
        "id": f"made-{domain}-{seed}-{index}",
        "dataset": domain_of(domain).dataset,
        "category": topic.category,
        "user_id": f"made-{domain}-{seed}-{number}",
        "index": index,
    }


def _person(rng: random.Random, domain: str) -> _Person:
    stance = rng.choice(domain_of(domain).stances)
    habit = rng.choice(HABITS)
    job, age, town = rng.choice(TEXTS["jobs"]), rng.randint(18, 79), rng.choice(TEXTS["towns"])
    text = (
        f"A {job} of {age} from {town} who {rng.choice(TEXTS['pastimes'])}. In matters like these, "
        f"a person who {stance.trait}. {habit.description}"
    )
    return _Person(text, stance, habit)


def _messages(topic: _Topic) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in topic.seen]
