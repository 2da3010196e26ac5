"""CoSER's test set: one scene of a book a record, as a JSON array or JSON lines.

    {"book": "...", "scenario": "...", "plot": {"summary": "..."}, "character_profiles": {"Ilka":
     "..."}, "key_characters": [{"name": "Ilka", "thought": "..."}], "major_characters": ["Ilka"],
     "speaking_characters_w_env": ["Ilka", "Environment"], "dialogues": [{"character": "Ilka",
     "message": "[What now?] (stands up) Who is there?"}], "tag": "ood", ...}

The record is kept whole, as JSON text under `circumstance`, which is how released rows carry it.
Older files say `motivation` and `experience` where newer ones say `thought` and `summary`; both
stay as they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow
from soulkit.tasks.importing import BadRecord, Imported, need, of_shape, rows_from

LICENCE = (
    "not stated by the source; scenes and dialogue come from novels, most of them in copyright"
)
_FIELDS = ("book", "scenario", "dialogues")


def import_coser(path: Path) -> Imported:
    """Rows of a file of scenes; DataError when none of its records is one."""
    raw, bad = of_shape(path, _FIELDS, "Give test_set.json, or JSON lines of its records.")
    rows = rows_from(raw, bad, _row)
    return Imported(rows=tuple(rows), bad=tuple(bad), notes=_notes(rows))


def _row(raw: RawRow, index: int) -> dict[str, Any]:
    book, _ = need(raw, "book", "scenario")
    _check_scene(raw.fields)
    return {
        "circumstance": json.dumps(raw.fields, ensure_ascii=False),
        "book": book,
        "tag": raw.fields.get("tag"),
        "index": index,
        "provenance": raw.source,
        "licence": LICENCE,
    }


def _check_scene(fields: Mapping[str, Any]) -> None:
    """BadRecord for what nobody could play or compare with."""
    plot, profiles = fields.get("plot"), fields.get("character_profiles")
    if not isinstance(plot, Mapping) or not isinstance(profiles, Mapping):
        raise BadRecord("its plot or its character_profiles are no object")
    speaking = _names(fields.get("speaking_characters_w_env"))
    if not speaking or not _names(fields.get("major_characters")):
        raise BadRecord("it does not list who speaks and who is a major character")
    lines = fields.get("dialogues")
    if not isinstance(lines, list) or not lines or not all(map(_is_line, lines)):
        raise BadRecord("its dialogues are no list of messages with a character each")
    strangers = {line["character"] for line in lines} - set(speaking)
    if strangers:
        raise BadRecord(f"{', '.join(sorted(strangers))} speaks in it and is not listed as speaker")


def _names(value: Any) -> list[str]:
    """`value` when it is a list of names, else an empty list."""
    named = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
    return value if named else []


def _is_line(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str) and value[key].strip() for key in ("character", "message")
    )


def _notes(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    tags = Counter(str(row["tag"]) for row in rows if row["tag"])
    counted = ", ".join(f"{count} {tag}" for tag, count in sorted(tags.items())) or "no tags"
    books = len({row["book"] for row in rows})
    return (
        f"{len(rows)} scenes of {books} books ({counted}).",
        f"Licence: {LICENCE}. Use the rows for evaluation on this machine, and do not publish or "
        "train on them without the rights.",
    )
