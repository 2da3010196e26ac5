"""Rows of `socsci210`: invented studies, each with conditions, outcomes and respondents.

A respondent has an earlier answer and a way of taking in what they read; a condition pushes up,
down or not at all. So the answer follows from the row: earlier answer, plus the push if the
respondent is one who is moved, never past the ends. Respondents of one study share its texts.

    {"prompt_text": "Respondent: ... Only return an integer from 1 to 7, ...", "response": 5,
     "r_min": 1, "r_max": 7, "response_type": "ordinal", "study_id": "made-0-3", ...}
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

PER_STUDY = 6
"""Respondents in a row who belong to the same study."""

_JOBS = ("bus driver", "florist", "retired surveyor", "nurse", "student of law", "roofer", "baker",
        "clerk in a town hall", "violin teacher", "farmer")  # fmt: skip
_TOWNS = ("a harbour town", "a mountain village", "a big city", "a suburb", "a market town")
MATTERS = (
    "closing the old town to cars", "a longer school day", "a fee for plastic cups",
    "night trains instead of short flights", "opening libraries on Sundays",
    "a curfew for cats in spring", "free swimming lessons", "a tax on second homes",
    "fences around playgrounds", "a public fund for street music",
)  # fmt: skip
SCALES = ((1, 5, 1), (1, 7, 1), (0, 10, 2), (-3, 3, 1), (0, 100, 20))
"""Lowest point, highest point, and how far a push moves an answer."""
PUSHES = {
    "0": (0, "a page about the history of map making, which has nothing to do with the matter"),
    "1": (1, "a letter by neighbours who have good experiences with it and ask for more of it"),
    "2": (-1, "a report that lists what it cost elsewhere and how little came of it"),
}
MOVED = "They say of themselves that a well-written text moves them a step towards its side."
FIRM = "They say of themselves that no text has ever changed what they answer."
_HABITS = {
    "the cheapest": "At the counter they look at the price and at nothing else.",
    "the nearest": "They take what is closest to home, whatever it costs.",
    "the best known": "They go where everybody goes and distrust what is new.",
}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One outcome of a study, as one respondent meets it."""

    persona: str
    shown: str
    question: str
    response: int
    low: int
    high: int
    kind: str


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(seed, i) for i in range(n)]


def _row(seed: int, index: int) -> dict[str, Any]:
    study = index // PER_STUDY
    texts = random.Random(f"socsci210/{seed}/study/{study}")
    person = random.Random(f"socsci210/{seed}/person/{index}")
    condition = person.choice(tuple(PUSHES))
    kind = ("ordinal", "ordinal", "binary", "ordinal", "categorical")[study % 5]
    make = {"ordinal": _ordinal, "binary": _binary, "categorical": _categorical}[kind]
    item = make(texts, person, condition)
    return {
        "prompt_text": f"Respondent: {item.persona}\n\n{item.shown} {item.question}",
        "persona": item.persona,
        "condition_text": item.shown,
        "outcome_question": item.question,
        "response": item.response,
        "r_min": item.low,
        "r_max": item.high,
        "response_type": item.kind,
        "study_id": f"made-{seed}-{study}",
        "condition_id": condition,
        "outcome_id": kind,
        "index": index,
    }


def _person(rng: random.Random) -> str:
    job, town = rng.choice(_JOBS), rng.choice(_TOWNS)
    return f"{rng.randint(19, 84)} years old, {job}, lives in {town}."


def _reading(matter: str, condition: str) -> str:
    return f"The survey was about {matter}. Before the question they read {PUSHES[condition][1]}."


def _ordinal(texts: random.Random, person: random.Random, condition: str) -> _Outcome:
    matter, (low, high, step) = texts.choice(MATTERS), texts.choice(SCALES)
    earlier = person.choice(range(low, high + 1, step))
    moved = person.random() < 0.6
    push = PUSHES[condition][0] * step if moved else 0
    persona = (
        f"{_person(person)} Asked the same question last year, they answered {earlier}. "
        f"{MOVED if moved else FIRM}"
    )
    means = f"{low} means dead against it and {high} means all for it"
    steps = f" A step on this scale is {step} points." if step > 1 else ""
    question = (
        f"Then they were asked what they think of it.{steps} Only return an integer from {low} to "
        f"{high}, where {means}, nothing else."
    )
    response = min(max(earlier + push, low), high)
    return _Outcome(persona, _reading(matter, condition), question, response, low, high, "ordinal")


def _binary(texts: random.Random, person: random.Random, condition: str) -> _Outcome:
    matter = texts.choice(MATTERS)
    earlier = person.randrange(2)
    moved = person.random() < 0.6
    push = PUSHES[condition][0] if moved else 0
    turn = "is enough to turn them round" if moved else "does not turn them round"
    persona = (
        f"{_person(person)} Last year they {'signed' if earlier else 'did not sign'} a petition "
        f"for it. A well-written text {turn}."
    )
    question = (
        "Then they were asked whether they would sign a petition for it. Only return 1 for yes or "
        "0 for no, nothing else."
    )
    response = earlier if push == 0 else int(push > 0)
    return _Outcome(persona, _reading(matter, condition), question, response, 0, 1, "binary")


def _categorical(texts: random.Random, person: random.Random, condition: str) -> _Outcome:
    options = texts.sample(tuple(_HABITS), len(_HABITS))
    habit = person.choice(tuple(_HABITS))
    named = ", ".join(f"{i} for {option} of them" for i, option in enumerate(options, 1))
    shown = (
        f"The survey was about swimming pools in their district. Before the question they read "
        f"{PUSHES['0'][1]}." if condition == "0" else
        "The survey was about swimming pools in their district. They read nothing beforehand."
    )  # fmt: skip
    question = (
        f"Then they were asked which pool they would go to. Only return {named}, nothing else."
    )
    persona = f"{_person(person)} {_HABITS[habit]}"
    response = options.index(habit) + 1
    return _Outcome(persona, shown, question, response, 1, len(options), "categorical")
