"""Rows of `mmtom`: one person, one flat, what is where, what the person does, two statements.

The reader sees everything, the person only what lies in containers that they opened. Types take
turns, so that groups are equally large:

* 1.1 the person walks straight to where the thing is; 1.2 passes it by and walks to an empty place;
  1.3 has looked into a place in vain and walks on: what do they believe?
* 2.1 opens a container, leaves what is in it and walks to one that holds something else; 2.2 the
  same, but walks to an empty place; 2.3 looks into two; 2.4 takes something in the end: what do
  they want?

    {"question": "This flat has a hall, ... Question: ... (a) ... (b) ...", "answer": "b",
     "question_type": 2.1, "episode": 3, "test": ["goal"], ...}
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_NAMES = ("Aino", "Bela", "Caspar", "Delia", "Edda", "Florin", "Gesa", "Hanno", "Imre", "Jorun")
_ROOMS = ("study", "hall", "laundry room", "dining room", "bedroom", "kitchen")
_CONTAINERS = (
    "oak chest", "hat box", "bread bin", "tool drawer", "pantry shelf box", "sideboard",
    "wicker trunk", "medicine cabinet", "sewing box", "ice box",
)  # fmt: skip
_THINGS = (
    "torch", "soup bowl", "jar of honey", "deck of cards", "stapler", "corkscrew", "tea towel",
    "bar of soap", "ball of string", "alarm clock", "pair of pliers", "tin of sardines",
)  # fmt: skip
TYPES = (1.1, 2.1, 1.2, 2.2, 1.3, 2.3, 2.4)
REQUEST = "Please respond with either a or b."


@dataclass(frozen=True, slots=True)
class _Scene:
    who: str
    rooms: tuple[str, ...]
    boxes: tuple[str, ...]
    """Containers of the flat; the first two get the first two things unless a type says else."""
    things: tuple[str, ...]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"mmtom/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
    kind = TYPES[index % len(TYPES)]
    scene = _Scene(
        rng.choice(_NAMES), tuple(rng.sample(_ROOMS, 3)), tuple(rng.sample(_CONTAINERS, 4)),
        tuple(rng.sample(_THINGS, 3)),
    )  # fmt: skip
    story, question, right, wrong = (_belief if kind < 2 else _goal)(scene, kind)
    answer = rng.choice("ab")
    first, second = (right, wrong) if answer == "a" else (wrong, right)
    text = f"{story}\nQuestion: {question} (a) {first} (b) {second} {REQUEST}"
    begin = rng.randrange(40)
    return {
        "question": text,
        "answer": answer,
        "question_type": kind,
        "episode": index,
        "test": ["belief" if kind < 2 else "goal"],
        "start_time": begin,
        "end_time": begin + rng.randint(5, 40),
        "answer_list": ["a", "b"],
        "index": index,
    }


def _flat(scene: _Scene, contents: dict[str, str]) -> str:
    listed = ", ".join(f"a {room}" for room in scene.rooms[:-1])
    lines = [f"This flat has {listed} and a {scene.rooms[-1]}."]
    for box in scene.boxes:
        lines.append(f"In the {box} there is {_one(contents.get(box))}.")
    return " ".join(lines)


def _one(thing: str | None) -> str:
    if thing is None:
        return "nothing"
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def _belief(scene: _Scene, kind: float) -> tuple[str, str, str, str]:
    """What happens, the question, the statement that fits, the one that does not."""
    who, (here, there, _), (p, q, r, _) = scene.who, scene.rooms, scene.boxes
    thing = scene.things[0]
    contents = {p: thing, r: scene.things[1]}
    start = f"{who} is in the {here} and has not opened anything yet."
    if kind == 1.1:
        acts = f"{who} goes to the {there} and walks straight up to the {p}."
        inside, place = True, p
    elif kind == 1.2:
        acts = (
            f"{who} goes to the {there}, stops in front of the {p}, leaves it closed, and walks on "
            f"to the {q}."
        )
        inside, place = False, p
    else:
        acts = (
            f"{who} goes to the {there}, opens the {q}, looks in, closes it, and walks on to the "
            f"{r}."
        )
        inside, place = False, q
    question = f"If {who} has been looking for {_one(thing)}, which of the two is more likely?"
    believes = f"{who} believes that the {thing} is in the {place}."
    doubts = f"{who} believes that the {thing} is not in the {place}."
    right, wrong = (believes, doubts) if inside else (doubts, believes)
    return f"{_flat(scene, contents)} {start} {acts}", question, right, wrong


def _goal(scene: _Scene, kind: float) -> tuple[str, str, str, str]:
    who, (here, there, _), (p, q, r, s) = scene.who, scene.rooms, scene.boxes
    left, goal, third = scene.things
    contents = {p: left, q: goal}
    looks = f"{who} goes to the {there}, opens the {p}, sees what is in it, closes it again"
    if kind == 2.1:
        acts = f"{looks}, and walks to the {q}."
    elif kind == 2.2:
        acts = f"{looks}, and walks to the {s}, which {who} has never opened."
    elif kind == 2.3:
        contents[r] = third
        acts = f"{looks}, opens the {r} and closes that as well, and walks to the {q}."
    else:
        acts = f"{looks}, opens the {q} and takes out what is in it."
    start = f"{who} is in the {here} and has not opened anything yet."
    question = "Which of the two is more likely?"
    right = f"{who} has been looking for {_one(goal)}."
    wrong = f"{who} has been looking for {_one(left)}."
    return f"{_flat(scene, contents)} {start} {acts}", question, right, wrong
