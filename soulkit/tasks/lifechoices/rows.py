"""Rows of `lifechoices`: invented people whose remembered deeds show what drives them.

The memory of a `plain` row shows one drive three times, among deeds that show nothing. In a
`changed` row it shows another drive first, then a turning point, then the one that counts now. The
four options are what four drives would do in one situation, so a row is solved by reading the
memory and asking who acts like that.

    {"character_name": "Corin Vale", "book": "The Salt Road", "input_text": "Corin Vale is a ...",
     "Multiple Choice Question": {"Scenario": "Soldiers ask at Corin's ...", "Question": "What will
     Corin do?", "Options": ["Name a price ...", ...], "Correct Answer": "C"}, "kind": "plain"}
"""

from __future__ import annotations

import random
from typing import Any

from soulkit.tasks.texts import Texts

TEXTS = Texts(__file__)

_LAST = ("Vale", "Brandt", "Ostrow", "Hale", "Quill", "Marsh", "Tolland", "Reyes", "Fenn", "Dorn")
_JOBS = ("ferryman's child", "weaver", "clerk", "carter", "innkeeper", "bell founder", "gardener")
_TOWNS = ("Tarn", "Low Weir", "Saltby", "Gelm", "Orrin", "Maidenford")


ASKED = ("What will {n} do?", "What does {n} decide?", "Which course does {n} take?")


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"lifechoices/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
    who = dict(zip("nfp", rng.sample(TEXTS["first"], 3), strict=True)) | {
        "town": rng.choice(_TOWNS)
    }
    full = f"{who['n']} {rng.choice(_LAST)}"
    situation = rng.choice(TEXTS["situations"])
    drive, *others = rng.sample(sorted(TEXTS["drives"]), 4)
    changed = index % 3 == 2
    options = [drive, *others]
    rng.shuffle(options)
    return {
        "character_name": full,
        "book": rng.choice(TEXTS["books"]),
        "input_text": _memory(rng, {**who, "full": full}, drive, others[0] if changed else ""),
        "Multiple Choice Question": {
            "Scenario": situation["scene"].format(**who),
            "Question": rng.choice(ASKED).format(**who),
            "Options": [situation["acts"][option].format(**who) for option in options],
            "Correct Answer": "ABCD"[options.index(drive)],
        },
        "kind": "changed" if changed else "plain",
        "index": index,
    }


def _memory(rng: random.Random, who: dict[str, str], drive: str, former: str) -> str:
    """The life so far: deeds of the former drive and a turning point first, where there is one."""
    quiet = rng.sample(TEXTS["quiet"], 4)
    parts = [f"{{full}} is a {rng.choice(_JOBS)} from {{town}}. {{f}} is an old friend."]
    if former:
        early = [*rng.sample(TEXTS["drives"][former], 2), quiet.pop()]
        rng.shuffle(early)
        parts += ["This is told of the early years.", *early, rng.choice(TEXTS["turns"])]
    late = [*rng.sample(TEXTS["drives"][drive], 3), *quiet]
    rng.shuffle(late)
    return " ".join([*parts, *late]).format(**who)
