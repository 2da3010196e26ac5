"""Rows of `social_r1`: short scenes that turn on what somebody means, feels, or does not know.

Six kinds take turns: irony, white lies, hints, hidden feelings, careless remarks, false beliefs.
What decides a scene is told in it (who was there, what somebody did a moment before), and `why`
says which part that is; only the writer of a worked example reads `why`.

    {"prompt_text": "Story: Ida had planned ...\\nQuestion: What does Ida mean?\\nA. ...\\nB. ...",
     "answer_letter": "B", "answer_text": "B. She finds the weather awful", "kind": "irony", ...}
"""

from __future__ import annotations

import random
from typing import Any

from soulkit.tasks.texts import Texts

NAMES = (
    "Ada", "Bruno", "Chiara", "Deniz", "Elif", "Florian", "Gwen", "Hugo", "Ida", "Jaro", "Kaia",
    "Levi", "Mina", "Nils", "Olga", "Piet", "Runa", "Samir", "Tilda", "Vito",
)  # fmt: skip
_THINGS = ("umbrella", "guitar", "bicycle pump", "tent", "lamp", "sewing kit", "drill", "kettle")
_PLACES = ("cupboard", "shed", "hallway", "attic", "cellar", "car boot")

TEXTS = Texts(__file__)

KINDS = ("irony", "white_lie", "hint", "hidden_feeling", "careless_remark", "false_belief")


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"social_r1/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
    kind = KINDS[index % len(KINDS)]
    scene = rng.choice(TEXTS["scenes"][kind])
    filled = dict(zip("abc", rng.sample(NAMES, 3), strict=True))
    filled |= {"thing": rng.choice(_THINGS), "place": rng.choice(_PLACES)}
    options = [scene["right"], *rng.sample(scene["others"], rng.choice((2, 3)))]
    rng.shuffle(options)
    letter = "ABCD"[options.index(scene["right"])]
    lettered = [f"{'ABCD'[i]}. {text}" for i, text in enumerate(options)]
    lines = (f"Story: {scene['story']}", f"Question: {scene['question']}", *lettered)
    return {
        "prompt_text": "\n".join(lines).format(**filled),
        "answer_letter": letter,
        "answer_text": f"{letter}. {scene['right']}".format(**filled),
        "kind": kind,
        "why": scene["why"].format(**filled),
        "index": index,
    }
