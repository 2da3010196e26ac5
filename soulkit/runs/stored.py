"""The names and versions of what a run writes, and the refusal of what is newer than this soulkit.

    {"key": "0/3fe6f8cceace67c0/0/draft", "schema": "soulkit/episodes@1", …}

The JSON Schemas ship with the package, in `soulkit/schemas/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soulkit.errors import DataError, RunError

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
