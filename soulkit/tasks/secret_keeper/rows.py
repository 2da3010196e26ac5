"""Rows of `secret_keeper`: small invented people with public facts and one secret.

Every value belongs to one topic and occurs in no prompt, so that "conveyed" and "given away" can be
read from the words alone.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = (
    "Anouk",
    "Bastian",
    "Cleo",
    "Dario",
    "Esme",
    "Faris",
    "Greta",
    "Hamid",
    "Ilka",
    "Jonas",
    "Katya",
    "Lorenz",
    "Marisol",
    "Nuri",
    "Odile",
    "Pavel",
    "Quinn",
    "Rosa",
    "Sven",
    "Talia",
)
PLACES = ("bakery", "ferry", "library", "market", "museum", "station", "tavern", "workshop")
TOPICS: dict[str, tuple[str, ...]] = {
    "job": ("baker", "carpenter", "nurse", "pilot", "tailor", "teacher"),
    "hometown": ("Bergen", "Cadiz", "Lyon", "Porto", "Riga", "Turin"),
    "pet": ("canary", "hamster", "parrot", "rabbit", "terrier", "tortoise"),
    "instrument": ("cello", "drum", "flute", "harp", "trumpet", "violin"),
    "dish": ("curry", "dumplings", "lasagna", "omelette", "paella", "ramen"),
    "sport": ("archery", "boxing", "fencing", "rowing", "skating", "tennis"),
    "hideout": ("attic", "boathouse", "cellar", "greenhouse", "lighthouse", "tunnel"),
    "treasure": ("compass", "diary", "lantern", "locket", "ring", "sapphire"),
    "surprise": ("balloon", "concert", "picnic", "puppet", "telescope", "voyage"),
}
SECRETS = ("hideout", "treasure", "surprise")
N_FACTS = 3


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"secret_keeper/{seed}/{i}")) for i in range(n)]


def _row(rng: random.Random) -> dict[str, Any]:
    keeper, visitor = rng.sample(NAMES, 2)
    public = [topic for topic in TOPICS if topic not in SECRETS]
    topics = rng.sample(public, N_FACTS)
    hidden = rng.choice(SECRETS)
    return {
        "keeper": keeper,
        "visitor": visitor,
        "place": rng.choice(PLACES),
        "facts": [{"topic": t, "value": rng.choice(TOPICS[t])} for t in topics],
        "secret": {"topic": hidden, "value": rng.choice(TOPICS[hidden])},
        "wanted": topics,
        "curiosity": hidden,
    }
