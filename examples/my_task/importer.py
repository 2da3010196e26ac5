"""Import original files as rows of `my_task`.

Example record: {"scene": "It snows, and the window is open.", "line": {"by": "Lien", "text":
"Were you raised in a tent?"}, "right": "The window should be shut.", "wrong": ["...", "..."]}.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from soulkit.data.files import RawRow
from soulkit.tasks import BadRecord, Imported, import_records, need

WRONG = 2


def read_original(path: Path) -> Imported:
    """The rows of an original file; DataError if no record has the required fields."""
    fields = ("scene", "line", "right", "wrong")
    return import_records(path, _row, fields=fields, way_out="Give an original file.")


def _row(record: RawRow, index: int) -> dict[str, Any]:
    scene, right = need(record, "scene", "right")
    line, wrong = record.fields["line"], record.fields["wrong"]
    if not isinstance(line, dict) or not {"by", "text"} <= line.keys():
        raise BadRecord("its 'line' needs 'by' (the speaker) and 'text'")
    if not isinstance(wrong, list) or len(wrong) != WRONG:
        raise BadRecord(f"it needs {WRONG} wrong readings")
    options = [right, *map(str, wrong)]
    # The original lists the right reading first; without shuffling, A would always be right.
    random.Random(f"{index}/{right}").shuffle(options)
    return {
        "situation": scene,
        "speaker": str(line["by"]),
        "said": str(line["text"]),
        "options": options,
        "meant": right,
    }
