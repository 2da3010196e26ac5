"""Rows of `behaviorchain` made here: invented people with habits, each met in a chain of moments.

A person has one way of acting in every kind of moment. The profile tells all of these habits but
one; that one is shown in a chapter of the narrative instead, so that it pays to read both. Each
chain has five nodes, one row a node, and the options of a node are the four ways that anybody
could act in it, in other words than the profile's: only knowing the person tells which.

Example: {"persona_name": "Ilka Brandt", "profile_text": "... When praised, Ilka changes the
subject. ...", "history_truncated": [{"chapter_num": 1, "chapter_content": "..."}], "prior_chain":
[], "current_context": "The mayor praises her bridge.", "options_dict": {"A": ...},
"right_option_letter": "B"}.
"""

from __future__ import annotations

import random
from typing import Any

from soulkit.tasks.texts import Texts

NODES = 5
"""Rows of one chain."""


TEXTS = Texts(__file__)

_LAST = ("Brandt", "Okoye", "Lindqvist", "Marchetti", "Varga", "Halloran", "Sato", "Delacroix")
_TRADES = ("bridge builder", "clockmaker", "ferry captain", "beekeeper", "organist", "bookbinder")
_TOWNS = ("Halmstead", "Port Verity", "Ostrava Mill", "Lower Finch", "Saint Orlen")

Way = tuple[str, str]
"""A way to act: as a habit in words of a profile, and as it looks in one moment."""


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> dict[str, Any]:
    chain, node = divmod(i, NODES)
    rng = random.Random(f"behaviorchain/{seed}/{chain}")
    name = f"{rng.choice(TEXTS['first'])} {rng.choice(_LAST)}"
    every = TEXTS["habits"]
    habits = {kind: rng.choice(habit["ways"]) for kind, habit in every.items()}
    kinds = rng.sample(list(every), NODES)
    shown = rng.choice(kinds)
    picks = {kind: rng.randrange(2) for kind in every}
    steps = [
        {"context": _scene(kind, picks[kind], name), "behavior": f"{name} {habits[kind][1]}."}
        for kind in kinds
    ]
    ways = list(every[kinds[node]]["ways"])
    random.Random(f"behaviorchain/{seed}/{i}/order").shuffle(ways)
    return {
        "persona_name": name,
        "profile_text": _profile(rng, name, habits, shown),
        "history_truncated": _history(name, shown, 1 - picks[shown], habits[shown][0]),
        "prior_chain": steps[:node],
        "current_context": steps[node]["context"],
        "options_dict": {"ABCD"[k]: f"{name} {act}." for k, (_, act) in enumerate(ways)},
        "right_option_letter": "ABCD"[ways.index(habits[kinds[node]])],
        "index": i,
    }


def _scene(kind: str, pick: int, name: str) -> str:
    moment: str = TEXTS["habits"][kind]["moments"][pick]
    return moment.format(name=name)


def _profile(rng: random.Random, name: str, habits: dict[str, Way], shown: str) -> str:
    """Who somebody is: trade, town, and every habit but the one that is shown elsewhere."""
    kinds = [kind for kind in habits if kind != shown]
    rng.shuffle(kinds)
    first = f"{name} is a {rng.choice(_TRADES)} from {rng.choice(_TOWNS)}."
    named = {kind: habit["named"] for kind, habit in TEXTS["habits"].items()}
    return " ".join([first, *(f"{named[k]}, {name} {habits[k][0]}." for k in kinds)])


def _history(name: str, shown: str, pick: int, way: str) -> list[dict[str, Any]]:
    first = f"It is the first winter of {name} in the new house."
    second = f"{_scene(shown, pick, name)} {name} {way}. Those who know {name} are not surprised."
    return [
        {"chapter_num": number, "chapter_content": text}
        for number, text in enumerate((first, second), 1)
    ]
