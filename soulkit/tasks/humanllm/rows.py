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
from typing import Any

Row = dict[str, Any]

PURSUITS: dict[str, tuple[str, ...]] = {
    "angling": ("fishing rod", "tackle box", "float set", "fishing net", "wading boots",
                "fishing reel", "bait bucket"),
    "chess": ("chess clock", "endgame book", "wooden chessboard", "opening flashcards",
              "score pad", "travel chess kit", "chess puzzle calendar"),
    "pottery": ("potter's wheel", "stoneware clay", "glaze brush", "kiln gloves",
                "clay wire cutter", "celadon glaze", "trimming tool"),
    "camping": ("two-man tent", "sleeping bag", "camp stove", "trekking poles", "tarp",
                "water purifier", "folding cot"),
    "baking": ("rolling pin", "proofing basket", "piping bags", "bread lame", "flour sieve",
               "muffin tray", "dough scraper"),
    "cycling": ("bicycle pump", "cycling jersey", "clipless pedals", "chain oil",
                "handlebar tape", "bike repair stand", "puncture kit"),
    "astronomy": ("refractor telescope", "star atlas", "moon filter", "red headlamp",
                  "wide eyepiece", "telescope tripod", "planisphere"),
    "sewing": ("sewing machine", "fabric shears", "thread assortment", "seam ripper",
               "pin cushion", "zipper pack", "pattern paper"),
    "guitar": ("guitar strings", "capo", "plectrum tin", "guitar tuner", "leather guitar strap",
               "chord chart poster", "guitar stand"),
    "aquarium": ("aquarium heater", "fish flakes", "gravel vacuum", "driftwood root",
                 "algae scraper", "air pump", "snail trap"),
    "gardening": ("pruning shears", "tomato seedlings", "watering can", "compost bin",
                  "garden kneeler", "slug collars", "seed tray"),
    "photography": ("camera lens", "lens cloth", "memory card", "light meter", "camera backpack",
                    "softbox lamp", "negative sleeves"),
    "yoga": ("yoga mat", "cork block", "stretching belt", "bolster pillow", "incense sticks",
             "toe socks", "massage roller"),
    "coffee": ("espresso tamper", "coffee grinder", "milk frother", "paper filters",
               "gooseneck kettle", "coffee scale", "pour-over cone"),
    "drawing": ("charcoal set", "sketchbook", "kneaded eraser", "ink nibs", "easel",
                "watercolour pans", "drawing board"),
    "swimming": ("swim goggles", "pull buoy", "nose clip", "swim fins", "swimming cap",
                 "kickboard", "quick-dry towel"),
    "birding": ("field binoculars", "bird guide", "nest box", "suet balls", "camouflage poncho",
                "bird bath", "hummingbird feeder"),
    "woodwork": ("hand plane", "wood chisel", "bar clamps", "sanding disc", "dovetail saw",
                 "linseed varnish", "marking gauge"),
    "climbing": ("climbing shoes", "chalk bag", "belay device", "climbing harness", "finger tape",
                 "carabiner pair", "crash pad"),
    "modelling": ("airbrush", "model glue", "locomotive kit", "enamel paints", "track sections",
                  "hobby knife", "tiny trees"),
}  # fmt: skip
EVERYDAY = ("soap", "batteries", "light bulbs", "toothpaste", "tea towels", "umbrella", "candles")
JOBS = ("baker", "bus driver", "dentist", "florist", "plumber", "teacher", "translator", "welder")
PLACES = ("by a lake", "in a small flat", "at the edge of town", "near the station", "on a farm",
          "with two cats", "with a large family")  # fmt: skip
_LETTERS = "ABCDEFGHIJKLMNOPQRST"


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"humanllm/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> Row:
    pursuit, *others = rng.sample(sorted(PURSUITS), len(PURSUITS))
    bought = rng.sample(PURSUITS[pursuit], rng.randint(4, 6))
    gold = rng.choice([thing for thing in PURSUITS[pursuit] if thing not in bought])
    history = [*bought, *rng.sample(EVERYDAY, rng.randint(1, 2))]
    rng.shuffle(history)
    candidates = [gold, *(rng.choice(PURSUITS[other]) for other in others)]
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
    person = f"A {rng.choice(JOBS)} of {rng.randint(19, 74)} who lives {rng.choice(PLACES)}."
    past = ", ".join(f"History {i}: {thing}" for i, thing in enumerate(history, 1))
    offer = " ".join(f"Candidate {i}: {thing}" for i, thing in enumerate(candidates, 1))
    return f"{person} {past}\n{offer}\nWhich of these is bought next?"
