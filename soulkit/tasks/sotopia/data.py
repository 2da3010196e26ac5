"""Rows of `sotopia`: generated, or imported from Sotopia's release.

    {"scenario": "Agent1 offers a used cello for 600, and Agent2 has come to look at it.",
     "agent1_name": "Ada Brandt", "agent1_goal": "Sell the cello today for at least 510, ...", ...,
     "eval_position": "agent1"}

Generated: a template with random things, sums and days, in which two people have partly conflicting
goals. Rows 2k and 2k + 1 are the same pair, played from each side. Imported: a row joins the
release's scenarios, characters, pairs and relationships. From the folder, the 14 hard scenarios are
imported (70 pairs); from the file of pairs, all of them. Text for the referee alone
(`viewer="environment"`) is removed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, check_file, read_rows
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need, wrong_shape
from soulkit.tasks.kit.made_rows import draw_slots
from soulkit.tasks.kit.prompting import Texts
from soulkit.text import with_stop

TEXTS = Texts(__file__)


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(random.Random(f"sotopia/{seed}/{i // 2}"), i) for i in range(n)]


def _made_row(rng: random.Random, index: int) -> dict[str, Any]:
    first_names = rng.sample(TEXTS["first_names"], 2)
    names = [f"{first} {rng.choice(TEXTS['last_names'])}" for first in first_names]
    hidden = rng.sample(TEXTS["secrets"], 2)
    profiles = [_made_profile(rng, *person) for person in zip(names, hidden, strict=True)]
    scene = TEXTS["scenes"][index // 2 % len(TEXTS["scenes"])]
    slots = draw_slots(rng, scene["slots"])
    goals = [goal.format(**slots) for goal in scene["goals"]]
    return {
        "scenario": scene["scenario"].format(**slots),
        "agent1_name": names[0], "agent2_name": names[1],
        "agent1_background": profiles[0], "agent2_background": profiles[1],
        "agent1_goal": goals[0], "agent2_goal": goals[1],
        "relationship": TEXTS["relationships"][slots["level"]],
        "eval_position": f"agent{1 + index % 2}",
        "codename": scene["codename"],
        "index": index,
    }  # fmt: skip


def _made_profile(rng: random.Random, name: str, secret: str) -> str:
    return (
        f"{name}, {rng.randrange(19, 76)} years old, {rng.choice(TEXTS['trades'])}. Temper: "
        f"{rng.choice(TEXTS['tempers'])}. Secret, known to nobody else: {secret}."
    )


# -- imported ------------------------------------------------------------------------------------

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

_WAY_OUT = "Give the folder of Sotopia's released profiles."
_FOR_REFEREE = re.compile(r"<p viewer=.environment.>.*?</p>", re.DOTALL)
_MARK = re.compile(r"</?(?:extra_info|strategy_hint|clarification_hint|p)\b[^>]*>")


def import_sotopia(path: Path) -> Imported:
    """Rows of a release folder (the hard scenarios), or of its file of pairs (all of them).

    DataError if one of the files next to it is missing or has another format.
    """
    folder, only_hard = (path, True) if path.is_dir() else (path.parent, False)
    file = folder / PAIRS if only_hard else path
    pairs, bad = _read_file(file, "env_id", "agent_ids")
    scenes, bad_scenes = _read_file(folder / SCENES, "env_id", "scenario", "agent_goals")
    people, bad_people = _read_file(folder / PEOPLE, "agent_id", "first_name")
    bonds, bad_bonds = _read_file(folder / BONDS, "agent1_id", "agent2_id")
    release = _Release(scenes, people, bonds)
    if only_hard:
        pairs = [pair for pair in pairs if _id(pair, "env_id") in HARD_SCENARIOS]
    return import_records(
        file, release.rows, way_out=_WAY_OUT, origin="sotopia-space", licence=LICENCE,
        read=lambda _: (pairs, [*bad, *bad_scenes, *bad_people, *bad_bonds]),
        notes=lambda rows, _: _notes(rows, only_hard, release),
    )  # fmt: skip


def _read_file(path: Path, *columns: str) -> tuple[list[RawRow], list[BadRow]]:
    check_file(path)
    rows, bad = read_rows(path)
    if not any(all(name in row.fields for name in columns) for row in rows):
        raise wrong_shape(path, columns, _WAY_OUT)
    return rows, bad


class _Release:
    """Scenarios, characters and relationships by id."""

    def __init__(
        self, scenes: Iterable[RawRow], people: Iterable[RawRow], bonds: Iterable[RawRow]
    ) -> None:
        self.scenes = {_id(row, "env_id"): row for row in scenes}
        self.people = {_id(row, "agent_id"): row for row in people}
        self.bonds = {
            frozenset((_id(row, "agent1_id"), _id(row, "agent2_id"))): row.fields for row in bonds
        }
        self.differ = 0
        """Pairs whose relationship differs from the one that the scenario requires."""

    def rows(self, pair: RawRow, index: int) -> list[Row]:
        """Both rows of a pair."""
        place = _id(pair, "env_id")
        scene = self.scenes.get(place) if place else None
        ids = pair.fields.get("agent_ids")
        if scene is None:
            raise BadRecord(f"its scenario '{place:.40}' is not in {SCENES}")
        ids = [str(i) for i in ids] if isinstance(ids, list) else []
        if len(ids) != 2 or any(i not in self.people for i in ids):
            raise BadRecord(f"its characters are not two entries of {PEOPLE}")
        level = str(scene.fields.get("relationship"))
        bond = self.bonds.get(frozenset(ids))
        common = {
            **_scene_fields(scene), **_side_fields([self.people[i] for i in ids]),
            "relationship": _BONDS_BY_LEVEL.get(level, ""), "combo_id": pair.fields.get("combo_id"),
        }  # fmt: skip
        self.differ += bond is not None and str(bond.get("relationship")) != level
        return [{**common, "eval_position": side, "index": 2 * index + i}
                for i, side in enumerate(_SIDES)]  # fmt: skip


def _id(row: RawRow, name: str) -> str:
    """An id as text, whatever its type in the file; "" if there is none."""
    return str(row.fields.get(name) or "")


def _scene_fields(scene: RawRow) -> dict[str, Any]:
    (text,) = need(scene, "scenario")
    goals = scene.fields.get("agent_goals")
    if not isinstance(goals, Sequence) or len(goals) != 2 or not all(map(_is_text, goals)):
        raise BadRecord("its scenario does not have two goals")
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
    """The text without marks and referee-only parts; line breaks stay, runs of spaces do not."""
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
    """A character's non-empty fields as one paragraph."""

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
    lines = [f"{label}: {with_stop(text_of(field))}" for label, field in labelled if text_of(field)]
    opening = ", ".join([name, *filter(None, facts)])
    return " ".join([f"{opening}{manner}.", *lines])


def _notes(
    rows: Sequence[Mapping[str, Any]], only_hard: bool, release: _Release
) -> tuple[str, ...]:
    pairs, scenes = len(rows) // 2, len({row["environment_id"] for row in rows})
    notes = [
        f"{pairs} pairs in {scenes} scenarios, each played from both sides: {len(rows)} rows. The "
        "released evaluation file has only one side per pair."
    ]
    if only_hard:
        notes.append(f"Only the hard scenarios; to import all of them, give the file {PAIRS}.")
    if release.differ:
        notes.append(
            f"In {release.differ} pairs the relationship differs from the one in the scenario; the "
            "rows follow the scenario."
        )
    return tuple(notes)
