"""MISTAKES: which wrong option a student with a certain misconception picks (school mathematics).

{"QuestionText": "What is 1/2 + 1/3?", "AnswerAText": "2/5", "AnswerBText": "5/6", "AnswerCText":
"1/6", "AnswerDText": "2/6", "MisconceptionName": "Adds numerators and adds denominators",
"TargetOption": "A", "TargetAnswer": "2/5", "CorrectAnswer": "B"}

The right answer to the problem is wrong here. `mistakes_worked`, the same rows, gives the
student's line of thought as feedback (`feedback: {kind: worked_example}`). The Eedi files
become one row for each question and labelled wrong option. A made problem has one right result
and three wrong ones, each computed by a rule that some students follow.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.errors import DataError, RowError
from soulkit.judge.leaks import LeakView
from soulkit.runs.records import drafts
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.choice import (
    CLOSE,
    LETTERS,
    WorkedTask,
    bad_gold,
    led_letter,
    opening,
    read_state,
)
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need, wrong_shape
from soulkit.types import BatchMetric, Example, Record, Score


class Mistakes(WorkedTask):
    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        target = str(fields.get("TargetOption") or "").strip().upper()
        right = led_letter(str(fields.get("CorrectAnswer") or ""), "ABCD")
        if self.protocol == "paper":
            target = self._checked(fields, target, right)
        return {**fields, "TargetOption": target, "CorrectAnswer": right or None}

    def _checked(self, fields: Mapping[str, Any], target: str, right: str) -> str:
        """The target's letter; DataError when no wrong option of the row can be the answer."""
        options = row_options(fields)
        letter = led_letter(target, "ABCD")
        if letter not in options:
            raise bad_gold(target, "the letter of an option that the row has")
        if letter == right:
            what = f"The option '{letter}' of a row of mistakes is target and right answer at once."
            raise RowError(what, "A misconception leads to a wrong option.")
        return letter

    def options(self, example: Example) -> dict[str, str]:
        return row_options(example.fields)

    def gold_letter(self, example: Example) -> str:
        return str(example.fields["TargetOption"])

    def gold_text(self, example: Example) -> str:
        letter = self.gold_letter(example)
        text = str(example.fields.get("TargetAnswer") or letter)
        return self.options(example).get(letter, text)

    def leak_view(self, example: Example) -> LeakView:
        options, gold = self.options(example), self.gold_text(example)
        question = str(example.fields["QuestionText"])
        return LeakView(question, tuple(options.values()), gold, tuple(options))

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        right = example.fields.get("CorrectAnswer")
        if right is None:
            return {"picked_correct": None, "picked_other": None}
        other = answer not in ("", right, self.gold_letter(example))
        return {"picked_correct": float(answer == right), "picked_other": float(other)}

    # -- feedback -----------------------------------------------------------------------------

    def worked_example(self, example: Example) -> str:
        idea = str(example.fields["MisconceptionName"]).strip().rstrip(".")
        return (
            f'The student goes by one idea, "{idea}", and working it through arrives at '
            f"{self.gold_text(example)}. {self.gold_completion(example)}"
        )

    def lessons(self, example: Example, score: Score | None) -> Iterable[str]:
        lead, texts = self._remark(example, score)
        yield from (f"{lead} {text}".strip() for text in texts)
        yield CLOSE

    def _remark(self, example: Example, score: Score | None) -> tuple[str, tuple[str, ...]]:
        """(first sentence by how the draft went, wordings of the rest)."""
        right = example.fields.get("CorrectAnswer")
        if read_state(score) == "wrong" and score is not None and right is not None:
            if score.words == right:
                return "The draft solved the problem, as this student cannot.", (_OBEY, _SHORT)
            return "The draft erred, though by another route than this student.", (_SINGLE, _SHORT)
        lead = opening(
            read_state(score), "The draft thought as this student does.",
            "The draft did not think as this student does.",
        )  # fmt: skip
        return lead, (_OBEY, _SHORT)

    # -- batches ------------------------------------------------------------------------------

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The distractor matrix: `picked_B_for_A` is how often B was picked where A was meant.

        `picked_none_for_A` counts replies without a readable letter; each target's shares sum to 1.
        Each counts the rows that mean its target; unscored replies have no share.
        """
        rows: Counter[str] = Counter()
        picks: dict[str, Counter[str]] = defaultdict(Counter)
        for record in drafts(records):
            target = record.tags.get("target")
            if not target:
                continue
            rows[target] += 1
            if record.score.scored:
                read = record.score.status in READABLE and record.score.words in LETTERS
                picks[target][record.score.words if read else "none"] += 1
        return {
            f"picked_{pick}_for_{target}": BatchMetric(
                value=counts[pick] / counts.total(), n=rows[target], n_scored=counts.total(),
                unit="rows", low=0.0, high=1.0,
            )
            for target, counts in sorted(picks.items())
            for pick in (*LETTERS, "none")
        }  # fmt: skip


_OBEY = (
    "Put what you know aside: write the calculation down line by line as the stated idea demands, "
    "without repairing any step, and only then look which option is closest."
)
_SINGLE = (
    "Break just the rule that the stated idea breaks and keep every other step sound; then compare "
    "with what is offered."
)
_SHORT = "Follow the stated idea literally, step by step, before looking at what is offered."


def row_options(fields: Mapping[str, Any]) -> dict[str, str]:
    """Letter → text of the options that a row has; letters go by column, so gaps shift nothing."""
    texts = {letter: str(fields.get(f"Answer{letter}Text") or "").strip() for letter in LETTERS}
    return {letter: text for letter, text in texts.items() if text}


NAMES_FILE = "misconception_mapping.csv"
LICENCE = "Eedi competition data: competition rules, non-commercial research"
_LETTERS = "ABCD"
_LABELS = tuple(f"Misconception{letter}Id" for letter in _LETTERS)


def import_mistakes(path: Path, *, names: Path | None = None) -> Imported:
    """Rows of an Eedi question file; `names` is the mapping file, by default the one beside it.

    Raises DataError when either file is missing or of another shape.
    """
    mapping = names or path.with_name(NAMES_FILE)

    @cache
    def names_by_id() -> dict[int, str]:
        if names is None and not mapping.is_file():
            raise DataError(
                f"There is no '{NAMES_FILE}' beside '{path}'.",
                "The questions carry numbers of misconceptions; their names stand in that file.",
                "Put it there, or name it: soul data build mistakes FILE --names MAPPING",
            )
        return read_names(mapping)

    def rows(question: RawRow, _: int) -> Iterator[Row | BadRow]:
        return _wrong_options(question, names_by_id(), path.name)

    return import_records(
        path, {("QuestionText", label): rows for label in _LABELS}, licence=LICENCE,
        way_out="Give train.csv of the Eedi competition.", notes=_notes,
    )  # fmt: skip


def read_names(path: Path) -> dict[int, str]:
    """Misconception id → name. DataError when the file holds no such pairs."""
    raw, _ = read_rows(path)
    names = {}
    for row in raw:
        number = _id(row.fields.get("MisconceptionId"))
        name = str(row.fields.get("MisconceptionName") or "").strip()
        if number is not None and name:
            names[number] = name
    if not names:
        columns = ("MisconceptionId", "MisconceptionName")
        raise wrong_shape(path, columns, f"Give {NAMES_FILE} of the Eedi competition.")
    return names


def _wrong_options(
    question: RawRow, names: Mapping[int, str], origin: str
) -> Iterator[Row | BadRow]:
    """A row for each labelled wrong option, in the order of the letters."""
    common, labels = _question(question)
    for letter, number in labels.items():
        if number in names:
            row = _pair(common, letter, number, names[number])
            row["rivals"] = Counter(labels.values())[number] - 1
            yield {**row, "provenance": f"{origin}:{common['id']}"}
        else:
            yield BadRow(question.source, f"misconception {number} has no name")


def _question(raw: RawRow) -> tuple[dict[str, Any], dict[str, int]]:
    """(what all pairs of a question share, letter of a wrong option → its misconception)."""
    text, right = need(raw, "QuestionText", "CorrectAnswer")
    answers = need(raw, *(f"Answer{letter}Text" for letter in _LETTERS))
    right = right.strip().upper()
    if right not in _LETTERS or len(right) != 1:
        raise BadRecord(f"its right answer '{right:.20}' is no letter from A to D")
    labels = {}
    for letter, column in zip(_LETTERS, _LABELS, strict=True):
        label = raw.fields.get(column)
        number = _id(label)
        if number is None and label not in (None, ""):
            raise BadRecord(f"its {column} {label!r:.20} is no number")
        if number is not None and letter != right:
            labels[letter] = number
    subject = {k: raw.fields[k] for k in ("SubjectName", "ConstructName") if raw.fields.get(k)}
    texts = {f"Answer{x}Text": a.strip() for x, a in zip(_LETTERS, answers, strict=True)}
    key = str(raw.fields.get("QuestionId", raw.source))
    return {
        "id": key, "QuestionText": text.strip(), **texts, "CorrectAnswer": right, **subject,
    }, labels  # fmt: skip


def _pair(common: Mapping[str, Any], letter: str, number: int, name: str) -> dict[str, Any]:
    return {
        **common,
        "id": f"{common['id']}_{letter}",
        "MisconceptionId": number,
        "MisconceptionName": name,
        "TargetOption": letter,
        "TargetAnswer": common[f"Answer{letter}Text"],
    }


def _id(value: Any) -> int | None:
    """1672 from `1672`, `1672.0` or a number; None for a blank, or what is no whole number."""
    try:
        number = float(str(value).strip())
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def _notes(rows: Sequence[Row], _: Sequence[BadRow]) -> tuple[str, ...]:
    shared = sum(row["rivals"] > 0 for row in rows)
    if not shared:
        return ()
    return (
        f"In {shared} of {len(rows)} rows another wrong option of the same question carries the "
        "same misconception, so nobody can tell which one is meant; the break-down 'rivals' keeps "
        "them apart.",
    )


FIRST_ID = 9000
"""Ids of the wrong rules start here, above those of any published list."""


@dataclass(frozen=True, slots=True)
class _Problem:
    """A question, its right result, and wrong rule → the result it leads to."""

    text: str
    right: str
    wrong: dict[str, str]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_made_row(random.Random(f"mistakes/{seed}/{i}"), i) for i in range(n)]


def _made_row(rng: random.Random, index: int) -> dict[str, Any]:
    kind = _KINDS[index % len(_KINDS)]
    problem = kind(rng)
    while len({problem.right, *problem.wrong.values()}) < len(_LETTERS):
        problem = kind(rng)
    results = [problem.right, *problem.wrong.values()]
    rng.shuffle(results)
    options = dict(zip(_LETTERS, results, strict=True))
    name = rng.choice(sorted(problem.wrong))
    letter = {text: key for key, text in options.items()}
    target = letter[problem.wrong[name]]
    return {
        "id": f"made_{index}_{target}",
        "QuestionText": problem.text,
        **{f"Answer{key}Text": text for key, text in options.items()},
        "MisconceptionId": FIRST_ID + 10 * _KINDS.index(kind) + list(problem.wrong).index(name),
        "MisconceptionName": name,
        "TargetOption": target,
        "TargetAnswer": problem.wrong[name],
        "CorrectAnswer": letter[problem.right],
        "index": index,
    }


def _frac(top: int, bottom: int) -> str:
    return f"\\( \\frac{{{top}}}{{{bottom}}} \\)"


def _number(value: Fraction) -> str:
    """A number as pupils write it: whole, or with at most three decimals."""
    return f"{float(value):.3f}".rstrip("0").rstrip(".")


# -- the problems --------------------------------------------------------------------------------


def _fractions(rng: random.Random) -> _Problem:
    b, d = rng.sample((2, 3, 5, 7, 9, 11), 2)
    a, c = rng.randint(1, b - 1), rng.randint(1, d - 1)
    return _Problem(
        f"Work out {_frac(a, b)} + {_frac(c, d)}.",
        _frac(a * d + c * b, b * d),
        {
            "Adds the numerators, and adds the denominators": _frac(a + c, b + d),
            "Takes the product of the denominators but leaves the numerators as they are when "
            "adding": _frac(a + c, b * d),
            "Multiplies fractions where they should be added": _frac(a * c, b * d),
        },
    )


def _order(rng: random.Random) -> _Problem:
    a, b, c = rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 9)
    return _Problem(
        f"Work out \\( {a} + {b} \\times {c} \\).",
        str(a + b * c),
        {
            "Calculates strictly from left to right, whatever the operations are": str((a + b) * c),
            "Reads every multiplication sign as addition": str(a + b + c),
            "Multiplies the outer two numbers first and then adds the middle one": str(a * c + b),
        },
    )


def _percent(rng: random.Random) -> _Problem:
    p, n = rng.choice((4, 5, 8, 16, 20, 25, 40)), 100 * rng.randint(2, 9)
    return _Problem(
        f"What is \\( {p} \\% \\) of {n}?",
        _number(Fraction(p * n, 100)),
        {
            "Finds a percentage of a number by dividing by it": _number(Fraction(n, p)),
            "Takes a percentage off a number as if it were a plain number": str(n - p),
            "Treats a percentage as a number of tenths": _number(Fraction(p * n, 10)),
        },
    )


def _triangle(rng: random.Random) -> _Problem:
    base, height = rng.randint(3, 15), 2 * rng.randint(2, 8)
    return _Problem(
        f"A triangle has a base of {base} cm and a height of {height} cm. What is its area in "
        "square centimetres?",
        str(base * height // 2),
        {
            "Leaves out the halving when finding the area of a triangle": str(base * height),
            "Adds base and height to find an area": str(base + height),
            "Squares the base and halves the result, disregarding the height": _number(
                Fraction(base * base, 2)
            ),
        },
    )


def _negatives(rng: random.Random) -> _Problem:
    a, b = rng.randint(2, 9), rng.randint(10, 19)
    return _Problem(
        f"Work out \\( {a} - (-{b}) \\).",
        str(a + b),
        {
            "Drops one of two minus signs that follow each other": str(a - b),
            "Thinks that two minus signs make the whole result negative": str(-a - b),
            "Always takes the smaller number from the larger one, whatever the signs": str(b - a),
        },
    )


def _decimals(rng: random.Random) -> _Problem:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return _Problem(
        f"Work out \\( 0.{a} \\times 0.{b} \\).",
        _number(Fraction(a * b, 100)),
        {
            "Keeps as many decimal places in a product as one factor has": _number(
                Fraction(a * b, 10)
            ),
            "Disregards the decimal points in a product": str(a * b),
            "Adds the digits behind the point where a product is asked for": _number(
                Fraction(a + b, 10)
            ),
        },
    )


def _brackets(rng: random.Random) -> _Problem:
    k, m = rng.randint(2, 9), rng.randint(2, 9)
    return _Problem(
        f"Expand \\( {k}(x + {m}) \\).",
        f"\\( {k}x + {k * m} \\)",
        {
            "Multiplies only the first term in a bracket": f"\\( {k}x + {m} \\)",
            "Adds the outer number to the constant in a bracket": f"\\( x + {k + m} \\)",
            "Joins unlike terms of an expansion into one term in x": f"\\( {k + k * m}x \\)",
        },
    )


def _powers(rng: random.Random) -> _Problem:
    base, exponent = rng.randint(3, 9), rng.choice((3, 4))
    return _Problem(
        f"What is the value of \\( {base}^{{{exponent}}} \\)?",
        str(base**exponent),
        {
            "Multiplies the base by the exponent": str(base * exponent),
            "Adds base and exponent": str(base + exponent),
            "Swaps the roles of base and exponent": str(exponent**base),
        },
    )


def _perimeter(rng: random.Random) -> _Problem:
    a, b = rng.sample(range(3, 15), 2)
    return _Problem(
        f"A rectangle is {a} m long and {b} m wide. What is its perimeter in metres?",
        str(2 * (a + b)),
        {
            "Gives the area where the perimeter is asked for": str(a * b),
            "Counts only one length and one width in a perimeter": str(a + b),
            "Takes the perimeter of a rectangle to be four times its length": str(4 * a),
        },
    )


def _mean(rng: random.Random) -> _Problem:
    numbers = rng.sample(range(2, 30), 5)
    numbers[-1] += -sum(numbers) % 5
    ordered = sorted(numbers)
    return _Problem(
        f"What is the mean of {', '.join(map(str, numbers))}?",
        str(sum(numbers) // 5),
        {
            "Gives the number in the middle of the ordered list as the mean": str(ordered[2]),
            "Gives the number that stands in the middle of the unordered list": str(numbers[2]),
            "Adds the numbers and does not divide": str(sum(numbers)),
        },
    )


def _duration(rng: random.Random) -> _Problem:
    start, end = rng.randint(7, 10), rng.randint(12, 16)
    late, early = rng.randint(35, 55), rng.randint(5, 30)
    minutes = 60 * (end - start) + early - late
    hundreds = 100 * (end - start) + early - late
    return _Problem(
        f"A film starts at {start}:{late} and ends at {end}:{early:02d}. How long is it?",
        _clock(minutes, 60),
        {
            "Counts an hour as 100 minutes when subtracting times": _clock(hundreds, 100),
            "Subtracts hours and minutes separately, the smaller from the larger": _clock(
                60 * (end - start) + late - early, 60
            ),
            "Adds the minutes of two times where they should be subtracted": _clock(
                60 * (end - start) + late + early, 60
            ),
        },
    )


def _clock(minutes: int, hour: int) -> str:
    return f"{minutes // hour} h {minutes % hour} min"


def _ratio(rng: random.Random) -> _Problem:
    a, b = rng.sample(range(2, 8), 2)
    total = (a + b) * a * b * rng.randint(1, 3)
    return _Problem(
        f"Ida and Uwe share {total} euros in the ratio {a} : {b}. How much does Ida get?",
        str(total * a // (a + b)),
        {
            "Divides an amount by a person's own part of the ratio": str(total // a),
            "Takes each part of a ratio to be one equal half": _number(Fraction(total, 2)),
            "Gives a person the share that belongs to the other part of the ratio": str(
                total * b // (a + b)
            ),
        },
    )


_KINDS: tuple[Callable[[random.Random], _Problem], ...] = (
    _fractions, _order, _percent, _triangle, _negatives, _decimals,
    _brackets, _powers, _perimeter, _mean, _duration, _ratio,
)  # fmt: skip
