"""ToMBench's files: one per subtask, each record in Chinese and in English.

A record becomes two rows with one `story_id`, which names the Chinese story, so that neither
languages nor questions of one story fall on two sides of a split. The header is bilingual and holds
line breaks (`答案\\nANSWER`). Two-option items have a bare NaN under C and D, which is read as
absent. Some options repeat their own letter (`B. 图书馆`), and one answer reads `A. `: neither the
letter nor the stop is part of the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.data.rows import content_hash
from soulkit.tasks.importing import BadRecord, Imported, need, wrong_shape

LICENCE = "MIT"
_ABILITY, _INDEX, _ANSWER = "能力\nABILITY", "序号\nINDEX", "答案\nANSWER"
_COLUMNS = {
    "en": ("STORY", "QUESTION", "OPTION-{}"),
    "zh": ("故事", "问题", "选项{}"),
}
_GOLD = re.compile(r"\s*([A-D])\s*[.．。、]?\s*")


def import_tombench(path: Path) -> Imported:
    """Rows of one subtask's JSON lines, English before Chinese; the file's name is the subtask."""
    raw, bad = read_rows(path)
    if not any("STORY" in row.fields or "故事" in row.fields for row in raw):
        raise wrong_shape(path, ("STORY", "故事"), "Give a .jsonl file of the ToMBench release.")
    rows: list[dict[str, Any]] = []
    for record in raw:
        for language in _COLUMNS:
            try:
                rows.append(_row(record, language, path.stem))
            except BadRecord as error:
                bad.append(BadRow(f"{record.source} ({language})", str(error)))
    short = sum(len(row["options_dict"]) < 4 for row in rows)
    notes = (f"{short} of {len(rows)} rows have fewer than four options.",) if short else ()
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=notes)


def _row(record: RawRow, language: str, subtask: str) -> dict[str, Any]:
    story_name, question_name, option_name = _COLUMNS[language]
    story, question = need(record, story_name, question_name)
    options = {x: record.fields.get(option_name.format(x)) for x in "ABCD"}
    letters = {x: _without_letter(text, x) for x, text in options.items() if text is not None}
    gold = _GOLD.fullmatch(str(record.fields.get(_ANSWER) or ""))
    if gold is None or not letters.get(gold.group(1)):
        raise BadRecord("its answer is none of its options")
    return {
        "language": language,
        "story": story.strip(),
        "question": question.strip(),
        "options_dict": {x: text for x, text in letters.items() if text},
        "correct_letter": gold.group(1),
        "ability": " ".join(str(record.fields.get(_ABILITY) or "").split()),
        "subtask": subtask,
        "story_id": _story_id(record.fields),
        "index": record.fields.get(_INDEX),
        "provenance": f"ToMBench, {record.source}",
        "licence": LICENCE,
    }


def _without_letter(text: Any, letter: str) -> str:
    """An option's text; its own letter in front is a mark, another letter is not."""
    return re.sub(rf"\A\s*{letter}\s*[.．、:：]\s*", "", str(text)).strip()


def _story_id(fields: Mapping[str, Any]) -> str:
    story = " ".join(str(fields.get("故事") or fields.get("STORY")).split())
    return content_hash("tombench", {"story": story})
