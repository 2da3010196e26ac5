"""SocSci210: the number that a survey respondent gave, from their profile and the survey's text.

{"prompt_text": "Age: 44; ... How fair is the fee? Only return an integer from 1 to 7, nothing
else.", "response": 5, "r_min": 1, "r_max": 7, "response_type": "ordinal", "study_id": "fees",
"condition_id": "2", "outcome_id": "fair"}

On an ordinal scale the value is 1 - distance / length of the scale. `paper` rejects answers off the
scale; `reference` clips them. In the source's instruction layout only the text states the scale; a
scale with a name for every point is categorical. In generated rows a respondent has an earlier
answer and a way of reacting to texts; a condition pushes up, down or not at all.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from soulkit.data.files import BadRow, RawRow
from soulkit.data.literals import first_message, structure
from soulkit.errors import RowError
from soulkit.judge.leaks import LeakView
from soulkit.judge.verdict import tagged_text
from soulkit.runs.records import drafts
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.importing import BadRecord, Imported, Row, import_records, need
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.kit.scoring import mean_of
from soulkit.types import BatchMetric, Episode, Example, Feedback, Record, Score, Segment

EXACT_KINDS = ("binary", "categorical")
LEAK_POINTS = 21
"""Maximum number of points of a long scale that the leak check looks at."""

_NUMBER = re.compile(r"(?P<number>[-+]?\d+(?:\.\d+)?)(?P<rest>(?:[\s.,:;)(%-]\D*)?)")
_WORD = re.compile(r"(?P<word>yes|no)(?P<rest>(?:[\s.,:;!(-].*)?)", re.IGNORECASE | re.DOTALL)
_ONLY_RETURN = re.compile(r"\b([Oo])nly return\b")
_NOTHING_ELSE = re.compile(r",\s*nothing else\b(?:(?=,)|(\.?))")

TEXTS = Texts(__file__)


class SocSci210(ChoiceTask):
    loosely = True
    """Whether to look for the demand for a bare number in more places."""

    def prepare(self, fields: dict[str, Any]) -> dict[str, Any]:
        text, kind = _prompt_of(fields), self.kind_of(fields)
        low, high = self._bounds(fields, text, kind)
        prepared = {**fields, "prompt_text": text, "conversations": None}
        prepared |= {"response_type": kind, "r_min": low, "r_max": high}
        prepared["scale"] = f"{_number_text(low)} to {_number_text(high)}"
        self.check(prepared)
        return prepared

    def kind_of(self, fields: Mapping[str, Any]) -> str:
        """The row's kind of answer."""
        return str(fields.get("response_type") or "ordinal").strip().lower()

    def check(self, fields: Mapping[str, Any]) -> None:
        """DataError for a row whose recorded answer is off its scale."""
        _check_gold(fields)

    def stated(self, text: str) -> Scale | None:
        """The scale that a question states."""
        return read_scale(text)

    def _bounds(
        self, fields: Mapping[str, Any], text: str, kind: str
    ) -> tuple[int | float, int | float]:
        low, high = fields.get("r_min"), fields.get("r_max")
        stated = self.stated(text) if None in (low, high) else None
        if stated and kind == "binary" and stated.high - stated.low > 1:
            stated = None  # another scale in the text: yes or no has two points
        if low is None:
            low = stated.low if stated else 0
        if high is None:
            high = stated.high if stated else 1 if kind == "binary" else 7
        return low, high

    def tags(self, fields: Mapping[str, Any]) -> dict[str, str]:
        scale = f"{_number_text(fields['r_min'])} to {_number_text(fields['r_max'])}"
        return {**super().tags(fields), "scale": scale}

    def slot(self, example: Example, seat: str, feedback: Feedback | None) -> Segment:
        text = asked_openly(str(example.fields["prompt_text"]), loosely=self.loosely)
        open_row = replace(example, fields={**example.fields, "prompt_text": text})
        return super().slot(open_row, seat, feedback)

    def parse(self, text: str) -> tuple[str, str]:
        inside = tagged_text(text, "paper")
        return ("", "no_tag") if inside is None else _read_loosely(inside)

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """The answer as the text of a number; a number outside the row's scale is malformed."""
        answer, status = self.parse(text)
        kind, low, high = scale_of(example.fields)
        if answer in ("yes", "no"):
            if kind != "binary" or (low, high) != (0, 1):
                return "", "malformed"
            return str(int(answer == "yes")), status
        if answer:
            number = float(answer)
            whole = number.is_integer() or kind not in EXACT_KINDS
            if not (whole and low <= number <= high):
                return answer, "malformed"
        return answer, status

    def grade(self, example: Example, answer: str) -> float:
        kind, low, high = scale_of(example.fields)
        return value_of(kind, low, high, float(example.fields["response"]), float(answer))

    def measures(self, example: Example, answer: str) -> dict[str, float | None]:
        """`exact`, and on ordinal scales `shift`: (answer − gold) / length of the scale."""
        kind, low, high = scale_of(example.fields)
        gold = float(example.fields["response"])
        number = float(answer) if answer else None
        values: dict[str, float | None] = {"exact": float(number == self.recorded(gold))}
        if kind not in EXACT_KINDS and high > low:
            values["shift"] = (
                None if number is None else (_clamp(number, low, high) - gold) / (high - low)
            )
        return values

    def recorded(self, gold: float) -> float:
        """The recorded answer that an exact one must equal."""
        return gold

    def gold_text(self, example: Example) -> str:
        return _number_text(example.fields["response"])

    def leak_view(self, example: Example) -> LeakView:
        _, low, high = scale_of(example.fields)
        step = max(math.ceil((high - low) / (LEAK_POINTS - 1)), 1)
        points = [_number_text(x) for x in range(math.ceil(low), math.floor(high) + 1, step)]
        gold = self.gold_text(example)
        options = tuple(dict.fromkeys([*points, gold]))
        # Without the profile: the leak check must not see what the answer follows from.
        question = example.fields.get("outcome_question") or "What did this respondent answer?"
        return LeakView(str(question), options, gold)

    def explain(self, example: Example, episode: Episode | None, score: Score | None) -> str | None:
        kind, _, _ = scale_of(example.fields)
        advice = TEXTS["advice"].get(kind, TEXTS["advice"]["ordinal"])
        if score is None:
            return advice
        if score.status in TEXTS["unread"]:
            return f"{TEXTS['unread'][score.status]} {advice}"
        return f"{TEXTS['verdicts'][_verdict(kind, score.value or 0.0)]} {advice}"

    def summarise(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """The mean over studies, and the scores of constant answers on the same rows.

        `constant_middle` answers the middle of every scale; `constant_best` the number that scores
        best on the rows of a scale and type, chosen with knowledge of their answers.
        """
        main = drafts(records)
        scored = [r for r in main if r.score.value is not None]
        if not scored:
            return {}
        studies: dict[str, list[Record]] = defaultdict(list)
        for record in main:
            studies[record.cluster].append(record)
        macro = mean_of([mean_of([r.score.value for r in s]).value for s in studies.values()],
                        "studies")  # fmt: skip
        return {"study_macro": macro} | _constants(scored, len(main))


# -- rows ----------------------------------------------------------------------------------------


def _prompt_of(fields: Mapping[str, Any]) -> str:
    text = fields.get("prompt_text") or first_message(fields.get("conversations"))
    if text:
        return str(text)
    question = fields.get("outcome_question")
    if not question:
        why = "It has neither prompt_text, nor a conversation, nor an outcome_question."
        raise RowError("The row has no question.", why)
    parts = (_profile(fields.get("persona")), fields.get("condition_text"), question)
    return "\n\n".join(str(part) for part in parts if part)


def _profile(value: Any) -> str:
    """A respondent as text: `key: value; ...` from a mapping or its literal."""
    traits = structure(value)
    if isinstance(traits, Mapping):
        return "; ".join(f"{key}: {v}" for key, v in traits.items() if v not in (None, ""))
    return "" if value is None else str(value)


def _check_gold(fields: Mapping[str, Any]) -> None:
    kind, low, high = scale_of(fields)
    gold = float(fields["response"])
    if not low <= gold <= high or (kind in EXACT_KINDS and not gold.is_integer()):
        raise RowError(
            f"The recorded answer {_number_text(gold)} is not a point of the row's scale.",
            f"The scale goes from {_number_text(low)} to {_number_text(high)} and is {kind}.",
        )


def scale_of(fields: Mapping[str, Any]) -> tuple[str, float, float]:
    return str(fields["response_type"]), float(fields["r_min"]), float(fields["r_max"])


def _number_text(number: float) -> str:
    """`4`, not `4.0`; other numbers unchanged."""
    return str(int(number)) if float(number).is_integer() else str(number)


def asked_openly(text: str, *, loosely: bool = False) -> str:
    """The question without its demand for a bare number, to leave room for thinking.

    `loosely` also matches a lower-case first letter and a demand within a sentence.
    """
    if not loosely:
        text = text.replace("Only return", "Think it through step by step, then answer with")
        return re.sub(r", nothing else\.?", ".", text)
    think = {"O": "Think", "o": "think"}
    text = _ONLY_RETURN.sub(lambda m: f"{think[m[1]]} it through, then answer with", text)
    return _NOTHING_ELSE.sub(lambda m: "" if m[1] is None else ".", text)


# -- answers -------------------------------------------------------------------------------------


def _read_loosely(inside: str) -> tuple[str, str]:
    """A single number, yes or no; words may follow it, but not a second answer."""
    plain = unicodedata.normalize("NFKC", inside).replace("\u2212", "-")
    plain = plain.strip("*`\"'()[] \n\t")
    bare = plain == inside
    if (match := _NUMBER.fullmatch(plain)) is not None:
        number = _number_text(float(match["number"]))
        exact = bare and re.fullmatch(r"-?\d+", plain) is not None
        return number, "ok" if exact else "salvaged"
    if (match := _WORD.fullmatch(plain)) is not None:
        if re.search(r"\b(?:yes|no)\b", match["rest"], re.IGNORECASE):
            return "", "malformed"
        return match["word"].lower(), "ok" if bare and not match["rest"] else "salvaged"
    return "", "malformed"


def value_of(kind: str, low: float, high: float, gold: float, answer: float) -> float:
    """The value in [0, 1] of `answer` if the respondent said `gold`."""
    if kind in EXACT_KINDS:
        return float(answer == math.trunc(gold))
    if high <= low:
        return float(answer == gold)
    return _clamp(1 - abs(_clamp(answer, low, high) - gold) / (high - low), 0.0, 1.0)


def _clamp(number: float, low: float, high: float) -> float:
    return max(low, min(high, number))


def _verdict(kind: str, value: float) -> str:
    if value == 1:
        return "same"
    if kind in EXACT_KINDS:
        return "other"
    return "near" if value >= 0.75 else "far"


# -- constants -----------------------------------------------------------------------------------


def _constants(records: Sequence[Record], n: int) -> dict[str, BatchMetric]:
    groups: dict[tuple[str, float, float], list[float]] = defaultdict(list)
    for record in records:
        scale = record.tags.get("scale", "").split(" to ")
        if len(scale) == 2 and record.gold:
            kind = record.tags.get("type", "ordinal")
            groups[kind, float(scale[0]), float(scale[1])].append(float(record.gold))
    if not groups:
        return {}
    middle, best = [], []
    for (kind, low, high), golds in groups.items():
        half = float(math.floor((low + high) / 2))
        middle += [value_of(kind, low, high, gold, half) for gold in golds]
        worth = (
            [value_of(kind, low, high, gold, constant) for gold in golds] for constant in set(golds)
        )
        best += max(worth, key=fmean)
    worths = {"constant_middle": middle, "constant_best": best}
    return {name: replace(mean_of(worth), n=n) for name, worth in worths.items()}


class SocSci210Reference(SocSci210):
    loosely = False

    def check(self, fields: Mapping[str, Any]) -> None:
        """Accept a recorded answer that is off the scale."""

    def stated(self, text: str) -> None:
        """None: the scale comes from the row's columns or defaults, not from the question."""

    def parse(self, text: str) -> tuple[str, str]:
        inside = tagged_text(text, "reference")
        return ("", "no_tag") if inside is None else read_strictly(inside)

    def read(self, example: Example, text: str) -> tuple[str, str]:
        """`yes` is 1 and `no` is 0 on any scale with two points."""
        answer, status = self.parse(text)
        if answer not in ("yes", "no"):
            return answer, status
        binary = scale_of(example.fields)[0] == "binary"
        return (str(int(answer == "yes")), status) if binary else ("", "malformed")

    def recorded(self, gold: float) -> float:
        return math.trunc(gold)


def read_strictly(inside: str) -> tuple[str, str]:
    if re.fullmatch(r"-?\d+", inside):
        return inside, "ok"
    # The published parser accepts any case of the two words, and everything that is not a plain
    # "yes" (a long s folds to s) counts as no.
    if re.fullmatch(r"yes|no", inside, re.IGNORECASE):
        return ("yes" if inside.lower() == "yes" else "no"), "ok"
    return "", "malformed"


ScaleKind = Literal["ordinal", "binary", "categorical"]

_SIGNED = r"[-\u2212]?\d+"
_RANGE = re.compile(rf"\bfrom\s+({_SIGNED})(?:\s*\([^()]*\))?\s+to\s+({_SIGNED})(?!\d)")
_POINT = re.compile(rf"(?<![\d$.,])({_SIGNED})\s+(?:for|means|corresponds to|=)\s")
_NAMEABLE = 20
"""Scales with more steps than this are not lists of names."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Lowest and highest point, and how answers on it are compared."""

    low: int
    high: int
    kind: ScaleKind


def read_scale(text: str) -> Scale | None:
    """The scale in the last request to *return* something, else the last range in the text.

    None if the text states no scale (for example, only an amount of money).
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
        raise BadRecord(f"its output '{output:.40}' has no number")
    parts = _PARTS.fullmatch(text)
    persona, question = (parts["persona"], parts["told"]) if parts else ("", text.strip())
    scale = read_scale(question)
    if scale is None:
        raise BadRecord("its question states no scale, so distances are undefined")
    response = float(answer[1]) if "." in answer[1] else int(answer[1])
    if not scale.low <= response <= scale.high:
        where = f"from {scale.low} to {scale.high}"
        raise BadRecord(f"its recorded answer {answer[1]} is outside its scale {where}")
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
    studies = len({str(row["study_id"]) for row in rows})
    kinds = {kind: sum(row["response_type"] == kind for row in rows)
             for kind in ("ordinal", "binary", "categorical")}  # fmt: skip
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return (
        f"{len(rows)} rows of {studies} studies ({counted}); a scale with a name for every point "
        "is read as a list of options.",
    )


PER_STUDY = 6
"""Number of consecutive respondents in the same study."""

SCALES = ((1, 5, 1), (1, 7, 1), (0, 10, 2), (-3, 3, 1), (0, 100, 20))
"""Lowest point, highest point, and how far a push moves an answer."""
PUSHES = {"0": 0, "1": 1, "2": -1}
"""Condition → direction in which its text pushes."""


def rows(n: int, seed: int) -> list[Row]:
    """`n` rows; row i depends only on (seed, i), so fewer rows are a prefix of more."""
    return [_made_row(seed, i) for i in range(n)]


def _made_row(seed: int, index: int) -> Row:
    study = index // PER_STUDY
    texts = random.Random(f"socsci210/{seed}/study/{study}")
    person = random.Random(f"socsci210/{seed}/person/{index}")
    condition = person.choice(tuple(PUSHES))
    kind = ("ordinal", "ordinal", "binary", "ordinal", "categorical")[study % 5]
    make = {"ordinal": _ordinal, "binary": _binary, "categorical": _categorical}[kind]
    outcome = make(texts, person, condition)
    asked = "{persona}\n\n{condition_text} {outcome_question}".format(**outcome)
    return {
        "prompt_text": f"Respondent: {asked}",
        **outcome,
        "response_type": kind,
        "study_id": f"made-{seed}-{study}",
        "condition_id": condition,
        "outcome_id": kind,
        "index": index,
    }


def _outcome(
    kind: str, matter: str, condition: str, response: int, scale: tuple[int, int], **values: Any
) -> Row:
    told = TEXTS["outcomes"][kind]
    shown = told["unread"] if matter == "" and condition != "0" else TEXTS["reading"]
    return {
        "persona": told["persona"].format(**values),
        "condition_text": shown.format(
            matter=matter or told["matter"], page=TEXTS["pages"][condition]
        ),
        "outcome_question": told["question"].format(**values),
        "response": response,
        "r_min": scale[0],
        "r_max": scale[1],
    }


def _person(rng: random.Random) -> str:
    job, town = rng.choice(TEXTS["jobs"]), rng.choice(TEXTS["towns"])
    return f"{rng.randint(19, 84)} years old, {job}, lives in {town}."


def _ordinal(texts: random.Random, person: random.Random, condition: str) -> Row:
    matter, (low, high, step) = texts.choice(TEXTS["matters"]), texts.choice(SCALES)
    earlier = person.choice(range(low, high + 1, step))
    moved = person.random() < 0.6
    push = PUSHES[condition] * step if moved else 0
    steps = TEXTS["steps"].format(step=step) if step > 1 else ""
    return _outcome(
        "ordinal", matter, condition, min(max(earlier + push, low), high), (low, high),
        person=_person(person), earlier=earlier, moved=TEXTS["moved" if moved else "firm"],
        steps=steps, low=low, high=high,
    )  # fmt: skip


def _binary(texts: random.Random, person: random.Random, condition: str) -> Row:
    matter = texts.choice(TEXTS["matters"])
    earlier = person.randrange(2)
    moved = person.random() < 0.6
    push = PUSHES[condition] if moved else 0
    return _outcome(
        "binary", matter, condition, earlier if push == 0 else int(push > 0), (0, 1),
        person=_person(person), signed="signed" if earlier else "did not sign",
        turns="is enough to turn them round" if moved else "does not turn them round",
    )  # fmt: skip


def _categorical(texts: random.Random, person: random.Random, condition: str) -> Row:
    habits = TEXTS["habits"]
    options = texts.sample(tuple(habits), len(habits))
    habit = person.choice(tuple(habits))
    named = ", ".join(f"{i} for {option} of them" for i, option in enumerate(options, 1))
    return _outcome(
        "categorical", "", condition, options.index(habit) + 1, (1, len(options)),
        person=_person(person), habit=habits[habit], named=named,
    )  # fmt: skip
