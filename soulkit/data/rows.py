"""What a row is: its columns, its identity, the split that it belongs to.

Identity is content. A row's id is a hash of what it says, so the same row has one id in a Parquet
file, in JSON lines, and behind another order of rows; whether a row belongs to a `--limit` subset
or to the dev split follows from hashes alone. Splits go by cluster: a story never stands on both
sides. A split by columns puts whole combinations of their values on one side.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from soulkit.data.files import RawRow, without_absent
from soulkit.data.literals import literal_list, structure
from soulkit.errors import ConfigError, DataError, RowError, did_you_mean
from soulkit.text import join_and, one_line
from soulkit.types import Example
from soulkit.types import row_id as row_id


class Column(BaseModel):
    """One field of a row: what it holds, what else it may be called, and who may see it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "list", "int", "number", "bool", "any"] = "text"
    """`list` also accepts a JSON or Python literal of a list (read without evaluating it)."""
    required: bool = True
    aliases: tuple[str, ...] = ()
    """Other names under which files carry this column, tried in order after its own."""
    audience: tuple[str, ...]
    """Seats that may see it, or the readers `judge`, `coach`, `gold`; empty: bookkeeping only."""
    identity: bool = True
    """Whether the value is part of the content hash that names the row."""
    max_words: int | None = Field(default=None, gt=0)
    """Word budget: longer values are cut here, for every model alike, and the cut is recorded."""
    train_words: int | None = Field(default=None, gt=0)
    """The budget in training, where it is another one."""
    keep: Literal["first", "last"] = "first"
    """Which words of a longer value stay."""
    entity: str = ""
    """What kind of thing the value names (persona, character, scenario): training and evaluation
    rows that share one are not independent, and `soul data contamination` says so."""


T = TypeVar("T")
PLACEHOLDER = "name_in_your_file"
"""Stands for the name of a column that nobody can guess."""
_ABOUT = frozenset(
    ("id", "ids", "idx", "index", "num", "number", "n", "count", "total", "type", "key")
)
"""Words of a column that says something about another one."""
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
    what = f"A row holds {value!r:.60}, which has no canonical form."
    raise RowError(what, "A value is text, a finite number, a truth value, a list or a mapping.")


def share_of(salt: str, key: str) -> float:
    """A number in [0, 1) that belongs to `key`."""
    digest = hashlib.sha256(f"{salt}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def first_rows(items: Sequence[T], limit: int | None, id_of: Callable[[T], str]) -> list[T]:
    """The items of the first `limit` rows, in their order. A row that is played in several forms is
    one row; all items without a limit."""
    if limit is None:
        return list(items)
    ids = [row_id(id_of(item)) for item in items]
    kept = set(list(dict.fromkeys(ids))[:limit])
    return [item for item, key in zip(items, ids, strict=True) if key in kept]


# -- columns -------------------------------------------------------------------------------------


def bind_columns(
    row: Mapping[str, Any], columns: Mapping[str, Column], task: str, source: str
) -> dict[str, Any]:
    """The declared columns of a flat row, by their own names; None where an optional one is absent.

    Other keys are dropped. Raises ColumnsError when required columns are missing, DataError when a
    value is not of its column's type.
    """
    cells = without_absent(row)
    values = {name: _cell(cells, name, column) for name, column in columns.items()}
    missing = [n for n, column in columns.items() if column.required and values[n] is None]
    if missing:
        raise _missing_columns(cells, columns, task, source, missing)
    return {
        name: None if value is None else _convert(name, value, columns[name], source)
        for name, value in values.items()
    }


def with_unpacked(row: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Any]:
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
            what = f"{source or 'row'}: '{name}' should hold an object, or the JSON text of one."
            raise RowError(what, f"It holds {type(packed).__name__} {packed!r:.60}.")
        opened |= without_absent(inner)
    return opened


def _cell(row: Mapping[str, Any], name: str, column: Column) -> Any:
    names = (key for key in (name, *column.aliases) if row.get(key) is not None)
    value = row.get(next(names, name))
    # An empty CSV cell, or the word for "no number", is no value unless the column holds text.
    blank = isinstance(value, str) and value.strip().lower() in ("", "nan", "none", "null")
    return None if blank and column.type in ("int", "number", "bool") else value


def _missing_columns(
    row: Mapping[str, Any], columns: Mapping[str, Column], task: str, source: str,
    missing: Sequence[str],
) -> ColumnsError:  # fmt: skip
    expected = [name for name, column in columns.items() if column.required]
    declared = {alias for name, column in columns.items() for alias in (name, *column.aliases)}
    spare = [name for name in row if name not in declared and name != "data_source"]
    guesses = {name: _alike(name, columns[name], row, spare) for name in missing}
    aliases = ", ".join(f"{n}: {{aliases: [{guess or PLACEHOLDER}]}}"
                        for n, guess in guesses.items())  # fmt: skip
    columns_missing = "a required column" if len(missing) == 1 else "required columns"
    return ColumnsError(
        f"{source or 'row'}: {columns_missing} of task '{task}' missing: {', '.join(missing)}.",
        f"Expected {', '.join(expected)}; found {one_line(', '.join(row)) or 'nothing'}.",
        "If the file has them under other names, say so in the task's entry in tasks.yaml: "
        f"columns: {{{aliases}}}",
    )


def _alike(name: str, column: Column, row: Mapping[str, Any], spare: Sequence[str]) -> str:
    """The spare column that is called like a missing one and holds a value of its type; empty where
    no name is alike, as a guess would bind another column in its place."""
    wanted = [_words(each) for each in (name, *column.aliases)]
    for other in spare:
        words = _words(other)
        fits = _READ[column.type](row[other]) is not None
        if fits and any(_same_words(words, own) for own in wanted):
            return other
    return ""


def _words(name: str) -> list[str]:
    """`TargetOption`, `target_option` and `target option` are the same two words."""
    return re.findall(
        r"[a-z]+|[0-9]+|[^\W\d_a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    )


def _same_words(some: Sequence[str], own: Sequence[str]) -> bool:
    """Whether two names are alike: each word of the shorter one stands in the other, up to a slip,
    and no word beside them makes it something about the column (`answer_id` is no `answer`)."""
    short, long = sorted((some, own), key=len)
    left = list(long)
    for word in short:
        near = next((other for other in left if _near(word, other)), None)
        if near is None:
            return False
        left.remove(near)
    return not _ABOUT.issuperset(short) and not _ABOUT.intersection(left)


def _near(a: str, b: str) -> bool:
    """Equal up to an ending or a slip: `story`, `stories` and `storyline`, and no `history`."""
    short, long = sorted((a, b), key=len)
    begins = len(short) > 3 and long.startswith(short[: max(4, len(short) - 1)])
    slip = a[0] == b[0] and difflib.SequenceMatcher(None, a, b).ratio() >= 0.8
    return a == b or begins or slip


def _convert(name: str, value: Any, column: Column, source: str) -> Any:
    converted = _READ[column.type](value)
    if converted is None:
        what = f"{source or 'row'}: the column '{name}' should hold {_EXPECTED[column.type]}."
        raise RowError(what, f"It holds {type(value).__name__} {value!r:.60}.")
    return converted


def _int(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and float(number).is_integer() else None


def _number(value: Any) -> int | float | None:
    if isinstance(value, str):
        value = _parse_number(value.strip())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def _parse_number(text: str) -> int | float | None:
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
    "text": lambda value: value if isinstance(value, str) else None,
    "list": literal_list,
    "int": _int,
    "number": _number,
    "bool": _bool,
    "any": lambda value: value,
}
_EXPECTED = {
    "text": "text",
    "list": "a list, or the literal of one",
    "int": "a whole number",
    "number": "a finite number",
    "bool": "true or false",
    "any": "a value",
}


# -- splits ----------------------------------------------------------------------------------------


def groups_aside(keys: Iterable[str], share: float, salt: str) -> frozenset[str]:
    """The groups that are set aside, by hash of each one's key: about `share` of them.

    Whatever else is in the list, a group falls on the same side; only when a side would stay empty
    is the group nearest to it moved. A single group has no other side. ConfigError unless
    0 < share < 1.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"A share of {share} is no share.",
            "The rows that are set aside are a part of the rows, neither none nor all of them.",
            "Give a number between 0 and 1, such as 0.1.",
        )
    places = {key: share_of(salt, key) for key in keys}
    ranked = sorted(places, key=lambda key: places[key])
    aside = {key for key in ranked if places[key] < share}
    if len(ranked) > 1:
        aside = (aside or {ranked[0]}) - ({ranked[-1]} if len(aside) == len(ranked) else set())
    return frozenset(aside)


def group_key(values: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The key of the group in which a row's `columns` have these values; absent ones count."""
    return content_hash("", {name: values.get(name) for name in columns})


def dev_split(
    examples: Sequence[Example], share: float = 0.1, by: Sequence[str] = ()
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """(train, dev), both in the given order; whole clusters, chosen by hash of the cluster.

    With `by` whole groups of equal values in these fields instead: dev rows then hold combinations
    that training never shows. ConfigError unless 0 < share < 1; for a field that a row does not
    have; where a cluster would stand on both sides.
    """
    keys = [_group_of(example, by) for example in examples]
    aside = groups_aside(keys, share, "dev")
    train = tuple(e for e, key in zip(examples, keys, strict=True) if key not in aside)
    dev = tuple(e for e, key in zip(examples, keys, strict=True) if key in aside)
    torn = {e.cluster for e in train} & {e.cluster for e in dev} - {""}
    if torn:
        first = next(e for e in dev if e.cluster in torn)
        raise ConfigError(
            f"A dev split by {', '.join(by)} tears {len(torn)} stories apart, the first at "
            f"{first.source or first.id}.",
            f"Rows of '{first.task}' that belong together would be trained on and measured on.",
            "Name columns that rows of one story share, or leave out --dev-by.",
        )
    return train, dev


def _group_of(example: Example, by: Sequence[str]) -> str:
    if not by:
        return example.cluster or example.id
    for name in by:
        if name not in example.fields:
            raise ConfigError(
                f"Rows of '{example.task}' have no field '{name}' to split by.",
                "A dev split goes by the columns that the task declares; what else a file holds "
                "is dropped when its rows are read.",
                did_you_mean(name, example.fields),
            )
    return group_key(example.fields, by)


@dataclass(frozen=True, slots=True)
class RowSplit:
    """The two parts of a file's rows, each in file order, with their numbers of groups."""

    rest: tuple[RawRow, ...]
    aside: tuple[RawRow, ...]
    groups_rest: int
    groups_aside: int


def split_rows(rows: Sequence[RawRow], by: Sequence[str], share: float, seed: int = 0) -> RowSplit:
    """Sets about `share` of the groups of equal values in the columns `by` aside.

    Which groups follows from their values and the seed alone, not from the order of the rows, nor
    from what else is in the file; a row without a column has no value there. ConfigError for a
    share that is none and for columns that no row has, DataError where all rows are one group.
    """
    _refuse_unknown(rows, by)
    keys = [group_key(row.fields, by) for row in rows]
    chosen = groups_aside(keys, share, f"split/{seed}")
    if len(set(keys)) < 2:
        raise DataError(
            f"All {len(rows)} rows have the same {join_and(by)}.",
            "They are one group, and a group is never divided.",
            "Name columns in which the rows differ.",
        )
    parts: tuple[list[RawRow], list[RawRow]] = ([], [])
    for row, key in zip(rows, keys, strict=True):
        parts[key in chosen].append(row)
    rest, aside = parts
    return RowSplit(tuple(rest), tuple(aside), len(set(keys) - chosen), len(chosen))


def _refuse_unknown(rows: Sequence[RawRow], by: Sequence[str]) -> None:
    columns = {name for row in rows for name in row.fields}
    if not by:
        raise ConfigError(
            "No columns are named to split by.",
            "Rows with equal values in them stay together; without any nothing says which.",
            f"Name some: --by NAME,NAME. There are {', '.join(sorted(columns))}.",
        )
    for name in by:
        if name not in columns:
            raise ConfigError(
                f"No row has a column '{name}'.",
                "A group would be made by a column that is nowhere: all rows would be alike.",
                did_you_mean(name, columns),
            )
