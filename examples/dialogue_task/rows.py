"""Generated rows of `dialogue_task`: two people, an occasion, and one day that suits both."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("Ada", "Bo", "Cem", "Dora", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jule", "Kim", "Lars")
OCCASIONS = ("a walk", "the cinema", "a chess game", "dinner", "moving a sofa", "a swim")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
EACH = 3
"""Number of free days per person."""


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_row(random.Random(f"dialogue_task/{seed}/{i}")) for i in range(n)]


def _row(rng: random.Random) -> dict[str, Any]:
    caller, friend = rng.sample(NAMES, 2)
    day, *others = rng.sample(DAYS, 2 * EACH - 1)
    free, friend_free = [day, *others[: EACH - 1]], [day, *others[EACH - 1 :]]
    return {
        "caller": caller,
        "friend": friend,
        "occasion": rng.choice(OCCASIONS),
        "free": sorted(free, key=DAYS.index),
        "friend_free": sorted(friend_free, key=DAYS.index),
        "day": day,
    }
