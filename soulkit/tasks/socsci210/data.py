"""SocSci210 rows: the scale that a question states, rows from the instruction layout, made rows.

    "Only return an integer from 1 to 7, where 1 means Never and 7 means Always." → 1 to 7, ordinal
    "Only return 1 for Rent, 2 for Own, or 3 for Neither."                     → 1 to 3, categorical

A scale whose every point has a name is a list of options, on which an answer is right or wrong and
never near; a scale that names its ends alone is ordinal.

    {"input": "Demographics: Age: 74; ... Scenario: ... Only return an integer from 1 to 5, ...",
     "output": "Response: 2", "study_id": "yuazs", "condition_num": 1}

In the instruction layout the scale stands only in the scenario's words. Records that state none,
and those whose recorded answer is off it, are bad rows. Everybody in a study and condition meets
the same question, so the place of a record in the file is kept as its index.

Made rows are invented studies. A respondent has an earlier answer and a way of taking in what they
read; a condition pushes up, down or not at all. So the answer follows from the row.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from soulkit.data.files import BadRow, RawRow
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need

ScaleKind = Literal["ordinal", "binary", "categorical"]

_SIGNED = r"[-\u2212]?\d+"
_RANGE = re.compile(rf"\bfrom\s+({_SIGNED})(?:\s*\([^()]*\))?\s+to\s+({_SIGNED})(?!\d)")
_POINT = re.compile(rf"(?<![\d$.,])({_SIGNED})\s+(?:for|means|corresponds to|=)\s")
_NAMEABLE = 20
"""Scales with more steps than this are never lists of names."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Lowest and highest point, and how answers on it compare."""

    low: int
    high: int
    kind: ScaleKind


def read_scale(text: str) -> Scale | None:
    """The scale of the last request to *return* something, else the last range in the text.

    None when the text states none (an amount of money, say).
    """
    request = max(text.rfind("return"), text.rfind("Return"))
    scale = _requested(text[request:]) if request >= 0 else None
    ranges = _RANGE.findall(text)
    if scale is None and ranges:
        low, high = ranges[-1]
        scale = _scale(_int(low), _int(high), set())
    return scale


def _requested(text: str) -> Scale | None:
    points = {_int(point) for point in _POINT.findall(text)}
    spread = _RANGE.search(text)
    if spread is not None:
        return _scale(_int(spread[1]), _int(spread[2]), points)
    return _scale(min(points), max(points), points) if len(points) > 1 else None


def _scale(low: int, high: int, named: set[int]) -> Scale | None:
    if high <= low:
        return None
    if high - low > _NAMEABLE or not named.issuperset(range(low, high + 1)):
        return Scale(low, high, "ordinal")
    return Scale(low, high, "binary" if (low, high) == (0, 1) else "categorical")


def _int(text: str) -> int:
    return int(text.replace("\u2212", "-"))


_FIELDS = ("input", "output")
_RESPONSE = re.compile(r"\s*(?:Response:)?\s*(-?\d+(?:\.\d+)?)\s*")
_PARTS = re.compile(
    r"\s*Demographics:\s*(?P<persona>.*?)\s*Scenario:\s*(?P<told>.*?)\s*", re.DOTALL
)
LICENCE = "not stated by the source; see the terms of SocSci210 and TESS"


def import_socsci210(path: Path) -> Imported:
    """Rows of an instruction-layout file (JSON lines)."""
    return import_records(
        path, _imported_row, fields=_FIELDS, licence=LICENCE, notes=_notes,
        way_out="Give JSON lines with instruction, input and output.",
    )  # fmt: skip


def _imported_row(raw: RawRow, _: int) -> Row:
    text, output = need(raw, *_FIELDS)
    answer = _RESPONSE.fullmatch(output)
    if answer is None:
        raise BadRecord(f"its output '{output:.40}' holds no number")
    parts = _PARTS.fullmatch(text)
    persona, question = (parts["persona"], parts["told"]) if parts else ("", text.strip())
    scale = read_scale(question)
    if scale is None:
        raise BadRecord("its question states no scale, so a distance means nothing")
    response = float(answer[1]) if "." in answer[1] else int(answer[1])
    if not scale.low <= response <= scale.high:
        where = f"from {scale.low} to {scale.high}"
        raise BadRecord(f"its recorded answer {answer[1]} is off the scale {where} that it states")
    return {
        "prompt_text": text.strip(),
        "persona": persona or None,
        "response": response,
        "r_min": scale.low,
        "r_max": scale.high,
        "response_type": scale.kind,
        "study_id": raw.fields.get("study_id"),
        "condition_id": raw.fields.get("condition_num"),
    }


def _notes(rows: Sequence[Row], _: Sequence[BadRow]) -> tuple[str, ...]:
    studies = len({row["study_id"] for row in rows})
    kinds = {kind: sum(row["response_type"] == kind for row in rows)
             for kind in ("ordinal", "binary", "categorical")}  # fmt: skip
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return (
        f"{len(rows)} rows of {studies} studies ({counted}); a scale whose every point has a name "
        "is read as a list of options.",
    )


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
    return [_made_row(seed, i) for i in range(n)]


def _made_row(seed: int, index: int) -> dict[str, Any]:
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
