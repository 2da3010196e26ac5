"""Generated rows of `my_task`: a few figures of speech with random people and places."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("Ada", "Bo", "Cem", "Dora", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jule", "Kim", "Lars")
PLACES = ("kitchen", "office", "train", "garden", "waiting room", "cellar", "library", "tent")

# Situation, what is said, the meant reading, the wrong readings (the literal one first), kind.
FRAMES = (
    (
        "{a} and {b} sit in the {place}. The window is open and it is cold.",
        "It is rather fresh in here.",
        "{a} should close the window",
        ("{b} enjoys the fresh air", "{b} would like to paint the {place}"),
        "request",
    ),
    (
        "{a} sings in the {place} for the third hour.",
        "You must be tired by now.",
        "{a} should stop singing",
        ("{b} worries about the health of {a}", "{b} would like to sing as well"),
        "request",
    ),
    (
        "{a} has rebuilt the {place} and shows it to {b}.",
        "The door handle is very nice.",
        "{b} does not like what was made of the {place}",
        ("{b} collects door handles", "{b} wants to see the rest another day"),
        "criticism",
    ),
    (
        "{a} asks {b} to come along to the {place} on Sunday.",
        "I have a lot of ironing to do.",
        "{b} does not want to come",
        ("{b} looks forward to the ironing", "{b} would rather meet at noon"),
        "refusal",
    ),
    (
        "{a} gave a speech in the {place}, and {b} had to blow their nose all the time.",
        "I think I have caught a cold.",
        "{b} was moved by the speech",
        ("{b} needs a doctor", "{b} found the {place} too draughty"),
        "praise",
    ),
)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_row(random.Random(f"my_task/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
    situation, words, meant, others, kind = FRAMES[index % len(FRAMES)]
    one, other = rng.sample(NAMES, 2)
    drawn = {"a": one, "b": other, "place": rng.choice(PLACES)}
    options = [text.format(**drawn) for text in (meant, *others)]
    rng.shuffle(options)
    return {
        "situation": situation.format(**drawn),
        "speaker": other,
        "said": words,
        "options": options,
        "meant": meant.format(**drawn),
        "kind": kind,
    }
