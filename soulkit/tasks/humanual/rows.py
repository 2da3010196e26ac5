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
from typing import Any

from soulkit.tasks.humanual.public import NEWS, OPINION, POLITICS
from soulkit.tasks.humanual.texts import (
    BOOK,
    CHAT,
    EMAIL,
    JOBS,
    PASTIMES,
    TOWNS,
    Domain,
    Stance,
    Topic,
)

DOMAINS: dict[str, Domain] = {
    "book": BOOK, "chat": CHAT, "email": EMAIL, "news": NEWS, "opinion": OPINION,
    "politics": POLITICS,
}  # fmt: skip
TASKS = tuple(f"humanual_{domain}" for domain in DOMAINS)
PER_PERSON = 2
"""Rows in a row that are by the same person."""


@dataclass(frozen=True, slots=True)
class _Habit:
    """How somebody writes: in words, and as what it does to the two sentences of a saying."""

    told: str
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
    topic = rng.sample(DOMAINS[domain].topics, PER_PERSON)[turn]
    first, second = rng.choices(person.stance.says, k=PER_PERSON)[turn]
    written = person.habit.write(first.format(**topic.words), second.format(**topic.words))
    return {
        "persona": person.text,
        "prompt": json.dumps(_messages(topic), ensure_ascii=False),
        "completion": written,
        "id": f"made-{domain}-{seed}-{index}",
        "dataset": DOMAINS[domain].dataset,
        "category": topic.category,
        "user_id": f"made-{domain}-{seed}-{number}",
        "index": index,
    }


def _person(rng: random.Random, domain: str) -> _Person:
    stance = rng.choice(DOMAINS[domain].stances)
    habit = rng.choice(HABITS)
    text = (
        f"A {rng.choice(JOBS)} of {rng.randint(18, 79)} from {rng.choice(TOWNS)} who "
        f"{rng.choice(PASTIMES)}. In matters like these, a person who {stance.trait}. {habit.told}"
    )
    return _Person(text, stance, habit)


def _messages(topic: Topic) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in topic.seen]
