"""Records with a name for every field, for files that people and other programs read.

A field is made with `named`, `spread` or `section`; reading takes what has the right form and
leaves out the rest, because a file may be of any age, and damaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, field, fields, is_dataclass
from typing import Any, Self


def finite(value: object) -> float | None:
    """A finite number of a file; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def whole(value: object) -> int:
    """A count of a file; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def text(value: object) -> str:
    return value if isinstance(value, str) else ""


def members(value: object) -> Mapping[str, Any]:
    """An object of a file; empty for anything else."""
    return value if isinstance(value, Mapping) else {}


def counts(value: object) -> dict[str, int]:
    return {name: whole(number) for name, number in members(value).items()}


def named_field(name: str, *, read: Callable[[Any], Any] = finite, sparse: bool = False) -> Any:
    """A field that is written as `name`; a sparse one only where it is not empty or 0."""
    empty = read(None)
    metadata = {"name": name, "read": read, "sparse": sparse}
    if isinstance(empty, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=empty, metadata=metadata)


def spread_fields(prefix: str, *, read: Callable[[Any], Any] = finite) -> Any:
    """A field whose members are written under names of their own."""
    return field(default_factory=dict, metadata={"prefix": prefix, "read": read})


SECTION = {"section": True}
"""Marks a field that is a section of its own; one that is as it was made is not written."""


class Named:
    """What a section of a line can do; its fields are made with `named` and `spread`."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        line: dict[str, Any] = {}
        for one in fields(self):  # type: ignore[arg-type]
            value, metadata = getattr(self, one.name), one.metadata
            if "prefix" in metadata:
                line |= {f"{metadata['prefix']}{name}": number for name, number in value.items()}
            elif "section" in metadata:
                line |= value.to_json() if value != type(value)() else {}
            elif value is not None and (value or not metadata["sparse"]):
                line[metadata["name"]] = _plain(value)
        return line

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Self:
        """Of a line with the names of today."""
        return cls(**{one.name: _read(one, line) for one in fields(cls)})  # type: ignore[arg-type]


def _read(one: Field[Any], line: Mapping[str, Any]) -> Any:
    metadata: Mapping[str, Any] = one.metadata
    if "section" in metadata:
        return one.default_factory.from_json(line)  # type: ignore[union-attr]
    if "prefix" in metadata:
        prefix = metadata["prefix"]
        names = [name for name in line if name.startswith(prefix)]
        return {name.removeprefix(prefix): metadata["read"](line[name]) for name in names}
    return metadata["read"](line.get(metadata["name"]))


def _plain(value: Any) -> Any:
    """Plain JSON values."""
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def names_of(kind: type[Named]) -> tuple[set[str], set[str]]:
    """(whole names, prefixes of open ones) under which a record of `kind` is written."""
    names: set[str] = set()
    prefixes: set[str] = set()
    for one in fields(kind):  # type: ignore[arg-type]
        if "section" in one.metadata:
            inner = names_of(one.default_factory)  # type: ignore[arg-type]
            names, prefixes = names | inner[0], prefixes | inner[1]
        elif "prefix" in one.metadata:
            prefixes.add(one.metadata["prefix"])
        else:
            names.add(one.metadata["name"])
    return names, prefixes
