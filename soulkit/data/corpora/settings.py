"""One source of conversations, as options and YAML name it; its files; the side that is learned.

    chats.jsonl:1.5          {path: chats.jsonl, ratio: 1.5}
    shards/                  train_shard_*, train-*, train/, or what has `train` in its name
    data/*.parquet           every file that the pattern matches
    owner/name@1f2e/en:train a data set of the hub: [@revision][/configuration][:split]

In a folder where nothing is called either training or validation every row file is read. Validation
files are called `validation` or `val`. The side of released data sets is in `corpora.yaml`; a
setting overrules it.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath
from typing import Any, Literal

from pydantic import field_validator, model_validator

from soulkit.config import Settings, setting
from soulkit.data.files import ROW_SUFFIXES, check_file
from soulkit.errors import DataError, did_you_mean

_RATIO = re.compile(r"(?P<path>.*[^:]):(?P<ratio>\d+(?:\.\d*)?|\.\d+)", re.DOTALL)


class SourceSettings(Settings):
    """Where conversations lie, how much of them is used, and who in them is learned."""

    path: str = setting(help="File, glob pattern, folder of shards, or Hub data set (owner/name).")
    ratio: float = setting(
        1.0,
        gt=0,
        help="Passes over this source per pass over the mixture; below 1, a fixed part of it.",
    )
    side: str | None = setting(
        None,
        help="Side to learn from: human, assistant, or a speaker's name.",
        unset="set in corpora.yaml",
    )
    name: str | None = setting(
        None,
        help="Name of the source in this run.",
        unset="the row's data_source, else the file name",
    )
    strip_system: bool | None = setting(
        None, help="Remove the system prompts.", unset="as set for the run"
    )
    turns: int | None = setting(
        None, ge=1, help="Keep the last N messages of a conversation.", unset="as set for the run"
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, PurePath):
            return {"path": str(value)}
        if not isinstance(value, str):
            return value
        match = _RATIO.fullmatch(value)
        if match is None or Path(value).exists():
            return {"path": value}
        return {"path": match["path"], "ratio": float(match["ratio"])}

    @field_validator("path", "side", "name")
    @classmethod
    def _not_blank(cls, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise ValueError("it is blank")
        return value


AnySource = SourceSettings | Mapping[str, Any] | str | Path


def source_settings(value: AnySource) -> SourceSettings:
    """`value`, or the settings that a path, a text or a mapping spells."""
    if isinstance(value, SourceSettings):
        return value
    return SourceSettings.model_validate(value)


CorpusPart = Literal["train", "validation"]
_STEMS: dict[CorpusPart, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val"),
}
_ASIDE = re.compile(r"(?<![a-z])(?:validation|valid|val|test|dev|eval)(?![a-z])", re.IGNORECASE)
_HUB = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?"
    r"(?::(?P<split>[\w.%\[\]:+-]+))?"
)


def hub_address(path: str) -> re.Match[str] | None:
    """The parts of `owner/name[@revision][/configuration][:split]`; None for what lies here.

    A path that is here, ends like a row file, or is a pattern is never taken for a data set.
    """
    if Path(path).exists() or Path(path).suffix.lower() in ROW_SUFFIXES or _is_pattern(path):
        return None
    return _HUB.fullmatch(path)


def source_files(path: str, part: CorpusPart = "train") -> list[Path]:
    """The row files that `path` names, in a fixed order; DataError where there are none."""
    place = Path(path)
    if place.is_dir():
        return _shards(place, part)
    if not place.exists() and _is_pattern(path):
        matches = sorted(p for p in map(Path, glob.glob(path, recursive=True)) if _is_rows(p))
        if not matches:
            raise DataError(
                f"No row file matches '{path}'.",
                f"Row files end in {', '.join(ROW_SUFFIXES)}.",
                "Check the pattern, and quote it so that the shell leaves it alone.",
            )
        return matches
    check_file(place)
    if not _is_rows(place):
        raise DataError(
            f"'{place}' has a suffix that is no row format.",
            f"The suffix '{place.suffix}' says nothing about how to read it.",
            f"Rename or convert it to one of {', '.join(ROW_SUFFIXES)}.",
        )
    return [place]


def _is_pattern(path: str) -> bool:
    return glob.has_magic(path)


def _is_rows(path: Path) -> bool:
    return path.suffix.lower() in ROW_SUFFIXES and path.is_file()


def _shards(folder: Path, part: CorpusPart) -> list[Path]:
    files = sorted(
        path for path in folder.rglob("*")
        if _is_rows(path) and not any(n.startswith(".") for n in path.relative_to(folder).parts)
    )  # fmt: skip
    stems = _STEMS[part]
    rules: Sequence[Callable[[Path], bool]] = (
        lambda p: (
            p.name.startswith(tuple(f"{s}{end}" for s in stems for end in ("_shard_", "-")))
            or bool(set(p.relative_to(folder).parts[:-1]) & set(stems))
        ),
        lambda p: p.suffix.lower() == ".parquet" and any(s in p.name.lower() for s in stems),
        lambda p: p.stem.lower() in stems,
        lambda p: part == "train" and not _ASIDE.search(str(p.relative_to(folder))),
    )
    for rule in rules:
        if matches := [path for path in files if rule(path)]:
            return matches
    raise DataError(
        f"The folder '{folder}' holds no {part} files.",
        f"{len(files)} row files lie in it; looked for {', '.join(f'{s}-*' for s in stems)}, a "
        f"folder {stems[0]}/, and Parquet files with {stems[0]} in their name.",
        "Name the files themselves, or a pattern such as 'folder/*.jsonl'.",
    )


HUMAN, ASSISTANT = "human", "assistant"
SIDES = (HUMAN, ASSISTANT)


@dataclass(frozen=True, slots=True)
class CorpusRule:
    """What the table says of one data set."""

    side: str
    turns: int | None = None
    """So many messages stay of a longer conversation."""


@cache
def corpus_rules() -> dict[str, CorpusRule]:
    """Name (`data_source`) → its rule, for every name of the shipped table."""
    import yaml

    table = yaml.safe_load(Path(__file__).with_name("corpora.yaml").read_text(encoding="utf-8"))
    limits = table["turns"]
    return {
        name: CorpusRule(side, limits.get(name))
        for side in SIDES
        for names in table[side].values()
        for name in names
    }


def listed_rule(data_source: str | None, name: str | None) -> CorpusRule | None:
    """What the table says of a row: by its `data_source`, else by its source's `name`."""
    rules = corpus_rules()
    return next((rules[mark] for mark in (data_source, name) if mark and mark in rules), None)


def rule_for(data_source: str | None, name: str | None, place: str) -> CorpusRule:
    """The rule of a row: by its `data_source`, else by its source's `name`; `place` says where.

    DataError where nothing says who is learned.
    """
    rule = listed_rule(data_source, name)
    if rule is not None:
        return rule
    mark = data_source or name
    way_out = "Say who is learned: --side human, --side assistant, or --side NAME of a speaker."
    if mark is None:
        raise DataError(
            f"Nothing says who is learned in {place}.",
            "The row has no data_source, and its source has neither a side nor a name.",
            way_out,
        )
    raise DataError(
        f"Nobody knows who is learned in the data set '{mark}' ({place}).",
        f"corpora.yaml has no such name.{_near(mark)}",
        way_out,
    )


def _near(name: str) -> str:
    hint = did_you_mean(name, corpus_rules())
    return f" {hint}" if hint.startswith("Did") else ""
