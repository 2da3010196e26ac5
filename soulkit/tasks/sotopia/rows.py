"""Rows of `sotopia`: invented scenes in which two people want things that do not quite go together.

A scene is a template with drawn things, sums and days; the people are drawn with a trade, a temper
and a secret. Rows 2k and 2k + 1 are one pair, played from either side.

    {"scenario": "Agent1 offers a used cello for 600, and Agent2 has come to look at it.",
     "agent1_name": "Ada Brandt", "agent1_goal": "Sell the cello today for at least 510, ...", ...,
     "eval_position": "agent1"}
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

_FIRST = (
    "Ada", "Bruno", "Celine", "Dmitri", "Edda", "Farid", "Ginevra", "Hanno", "Ines", "Jovan",
    "Kaja", "Levin", "Mirela", "Noor", "Otis", "Paola", "Renke", "Salma", "Tomas", "Yara",
)  # fmt: skip
_LAST = (
    "Brandt", "Castell", "Dorsey", "Eklund", "Farkas", "Grau", "Holm", "Ivanek", "Jansen", "Kovar",
    "Lorne", "Mattei", "Novik", "Oduya", "Petrell", "Rask", "Sorel", "Tveit", "Usman", "Weir",
)  # fmt: skip
_TRADES = (
    "bookbinder", "bus driver", "dental nurse", "gardener", "geography teacher", "glazier",
    "lighting technician", "locksmith", "pastry cook", "piano tuner", "surveyor", "translator",
)  # fmt: skip
TEMPERS = (
    "speaks little and means every word", "jokes when things get tense",
    "plans everything and hates surprises", "is generous with time and careful with money",
    "says what comes to mind and regrets it later", "would rather give in than quarrel",
    "likes to win and to be seen winning", "listens long and decides fast",
)  # fmt: skip
_SECRETS = (
    "lost the savings of the choir and paid them back unnoticed",
    "has written the anonymous column in the town's paper for years",
    "failed the final examination and never told the family",
    "is about to move to another country", "once let a friend take the blame for a broken window",
    "collects letters that were never sent", "has been out of work since the spring",
    "won a small lottery and told nobody",
)  # fmt: skip
_LEVELS = {
    "strangers": "They have never met.", "neighbours": "They are acquainted.",
    "friends": "They are friends.", "family": "They are family.",
}  # fmt: skip

_Setting = tuple[str, str, str, str, str]
"""(codename, scenario, relationship, goal of the first, goal of the second)."""


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"sotopia/{seed}/{i // 2}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
    one, two = rng.sample(_FIRST, 2)
    names = (f"{one} {rng.choice(_LAST)}", f"{two} {rng.choice(_LAST)}")
    hidden = rng.sample(_SECRETS, 2)
    profiles = [_profile(rng, *person) for person in zip(names, hidden, strict=True)]
    codename, scenario, level, goal1, goal2 = _SCENES[index // 2 % len(_SCENES)](rng)
    return {
        "scenario": scenario,
        "agent1_name": names[0], "agent2_name": names[1],
        "agent1_background": profiles[0], "agent2_background": profiles[1],
        "agent1_goal": goal1, "agent2_goal": goal2,
        "relationship": _LEVELS[level],
        "eval_position": f"agent{1 + index % 2}",
        "codename": codename,
        "index": index,
    }  # fmt: skip


def _profile(rng: random.Random, name: str, secret: str) -> str:
    return (
        f"{name}, {rng.randrange(19, 76)} years old, {rng.choice(_TRADES)}. Temper: "
        f"{rng.choice(TEMPERS)}. Secret, known to nobody else: {secret}."
    )


def _sale(rng: random.Random) -> _Setting:
    thing = rng.choice(("cello", "cargo bicycle", "loom", "wood stove", "telescope", "dinghy"))
    price = rng.randrange(20, 90) * 10
    least, most = round(price * 0.85), round(price * 0.9)
    return (
        "sale", f"Agent1 offers a used {thing} for {price}, and Agent2 has come to look at it.",
        "strangers", f"Sell the {thing} today for at least {least}, without saying how low you go.",
        f"Buy the {thing}, and pay {most} at most. You need it by the weekend and hide that.",
    )  # fmt: skip


def _noise(rng: random.Random) -> _Setting:
    what = rng.choice(("practises the trumpet", "repairs motorcycles", "holds choir rehearsals"))
    hour = rng.choice(("six in the morning", "eleven at night", "noon on Sundays"))
    return (
        "noise", f"Agent1 {what} at {hour}, wall to wall with Agent2, who rings the bell.",
        "neighbours", "Keep your hour: there is no other one at which you can do it.",
        "Get quiet at that hour, and stay on good terms, since you will need a favour next month.",
    )  # fmt: skip


def _loan(rng: random.Random) -> _Setting:
    sum_ = rng.randrange(4, 40) * 50
    reason = rng.choice(("a course fee", "the vet's bill", "a deposit for a flat", "new brakes"))
    return (
        "loan", "Agent1 and Agent2 have finished dinner at Agent2's place and wash up together.",
        "friends", f"Borrow {sum_} until summer for {reason}, though the last loan is not repaid.",
        f"Lend {sum_ // 2} at most, and bring up the last loan without hurting anybody.",
    )  # fmt: skip


def _journey(rng: random.Random) -> _Setting:
    one, two = rng.sample(("the sea", "the mountains", "a big city", "the parents' farm"), 2)
    days = rng.randrange(3, 11)
    return (
        "journey", f"Agent1 and Agent2 have {days} days off together and one ticket to book today.",
        rng.choice(("friends", "family")), f"Go to {one}; a surprise waits there that you keep.",
        f"Go to {two}. You have already promised somebody there to come, and say so only if asked.",
    )  # fmt: skip


def _credit(rng: random.Random) -> _Setting:
    work = rng.choice(("a mural", "a school play", "a cookbook", "a garden plan", "a short film"))
    return (
        "credit", f"Agent1 and Agent2 made {work} together. It wins a prize for one person.",
        "friends",
        "Have your name on the prize: you had the idea, and need it to apply for a post.",
        "Have your name on the prize: you did most of the work, and were left out once before.",
    )  # fmt: skip


def _secret(rng: random.Random) -> _Setting:
    feast = rng.choice(("a birthday", "a retirement", "a wedding anniversary", "a homecoming"))
    day = rng.choice(("Tuesday", "Thursday", "Saturday"))
    return (
        "surprise", "Agent1 and Agent2 meet by chance in front of the bakery. Both have next "
        f"{day} on their minds.",
        "neighbours", f"Find out whether Agent2 is free on {day}, and do not give away that "
        f"{feast} is planned for Agent2.",
        f"Find out what everybody keeps from you, and keep {day} free for a doctor's appointment.",
    )  # fmt: skip


def _share(rng: random.Random) -> _Setting:
    things = rng.sample(("lamps", "chairs", "records", "plants", "maps"), 3)
    counts = [rng.randrange(1, 5) for _ in things]
    listed = ", ".join(f"{count} {thing}" for count, thing in zip(counts, things, strict=True))
    first, second = (rng.sample((1, 3, 5), 3) for _ in range(2))

    def worth(points: list[int]) -> str:
        parts = (f"{thing}: {point}" for thing, point in zip(things, points, strict=True))
        return f"points for each of the {', of the '.join(parts)}"

    return (
        "share", f"Agent1 and Agent2 clear a flat and divide what is left: {listed}.",
        "family", f"Get as many points as you can ({worth(first)}).",
        f"Get as many points as you can ({worth(second)}).",
    )  # fmt: skip


_SCENES: tuple[Callable[[random.Random], _Setting], ...] = (
    _sale, _noise, _loan, _journey, _credit, _secret, _share,
)  # fmt: skip
