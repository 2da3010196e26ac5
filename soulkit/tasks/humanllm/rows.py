"""Rows of `humanllm`: invented customers who pursue one thing, and twenty things on offer.

The history is mostly of one pursuit, with a few everyday purchases between; of the things on offer
exactly one belongs to that pursuit and was not bought yet, so a row is solvable from itself. The
text has the layout of released rows, its list of candidates included.

Example row: {"prompt_text": "A baker of 34 who lives by a lake. History 1: float set, History 2:
soap, History 3: fishing rod Candidate 1: ...", "candidates": ["fishing net", "chess clock", ...],
"answer_index": 0, "answer_letter": "A", "answer_text": "fishing net", "index": 5}.
"""

from __future__ import annotations

import random

from soulkit.tasks.made import Row
from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)

EVERYDAY = ("soap", "batteries", "light bulbs", "toothpaste", "tea towels", "umbrella", "candles")
_JOBS = ("baker", "bus driver", "dentist", "florist", "plumber", "teacher", "translator", "welder")
_PLACES = ("by a lake", "in a small flat", "at the edge of town", "near the station", "on a farm",
          "with two cats", "with a large family")  # fmt: skip
_LETTERS = "ABCDEFGHIJKLMNOPQRST"


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"humanllm/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> Row:
    pursuit, *others = rng.sample(sorted(TEXTS["pursuits"]), len(TEXTS["pursuits"]))
    bought = rng.sample(TEXTS["pursuits"][pursuit], rng.randint(4, 6))
    gold = rng.choice([thing for thing in TEXTS["pursuits"][pursuit] if thing not in bought])
    history = [*bought, *rng.sample(EVERYDAY, rng.randint(1, 2))]
    rng.shuffle(history)
    candidates = [gold, *(rng.choice(TEXTS["pursuits"][other]) for other in others)]
    rng.shuffle(candidates)
    place = candidates.index(gold)
    return {
        "prompt_text": _text(rng, history, candidates),
        "candidates": candidates,
        "answer_index": place,
        "answer_letter": _LETTERS[place],
        "answer_text": gold,
        "index": index,
    }


def _text(rng: random.Random, history: list[str], candidates: list[str]) -> str:
    person = f"A {rng.choice(_JOBS)} of {rng.randint(19, 74)} who lives {rng.choice(_PLACES)}."
    past = ", ".join(f"History {i}: {thing}" for i, thing in enumerate(history, 1))
    offer = " ".join(f"Candidate {i}: {thing}" for i, thing in enumerate(candidates, 1))
    return f"{person} {past}\n{offer}\nWhich of these is bought next?"
