"""Rows of `tau_usi`: customers of the made desk, the numbers of a runtime's tasks, or a file's ids.

A row is little more than a number, because the service of its domain has the rest. The made domain
is served in this process; the others need a runtime, which knows their tasks by domain and index.

    {"retail_12": {...}, "retail_12_ann2": {...}}   →   {"env_name": "retail", "task_index": 12}

Of a file of recorded conversations only the ids are read: what the people said is no part of a row.
The rows are marked as the file's terms have it, for evaluation only. A list of tasks, as tau-bench
has it, is refused: the runtime that serves the domain has the task itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from soulkit.data.files import BadRow
from soulkit.errors import DataError
from soulkit.tasks.kit.importing import Imported, WrongShape
from soulkit.tasks.kit.spec import EVALUATION_ONLY
from soulkit.tasks.tau_usi.desk import DOMAIN

SIZES: Mapping[str, int] = {"retail": 115, "airline": 50}
"""Tasks of the published domains."""
_PER_SEED = 10_000


def rows(
    n: int = 100, seed: int = 0, *, domain: Literal["tool_library", "retail", "airline"] = DOMAIN
) -> list[dict[str, Any]]:
    """`n` rows of a domain; of a published one its first `n`, which the seed does not change."""
    if domain in SIZES:
        return [_row(domain, i) for i in range(min(n, SIZES[domain]))]
    return [_row(domain, seed * _PER_SEED + i) for i in range(n)]


def _row(domain: str, number: int) -> dict[str, Any]:
    return {"env_name": domain, "task_index": number, "instance_id": f"{domain}_{number}"}


_TASK_KEYS = ({"instruction", "actions"}, {"user_scenario", "evaluation_criteria"})

_DOMAIN, _SIZE = next(iter(SIZES.items()))
_MAKE_ROWS = (
    f"Make the rows of a domain: soul data synth tau_usi --domain {_DOMAIN} -n {_SIZE} "
    f"({'; '.join(f'{name}: -n {size}' for name, size in list(SIZES.items())[1:])})."
)
_ID = re.compile(r"([a-z_]*[a-z])_(\d+)(?:_ann[23])?")


def import_tau(path: Path) -> Imported:
    """One row a task, in the order of the file; DataError for a file of another shape."""
    if path.suffix == ".py":  # as tau-bench itself writes them
        raise _tasks_of_tau_bench(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = _lines(text) if path.suffix == ".jsonl" else json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise _of_other_shape(path, " ".join(str(error).split())[:200]) from error
    if _are_tasks(entries):
        raise _tasks_of_tau_bench(path)
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


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _are_tasks(entries: Any) -> bool:
    """Whether these are tasks of tau-bench or its successor: what a customer wants, and what the
    service should do."""
    listed = entries.get("data", entries.get("tasks")) if isinstance(entries, dict) else entries
    return isinstance(listed, list) and any(
        isinstance(entry, dict) and any(keys <= entry.keys() for keys in _TASK_KEYS)
        for entry in listed
    )


def _tasks_of_tau_bench(path: Path) -> DataError:
    return DataError(
        f"'{path}' holds tasks of tau-bench, and rows are not made of them.",
        "A row is the domain and the number of a task; the runtime that serves the domain has the "
        "task itself, with its customers, tools and database.",
        _MAKE_ROWS,
    )


def _of_other_shape(path: Path, why: str) -> WrongShape:
    return WrongShape(
        f"'{path}' is no file of recorded conversations.",
        why,
        "Name a JSON file with an object for each conversation, under ids such as retail_12. Or "
        f"without a file: {_MAKE_ROWS[0].lower()}{_MAKE_ROWS[1:]}",
    )
