"""Rows in two parts by whole groups: what one part holds in a combination of columns, the other
never does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soulkit.data.files import RawRow
from soulkit.data.rows import group_key, groups_aside
from soulkit.errors import ConfigError, DataError, did_you_mean


@dataclass(frozen=True, slots=True)
class Parts:
    """The two parts of a file's rows, each in file order, with their numbers of groups."""

    rest: tuple[RawRow, ...]
    aside: tuple[RawRow, ...]
    groups_rest: int
    groups_aside: int


def split_rows(rows: Sequence[RawRow], by: Sequence[str], share: float, seed: int = 0) -> Parts:
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
            f"All {len(rows)} rows have the same {_listed(by)}.",
            "They are one group, and a group is never divided.",
            "Name columns in which the rows differ.",
        )
    parts: tuple[list[RawRow], list[RawRow]] = ([], [])
    for row, key in zip(rows, keys, strict=True):
        parts[key in chosen].append(row)
    rest, aside = parts
    return Parts(tuple(rest), tuple(aside), len(set(keys) - chosen), len(chosen))


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


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names))
