"""MISTAKES: which wrong option does a student with a given misconception pick (school maths)?

{"QuestionText": "What is 1/2 + 1/3?", "AnswerAText": "2/5", "AnswerBText": "5/6", "AnswerCText":
"1/6", "AnswerDText": "2/6", "MisconceptionName": "Adds numerators and adds denominators",
"TargetOption": "A", "TargetAnswer": "2/5", "CorrectAnswer": "B"}

The right answer to the problem is wrong here. `mistakes_worked` has the same rows, but its feedback
is the student's line of thought (`feedback: {kind: worked_example}`). The Eedi files give one row
per question and labelled wrong option. A generated problem has one right result and three wrong
ones, each computed by a rule that some students follow.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.errors import DataError, RowError
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
from soulkit.tasks.kit.made_rows import Numbers, rows_by_index
from soulkit.tasks.kit.prompting import Texts
from soulkit.types import BatchMetric, Example, Record, Score

TEXTS = Texts(__file__)


class Mistakes(WorkedTask):
    question_column, gold_column = "QuestionText", "TargetAnswer"
    letter_column = "TargetOption"

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        target = str(fields.get("TargetOption") or "").strip().upper()
        right = led_letter(str(fields.get("CorrectAnswer") or ""), "ABCD")
        if self.protocol == "paper":
            target = self._checked(fields, target, right)
        return {**fields, "TargetOption": target, "CorrectAnswer": right or None}

    def _checked(self, fields: Mapping[str, Any], target: str, right: str) -> str:
        """The target's letter; DataError if it is not a wrong option of the row."""
        options = row_options(fields)
        letter = led_letter(target, "ABCD")
        if letter not in options:
            raise bad_gold(target, "the letter of an option that the row has")
        if letter == right:
            what = f"The option '{letter}' of a row of mistakes is both target and right answer."
            raise RowError(what, "A misconception must lead to a wrong option.")
        return letter

    def options(self, example: Example) -> dict[str, str]:
        return row_options(example.fields)

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
        lead, way = self._remark(example, score)
        for name in (way, "short"):
            yield f"{lead} {TEXTS['advice'][name]}".strip()
        yield CLOSE

    def _remark(self, example: Example, score: Score | None) -> tuple[str, str]:
        """(first sentence for the state of the draft, name of the advice)."""
        right, state = example.fields.get("CorrectAnswer"), read_state(score)
        if state == "wrong" and score is not None and right is not None:
            if score.words == right:
                return "The draft solved the problem, as this student cannot.", "obey"
            return "The draft erred, though by another route than this student.", "single"
        lead = opening(
            state, "The draft thought as this student does.",
            "The draft did not think as this student does.",
        )  # fmt: skip
        return lead, "obey"

    # -- batches ------------------------------------------------------------------------------

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The distractor matrix: `picked_B_for_A` is the share of B among rows with target A.

        `picked_none_for_A` counts unreadable replies; each target's shares sum to 1. Each share
        counts the rows of its target; unscored replies have no share.
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


def row_options(fields: Mapping[str, Any]) -> dict[str, str]:
    """Letter → option text; letters come from the column names, so a missing option does not shift
    the others."""
    texts = {letter: str(fields.get(f"Answer{letter}Text") or "").strip() for letter in LETTERS}
    return {letter: text for letter, text in texts.items() if text}


NAMES_FILE = "misconception_mapping.csv"
LICENCE = "Eedi competition data: competition rules, non-commercial research"
_LETTERS = "ABCD"
_LABELS = tuple(f"Misconception{letter}Id" for letter in _LETTERS)


def import_mistakes(path: Path, *, names: Path | None = None) -> Imported:
    """Rows of an Eedi question file; `names` is the mapping file, by default the one next to it.

    DataError if either file is missing or has another format.
    """
    mapping = names or path.with_name(NAMES_FILE)

    @cache
    def names_by_id() -> dict[int, str]:
        if names is None and not mapping.is_file():
            raise DataError(
                f"There is no '{NAMES_FILE}' next to '{path}'.",
                "The questions contain numbers of misconceptions; that file contains the names.",
                "Put it there, or give its path: soul data build mistakes FILE --names MAPPING",
            )
        return read_names(mapping)

    def rows(question: RawRow, _: int) -> Iterator[Row | BadRow]:
        return _wrong_options(question, names_by_id(), path.name)

    return import_records(
        path, {("QuestionText", label): rows for label in _LABELS}, licence=LICENCE,
        way_out="Give train.csv of the Eedi competition.", notes=_notes,
    )  # fmt: skip


def read_names(path: Path) -> dict[int, str]:
    """Misconception id → name. DataError if the file has no such pairs."""
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
    common, labels = _question(question)
    for letter, number in labels.items():
        if number in names:
            row = _pair(common, letter, number, names[number])
            row["rivals"] = Counter(labels.values())[number] - 1
            yield {**row, "provenance": f"{origin}:{common['id']}"}
        else:
            yield BadRow(question.source, f"misconception {number} has no name")


def _question(raw: RawRow) -> tuple[dict[str, Any], dict[str, int]]:
    """(columns shared by all rows of a question, letter of a wrong option → its misconception)."""
    text, right = need(raw, "QuestionText", "CorrectAnswer")
    answers = need(raw, *(f"Answer{letter}Text" for letter in _LETTERS))
    right = right.strip().upper()
    if right not in _LETTERS or len(right) != 1:
        raise BadRecord(f"its right answer '{right:.20}' is not a letter from A to D")
    labels = {}
    for letter, column in zip(_LETTERS, _LABELS, strict=True):
        label = raw.fields.get(column)
        number = _id(label)
        if number is None and label not in (None, ""):
            raise BadRecord(f"its {column} {label!r:.20} is not a number")
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
    """1672 from `1672`, `1672.0` or a number; None for a blank or anything but an integer."""
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
        f"In {shared} of {len(rows)} rows another wrong option of the same question has the "
        "same misconception, so the target is ambiguous; the breakdown 'rivals' separates "
        "these rows.",
    )


FIRST_ID = 9000
"""First id of generated misconceptions, above those of any published list."""


def _made_row(rng: random.Random, index: int) -> Row:
    kind = index % len(_PROBLEMS)
    name, draw = _PROBLEMS[kind]
    values, results = draw(rng)
    while len(set(map(_shown, results))) < len(_LETTERS):
        values, results = draw(rng)
    right, *wrong = map(_shown, results)
    shuffled = [right, *wrong]
    rng.shuffle(shuffled)
    letters = {text: letter for letter, text in zip(_LETTERS, shuffled, strict=True)}
    problem = TEXTS["problems"][name]
    rule = rng.choice(sorted(problem["rules"]))
    place = problem["rules"].index(rule)
    target = letters[wrong[place]]
    return {
        "id": f"made_{index}_{target}",
        "QuestionText": problem["text"].format(**values),
        **{f"Answer{letter}Text": text for text, letter in letters.items()},
        "MisconceptionId": FIRST_ID + 10 * kind + place,
        "MisconceptionName": rule,
        "TargetOption": target,
        "TargetAnswer": wrong[place],
        "CorrectAnswer": letters[right],
        "index": index,
    }


rows = rows_by_index("mistakes", _made_row)


def _shown(result: str | int | Fraction) -> str:
    """A result in pupils' notation: integers, or at most three decimals."""
    if isinstance(result, str):
        return result
    return f"{float(result):.3f}".rstrip("0").rstrip(".")


# -- problems: values of the text, the right result, the results of the three wrong rules ---------


def _fractions(rng: random.Random) -> Numbers:
    b, d = rng.sample((2, 3, 5, 7, 9, 11), 2)
    a, c = rng.randint(1, b - 1), rng.randint(1, d - 1)
    results = (a * d + c * b, b * d), (a + c, b + d), (a + c, b * d), (a * c, b * d)
    values = {"first": _fraction(a, b), "second": _fraction(c, d)}
    return values, tuple(_fraction(top, bottom) for top, bottom in results)


def _fraction(top: int, bottom: int) -> str:
    return f"\\( \\frac{{{top}}}{{{bottom}}} \\)"


def _order(rng: random.Random) -> Numbers:
    a, b, c = rng.randint(2, 12), rng.randint(2, 9), rng.randint(2, 9)
    return {"a": a, "b": b, "c": c}, (a + b * c, (a + b) * c, a + b + c, a * c + b)


def _percent(rng: random.Random) -> Numbers:
    p, n = rng.choice((4, 5, 8, 16, 20, 25, 40)), 100 * rng.randint(2, 9)
    return {"p": p, "n": n}, (Fraction(p * n, 100), Fraction(n, p), n - p, Fraction(p * n, 10))


def _triangle(rng: random.Random) -> Numbers:
    base, height = rng.randint(3, 15), 2 * rng.randint(2, 8)
    results = (base * height // 2, base * height, base + height, Fraction(base * base, 2))
    return {"base": base, "height": height}, results


def _negatives(rng: random.Random) -> Numbers:
    a, b = rng.randint(2, 9), rng.randint(10, 19)
    return {"a": a, "b": b}, (a + b, a - b, -a - b, b - a)


def _decimals(rng: random.Random) -> Numbers:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    results = (Fraction(a * b, 100), Fraction(a * b, 10), a * b, Fraction(a + b, 10))
    return {"a": a, "b": b}, results


def _brackets(rng: random.Random) -> Numbers:
    k, m = rng.randint(2, 9), rng.randint(2, 9)
    terms = (f"{k}x + {k * m}", f"{k}x + {m}", f"x + {k + m}", f"{k + k * m}x")
    return {"k": k, "m": m}, tuple(f"\\( {term} \\)" for term in terms)


def _powers(rng: random.Random) -> Numbers:
    base, exponent = rng.randint(3, 9), rng.choice((3, 4))
    results = (base**exponent, base * exponent, base + exponent, exponent**base)
    return {"base": base, "exponent": exponent}, results


def _perimeter(rng: random.Random) -> Numbers:
    a, b = rng.sample(range(3, 15), 2)
    return {"a": a, "b": b}, (2 * (a + b), a * b, a + b, 4 * a)


def _mean(rng: random.Random) -> Numbers:
    numbers = rng.sample(range(2, 30), 5)
    numbers[-1] += -sum(numbers) % 5
    results = (sum(numbers) // 5, sorted(numbers)[2], numbers[2], sum(numbers))
    return {"numbers": ", ".join(map(str, numbers))}, results


def _duration(rng: random.Random) -> Numbers:
    start, end = rng.randint(7, 10), rng.randint(12, 16)
    late, early = rng.randint(35, 55), rng.randint(5, 30)
    hours = end - start
    results = (
        _clock(60 * hours + early - late, 60), _clock(100 * hours + early - late, 100),
        _clock(60 * hours + late - early, 60), _clock(60 * hours + late + early, 60),
    )  # fmt: skip
    return {"start": f"{start}:{late}", "end": f"{end}:{early:02d}"}, results


def _clock(minutes: int, hour: int) -> str:
    return f"{minutes // hour} h {minutes % hour} min"


def _ratio(rng: random.Random) -> Numbers:
    a, b = rng.sample(range(2, 8), 2)
    total = (a + b) * a * b * rng.randint(1, 3)
    results = (total * a // (a + b), total // a, Fraction(total, 2), total * b // (a + b))
    return {"total": total, "a": a, "b": b}, results


_PROBLEMS: tuple[tuple[str, Callable[[random.Random], Numbers]], ...] = (
    ("fractions", _fractions), ("order", _order), ("percent", _percent), ("triangle", _triangle),
    ("negatives", _negatives), ("decimals", _decimals), ("brackets", _brackets),
    ("powers", _powers), ("perimeter", _perimeter), ("mean", _mean), ("duration", _duration),
    ("ratio", _ratio),
)  # fmt: skip
