"""Columns, ids and splits of rows.

A row's id is a hash of its content, so a row has the same id in a Parquet file, in JSON lines and
in any row order. `--limit` subsets and the dev split depend only on these hashes. Splits keep
clusters together: a story is never on both sides. A split by columns keeps all rows with equal
values in these columns together.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from soulkit.data.chats import has_messages, owner_of
from soulkit.data.files import RawRow, without_absent
from soulkit.data.literals import literal_list, structure
from soulkit.errors import ConfigError, DataError, RowError, did_you_mean
from soulkit.text import join_and, one_line
from soulkit.types import Example
from soulkit.types import row_id as row_id


def as_list(value: Any) -> Any:
    """A single text as a list, the short form of many keys."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[
    tuple[str, ...], BeforeValidator(as_list, json_schema_input_type=str | tuple[str, ...])
]


class Column(BaseModel):
    """One field of a row: its type, its other names, and the seats that may see it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["text", "list", "int", "number", "bool", "any"] = "text"
    """`list` also accepts a JSON or Python literal of a list (parsed, not evaluated)."""
    required: bool = True
    aliases: Texts = ()
    """Other names of this column in files, tried in order after its own."""
    audience: tuple[str, ...]
    """Seats that may see it, or the readers `judge`, `coach`, `gold`; empty: hidden from all."""
    identity: bool = True
    """Whether the value is part of the content hash that names the row."""
    max_words: int | None = Field(default=None, gt=0)
    """Word limit: longer values are cut for every model alike, and the cut is recorded."""
    train_words: int | None = Field(default=None, gt=0)
    """Word limit in training, if different."""
    keep: Literal["first", "last"] = "first"
    """Which end of a longer value is kept."""
    entity: str = ""
    """Kind of thing that the value names (persona, character, scenario). Training and evaluation
    rows that share one are not independent; `soul data contamination` reports them."""


T = TypeVar("T")
PLACEHOLDER = "name_in_your_file"
"""Placeholder for an unknown column name."""
_ABOUT = frozenset(
    ("id", "ids", "idx", "index", "num", "number", "n", "count", "total", "type", "key")
)
"""Words that mark a column as describing another one."""
HUMAN = "human_"
"""Prefix of human ratings: `human_<dimension>` rates that dimension; any row may have some."""


class ColumnsError(DataError):
    """Required columns are missing; if every row lacks them, the file has another format."""


# -- identity ------------------------------------------------------------------------------------


def content_hash(task: str, fields: Mapping[str, Any]) -> str:
    """16 hex digits that identify a row of `task`; None counts as absent, tuples as lists.

    DataError for values that a file cannot hold (NaN, infinities, objects).
    """
    text = json.dumps([task, _canonical(fields)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def _canonical(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        # Some writers store integer columns with gaps as floats.
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    what = f"A row contains {value!r:.60}, which has no canonical form."
    raise RowError(what, "Allowed values: text, finite numbers, true or false, lists, mappings.")


def share_of(salt: str, key: str) -> float:
    """A number in [0, 1), derived from `key`."""
    digest = hashlib.sha256(f"{salt}/{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def first_rows(items: Sequence[T], limit: int | None, id_of: Callable[[T], str]) -> list[T]:
    """The items of the first `limit` rows, in order; all items without a limit. Several forms of a
    row count as one."""
    if limit is None:
        return list(items)
    ids = [row_id(id_of(item)) for item in items]
    kept = set(list(dict.fromkeys(ids))[:limit])
    return [item for item, key in zip(items, ids, strict=True) if key in kept]


# -- columns -------------------------------------------------------------------------------------


def bind_columns(
    row: Mapping[str, Any], columns: Mapping[str, Column], task: str, source: str
) -> dict[str, Any]:
    """The declared columns of a flat row by their own names; absent optional ones are None.

    Other keys are dropped. ColumnsError if required columns are missing, DataError if a value does
    not match its column's type.
    """
    cells = _present(row, source)
    values = {name: _cell(cells, name, column) for name, column in columns.items()}
    missing = [n for n, column in columns.items() if column.required and values[n] is None]
    if missing:
        raise _missing_columns(cells, columns, task, source, missing)
    return {
        name: None if value is None else _convert(name, value, columns[name], source)
        for name, value in values.items()
    }


def with_unpacked(row: Mapping[str, Any], names: Sequence[str], source: str) -> dict[str, Any]:
    """`row` with the keys of the objects under `names` moved to the top level. The objects may be
    JSON text.

    DataError if a value is not an object.
    """
    opened = dict(row)
    for name in names:
        packed = opened.pop(name, None)
        if packed is None:
            continue
        inner = structure(packed)
        if not isinstance(inner, Mapping):
            what = f"{source or 'row'}: '{name}' must be an object or its JSON text."
            raise RowError(what, f"It is {type(packed).__name__} {packed!r:.60}.")
        opened |= _present(inner, source)
    return opened


def _present(row: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`without_absent`; RowError with the column that JSON cannot store."""
    cells = {}
    for name, value in row.items():
        try:
            if (cell := without_absent(value)) is not None:
                cells[str(name)] = cell
        except ValueError as error:
            what = f"{source or 'row'}: the column '{name}' cannot be read."
            raise RowError(what, f"The reader reports: {error}.") from error
    return cells


def _cell(row: Mapping[str, Any], name: str, column: Column) -> Any:
    names = (key for key in (name, *column.aliases) if row.get(key) is not None)
    value = row.get(next(names, name))
    # In columns that are not text, an empty cell or a word such as "nan" means absent.
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
    return ColumnsError(
        f"{source or 'row'}: required columns of task '{task}' are missing: {', '.join(missing)}.",
        f"Expected {', '.join(expected)}; found {one_line(', '.join(row)) or 'nothing'}.",
        "If the file has other names for them, add these to the task's entry in tasks.yaml: "
        f"columns: {{{aliases}}}",
    )


def _alike(name: str, column: Column, row: Mapping[str, Any], spare: Sequence[str]) -> str:
    """The unused column with a similar name and a matching type; empty if no name is similar,
    because a wrong guess would bind an unrelated column."""
    forms = [_words(each) for each in (name, *column.aliases)]
    for other in spare:
        words = _words(other)
        fits = _READ[column.type](row[other]) is not None
        if fits and any(_same_words(words, form) for form in forms):
            return other
    return ""


def _words(name: str) -> list[str]:
    """Split a name into words; `TargetOption`, `target_option` and `target option` are equal."""
    return re.findall(
        r"[a-z]+|[0-9]+|[^\W\d_a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    )


def _same_words(some: Sequence[str], own: Sequence[str]) -> bool:
    """Whether two names are similar: the longer one contains each word of the shorter one, up to
    a typo, and no extra word that makes it describe the column (`answer_id` is not `answer`)."""
    short, long = sorted((some, own), key=len)
    left = list(long)
    for word in short:
        near = next((other for other in left if _near(word, other)), None)
        if near is None:
            return False
        left.remove(near)
    return not _ABOUT.issuperset(short) and not _ABOUT.intersection(left)


def _near(a: str, b: str) -> bool:
    """Equal up to an ending or a typo: `story` is near `stories` and `storyline`, not `history`."""
    short, long = sorted((a, b), key=len)
    begins = len(short) > 3 and long.startswith(short[: max(4, len(short) - 1)])
    slip = a[0] == b[0] and difflib.SequenceMatcher(None, a, b).ratio() >= 0.8
    return a == b or begins or slip


def _convert(name: str, value: Any, column: Column, source: str) -> Any:
    converted = _READ[column.type](value)
    if converted is None:
        what = f"{source or 'row'}: the column '{name}' must be {_EXPECTED[column.type]}."
        raise RowError(what, f"It is {type(value).__name__} {value!r:.60}.")
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
    "list": "a list or the literal of a list",
    "int": "an integer",
    "number": "a finite number",
    "bool": "true or false",
    "any": "a value",
}


# -- splits ----------------------------------------------------------------------------------------


def groups_aside(keys: Iterable[str], share: float, salt: str) -> frozenset[str]:
    """About `share` of the groups, chosen by the hash of each key.

    A group's side does not depend on the other groups. If one side would be
    empty, the nearest group is moved there (a single group is not moved). ConfigError unless
    0 < share < 1.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"The share {share} is out of range.",
            "Both parts must contain rows.",
            "Set a number between 0 and 1, such as 0.1.",
        )
    places = {key: share_of(salt, key) for key in keys}
    ranked = sorted(places, key=lambda key: places[key])
    aside = {key for key in ranked if places[key] < share}
    if len(ranked) > 1:
        aside = (aside or {ranked[0]}) - ({ranked[-1]} if len(aside) == len(ranked) else set())
    return frozenset(aside)


def group_key(values: Mapping[str, Any], columns: Sequence[str]) -> str:
    """The key of the group with these values in `columns`; an absent value counts as a value."""
    return content_hash("", {name: values.get(name) for name in columns})


def dev_split(
    examples: Sequence[Example], share: float = 0.1, by: Sequence[str] = ()
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """(train, dev), both in the given order. Whole clusters are chosen by their hash.

    With `by`, groups of equal values in these fields are chosen instead, so dev rows have
    combinations that training rows lack. ConfigError unless 0 < share < 1, for a field that a row
    lacks, and if a cluster would be on both sides.
    """
    keys = [_group_of(example, by) for example in examples]
    aside = groups_aside(keys, share, "dev")
    train = tuple(e for e, key in zip(examples, keys, strict=True) if key not in aside)
    dev = tuple(e for e, key in zip(examples, keys, strict=True) if key in aside)
    torn = {e.cluster for e in train} & {e.cluster for e in dev} - {""}
    if torn:
        first = next(e for e in dev if e.cluster in torn)
        raise ConfigError(
            f"A dev split by {', '.join(by)} divides {len(torn)} stories, the first at "
            f"{first.source or first.id}.",
            f"Rows of '{first.task}' from one story would be in both training and dev.",
            "Name columns that are equal for all rows of a story, or omit --dev-by.",
        )
    return train, dev


def _group_of(example: Example, by: Sequence[str]) -> str:
    if not by:
        return example.cluster or example.id
    for name in by:
        if name not in example.fields:
            raise ConfigError(
                f"Rows of '{example.task}' have no field '{name}' to split by.",
                "A dev split can only use columns that the task declares; other columns of the "
                "file are dropped when its rows are read.",
                did_you_mean(name, example.fields),
            )
    return group_key(example.fields, by)


@dataclass(frozen=True, slots=True)
class RowSplit:
    """The two parts of a file's rows, each in file order, and their numbers of groups."""

    rest: tuple[RawRow, ...]
    aside: tuple[RawRow, ...]
    groups_rest: int
    groups_aside: int


PERSON = ("person",)
"""Columns of a split that keeps the conversations of a person together, whatever their column."""


def split_rows(rows: Sequence[RawRow], by: Sequence[str], share: float, seed: int = 0) -> RowSplit:
    """Set aside about `share` of the groups of rows with equal values in the columns `by`.

    The choice depends only on the groups' values and the seed, not on row order or other rows. An
    absent column counts as a value of its own, but a conversation without a person counts as one.
    ConfigError for an invalid share and for columns that no row has; DataError if all rows are one
    group.
    """
    if tuple(by) == PERSON and all(has_messages(row.fields) for row in rows):
        keys = [content_hash("", owner_of(row.fields)) for row in rows]
    else:
        _refuse_unknown(rows, by)
        keys = [group_key(row.fields, by) for row in rows]
    chosen = groups_aside(keys, share, f"split/{seed}")
    if len(set(keys)) < 2:
        raise DataError(
            f"All {len(rows)} rows have the same {join_and(by)}.",
            "They form a single group, and groups are never divided.",
            "Choose columns in which the rows differ.",
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
            "No columns are given to split by.",
            "Rows with equal values in these columns stay together.",
            f"Use --by NAME,NAME. {did_you_mean('', columns)}",
        )
    for name in by:
        if name not in columns:
            raise ConfigError(
                f"No row has a column '{name}'.",
                "All rows would be in the same group.",
                did_you_mean(name, columns),
            )
