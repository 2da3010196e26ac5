"""Rows of `mistakes`: school problems whose wrong options are worked out from wrong rules.

Every problem has one right result and three wrong ones, each computed by a rule that some students
follow. One of the three rules is named, and its result is the target, so a row is solved by
following the rule. Numbers are drawn again until the four results differ.

    {"id": "made_7_C", "QuestionText": "Work out \\( 3 + 4 \\times 5 \\).", "AnswerAText": "23",
     "AnswerBText": "60", "AnswerCText": "35", "AnswerDText": "12", "MisconceptionId": 9005,
     "MisconceptionName": "Calculates strictly from left to right ...", "TargetOption": "C",
     "TargetAnswer": "35", "CorrectAnswer": "A"}
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

FIRST_ID = 9000
"""Ids of the wrong rules start here, above those of any published list."""
_LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class _Problem:
    """A question, its right result, and wrong rule → the result it leads to."""

    text: str
    right: str
    wrong: dict[str, str]


def rows(n: int, seed: int) -> list[dict[str, Any]]:
    """`n` rows; row i depends on (seed, i) alone, so fewer rows are a prefix of more."""
    return [_row(random.Random(f"mistakes/{seed}/{i}"), i) for i in range(n)]


def _row(rng: random.Random, index: int) -> dict[str, Any]:
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
