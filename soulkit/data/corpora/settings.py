"""Settings of one conversation source: its address, its files, and the side that is learned.

    chats.jsonl:1.5          {path: chats.jsonl, ratio: 1.5}
    shards/                  train_shard_*, train-*, train/, or names that contain `train`
    data/*.parquet           all matching files
    owner/name@1f2e/en:train a Hub dataset: [@revision][/configuration][:split]

If no name in a folder marks training or validation files, all row files are read. Validation files
are called `validation` or `val`. `corpora.yaml` sets the side of released datasets; a setting
overrides it.
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
from soulkit.data.exports.reading import EXPORT_SUFFIXES, is_export
from soulkit.data.files import ROW_SUFFIXES, check_file
from soulkit.errors import DataError, did_you_mean
from soulkit.parse import parse_yaml

_RATIO = re.compile(r"(?P<path>.*[^:]):(?P<ratio>\d+(?:\.\d*)?|\.\d+)", re.DOTALL)


class SourceSettings(Settings):
    """Location of a source of conversations, how much of it is used, and the side to learn."""

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
    """Settings from a path, a text or a mapping; SourceSettings are returned unchanged."""
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
    """The parts of `owner/name[@revision][/configuration][:split]`; None for a local path.

    A path that exists, has a row file suffix or is a pattern is never treated as a Hub dataset.
    """
    suffix = Path(path).suffix.lower()
    if Path(path).exists() or suffix in (*ROW_SUFFIXES, *EXPORT_SUFFIXES) or _is_pattern(path):
        return None
    return _HUB.fullmatch(path)


def source_files(path: str, part: CorpusPart = "train") -> list[Path]:
    """The row files that `path` names, in a fixed order; DataError if there are none."""
    place = Path(path)
    if place.is_dir():
        export = part == "train" and is_export(place)
        return [place] if export else _shards(place, _row_files(place), part)
    if not place.exists() and _is_pattern(path):
        matches = sorted(p for p in map(Path, glob.glob(path, recursive=True)) if _is_rows(p))
        if not matches:
            raise DataError(
                f"No row file matches '{path}'.",
                f"Row files end in {', '.join(ROW_SUFFIXES)}.",
                "Check the pattern, and quote it so that the shell does not expand it.",
            )
        return matches
    check_file(place)
    if not (_is_rows(place) or is_export(place)):
        raise DataError(
            f"'{place}' is not in a supported row format.",
            f"The suffix selects the format, and '{place.suffix}' is unknown.",
            f"Rename or convert it to one of {', '.join((*ROW_SUFFIXES, *EXPORT_SUFFIXES))}.",
        )
    return [place]


def _is_pattern(path: str) -> bool:
    return glob.has_magic(path)


CANARIES = ".canaries.jsonl"
"""End of the name of a list of made secrets (see `data/privacy/canaries.py`), which is no corpus.
"""


def _is_rows(path: Path) -> bool:
    suffix, listed = path.suffix.lower() in ROW_SUFFIXES, path.name.endswith(CANARIES)
    return suffix and not listed and path.is_file()


_NAMED = 5
"""Files that the note names; it counts the others."""


def left_out_note(path: str) -> str:
    """The note on row files in the folder `path` that are not read as training files, or empty."""
    folder = Path(path)
    if not folder.is_dir() or is_export(folder):
        return ""
    files = _row_files(folder)
    read = set(_shards(folder, files, "train"))
    left_out = [file for file in files if file not in read]
    if not left_out:
        return ""
    names = [str(file.relative_to(folder)) for file in left_out[:_NAMED]]
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    flat = all(file.parent == folder for file in left_out)
    suffixes = {file.suffix for file in files}
    ending = f"*{suffixes.pop()}" if len(suffixes) == 1 else "*"
    pattern = str(Path(glob.escape(path)) / ("" if flat else "**") / ending)
    return (
        f"the training files of '{path}' do not include {', '.join(names)}{more}; to include all "
        f"files, give the pattern '{pattern}'"
    )


def _row_files(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*")
        if _is_rows(path) and not any(n.startswith(".") for n in path.relative_to(folder).parts)
    )  # fmt: skip


def _shards(folder: Path, files: Sequence[Path], part: CorpusPart) -> list[Path]:
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
        f"The folder '{folder}' contains no {part} files.",
        f"It has {len(files)} row files, but none match {', '.join(f'{s}-*' for s in stems)}, a "
        f"folder {stems[0]}/, or a Parquet file with {stems[0]} in its name.",
        "Give the files themselves, or a pattern such as 'folder/*.jsonl'.",
    )


HUMAN, ASSISTANT = "human", "assistant"
SIDES = (HUMAN, ASSISTANT)


@dataclass(frozen=True, slots=True)
class CorpusRule:
    """The entry of one dataset in `corpora.yaml`."""

    side: str
    turns: int | None = None
    """Number of messages to keep of a longer conversation."""


@cache
def corpus_rules() -> dict[str, CorpusRule]:
    """Name (`data_source`) → rule, for all entries of `corpora.yaml`."""
    table = parse_yaml(Path(__file__).with_name("corpora.yaml").read_bytes(), ours=True)
    limits = table["turns"]
    return {
        name: CorpusRule(side, limits.get(name))
        for side in SIDES
        for names in table[side].values()
        for name in names
    }


def listed_rule(data_source: str | None, name: str | None) -> CorpusRule | None:
    """The listed rule for a row: by its `data_source`, else by its source's `name`."""
    rules = corpus_rules()
    return next((rules[mark] for mark in (data_source, name) if mark and mark in rules), None)


def rule_for(data_source: str | None, name: str | None, place: str) -> CorpusRule:
    """The rule of a row, by its `data_source` or its source's `name`; `place` is for errors.

    DataError if neither is listed.
    """
    rule = listed_rule(data_source, name)
    if rule is not None:
        return rule
    mark = data_source or name
    way_out = "Set the side: --side human, --side assistant, or --side NAME for a speaker."
    if mark is None:
        raise DataError(
            f"The side to learn is not set for {place}.",
            "The row has no data_source, and its source has no side and no name.",
            way_out,
        )
    raise DataError(
        f"The side to learn is unknown for the dataset '{mark}' ({place}).",
        f"corpora.yaml has no entry of that name.{_near(mark)}",
        way_out,
    )


def _near(name: str) -> str:
    hint = did_you_mean(name, corpus_rules())
    return f" {hint}" if hint.startswith("Did") else ""
