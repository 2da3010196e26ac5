"""The names and versions of what a run writes, and the refusal of what is newer than this soulkit.

    {"key": "0/3fe6f8cceace67c0/0/draft", "schema": "soulkit/episodes@1", …}

A line or file without a name is older than the names, and is read as it always was. The JSON
Schemas of the newest versions ship with the package, in `soulkit/schemas/`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from soulkit.errors import DataError

T = TypeVar("T")
SCHEMA = "schema"
"""The member under which a line, or a summary, says what it is."""
EPISODES_SCHEMA = "soulkit/episodes@1"
"""Of `episodes.jsonl` and `dev.jsonl`."""
CONTROLS_SCHEMA = "soulkit/controls@1"
METRICS_SCHEMA = "soulkit/metrics@1"
SUMMARY_SCHEMA = "soulkit/summary@1"
DISTILLATION_SCHEMA = "soulkit/distillation@1"
"""Of `distillation.json`, and of the member `distillation` of a summary."""
DOCTOR_SCHEMA = "soulkit/doctor@1"
"""Of what `soul doctor --json` prints."""
_NAME = re.compile(r"(soulkit/[a-z]+)@([0-9]+)")


def refuse_other_schema(line: Mapping[str, Any], schema: str, where: str) -> None:
    """DataError unless `line` is of `schema`, of an earlier version, or says nothing.

    `where` names the file, or the line in it, for the reader.
    """
    name = line.get(SCHEMA)
    if name is None or name == schema:
        return
    known, written = _NAME.fullmatch(schema), _NAME.fullmatch(str(name))
    if known and written and written[1] == known[1] and int(written[2]) <= int(known[2]):
        return
    newer = bool(known and written and written[1] == known[1])
    raise DataError(
        f"{where} is '{name}', and this soulkit reads '{schema}'.",
        "A newer version of soulkit wrote it, and what it added could be read wrongly."
        if newer
        else "It is another file than its name says, or was changed by another program.",
        "Read it with the version that wrote it: pip install --upgrade soulkit"
        if newer
        else "Restore the file that `soul eval` or `soul train` wrote.",
    )


@cache
def form_of(kind: type[Any]) -> TypeAdapter[Any]:
    """What reads and writes values of a dataclass."""
    return TypeAdapter(kind)


def read_value(kind: type[T], value: object, what: str) -> T:
    """A dataclass from plain JSON values; members that it does not have are passed over. DataError
    names `what` and the member that cannot be read."""
    try:
        made: T = form_of(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the object"
        raise DataError(
            f"{what} cannot be read ({where}: {first['msg']}).",
            "The file was edited, damaged, or written by another version of soulkit.",
            "Restore the file, or give the run's own command again.",
        ) from error
    return made


def sparse(value: Any, always: Container[str] = ()) -> dict[str, Any]:
    """The members of a dataclass that differ from their defaults, and those that are `always`
    written."""
    return {
        one.name: getattr(value, one.name)
        for one in fields(value)
        if one.name in always or getattr(value, one.name) != _default(one)
    }


def _default(one: Field[Any]) -> Any:
    return one.default if one.default_factory is MISSING else one.default_factory()


def schema_file(schema: str) -> Path:
    """Where the JSON Schema of `schema` lies, in the package."""
    name, version = schema.removeprefix("soulkit/").split("@")
    return Path(__file__).parents[1] / "schemas" / f"{name}-{version}.json"
