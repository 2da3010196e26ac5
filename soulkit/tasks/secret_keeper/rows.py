"""Rows of `secret_keeper`: small invented people with public facts and one secret.

Every value belongs to one topic and occurs in no prompt, so that "conveyed" and "given away" can be
read from the words alone.
"""

from __future__ import annotations

import random
from typing import Any

from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)

_PLACES = ("bakery", "ferry", "library", "market", "museum", "station", "tavern", "workshop")
_SECRETS = ("hideout", "treasure", "surprise")
N_FACTS = 3


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"secret_keeper/{seed}/{i}")) for i in range(n)]


def _row(rng: random.Random) -> dict[str, Any]:
    keeper, visitor = rng.sample(TEXTS["names"], 2)
    public = [topic for topic in TEXTS["topics"] if topic not in _SECRETS]
    topics = rng.sample(public, N_FACTS)
    hidden = rng.choice(_SECRETS)
    return {
        "keeper": keeper,
        "visitor": visitor,
        "place": rng.choice(_PLACES),
        "facts": [{"topic": t, "value": rng.choice(TEXTS["topics"][t])} for t in topics],
        "secret": {"topic": hidden, "value": rng.choice(TEXTS["topics"][hidden])},
        "wanted": topics,
        "curiosity": hidden,
    }
