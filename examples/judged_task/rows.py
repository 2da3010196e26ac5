"""Generated rows of `judged_task`: everyday topics to write a few sentences about."""

from __future__ import annotations

import random
from typing import Any

THINGS = ("a bus", "a neighbour", "a letter", "a dog", "a storm", "a recipe", "a chair", "a song")
TURNS = (
    "that came too late",
    "that nobody wanted",
    "that would not leave",
    "that changed its mind",
    "that was better than expected",
    "that had been forgotten",
)
PLACES = ("on a Monday", "in the rain", "at the harbour", "after a wedding", "in an empty school")


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; topics repeat only after all of them have been used."""
    topics = [f"{a} {b} {c}" for a in THINGS for b in TURNS for c in PLACES]
    random.Random(f"judged_task/{seed}").shuffle(topics)
    return [{"topic": topics[i % len(topics)]} for i in range(n)]
