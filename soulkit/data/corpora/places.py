"""Where the files of a source lie: a file, a pattern, or a folder of shards.

Of a folder the training files are `train_shard_*`, `train-*` and what lies below `train/`, else
Parquet files with `train` in their name, else, where nothing is called either training or
validation, every row file in it. Validation files likewise: `validation` or `val`.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from soulkit.data.files import ROW_SUFFIXES, check_file
from soulkit.errors import DataError

CorpusPart = Literal["train", "validation"]
_STEMS: dict[CorpusPart, tuple[str, ...]] = {
    "train": ("train",),
    "validation": ("validation", "valid", "val"),
}
_ASIDE = re.compile(r"(?<![a-z])(?:validation|valid|val|test|dev|eval)(?![a-z])", re.IGNORECASE)
_HUB = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?"
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
    files = sorted(p for p in folder.rglob("*") if _is_rows(p) and not _is_hidden(p, folder))
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


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(name.startswith(".") for name in path.relative_to(folder).parts)
