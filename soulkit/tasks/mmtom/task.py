"""MMToM-QA, text only: which of two statements about a person at home is more likely?

{"question": "The flat has ... Olga opens the oven, shuts it and heads for the shelf. Question:
Suppose Olga wants the salmon. Which is likelier? (a) To her mind it lies on the shelf. (b) ...
Answer with a or b.", "answer": "a", "question_type": 1.1, "episode": 7}

Types that begin with 1 ask for a belief, those that begin with 2 for a goal. `reference` accepts
any gold, and one exact form of answer. In generated rows the reader sees everything, but the person
sees only the contents of containers that they opened. texts.yaml describes the types.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import spoken, tagged_letter
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.made_rows import Row, rows_by_index
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import Episode, Example, Score

_OPTIONS = re.compile(r"\(a\)\s*(?P<a>.+?)\s*\(b\)\s*(?P<b>.+)", re.DOTALL | re.IGNORECASE)
_REQUEST = re.compile(r"(?:Please (?:respond|answer|reply)|Answer:)[^.]*\.?\s*\Z")

TEXTS = Texts(__file__)


class MMToM(ChoiceTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        gold = str(fields.get("answer") or "").strip().lower()
        return {**fields, "answer": self.checked(gold)}

    def checked(self, gold: str) -> str:
        """The gold's letter; DataError if it is not a or b."""
        letter = gold.strip("(). ")
        if letter in ("a", "b"):
            return letter
        what = f"The gold answer '{letter}' is neither a nor b."
        raise RowError(what, "MMToM has the options a and b.")

    def parse(self, text: str) -> tuple[str, str]:
        letter, status = tagged_letter(text, "paper")
        if letter in ("", "A", "B"):
            return letter.lower(), status
        return "", "malformed"

    def grade(self, example: Example, answer: str) -> float:
        return float(answer == self.gold_text(example))

    def gold_text(self, example: Example) -> str:
        return str(example.fields["answer"])

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        kind = str(example.fields.get("question_type") or "")[:1]
        advice = TEXTS["advice"].get(kind) or " ".join(TEXTS["advice"].values())
        if score is None:
            return str(advice)
        if score.status in TEXTS["unread"]:
            return f"{TEXTS['unread'][score.status]} {advice}"
        fits = "fits" if score.value == 1 else "does not fit"
        return f"The draft {fits} what this person did. {advice}"

    def leak_view(self, example: Example) -> LeakView:
        text = str(example.fields["question"])
        options = statements_of(text)
        gold = options.get(self.gold_text(example), self.gold_text(example))
        # Without the scene: the leak check must not see what the answer follows from.
        stem = text[: text.lower().rfind("(a)")].rpartition("Question:")[2] if options else ""
        letters = tuple(letter.upper() for letter in options)
        return LeakView(stem.strip(), tuple(options.values()), gold, letters)


def statements_of(question: str) -> dict[str, str]:
    """`a` and `b` → statement; empty unless the text has both options with these marks."""
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
        """A row without a gold counts as right if the answer is unreadable, because the published
        scorer compares the two empty texts."""
        answer, status = self.parse(text)
        return ("", "ok") if not answer and not self.gold_text(example) else (answer, status)


TYPES = (1.1, 2.1, 1.2, 2.2, 1.3, 2.3, 2.4)
REQUEST = "Please respond with either a or b."


def _made_row(rng: random.Random, index: int) -> Row:
    kind = TYPES[index % len(TYPES)]
    names = {"person": rng.choice(TEXTS["names"])}
    rooms, boxes = rng.sample(TEXTS["rooms"], 3), rng.sample(TEXTS["containers"], 4)
    things = rng.sample(TEXTS["things"], 3)
    names |= {"room": rooms[1], **dict(zip("pqrs", boxes, strict=True))}
    told = TEXTS["types"][str(kind)]
    belief = kind < 2
    asked = TEXTS["belief" if belief else "goal"]
    if belief:
        names |= {"one": _one(things[0]), "thing": things[0], "place": names[told["place"]]}
        statements = [asked[name].format(**names) for name in ("believes", "doubts")]
        right, wrong = statements if told["inside"] else reversed(statements)
    else:
        left, goal, _ = things
        right, wrong = (asked["statement"].format(**names, one=_one(x)) for x in (goal, left))
    contents = {names[box]: thing for box, thing in zip(told["full"], things, strict=False)}
    answer = rng.choice("ab")
    first, second = (right, wrong) if answer == "a" else (wrong, right)
    story = f"{_flat(rooms, boxes, contents)} {TEXTS['start'].format(**names, first=rooms[0])}"
    acts, question = told["acts"].format(**names), asked["question"].format(**names)
    begin = rng.randrange(40)
    return {
        "question": f"{story} {acts}\nQuestion: {question} (a) {first} (b) {second} {REQUEST}",
        "answer": answer,
        "question_type": kind,
        "episode": index,
        "test": ["belief" if belief else "goal"],
        "start_time": begin,
        "end_time": begin + rng.randint(5, 40),
        "answer_list": ["a", "b"],
        "index": index,
    }


rows = rows_by_index("mmtom", _made_row)


def _flat(rooms: Sequence[str], boxes: Sequence[str], contents: Mapping[str, str]) -> str:
    listed = ", ".join(f"a {room}" for room in rooms[:-1])
    lines = [f"This flat has {listed} and a {rooms[-1]}."]
    lines += [f"In the {box} there is {_one(contents.get(box))}." for box in boxes]
    return " ".join(lines)


def _one(thing: str | None) -> str:
    if thing is None:
        return "nothing"
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"
