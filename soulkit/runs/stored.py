"""The files of a run as dataclasses: reading, writing, and the names and versions of their schemas.

    {"key": "0/3fe6f8cceace67c0/0/draft", "schema": "soulkit/episodes@1", …}

The JSON Schemas ship with the package, in `soulkit/schemas/`.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from soulkit.errors import DataError, RunError

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


def refuse_other_schema(line: Mapping[str, Any], schema: str, where: str) -> None:
    """DataError unless `line` is of `schema`, or names none.

    `where` names the file, or the line in it, for the reader.
    """
    name = line.get(SCHEMA)
    if name is None or name == schema:
        return
    other_version = str(name).partition("@")[0] == schema.partition("@")[0]
    raise DataError(
        f"{where} is '{name}', and this soulkit reads '{schema}'.",
        "Another version of soulkit wrote it, and it could be read wrongly."
        if other_version
        else "It is another file than its name says, or was changed by another program.",
        "Read it with the version that wrote it: pip install --upgrade soulkit"
        if other_version
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


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run; empty where there is no file, RunError for a damaged
    one."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(loaded, dict):
        raise _damaged(path, "it holds no JSON object")
    return loaded


def _damaged(path: Path, detail: str) -> RunError:
    return RunError(
        f"'{path}' cannot be read ({detail}).",
        "The file was changed by hand or by another program.",
        "Restore it from where the run was copied, or start the run again with another --out.",
    )


def schema_file(schema: str) -> Path:
    """Where the JSON Schema of `schema` lies, in the package."""
    name, version = schema.removeprefix("soulkit/").split("@")
    return Path(__file__).parents[1] / "schemas" / f"{name}-{version}.json"
