"""MMToM-QA, text only: which of two statements about a person at home is more likely.

Example row: {"question": "The flat has ... Olga opens the oven, shuts it and heads for the shelf.
Question: Suppose Olga wants the salmon. Which is likelier? (a) To her mind it lies on the shelf.
(b) To her mind it does not lie there. Answer with a or b.", "answer": "a", "question_type": 1.1,
"episode": 7}. Types that begin with 1 ask for a belief, those that begin with 2 for a goal.
`reference` takes any gold, and one exact form of an answer.

Made rows: the reader sees everything, the person only what lies in containers that they opened.

* 1.1 the person walks straight to where the thing is; 1.2 passes it by and walks to an empty place;
  1.3 has looked into a place in vain and walks on: what do they believe?
* 2.1 opens a container, leaves what is in it and walks to one that holds something else; 2.2 the
  same, but walks to an empty place; 2.3 looks into two; 2.4 takes something in the end: what do
  they want?
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken, tagged_letter
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.types import Episode, Example, Score

_OPTIONS = re.compile(r"\(a\)\s*(?P<a>.+?)\s*\(b\)\s*(?P<b>.+)", re.DOTALL | re.IGNORECASE)
_REQUEST = re.compile(r"(?:Please (?:respond|answer|reply)|Answer:)[^.]*\.?\s*\Z")

_NOT_READ = {
    "no_tag": "The reply gave no answer between the answer tags; close with one.",
    "malformed": "What stood between the tags was not one of the two letters; give one alone.",
    "empty": "The reply was empty; reason in a few sentences and then answer.",
    "truncated": "The reply was cut off before its answer; reason more briefly.",
    "refusal": "The question is about an everyday scene at home; give an answer.",
}
_ADVICE = {
    "1": "Go through the actions one by one. What somebody saw in an open container they know; "
    "whoever looks for a thing goes where they believe it to be, whether it is there or not, and "
    "does not trouble with places where they expect nothing.",
    "2": "Go through the actions one by one. Whoever opens a container and closes it again did not "
    "want what they saw in it; then ask which of the two wishes makes the last steps sensible, "
    "given what this person could know, not what you know.",
}


class MMToM(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        gold = str(fields.get("answer") or "").strip().lower()
        return {**fields, "answer": self.checked(gold)}

    def checked(self, gold: str) -> str:
        """The gold's letter; DataError when it is none."""
        letter = gold.strip("(). ")
        if letter in ("a", "b"):
            return letter
        what = f"The gold answer '{letter}' is neither a nor b."
        raise RowError(what, "MMToM's options have these letters.")

    def parse(self, text: str) -> tuple[str, str]:
        letter, status = tagged_letter(text, "paper")
        if letter in ("", "A", "B"):
            return letter.lower(), status
        return "", "malformed"

    def grade(self, example: Example, answer: str) -> float:
        return float(answer == self.gold_text(example))

    def gold_text(self, example: Example) -> str:
        return str(example.fields["answer"])

    def gold_completion(self, example: Example) -> str:
        return f"<answer>{self.gold_text(example)}</answer>"

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        kind = str(example.fields.get("question_type") or "")[:1]
        advice = _ADVICE.get(kind) or f"{_ADVICE['1']} {_ADVICE['2']}"
        if score is None:
            return advice
        if score.status in _NOT_READ:
            return f"{_NOT_READ[score.status]} {advice}"
        fits = "fits" if score.value == 1 else "does not fit"
        return f"The draft {fits} what this person did. {advice}"

    def leak_view(self, example: Example) -> LeakView:
        text = str(example.fields["question"])
        options = statements_of(text)
        gold = options.get(self.gold_text(example), self.gold_text(example))
        # The scene stays out: a blind reader must not see what the answer follows from.
        stem = text[: text.lower().rfind("(a)")].rpartition("Question:")[2] if options else ""
        letters = tuple(letter.upper() for letter in options)
        return LeakView(stem.strip(), tuple(options.values()), gold, letters)


def statements_of(question: str) -> dict[str, str]:
    """`a` and `b` → statement; empty when the text has no two options so marked."""
    start = question.lower().rfind("(a)")
    match = _OPTIONS.match(question, start) if start >= 0 else None
    if match is None:
        return {}
    return {"a": match["a"], "b": _REQUEST.sub("", match["b"]).strip()}


_TAGGED = re.compile(r"<answer>\s*([ab])\s*</answer>", re.IGNORECASE)


class MMToMReference(MMToM):
    def checked(self, gold: str) -> str:
        return gold

    def parse(self, text: str) -> tuple[str, str]:
        match = _TAGGED.search(spoken(text, "reference"))
        return (match[1].lower(), "ok") if match else ("", "no_tag")

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """A row without gold is right when nothing could be read: the published scorer compares
        before it asks whether there is anything to compare."""
        answer, status = self.parse(text)
        return ("", "ok") if not answer and not self.gold_text(example) else (answer, status)


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
    person: str
    rooms: tuple[str, ...]
    boxes: tuple[str, ...]
    """Containers of the flat; the first two get the first two things unless a type says else."""
    things: tuple[str, ...]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_made_row(random.Random(f"mmtom/{seed}/{i}"), i) for i in range(n)]


def _made_row(rng: random.Random, index: int) -> dict[str, Any]:
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
    person, (first_room, second_room, _), (p, q, r, _) = scene.person, scene.rooms, scene.boxes
    thing = scene.things[0]
    contents = {p: thing, r: scene.things[1]}
    start = f"{person} is in the {first_room} and has not opened anything yet."
    if kind == 1.1:
        acts = f"{person} goes to the {second_room} and walks straight up to the {p}."
        inside, place = True, p
    elif kind == 1.2:
        acts = (
            f"{person} goes to the {second_room}, stops in front of the {p}, leaves it closed, "
            f"and walks on to the {q}."
        )
        inside, place = False, p
    else:
        acts = (
            f"{person} goes to the {second_room}, opens the {q}, looks in, closes it, "
            f"and walks on to the {r}."
        )
        inside, place = False, q
    question = f"If {person} has been looking for {_one(thing)}, which of the two is more likely?"
    believes = f"{person} believes that the {thing} is in the {place}."
    doubts = f"{person} believes that the {thing} is not in the {place}."
    right, wrong = (believes, doubts) if inside else (doubts, believes)
    return f"{_flat(scene, contents)} {start} {acts}", question, right, wrong


def _goal(scene: _Scene, kind: float) -> tuple[str, str, str, str]:
    person, (first_room, second_room, _), (p, q, r, s) = scene.person, scene.rooms, scene.boxes
    left, goal, third = scene.things
    contents = {p: left, q: goal}
    looks = (
        f"{person} goes to the {second_room}, opens the {p}, sees what is in it, closes it again"
    )
    if kind == 2.1:
        acts = f"{looks}, and walks to the {q}."
    elif kind == 2.2:
        acts = f"{looks}, and walks to the {s}, which {person} has never opened."
    elif kind == 2.3:
        contents[r] = third
        acts = f"{looks}, opens the {r} and closes that as well, and walks to the {q}."
    else:
        acts = f"{looks}, opens the {q} and takes out what is in it."
    start = f"{person} is in the {first_room} and has not opened anything yet."
    question = "Which of the two is more likely?"
    right = f"{person} has been looking for {_one(goal)}."
    wrong = f"{person} has been looking for {_one(left)}."
    return f"{_flat(scene, contents)} {start} {acts}", question, right, wrong
