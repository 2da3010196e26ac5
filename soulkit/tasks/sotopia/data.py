"""Rows of `sotopia`: made here, or imported from Sotopia's release.

Made: a scene is a template with drawn things, sums and days, in which two people want things that
do not quite go together; the people are drawn with a trade, a temper and a secret. Rows 2k and
2k + 1 are one pair, played from either side.

    {"scenario": "Agent1 offers a used cello for 600, and Agent2 has come to look at it.",
     "agent1_name": "Ada Brandt", "agent1_goal": "Sell the cello today for at least 510, ...", ...,
     "eval_position": "agent1"}

Imported: the release keeps four files side by side: scenarios with two goals, characters, pairs of
characters with a scenario, and how people know each other. A row joins them. Given the folder, the
14 hard scenarios are taken (70 pairs); given the file of pairs, all of them. Every pair is two
rows, one for each side, which stand in one cluster.

    Amara Hartley, 29 years old, wildlife biologist (she/her). … Secret, known to nobody else: …

A profile is written here from the character's fields. A row says the level of the relationship in
words and leaves out its story: neither side learns anything of the other's profile. Marks around
hints in goals are taken off, what they mark stays; what a scenario says to the referee alone
(`viewer="environment"`) is left out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, check_file, read_rows
from soulkit.tasks.kit.importing import BadRecord, Imported, need, wrong_shape

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
_RELATIONSHIPS = {
    "strangers": "They have never met.", "neighbours": "They are acquainted.",
    "friends": "They are friends.", "family": "They are family.",
}  # fmt: skip

_Setting = tuple[str, str, str, str, str]
"""(codename, scenario, relationship, goal of the first, goal of the second)."""


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_made_row(random.Random(f"sotopia/{seed}/{i // 2}"), i) for i in range(n)]


def _made_row(rng: random.Random, index: int) -> dict[str, Any]:
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
        "relationship": _RELATIONSHIPS[level],
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


LICENCE = "Apache-2.0 (sotopia-space)"
PAIRS, SCENES = "env_agent_combo_storages.jsonl", "environment_profiles.jsonl"
PEOPLE, BONDS = "agent_profiles.jsonl", "relationship_profiles.jsonl"
_SIDES = ("agent1", "agent2")
_BONDS_BY_LEVEL = {
    "0": "They have never met.",
    "1": "They know each other by name.",
    "2": "They are acquainted.",
    "3": "They are friends.",
    "4": "They are in a romantic relationship.",
    "5": "They are family.",
}
HARD_SCENARIOS = frozenset(
    f"01H7VFH{rest}"
    for rest in (
        "NV13MHN97GAH73E3KM8", "N5WVC5HKKVBHZBA553R", "N9W0WAFZCBT09PKJJNK", "PDZVVCDZR3AARA547CY",
        "PQQQY6H4DNC6NBQ8XTG", "N7WJK7VWVRZZTQ6DX9T", "PS5WJW2694R1MNC8JFY", "NN7XTR99319DS8KZCQM",
        "Q11NAMZS4A2RDGDB01V", "PSWGDGEYRP63H2DJKV0", "NF4G18PC9JHGRC8A1R6", "NNYH3W0VRWVY178K2TK",
        "P8AN5643B0NR0NP00VE", "N7A1ZX5KSMT2YN9RXC4",
    )
)  # fmt: skip
"""The scenarios of the hard split."""

_FOR_REFEREE = re.compile(r"<p viewer=.environment.>.*?</p>", re.DOTALL)
_MARK = re.compile(r"</?(?:extra_info|strategy_hint|clarification_hint|p)\b[^>]*>")


def import_sotopia(path: Path) -> Imported:
    """Rows of a release folder (the hard scenarios), or of its file of pairs (all of them).

    DataError when one of the files beside it is missing or of another shape.
    """
    folder, only_hard = (path, True) if path.is_dir() else (path.parent, False)
    pairs, bad = _read_file(folder / PAIRS if only_hard else path, "env_id", "agent_ids")
    scenes, bad_scenes = _read_file(folder / SCENES, "env_id", "scenario", "agent_goals")
    people, bad_people = _read_file(folder / PEOPLE, "agent_id", "first_name")
    bonds, bad_bonds = _read_file(folder / BONDS, "agent1_id", "agent2_id")
    release = _Release(scenes, people, bonds)
    rows: list[dict[str, Any]] = []
    bad = [*bad, *bad_scenes, *bad_people, *bad_bonds]
    for pair in pairs:
        if only_hard and _id(pair, "env_id") not in HARD_SCENARIOS:
            continue
        try:
            rows += release.rows(pair, len(rows))
        except BadRecord as error:
            bad.append(BadRow(pair.source, str(error)))
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=_notes(rows, only_hard, release))


def _read_file(path: Path, *columns: str) -> tuple[list[RawRow], list[BadRow]]:
    check_file(path)
    rows, bad = read_rows(path)
    if not any(all(name in row.fields for name in columns) for row in rows):
        raise wrong_shape(path, columns, "Give the folder of Sotopia's released profiles.")
    return rows, bad


class _Release:
    """Scenarios, characters and bonds by id."""

    def __init__(
        self, scenes: Iterable[RawRow], people: Iterable[RawRow], bonds: Iterable[RawRow]
    ) -> None:
        self.scenes = {_id(row, "env_id"): row for row in scenes}
        self.people = {_id(row, "agent_id"): row for row in people}
        self.bonds = {
            frozenset((_id(row, "agent1_id"), _id(row, "agent2_id"))): row.fields for row in bonds
        }
        self.differ = 0
        """Pairs whose own bond is another than the one the scenario asks for."""

    def rows(self, pair: RawRow, index: int) -> list[dict[str, Any]]:
        """Both rows of a pair."""
        place = _id(pair, "env_id")
        scene = self.scenes.get(place) if place else None
        ids = pair.fields.get("agent_ids")
        if scene is None:
            raise BadRecord(f"its scenario '{place:.40}' is not in {SCENES}")
        ids = [str(i) for i in ids] if isinstance(ids, list) else []
        if len(ids) != 2 or any(i not in self.people for i in ids):
            raise BadRecord(f"its characters are not two of {PEOPLE}")
        level = str(scene.fields.get("relationship"))
        bond = self.bonds.get(frozenset(ids))
        common = {
            **_scene_fields(scene), **_side_fields([self.people[i] for i in ids]),
            "relationship": _BONDS_BY_LEVEL.get(level, ""), "combo_id": pair.fields.get("combo_id"),
            "provenance": f"sotopia-space, {pair.source}", "licence": LICENCE,
        }  # fmt: skip
        self.differ += bond is not None and str(bond.get("relationship")) != level
        return [{**common, "eval_position": side, "index": index + i}
                for i, side in enumerate(_SIDES)]  # fmt: skip


def _id(row: RawRow, name: str) -> str:
    """An id as text, whatever a file writes it as; "" for none."""
    return str(row.fields.get(name) or "")


def _scene_fields(scene: RawRow) -> dict[str, Any]:
    (text,) = need(scene, "scenario")
    goals = scene.fields.get("agent_goals")
    if not isinstance(goals, Sequence) or len(goals) != 2 or not all(map(_is_text, goals)):
        raise BadRecord("its scenario has no two goals")
    return {
        "scenario": _without_marks(text),
        **{f"{side}_goal": _without_marks(goal) for side, goal in zip(_SIDES, goals, strict=True)},
        "codename": scene.fields.get("codename"),
        "environment_id": _id(scene, "env_id"),
        "hard": _id(scene, "env_id") in HARD_SCENARIOS,
    }


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _without_marks(text: str) -> str:
    """Without marks and what is for the referee; line breaks stay, runs of blanks do not."""
    bare = _MARK.sub("", _FOR_REFEREE.sub("", text))
    lines = (" ".join(line.split()) for line in bare.splitlines())
    return "\n".join(line for line in lines if line)


def _side_fields(people: Sequence[RawRow]) -> dict[str, str]:
    fields = {}
    for side, person in zip(_SIDES, people, strict=True):
        first, last = need(person, "first_name", "last_name")
        fields[f"{side}_name"] = f"{first.strip()} {last.strip()}"
        fields[f"{side}_background"] = profile_text(person.fields)
    return fields


def profile_text(person: Mapping[str, Any]) -> str:
    """A character's fields as one paragraph; empty ones are passed over."""

    def text_of(name: str) -> str:
        value = person.get(name)
        parts = value if isinstance(value, list) else [value]
        return ", ".join(str(part).strip() for part in parts if part not in (None, ""))

    name = f"{text_of('first_name')} {text_of('last_name')}"
    facts = [f"{text_of('age')} years old" if text_of("age") else "", text_of("occupation").lower()]
    manner = f" ({text_of('gender_pronoun').lower()})" if text_of("gender_pronoun") else ""
    labelled = (
        ("Known to others", "public_info"), ("Temper and convictions", "personality_and_values"),
        ("Five traits", "big_five"), ("Way of deciding", "decision_making_style"),
        ("Moral values", "moral_values"), ("Holds dear", "schwartz_personal_values"),
        ("Type", "mbti"), ("Secret, known to nobody else", "secret"),
    )  # fmt: skip
    lines = [f"{label}: {_sentence(text_of(field))}" for label, field in labelled if text_of(field)]
    opening = ", ".join([name, *filter(None, facts)])
    return " ".join([f"{opening}{manner}.", *lines])


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _notes(
    rows: Sequence[Mapping[str, Any]], only_hard: bool, release: _Release
) -> tuple[str, ...]:
    pairs, scenes = len(rows) // 2, len({row["environment_id"] for row in rows})
    notes = [
        f"{pairs} pairs in {scenes} scenarios, each played from both sides: {len(rows)} rows. The "
        "released evaluation file plays one side of a pair."
    ]
    if only_hard:
        notes.append(f"Only the hard scenarios; for all of them give the file {PAIRS}.")
    if release.differ:
        notes.append(
            f"{release.differ} pairs know each other otherwise than their scenario says; the rows "
            "say what the scenario says."
        )
    return tuple(notes)
