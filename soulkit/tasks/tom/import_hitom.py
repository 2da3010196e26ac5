"""Hi-ToM's original file: every question twice, in a CoTP and a VP half.

The halves differ in their prompt and, by mistake, in some golds. A check of both against a belief
tracker sides with CoTP nearly always, so that half is the default. The VP stories open with an
instruction line and a few stories end in stray asterisks; neither is part of the story.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.data.literals import parse_choices
from soulkit.tasks.importing import BadRecord, Imported, need, wrong_shape

Half = Literal["cotp", "vp", "all"]
"""Which half of the questions: the two prompts, or both."""
LICENCE = "Apache-2.0 (Hi-ToM)"

_NUMBERED = re.compile(r"\s*\d+\s")
_FIELDS = ("story", "question", "choices")


def import_hitom(path: Path, *, half: Half = "cotp") -> Imported:
    """Rows of `Hi-ToM_data.json`, or of JSON lines with the same fields."""
    raw, bad = read_rows(path)
    if not any(all(name in row.fields for name in _FIELDS) for row in raw):
        raise wrong_shape(path, _FIELDS, "Give Hi-ToM_data.json of the Hi-ToM release.")
    rows: list[dict[str, Any]] = []
    halves: list[str] = []
    for row in raw:
        try:
            rows.append(_row(row))
            halves.append(str(row.fields.get("prompting_type", "")).lower())
        except BadRecord as error:
            bad.append(BadRow(row.source, str(error)))
    chosen_rows = [r for r, h in zip(rows, halves, strict=True) if half == "all" or h in (half, "")]
    notes = _notes(rows, halves, half, len(chosen_rows))
    return Imported(rows=tuple(chosen_rows), bad=tuple(bad), notes=notes)


def _row(raw: RawRow) -> dict[str, Any]:
    story, question, choices = need(raw, *_FIELDS)
    (gold,) = need(raw, "correct_answer" if "correct_answer" in raw.fields else "answer")
    options = parse_choices(choices)
    if len(options) < 2 or len(set(options.values())) < len(options):
        raise BadRecord("its choices are no list of distinct lettered options")
    if gold.strip() not in options.values():
        raise BadRecord(f"its answer '{gold:.40}' is none of its choices")
    columns = ("deception", "story_length", "question_order")
    return {
        "story": clean_story(story),
        "question": question.strip(),
        "choices": choices.strip(),
        "correct_answer": gold.strip(),
        **{name: raw.fields[name] for name in columns if name in raw.fields},
        "index": raw.fields.get("sample_id", raw.fields.get("index")),
        "provenance": f"Hi-ToM, {raw.source}",
        "licence": LICENCE,
    }


def clean_story(text: str) -> str:
    """The numbered lines of a story, without an instruction before them or stray marks."""
    lines = [line.replace("***", "").strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    if any(_NUMBERED.match(line) for line in lines):
        lines = [line for line in lines if _NUMBERED.match(line)]
    return "\n".join(lines)


def _notes(
    rows: Sequence[Mapping[str, Any]], halves: Sequence[str], half: Half, count: int
) -> tuple[str, ...]:
    golds: dict[tuple[str, str], dict[str, str]] = {}
    for row, name in zip(rows, halves, strict=True):
        golds.setdefault((row["story"], row["question"]), {})[name] = row["correct_answer"]
    pairs = [g for g in golds.values() if {"cotp", "vp"} <= set(g)]
    if not pairs:
        return ()
    differ = sum(g["cotp"] != g["vp"] for g in pairs)
    what = "Both halves are kept" if half == "all" else f"Only the half '{half}' is kept"
    return (
        f"{what} ({count} of {len(rows)} rows). The file asks {len(pairs)} questions twice, and "
        f"the halves give different golds to {differ} of them. The CoTP half is the default "
        "because a belief tracker agrees with it far more often; see: soul data audit hitom FILE",
    )
