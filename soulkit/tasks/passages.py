"""The rows of tasks as passages: what their seats may read, for a comparison of two files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from soulkit.data.contamination import (
    Passage,
    RowTexts,
    Words,
    entity_values,
    folded_words,
    texts_of,
)
from soulkit.data.files import BadRow, RawRow
from soulkit.errors import DataError
from soulkit.tasks.base import Task
from soulkit.types import Example


def passages(
    tasks: Mapping[str, Task], rows: Iterable[tuple[str, RawRow]]
) -> tuple[list[Passage], list[BadRow]]:
    """(task name, row) pairs as passages, and the rows that their task cannot use."""
    good: list[Passage] = []
    bad: list[BadRow] = []
    for name, row in rows:
        try:
            good.append(passage(tasks[name], row))
        except DataError as error:
            bad.append(BadRow(row.source, f"{error.what} {error.why}"))
    return good, bad


def passage(task: Task, row: RawRow) -> Passage:
    """One row as a passage; DataError when the task cannot use it."""
    return passage_of(task, task.example(row.fields, source=row.source))


def passage_of(task: Task, example: Example) -> Passage:
    """What the seats of one row may read."""
    columns = task.spec.columns
    texts = {name: folded_words(value) for name, value in _read(task, example).items()}
    entities = {
        (column.entity, value)
        for name, column in columns.items()
        if column.entity
        for value in entity_values(example.fields.get(name), task.name)
    }
    every = tuple(w for words in texts.values() for w in words)
    core = tuple(w for n, words in texts.items() if not columns[n].entity for w in words)
    return Passage(
        example.source, task.name, every, core or every, frozenset(entities),
        tuple(_recorded(example)),
    )  # fmt: skip


def row_texts(task: Task, example: Example) -> RowTexts:
    """The texts of one row as they are written, and which of them name its cluster."""
    texts = texts_of(list(_read(task, example).values()))
    telling = texts_of([example.fields.get(name) for name in task.spec.cluster])
    return RowTexts(example.source, example.cluster, tuple(texts), tuple(telling))


def _read(task: Task, example: Example) -> dict[str, Any]:
    """What some seat may read of a row, column by column as they are declared."""
    values = {n: v for seat in example.seats for n, v in example.visible(seat).items()}
    return {name: values[name] for name in task.spec.columns if name in values}


def _recorded(example: Example) -> Iterator[tuple[Words, ...]]:
    """Histories that a seat reads, message by message, and the texts of the gold."""
    for name, value in example.fields.items():
        readers = example.audience.get(name, ())
        if set(readers) & set(example.seats) and _is_history(value):
            texts = (folded_words(v) for item in value for v in item.values())
            yield tuple(words for words in texts if len(words) > 1)  # without names of roles
        elif "gold" in readers and isinstance(value, str):
            yield (folded_words(value),)


def _is_history(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and all(isinstance(item, Mapping) for item in value)


def entity_kinds(tasks: Iterable[Task]) -> tuple[str, ...]:
    """The kinds of entity that the columns of `tasks` name."""
    kinds = {c.entity for task in tasks for c in task.spec.columns.values() if c.entity}
    return tuple(sorted(kinds))
