"""Import original files as rows of `scene_task`.

Example record: {"cat": "Minka", "where": "the stairs", "thoughts": {"owner": "...", "neighbour":
"...", "child": "..."}, "scene": [{"who": "owner", "thinks": "...", "says": "..."}]}.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow
from soulkit.tasks import BadRecord, Imported, import_records, need

PEOPLE = ("owner", "neighbour", "child")


def read_original(path: Path) -> Imported:
    """The rows of an original file; DataError if no record has the required fields."""
    fields = ("cat", "where", "thoughts", "scene")
    return import_records(path, _row, fields=fields, way_out="Give an original file.")


def _row(record: RawRow, index: int) -> dict[str, Any]:
    cat, place = need(record, "cat", "where")
    thoughts, scene = record.fields["thoughts"], record.fields["scene"]
    if not isinstance(thoughts, dict) or set(thoughts) != set(PEOPLE):
        raise BadRecord(f"its 'thoughts' need exactly the keys {', '.join(PEOPLE)}")
    if not isinstance(scene, list) or not all(isinstance(line, dict) for line in scene):
        raise BadRecord("its 'scene' is not a list of objects")
    return {
        "cat": cat,
        "place": place,
        **{f"{seat}_thought": str(thoughts[seat]) for seat in PEOPLE},
        "written": [_line(line) for line in scene],
    }


def _line(line: dict[str, Any]) -> str:
    if not line.get("who") or not line.get("says"):
        raise BadRecord("a line of its 'scene' lacks 'who' or 'says'")
    thought = f"[{line['thinks']}] " if line.get("thinks") else ""
    return f"{line['who']}: {thought}{line['says']}"
