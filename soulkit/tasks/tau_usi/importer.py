"""Rows from a file of recorded conversations: which tasks people have talked about.

    {"retail_12": {...}, "retail_12_ann2": {...}}   →   {"env_name": "retail", "task_index": 12}

Only the ids are read: what the people said is no part of a row. The rows are marked as the file's
terms have it, for evaluation only.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from soulkit.data.files import BadRow
from soulkit.errors import DataError
from soulkit.tasks.importing import Imported
from soulkit.tasks.spec import EVALUATION_ONLY

_ID = re.compile(r"([a-z_]*[a-z])_(\d+)(?:_ann[23])?")


def import_tau(path: Path) -> Imported:
    """One row a task, in the order of the file; DataError for a file of another shape."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _of_other_shape(path, " ".join(str(error).split())[:200]) from error
    if not isinstance(entries, dict) or not any(_ID.fullmatch(key) for key in entries):
        raise _of_other_shape(path, "It holds no object with ids such as retail_12.")
    made: dict[str, dict[str, Any]] = {}
    bad: list[BadRow] = []
    for key in entries:
        match = _ID.fullmatch(key)
        if match is None:
            bad.append(BadRow(f"{path.name}: {key[:60]}", "its id names no domain and number"))
            continue
        name = f"{match[1]}_{match[2]}"
        row = {"env_name": match[1], "task_index": int(match[2]), "instance_id": name}
        made.setdefault(name, {**row, EVALUATION_ONLY: True})
    notes = ("the rows are marked evaluation-only, as the terms of the file have it",)
    return Imported(rows=tuple(made.values()), bad=tuple(bad), notes=notes)


def _of_other_shape(path: Path, why: str) -> DataError:
    return DataError(
        f"'{path}' is no file of recorded conversations.",
        why,
        "Name a JSON file with an object for each conversation, under ids such as retail_12.",
    )
