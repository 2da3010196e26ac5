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

NODES = 5
"""Rows of one chain."""

FIRST = (
    "Ilka",
    "Bram",
    "Sunniva",
    "Casimir",
    "Odalys",
    "Teodor",
    "Maren",
    "Yusuf",
    "Petra",
    "Anselm",
)
LAST = ("Brandt", "Okoye", "Lindqvist", "Marchetti", "Varga", "Halloran", "Sato", "Delacroix")
TRADES = ("bridge builder", "clockmaker", "ferry captain", "beekeeper", "organist", "bookbinder")
TOWNS = ("Halmstead", "Port Verity", "Ostrava Mill", "Lower Finch", "Saint Orlen")

Way = tuple[str, str]
"""A way to act: as a habit in words of a profile, and as it looks in one moment."""

HABITS: dict[str, tuple[str, tuple[str, ...], tuple[Way, ...]]] = {
    "praise": (
        "When praised",
        (
            "The mayor praises {name}'s work before a full hall.",
            "An old teacher says in public how proud they are of {name}.",
        ),
        (
            ("turns the talk to something else", "asks how the harvest is coming along"),
            ("gives all the credit to the helpers", "names everybody who lent a hand"),
            ("bows and asks for more applause", "takes a bow and waits for the clapping to go on"),
            ("points out the flaws that nobody has seen", "shows where a corner came out crooked"),
        ),
    ),
    "quarrel": (
        "When others quarrel",
        (
            "Two neighbours begin to shout at each other over a fence.",
            "At supper two cousins fall out over an inheritance.",
        ),
        (
            ("leaves without a word", "is gone before anybody notices"),
            (
                "steps between them and makes them sit down",
                "pushes two chairs out and will not have it otherwise",
            ),
            ("tells a joke until both laugh", "begins the story of the bishop and the goose"),
            ("writes down what each of them claims", "opens a notebook and takes both accounts"),
        ),
    ),
    "found": (
        "When something lost is found",
        (
            "A purse full of coins lies in the gutter, and the street is empty.",
            "Behind a loose brick a ring with initials comes to light.",
        ),
        (
            ("carries it to the constable", "is at the police station within minutes"),
            (
                "puts up a notice on every door",
                "letters a dozen signs and nails them up all over town",
            ),
            ("keeps it and tells nobody", "slips it into a pocket, and that is the last of it"),
            ("leaves it where it is", "looks at it and walks on"),
        ),
    ),
    "noise": (
        "When there is a noise at night",
        (
            "Long after midnight something scrapes along the back door.",
            "In the dark a step creaks on the stairs.",
        ),
        (
            ("takes the lamp and goes to look", "lights a wick and follows the sound"),
            (
                "pulls the blanket up and waits for the morning",
                "lies still under the covers until dawn",
            ),
            ("calls out and asks who is there", "shouts a question into the darkness"),
            ("wakes the whole house", "knocks on every bedroom door"),
        ),
    ),
    "request": (
        "When a stranger asks for help",
        (
            "A traveller with a broken wheel asks for a hand.",
            "A woman nobody knows begs for shelter from the storm.",
        ),
        (
            (
                "helps at once and asks no questions",
                "rolls up both sleeves before the sentence is over",
            ),
            ("asks for a fair price first", "wants to know what it will pay"),
            ("sends them to the parish", "gives directions to the vicarage"),
            (
                "wants to hear their story before anything else",
                "offers a seat and says: tell me everything",
            ),
        ),
    ),
    "news": (
        "When bad news comes by letter",
        (
            "A letter says that the savings at the bank are gone.",
            "A letter brings word that the ship has not arrived.",
        ),
        (
            (
                "burns the letter and goes on working",
                "feeds the page to the stove and picks up the tools",
            ),
            ("reads it aloud to whoever is near", "shares every line with the people in the room"),
            (
                "walks to the river and stays there until dusk",
                "sits by the water for the rest of the day",
            ),
            ("answers it within the hour", "has a reply in the post before noon"),
        ),
    ),
    "idle": (
        "When there is nothing to do",
        (
            "Rain keeps everybody indoors and the work is done.",
            "The train is six hours late and the waiting room is bare.",
        ),
        (
            ("carves small animals out of wood", "whittles a fox from a scrap of pine"),
            ("counts everything in sight", "finds out that there are forty-one tiles"),
            ("falls asleep sitting up", "is snoring upright before long"),
            ("starts a game with whoever is there", "deals cards to all who are around"),
        ),
    ),
}
"""Kind of moment → (its name in a profile, two such moments, the four ways to act in it)."""


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(i, seed) for i in range(n)]


def _row(i: int, seed: int) -> dict[str, Any]:
    chain, node = divmod(i, NODES)
    rng = random.Random(f"behaviorchain/{seed}/{chain}")
    name = f"{rng.choice(FIRST)} {rng.choice(LAST)}"
    habits = {kind: rng.choice(ways) for kind, (_, _, ways) in HABITS.items()}
    kinds = rng.sample(list(HABITS), NODES)
    shown = rng.choice(kinds)
    scenes = [HABITS[kind][1] for kind in HABITS]
    picks = dict(zip(HABITS, (rng.randrange(2) for _ in scenes), strict=True))
    steps = [
        {"context": _scene(kind, picks[kind], name), "behavior": f"{name} {habits[kind][1]}."}
        for kind in kinds
    ]
    ways = list(HABITS[kinds[node]][2])
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
    return HABITS[kind][1][pick].format(name=name)


def _profile(rng: random.Random, name: str, habits: dict[str, Way], shown: str) -> str:
    """Who somebody is: trade, town, and every habit but the one that is shown elsewhere."""
    told = [kind for kind in habits if kind != shown]
    rng.shuffle(told)
    first = f"{name} is a {rng.choice(TRADES)} from {rng.choice(TOWNS)}."
    return " ".join([first, *(f"{HABITS[k][0]}, {name} {habits[k][0]}." for k in told)])


def _history(name: str, shown: str, pick: int, way: str) -> list[dict[str, Any]]:
    first = f"It is the first winter of {name} in the new house."
    second = f"{_scene(shown, pick, name)} {name} {way}. Those who know {name} are not surprised."
    return [
        {"chapter_num": number, "chapter_content": text}
        for number, text in enumerate((first, second), 1)
    ]
