"""Generated rows of `scene_task`: a cat, a place, and a thought for each of three people."""

from __future__ import annotations

import random
from typing import Any

CATS = ("Minka", "Pablo", "Schnurri", "Olive", "Tiger", "Zelda", "Mops", "Biscuit")
PLACES = ("the bus stop", "the garden fence", "the stairs", "the bakery", "the playground")
# Seat → (what the person thinks, what they say instead).
THOUGHTS = {
    "owner": (
        ("I left the kitchen window open.", "I only turned round for a minute."),
        ("I shouted at the cat this morning.", "It was a morning like any other."),
        ("I forgot to buy food again.", "There was plenty in the bowl, I think."),
    ),
    "neighbour": (
        ("I have fed the cat for weeks.", "I hardly know the animal."),
        ("I am glad about the quiet.", "What a pity, and in this weather."),
        ("I locked the shed without looking.", "Has anybody tried the cellars?"),
    ),
    "child": (
        ("The cat sleeps under my bed.", "Cats like it where it is warm!"),
        ("I gave the cat my sandwich.", "Maybe it is just not hungry!"),
        ("I made a house of boxes for the cat.", "Can I look behind the bins? Please?"),
    ),
}


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_row(random.Random(f"scene_task/{seed}/{i}")) for i in range(n)]


def _row(rng: random.Random) -> dict[str, Any]:
    cat, place = rng.choice(CATS), rng.choice(PLACES)
    chosen = {seat: rng.choice(thoughts) for seat, thoughts in THOUGHTS.items()}
    lines = [f"{seat}: [{thought}] {words}" for seat, (thought, words) in chosen.items()]
    return {
        "cat": cat,
        "place": place,
        **{f"{seat}_thought": thought for seat, (thought, _) in chosen.items()},
        "written": [*lines, "street: A bell rings.", f"owner: {cat}! Was that the bell?"],
    }
