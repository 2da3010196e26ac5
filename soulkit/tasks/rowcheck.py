"""What is in a row file: counts, columns, lengths, and the rows that cannot be used.

The check binds rows exactly as an evaluation does, so a file that passes here loads there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soulkit.data.contamination import Renamed, find_renamed
from soulkit.data.files import BadRow, RawRow, read_rows
from soulkit.data.rows import HUMAN
from soulkit.errors import DataError, did_you_mean
from soulkit.tasks.base import Task
from soulkit.tasks.imports import chats_for_rows, naming_originals
from soulkit.tasks.loading import sources, to_examples
from soulkit.tasks.passages import row_texts
from soulkit.tasks.registry import Registry
from soulkit.types import Example


@dataclass(frozen=True, slots=True)
class WordCounts:
    """Words of one field over the rows, nearest-rank percentiles."""

    p50: int
    p95: int
    max: int
    over_budget: int
    """Rows whose field is longer than the column's `max_words`, and will be cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The check of one task's rows."""

    task: str
    rows: int
    """Rows of this task in the file, usable or not."""
    usable: int
    clusters: int
    duplicates: int
    columns: Mapping[str, int]
    """Column of the file → rows that have it."""
    ignored: tuple[str, ...]
    """Columns of the file that the task does not know."""
    tags: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    words: Mapping[str, WordCounts] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    equal_up_to_names: Renamed | None = None
    """Rows of different clusters that are equal up to names."""
    bad: tuple[BadRow, ...] = ()


def check_row_file(
    registry: Registry, path: Path, task: str | None
) -> tuple[list[Checked], list[BadRow]]:
    """The check of a file by task, and the rows that belong to none; all are rows of `task`, where
    one is named. OriginalFile for a file that is the original release's."""
    live = None if task is None else registry.task(task)
    if path.is_dir() and (chats := chats_for_rows(live, path)):
        raise chats
    if live is not None:
        with naming_originals(live, path):
            return [check_rows(live, *read_rows(path))], []
    rows, bad = read_rows(path)
    names = registry.by_source()
    if not any(str(row.fields.get("data_source", "")) in names for row in rows) and (
        chats := chats_for_rows(None, path)
    ):
        raise chats
    groups, strays = rows_by_task(rows, names)
    checks = []
    for name, group in groups.items():
        live = registry.task(name)
        with naming_originals(live, path):
            checks.append(check_rows(live, group))
    return checks, [*bad, *strays]


def check_rows(task: Task, rows: Sequence[RawRow], bad: Iterable[BadRow] = ()) -> Checked:
    """Check `rows` as rows of `task`; `bad` are those that were no rows to begin with.

    Raises ColumnsError when every row lacks required columns.
    """
    task_rows = [r for r in rows if str(r.fields.get("data_source") or task.name) in sources(task)]
    broken = tuple(bad)
    loaded = to_examples(task, rows, bad=broken)
    declared = {a for name, c in task.spec.columns.items() for a in (name, *c.aliases)}
    columns = Counter(name for row in task_rows for name in row.fields)
    return Checked(
        task=task.name,
        rows=len(task_rows) + len(broken),
        # A row that is played in several forms is one row.
        usable=len({example.source for example in loaded.examples}),
        clusters=len({example.cluster for example in loaded.examples}),
        duplicates=loaded.duplicates,
        columns=dict(columns),
        ignored=tuple(
            sorted(
                name
                for name in set(columns) - declared - {"data_source", *task.spec.unpack}
                if not name.startswith(HUMAN)
            )
        ),
        tags=_tags(loaded.examples),
        words=field_words(task, loaded.examples),
        skipped=loaded.skipped,
        equal_up_to_names=find_renamed([row_texts(task, example) for example in loaded.examples]),
        bad=loaded.bad,
    )


def rows_by_task(
    rows: Sequence[RawRow], names: Mapping[str, str]
) -> tuple[dict[str, list[RawRow]], list[BadRow]]:
    """Rows grouped by the task that their `data_source` names, and those that name none.

    `names`: data_source → task. DataError when no row says where it belongs.
    """
    groups: dict[str, list[RawRow]] = {}
    bad: list[BadRow] = []
    for row in rows:
        mark = str(row.fields.get("data_source", ""))
        if mark in names:
            groups.setdefault(names[mark], []).append(row)
        else:
            why = f"unknown data_source '{mark}'. {did_you_mean(mark, names)}" if mark else ""
            bad.append(BadRow(row.source, why or "it has no data_source"))
    if not groups:
        raise DataError(
            "The rows do not say which task they belong to.",
            f"{bad[0].source}: {bad[0].why}" if bad else "There is no row that could be read.",
            "Name the task with --task.",
        )
    return groups, bad


def _tags(examples: Sequence[Example]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for example in examples:
        for tag, value in example.tags.items():
            counts.setdefault(tag, Counter())[value] += 1
    return {tag: dict(sorted(values.items())) for tag, values in counts.items()}


def field_words(task: Task, examples: Sequence[Example]) -> dict[str, WordCounts]:
    """Words of every column that holds text, over the examples that have it.

    What a task makes of its columns, and labels that it does not declare, are no columns.
    """
    lengths: dict[str, list[int]] = {}
    columns = task.spec.columns
    for example in examples:
        for name, value in example.fields.items():
            if name in columns and (count := count_words(value)) is not None:
                lengths.setdefault(name, []).append(count)
    return {name: summary(sorted(values), columns[name].max_words)
            for name, values in lengths.items()}  # fmt: skip


def count_words(value: Any) -> int | None:
    """White-space words of a text, or of all texts of a list; None for anything else."""
    if isinstance(value, str):
        return len(value.split())
    if isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
        return sum(len(v.split()) for v in value)
    return None


def summary(values: Sequence[int], budget: int | None) -> WordCounts:
    """Percentiles of sorted word counts, of which there is at least one."""

    def rank(share: float) -> int:
        return values[max(math.ceil(share * len(values)) - 1, 0)]

    over = 0 if budget is None else sum(value > budget for value in values)
    return WordCounts(rank(0.5), rank(0.95), values[-1], over)
