"""Tables of texts beside a module: `texts.yaml` in its folder, read when the first one is needed.

    TEXTS = Texts(__file__)
    rng.choice(TEXTS["towns"])

Lists of the file are tuples here, so that no reader can change what the next one gets.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from soulkit.errors import ConfigError, did_you_mean

NAME = "texts.yaml"


class Texts:
    """The tables of one folder."""

    def __init__(self, module_file: str) -> None:
        self.path = Path(module_file).with_name(NAME)

    def __getitem__(self, table: str) -> Any:
        tables = read_texts(self.path.parent)
        if table not in tables:
            raise ConfigError(
                f"There is no table '{table}' in '{self.path}'.",
                "A module beside the file asks for it by that name.",
                f"{did_you_mean(table, tables)} Else add the table to the file.",
            )
        return tables[table]


@cache
def read_texts(folder: Path) -> Mapping[str, Any]:
    """The tables of `texts.yaml` in a folder; ConfigError when they cannot be read."""
    path = folder / NAME
    # Both loaders build plain values only; the one written in C is ten times as fast.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        tables = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"The texts in '{path}' cannot be read.",
            " ".join(str(error).split()),
            "Put the file back: reinstall soulkit, or mend it where the task is your own.",
        ) from error
    if not isinstance(tables, dict):
        raise ConfigError(
            f"The texts in '{path}' are no tables.",
            "The file has to hold names with a list or a mapping under each.",
            "Put the file back: reinstall soulkit, or mend it where the task is your own.",
        )
    return {str(name): _frozen(table) for name, table in tables.items()}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(part) for key, part in value.items()}
    return tuple(_frozen(part) for part in value) if isinstance(value, list) else value
