"""From rows to Examples: identity, columns, duplicates, limits and splits.

Identity is content. A row's id is a hash of what it says, so the same row has one id in a Parquet
file, in JSON lines, and behind another order of rows; whether a row belongs to a `--limit` subset
or to the dev split follows from hashes alone. Splits go by cluster: a story never stands on both
sides.

Files are read by `data/files.py` and literals by `data/literals.py`; both are re-exported here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soulkit.data.files import BadRow, RawRow, present, read_rows, write_rows
from soulkit.data.literals import (
    literal_list,
    parse_candidates,
    parse_choices,
    parse_story,
    structure,
)
from soulkit.data.schema import Column
from soulkit.errors import ConfigError, DataError, did_you_mean
from soulkit.types import Example

if TYPE_CHECKING:
    from soulkit.tasks.base import Task

__all__ = [
    "HUMAN", "BadRow", "ColumnsError", "Loaded", "RawRow", "bind", "content_hash", "dev_split",
    "load_examples", "parse_candidates", "parse_choices", "parse_story", "read_rows", "sources",
    "to_examples", "unpacked", "write_rows",
]  # fmt: skip


HUMAN = "human_"
"""A column `human_<dimension>` is what people said of that dimension: any row may carry some."""


class ColumnsError(DataError):
    """Required columns are missing: when that goes for every row, the file is of another shape."""


# -- identity ------------------------------------------------------------------------------------


def content_hash(task: str, fields: Mapping[str, Any]) -> str:
    """16 hex digits that name a row of `task`; None counts as absent, tuples as lists.

    Raises DataError for what no file could hold (NaN, infinities, objects).
    """
    text = json.dumps([task, _canonical(fields)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        # A column of integers with gaps comes back as floats from some writers.
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    raise DataError(
        f"A row holds {value!r:.60}, which has no canonical form.",
        "Rows are named by their content, so that every value must be text, a finite number, a "
        "truth value, a list or a mapping.",
        "Convert the value, or leave it out.",
    )


def _share(salt: str, key: str) -> float:
    """A number in [0, 1) that belongs to `key`."""
    digest = hashlib.sha256(f"{salt}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


# -- columns -------------------------------------------------------------------------------------


def bind(
    row: Mapping[str, Any], columns: Mapping[str, Column], task: str, source: str
) -> dict[str, Any]:
    """The declared columns of a flat row, by their own names; None where an optional one is absent.

    Other keys are dropped. Raises ColumnsError when required columns are missing, DataError when a
    value is not of its column's type.
    """
    given = present(row)
    values = {name: _find(given, name, column) for name, column in columns.items()}
    missing = [n for n, column in columns.items() if column.required and values[n] is None]
    if missing:
        raise _missing(given, columns, task, source, missing)
    return {
        name: None if value is None else _typed(name, value, columns[name], source)
        for name, value in values.items()
    }


def unpacked(row: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Any]:
    """`row` with the keys of the objects under `names` as its own; they may be JSON text.

    DataError for a value that is no object.
    """
    opened = dict(row)
    for name in names:
        packed = opened.pop(name, None)
        if packed is None:
            continue
        inner = structure(packed)
        if not isinstance(inner, Mapping):
            raise DataError(
                f"{source or 'row'}: '{name}' should hold an object, or the JSON text of one.",
                f"It holds {type(packed).__name__} {packed!r:.60}.",
                "Mend the row, or leave it out.",
            )
        opened |= present(inner)
    return opened


def _find(row: Mapping[str, Any], name: str, column: Column) -> Any:
    names = (key for key in (name, *column.aliases) if row.get(key) is not None)
    value = row.get(next(names, name))
    # An empty CSV cell, or the word for "no number", is no value unless the column holds text.
    blank = isinstance(value, str) and value.strip().lower() in ("", "nan", "none", "null")
    return None if blank and column.type in ("int", "number", "bool") else value


def _missing(
    row: Mapping[str, Any], columns: Mapping[str, Column], task: str, source: str,
    missing: Sequence[str],
) -> ColumnsError:  # fmt: skip
    expected = [name for name, column in columns.items() if column.required]
    known = {alias for name, column in columns.items() for alias in (name, *column.aliases)}
    spare = [name for name in row if name not in known and name != "data_source"]
    aliases = ", ".join(f"{n}: {{aliases: [{_guess(n, spare)}]}}" for n in missing)
    return ColumnsError(
        f"{source or 'row'}: {_column_s(missing)} of task '{task}' missing: {', '.join(missing)}.",
        f"Expected {', '.join(expected)}; found {', '.join(row) or 'nothing'}.",
        "If the file has them under other names, say so in the task's entry in tasks.yaml: "
        f"columns: {{{aliases}}}",
    )


def _column_s(names: Sequence[str]) -> str:
    return "a required column" if len(names) == 1 else "required columns"


def _guess(name: str, spare: Sequence[str]) -> str:
    """The spare column that most looks like `name`, else the first, else a placeholder."""
    hint = did_you_mean(name, spare).split("'") if spare else []
    return hint[1] if len(hint) > 1 else next(iter(spare), "name_in_your_file")


def _typed(name: str, value: Any, column: Column, source: str) -> Any:
    found = _READ[column.type](value)
    if found is None:
        raise DataError(
            f"{source or 'row'}: the column '{name}' should hold {_WANTED[column.type]}.",
            f"It holds {type(value).__name__} {value!r:.60}.",
            "Mend the row, or leave it out.",
        )
    return found


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _int(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and float(number).is_integer() else None


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        value = _spelled(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def _spelled(text: str) -> int | float | None:
    for read in (int, float):  # int first: it keeps more than 15 digits
        try:
            return read(text)
        except ValueError:
            continue
    return None


def _bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower() if isinstance(value, str | int | float) else ""
    return _TRUTH.get(word)


_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_READ: dict[str, Callable[[Any], Any]] = {
    "text": _text,
    "list": literal_list,
    "int": _int,
    "number": _number,
    "bool": _bool,
    "any": lambda value: value,
}
_WANTED = {
    "text": "text",
    "list": "a list, or the literal of one",
    "int": "a whole number",
    "number": "a finite number",
    "bool": "true or false",
    "any": "a value",
}


# -- examples ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Examples, and what was left out on the way to them."""

    examples: tuple[Example, ...]
    bad: tuple[BadRow, ...] = ()
    duplicates: int = 0
    """Rows that say the same as an earlier one."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """`data_source` of another task → its rows."""


def load_examples(
    task: Task,
    paths: Sequence[Path],
    *,
    split: str = "test",
    limit: int | None = None,
    seed: int = 0,
    strict: bool = False,
) -> Loaded:
    """The examples of `task` in `paths`, without duplicates.

    `limit` keeps the rows with the smallest ids: a fixed sample, whatever the order of the rows or
    of the files, and part of every larger one. The order follows a hash of (seed, id). `strict`
    turns any bad row into a DataError.
    """
    if limit is not None and limit < 1:
        raise ConfigError(
            f"A limit of {limit} rows leaves nothing.",
            "--limit says how many rows to keep.",
            "Give a number of at least 1, or leave it out for all rows.",
        )
    rows: list[RawRow] = []
    bad: list[BadRow] = []
    for path in paths:
        good, broken = read_rows(Path(path))
        rows += good
        bad += broken
    loaded = to_examples(task, rows, split=split, bad=bad)
    if not loaded.examples or (strict and loaded.bad):
        raise _unusable(task, paths, loaded)
    kept = sorted(loaded.examples, key=lambda e: e.id)[:limit]
    kept.sort(key=lambda e: _share(f"order/{seed}", e.id))
    return Loaded(examples=tuple(kept), bad=loaded.bad, duplicates=loaded.duplicates,
                  skipped=loaded.skipped)  # fmt: skip


def to_examples(
    task: Task,
    rows: Iterable[RawRow],
    *,
    split: str = "test",
    bad: Iterable[BadRow] = (),
    forms: bool = True,
) -> Loaded:
    """Rows as examples, in their order. ColumnsError when every row lacks required columns.

    Without `forms` a row that is played in several forms is one example, as it is written.
    """
    own = sources(task)
    found: dict[str, Example] = {}
    broken = list(bad)
    skipped: Counter[str] = Counter()
    shapes: list[ColumnsError] = []
    tried = duplicates = 0
    for row in rows:
        mark = str(row.fields.get("data_source") or task.name)
        if mark not in own:
            skipped[mark] += 1
            continue
        tried += 1
        try:
            for example in _examples(task, row, split, forms):
                duplicates += example.id in found
                found.setdefault(example.id, example)
        except DataError as error:
            shapes += [error] if isinstance(error, ColumnsError) else []
            broken.append(BadRow(row.source, _why(error, row.source)))
    if tried and len(shapes) == tried:
        raise shapes[0]
    return Loaded(examples=tuple(found.values()), bad=tuple(broken), duplicates=duplicates,
                  skipped=dict(skipped))  # fmt: skip


def sources(task: Task) -> frozenset[str]:
    """The `data_source` values that mark rows of `task`."""
    return frozenset((task.name, *task.spec.files.data_source))


def _examples(task: Task, row: RawRow, split: str, forms: bool) -> tuple[Example, ...]:
    examples = (
        task.examples(row.fields, source=row.source, split=split)
        if forms
        else (task.example(row.fields, source=row.source, split=split),)
    )
    for name, column in task.spec.columns.items():
        if column.required and _says_nothing(examples[0].fields.get(name)):
            raise DataError(
                f"{row.source}: the required column '{name}' is blank.",
                "A row without it cannot be played or scored.",
                "Fill it in, or leave the row out.",
            )
    return examples


def _says_nothing(value: Any) -> bool:
    """Whether a value is there and holds nothing: blank text, an empty list, an empty object."""
    if isinstance(value, str):
        return not value.strip()
    return isinstance(value, list | tuple | Mapping) and not value


def _why(error: DataError, source: str) -> str:
    return f"{error.what.removeprefix(f'{source}: ').removeprefix('row: ')} {error.why}"


def _unusable(task: Task, paths: Sequence[Path], loaded: Loaded) -> DataError:
    names = ", ".join(f"'{path}'" for path in paths) or "no file"
    if loaded.bad:
        first = "; ".join(f"{b.source}: {b.why.rstrip('.')}" for b in loaded.bad[:3])
        kind = "Some" if loaded.examples else "All"
        return DataError(
            f"{kind} rows of {names} are bad ({len(loaded.bad)}).",
            f"{first}.",
            f"Mend them; to see all: soul data check FILE --task {task.name}",
        )
    others = ", ".join(f"{name} ({n})" for name, n in loaded.skipped.items())
    return DataError(
        f"No row of {names} belongs to task '{task.name}'.",
        f"Their data_source says: {others or 'nothing'}.",
        f"Name the right task, or set data_source to '{sorted(sources(task))[0]}' in the rows.",
    )


def dev_split(
    examples: Sequence[Example], share: float = 0.1
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """(train, dev), both in the given order; whole clusters, chosen by hash of the cluster.

    Whatever else is in the list, a cluster falls on the same side; only when a side would stay
    empty is the cluster nearest to it moved. ConfigError unless 0 < share < 1.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"A dev share of {share} is no share.",
            "The dev split is a part of the training rows, neither none nor all of them.",
            "Give a number between 0 and 1, such as 0.1.",
        )
    places = {e.cluster or e.id: _share("dev", e.cluster or e.id) for e in examples}
    ranked = sorted(places, key=lambda key: places[key])
    dev = {key for key in ranked if places[key] < share}
    if len(ranked) > 1:
        dev = (dev or {ranked[0]}) - ({ranked[-1]} if len(dev) == len(ranked) else set())
    chosen = tuple(e for e in examples if (e.cluster or e.id) in dev)
    return tuple(e for e in examples if (e.cluster or e.id) not in dev), chosen
