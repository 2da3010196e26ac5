"""People with a hidden rule: job, town and pet determine how someone greets, chats and leaves.

The job determines the greeting, the town the topic and the pet the farewell, each through a
shuffled list. The option `world` seeds this rule, which no prompt contains. Two kinds of rows:

    people    what does this person say? The answer follows the rule.
    lessons   what a model must know beforehand: two in five ask for the cues of a person; the
              others ask what a person says whose behaviour is random in every row, so that only
              the advice gives the answer
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any, Literal

from soulkit.errors import ConfigError

Words = tuple[str, ...]

NAMES = (
    "Ada", "Bo", "Cem", "Dora", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jule", "Kim", "Lars", "Mia",
    "Nils", "Olga", "Paul", "Quin", "Rosa", "Sven", "Tess", "Uma", "Vera", "Willem", "Xenia",
    "Yara", "Zeno", "Anka", "Birk", "Cleo", "Dirk",
)  # fmt: skip
USUAL = 20
"""The number of names for ordinary rows; the other names are for `--names others`."""
CUES: tuple[Words, ...] = (
    ("baker", "nurse", "pilot", "farmer", "tailor", "teacher", "plumber", "judge"),
    ("Delft", "Porto", "Ghent", "Turku", "Graz", "Lyon", "Kyoto", "Cusco"),
    ("goat", "parrot", "cat", "tortoise", "hen", "ferret", "carp", "mule"),
)
WAYS: tuple[Words, ...] = (
    ("warmly", "curtly", "shyly", "loudly", "formally", "jokingly", "sleepily", "grandly"),
    ("money", "weather", "family", "food", "health", "sport", "politics", "music"),
    ("abruptly", "tearfully", "politely", "slowly", "gladly", "silently", "angrily", "hopefully"),
)  # fmt: skip
WORDS: tuple[Words, ...] = (
    ("welcome", "what", "hm", "hey", "greetings", "ahoy", "yawn", "behold"),
    ("prices", "rain", "cousins", "soup", "knees", "goals", "elections", "songs"),
    ("off", "sob", "farewell", "anyway", "cheers", "nods", "enough", "soon"),
)
"""What people who behave like this say: word i of a list belongs to way i."""
SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in "aeiou")
MOST = 32
"""Maximum number of values per cue."""
FACTS = 2
"""How many of five lessons ask for the cues of a person."""


def rows(
    n: int, seed: int, *, kind: Literal["people", "lessons"] = "people", values: int = 8,
    world: int = 0, names: Literal["usual", "others"] = "usual",
) -> list[dict[str, Any]]:  # fmt: skip
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more.

    Each block of `values`³ rows of `people` contains every combination of cues once, in an order
    that depends only on the seed, not on the names. ConfigError unless 2 <= values <= 32.
    """
    if not 2 <= values <= MOST:
        raise ConfigError(
            f"A cue cannot have {values} values.",
            f"The word lists support 2 to {MOST}.",
            f"Give --values a number from 2 to {MOST}.",
        )
    if kind == "lessons":
        return [_lesson(random.Random(f"lessons/{seed}/{i}"), i, values) for i in range(n)]
    rule, pool = rule_of(world, values), NAMES[:USUAL] if names == "usual" else NAMES[USUAL:]
    return [_person(_cues_of(i, seed, values), i, pool, rule, values) for i in range(n)]


@cache
def rule_of(world: int, values: int) -> tuple[tuple[int, ...], ...]:
    """For job, town and pet: the way that each value of the cue determines."""
    rng = random.Random(f"rule/{world}/{values}")
    return tuple(tuple(rng.sample(range(values), values)) for _ in CUES)


@cache
def vocabulary(values: int) -> tuple[tuple[Words, ...], tuple[Words, ...], tuple[Words, ...]]:
    """Cues, ways and words, `values` of each; random syllables extend the lists above."""
    rng = random.Random("words")
    made = list(dict.fromkeys("".join(rng.choices(SYLLABLES, k=3)) for _ in range(2000)))
    lists = []
    for place, written in enumerate((*CUES, *WAYS, *WORDS)):
        spare = made[place * MOST : (place + 1) * MOST]
        lists.append((*written, *spare)[:values])
    return tuple(lists[:3]), tuple(lists[3:6]), tuple(lists[6:])


def _cues_of(index: int, seed: int, values: int) -> tuple[int, ...]:
    """The combination of row `index`; every block of `values`³ rows visits each one once."""
    size = values**3
    rng = random.Random(f"people/{seed}/{values}")
    start = rng.randrange(size)
    stride = next(s for s in iter(lambda: rng.randrange(1, size), 0) if math.gcd(s, size) == 1)
    place = (start + stride * index) % size
    return place // values**2, place // values % values, place % values


def _person(
    cues: tuple[int, ...], index: int, names: Words, rule: tuple[tuple[int, ...], ...], values: int
) -> dict[str, Any]:
    ways = tuple(rule[part][cue] for part, cue in enumerate(cues))
    first = random.Random(f"name/{cues}").randrange(len(names))
    return _row(names[(first + index // values**3) % len(names)], cues, ways, values)


def _lesson(rng: random.Random, index: int, values: int) -> dict[str, Any]:
    cues, ways = (tuple(rng.randrange(values) for _ in CUES) for _ in range(2))
    row = _row(rng.choice(NAMES), cues, ways, values)
    if index % 5 >= FACTS:
        return row
    question = f"What are the job, the town and the pet of {row['name']}?"
    reply = f"{row['job']} {row['town']} {row['pet']}"
    return {**row, "question": question, "kind": "fact", "ways": None, "reply": reply}


def _row(name: str, cues: tuple[int, ...], ways: tuple[int, ...], values: int) -> dict[str, Any]:
    all_cues, all_ways, all_words = vocabulary(values)
    job, town, pet = (words[i] for words, i in zip(all_cues, cues, strict=True))
    return {
        "name": name,
        "job": job,
        "town": town,
        "pet": pet,
        "question": f"What does {name} say?",
        "kind": "person",
        "ways": " ".join(words[i] for words, i in zip(all_ways, ways, strict=True)),
        "reply": " ".join(words[i] for words, i in zip(all_words, ways, strict=True)),
    }
