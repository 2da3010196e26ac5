"""MISTAKES from the Eedi competition files: one row per question and labelled wrong option.

`train.csv` (or JSON lines with its columns) holds questions, four options, the right letter and a
misconception id for most wrong options; `misconception_mapping.csv`, looked for beside it, holds
the names. Ids are printed as `1672` or `1672.0`.

    {"QuestionId": "0", "CorrectAnswer": "A", ..., "MisconceptionDId": "1672"}
    → {"id": "0_D", "TargetOption": "D", "MisconceptionId": 1672, "MisconceptionName": ..., ...}

Two wrong options of a question may carry the same misconception; no reader can tell which of them
is meant. `rivals` counts the others, and such rows stay, as in the published set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.errors import DataError
from soulkit.tasks.importing import BadRecord, Imported, need, wrong_shape

NAMES_FILE = "misconception_mapping.csv"
LICENCE = "Eedi competition data: competition rules, non-commercial research"
_LETTERS = "ABCD"
_WANTED = ("QuestionText", "CorrectAnswer", "MisconceptionAId ... MisconceptionDId")
_LABELS = tuple(f"Misconception{letter}Id" for letter in _LETTERS)


def import_mistakes(path: Path, *, names: Path | None = None) -> Imported:
    """Rows of an Eedi question file; `names` is the mapping file, by default the one beside it.

    Raises DataError when either file is missing or of another shape.
    """
    raw, bad = read_rows(path)
    if not any("QuestionText" in r.fields and any(x in r.fields for x in _LABELS) for r in raw):
        raise wrong_shape(path, _WANTED, "Give train.csv of the Eedi competition.")
    beside = names or path.with_name(NAMES_FILE)
    if names is None and not beside.is_file():
        raise DataError(
            f"There is no '{NAMES_FILE}' beside '{path}'.",
            "The questions carry numbers of misconceptions; their names stand in that file.",
            "Put it there, or name it: soul data build mistakes FILE --names MAPPING",
        )
    pairs = wrong_options(raw, read_names(beside), path.name)
    return Imported(rows=pairs.rows, bad=(*bad, *pairs.bad), notes=pairs.notes)


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


def wrong_options(
    questions: Sequence[RawRow], names: Mapping[int, str], origin: str = ""
) -> Imported:
    """Question × labelled wrong option, in the order of the file and of the letters."""
    rows: list[dict[str, Any]] = []
    bad: list[BadRow] = []
    for question in questions:
        try:
            common, labels = _question(question)
        except BadRecord as error:
            bad.append(BadRow(question.source, str(error)))
            continue
        for letter, number in labels.items():
            if number not in names:
                bad.append(BadRow(question.source, f"misconception {number} has no name"))
                continue
            row = _pair(common, letter, number, names[number])
            row["rivals"] = Counter(labels.values())[number] - 1
            rows.append({**row, "provenance": f"{origin}:{common['id']}", "licence": LICENCE})
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=_notes(rows))


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
    about = {k: raw.fields[k] for k in ("SubjectName", "ConstructName") if raw.fields.get(k)}
    texts = {f"Answer{x}Text": a.strip() for x, a in zip(_LETTERS, answers, strict=True)}
    key = str(raw.fields.get("QuestionId", raw.source))
    return {
        "id": key, "QuestionText": text.strip(), **texts, "CorrectAnswer": right, **about,
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


def _notes(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    shared = sum(row["rivals"] > 0 for row in rows)
    if not shared:
        return ()
    return (
        f"In {shared} of {len(rows)} rows another wrong option of the same question carries the "
        "same misconception, so nobody can tell which one is meant; the break-down 'rivals' keeps "
        "them apart.",
    )
