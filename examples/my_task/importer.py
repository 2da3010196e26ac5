"""The original files of `my_task` as rows in its columns.

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
    """The rows of an original file; DataError when no record of it has the fields."""
    fields = ("scene", "line", "right", "wrong")
    return import_records(path, _row, fields=fields, way_out="Give an original file.")


def _row(record: RawRow, index: int) -> dict[str, Any]:
    scene, right = need(record, "scene", "right")
    line, wrong = record.fields["line"], record.fields["wrong"]
    if not isinstance(line, dict) or not {"by", "text"} <= line.keys():
        raise BadRecord("its line does not say by whom it is, or what is said")
    if not isinstance(wrong, list) or len(wrong) != WRONG:
        raise BadRecord(f"it does not have {WRONG} wrong readings")
    options = [right, *map(str, wrong)]
    # The original has the right reading first: left there, always answering A would be right.
    random.Random(f"{index}/{right}").shuffle(options)
    return {
        "situation": scene,
        "speaker": str(line["by"]),
        "said": str(line["text"]),
        "options": options,
        "meant": right,
    }
