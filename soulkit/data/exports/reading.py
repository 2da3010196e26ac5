"""Opens exports, recognises their layout, and reads their conversations one after the other.

An export is a file, a folder or a .zip file, whose members are read without unpacking it. Every
file is compared with all LAYOUTS in a fixed order, special ones first. Files with one layout are
read together, and files without conversations (pictures, settings) are counted.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from soulkit.data.exports import assistants, datasets, logs, messengers, tables
from soulkit.data.exports.layouts import READABLE, ExportFile, Layout, ReadOptions
from soulkit.data.exports.records import is_plain, sample_of
from soulkit.data.files import BadRow, check_file, unreadable_file, write_lines
from soulkit.errors import DataError
from soulkit.reporting import SILENT, Reporter
from soulkit.text import listed, one_line

LAYOUTS = (
    *logs.LAYOUTS, *messengers.LAYOUTS, *tables.LAYOUTS, *assistants.LAYOUTS, *datasets.LAYOUTS,
)  # fmt: skip
"""All layouts, special ones first; those of data sets are read only where no other was found."""
_BOMB = 1 << 26, 200
"""Size and ratio of compression from which on a member of a .zip file is refused."""

# -- opening -------------------------------------------------------------------------------------


def open_export(path: Path) -> list[ExportFile]:
    """The files of an export, in a fixed order; DataError if `path` cannot be read."""
    if path.is_dir():
        names = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}
        return [_on_disk(name, file) for name, file in sorted(names.items()) if _is_shown(name)]
    check_file(path)
    if path.suffix.lower() != ".zip":
        return [_on_disk(path.name, path)]
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise unreadable_file(path, f"not a valid .zip file: {error}") from error
    members = {m.filename.replace("\\", "/"): m for m in archive.infolist() if not m.is_dir()}
    for name, member in members.items():
        _check_member(path, name, member)
    return [
        ExportFile(name, partial(archive.open, member), member.file_size)  # type: ignore[arg-type]
        for name, member in sorted(members.items())
        if _is_shown(name)
    ]


def _on_disk(name: str, path: Path) -> ExportFile:
    return ExportFile(name, partial(path.open, "rb"), path.stat().st_size)  # type: ignore[arg-type]


def _is_shown(name: str) -> bool:
    return not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


def _check_member(path: Path, name: str, member: zipfile.ZipInfo) -> None:
    size, ratio = _BOMB
    if member.flag_bits & 1:
        why, fix = "it is encrypted", "Unpack it with its password, and give the folder."
    elif name.startswith("/") or ".." in name.split("/"):
        why, fix = "its path leads out of the archive", "Unpack the files that you trust."
    elif member.file_size > size and member.file_size > ratio * max(member.compress_size, 1):
        why = f"it would unpack to {member.file_size >> 20} MiB, {ratio} times its size"
        fix = "Unpack it, and give the folder, if you trust its sender."
    else:
        return
    raise DataError(f"'{path}' cannot be read.", f"Its member '{name}': {why}.", fix)


# -- importing -----------------------------------------------------------------------------------


@dataclass(slots=True)
class ChatImport:
    """What an import read and wrote."""

    layouts: dict[str, int]
    """Layout → number of files."""
    skipped: Counter[str]
    """Ending of a file without conversations → number of such files."""
    left_out: Counter[str]
    """What is left out although nothing is wrong with it → number."""
    conversations: int = 0
    messages: int = 0
    people: set[str] = field(default_factory=set)
    """Ids of persons who talk to an assistant."""
    speakers: Counter[str] = field(default_factory=Counter)
    """Name → messages, in conversations between people."""
    bad: list[BadRow] = field(default_factory=list)

    def count(self, row: dict[str, Any]) -> None:
        """Add one conversation."""
        messages = row["messages"]
        self.conversations += 1
        self.messages += len(messages)
        if row.get("person"):
            self.people.add(str(row["person"]))
        self.speakers.update(m["speaker"] for m in messages if "speaker" in m)


def import_chats(
    path: Path, target: Path, options: ReadOptions | None = None, reporter: Reporter = SILENT
) -> ChatImport:
    """Write the conversations of an export to `target` (.jsonl), one per line, while they are read.

    DataError if the layout is unknown, if there is no conversation, or if `target` exists with
    other content.
    """
    options = options or ReadOptions()
    export = recognise(path, options)
    names = {layout.name: len(files) for layout, files in export.parts.items()}
    done = ChatImport(names, export.skipped, options.left_out)

    def rows() -> Iterator[dict[str, Any]]:
        with reporter.progress(None) as bar:
            for row in export.rows(options):
                if isinstance(row, BadRow):
                    done.bad.append(row)
                    continue
                done.count(row)
                bar.advance()
                yield row
        if not done.conversations:
            out = listed(options.left_out)
            why = f"left out: {out}" if out else "all are empty"
            why = f"{done.bad[0].source}: {done.bad[0].why}" if done.bad else why
            raise DataError(
                f"'{path}' contains no usable conversation.",
                f"It was read as {', '.join(names)}; {why}.",
                "Check the export, or export it again.",
            )

    write_lines(target, rows())
    return done


# -- recognising ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Export:
    """The files of an export by layout."""

    path: Path
    parts: Mapping[Layout, Sequence[ExportFile]]
    skipped: Counter[str]
    """Ending of a file without conversations → number of such files."""

    def rows(self, options: ReadOptions) -> Iterator[dict[str, Any] | BadRow]:
        """All conversations, with unique ids that stay the same in a later export."""
        seen: Counter[str] = Counter()
        for layout, files in self.parts.items():
            for row in layout.rows(files, options):
                if isinstance(row, BadRow):
                    yield row
                elif not row.get("messages"):
                    options.left_out["empty conversations"] += 1
                else:
                    key = str(row.get("id") or _fingerprint(row["messages"]))
                    seen[key] += 1
                    yield {**row, "id": key if seen[key] == 1 else f"{key}-{seen[key]}"}


def _fingerprint(messages: Any) -> str:
    text = json.dumps(messages, sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:12]


def recognise(path: Path, options: ReadOptions | None = None) -> Export:
    """The export at `path`; DataError with the nearest layouts if it has none of them."""
    files = open_export(path)
    found: dict[Layout | None, list[ExportFile]] = defaultdict(list)
    for file in files:
        found[layout_of(file, bool(options and options.columns))].append(file)
    if found.keys() - {None, *datasets.LAYOUTS}:
        for layout in datasets.LAYOUTS:
            found[None] += found.pop(layout, [])
    endings = (PurePosixPath(file.name).suffix.lower() for file in found.pop(None, ()))
    skipped = Counter(ending.lstrip(".") or "other" for ending in endings)
    if not found:
        raise unknown_layout(path, files)
    return Export(path, {layout: part for layout, part in found.items() if layout}, skipped)


def layout_of(file: ExportFile, columns: bool = False) -> Layout | None:
    """The layout of one file; with `columns`, the one for tables with named columns."""
    if not file.is_readable:
        return None
    try:
        return next((o for o in LAYOUTS if (o.columns if columns else o.fits(file))), None)
    finally:
        vars(file).pop("head", None)  # an export may have thousands of files


EXPORT_SUFFIXES = (".zip", ".txt", ".log", ".ndjson")
"""Endings of exports that are no row files."""
_LOOKED_AT = 50


def is_export(path: Path) -> bool:
    """Whether a file or folder is read with the reader of its layout, and not row by row."""
    if path.suffix.lower() in EXPORT_SUFFIXES and path.is_file():
        return True
    if path.suffix.lower() == ".parquet":
        return False
    files = [f for f in open_export(path) if f.is_readable and not f.name.endswith(".parquet")]
    return any(
        (layout := layout_of(file))
        and not (layout.name in datasets.FORMS and (path.is_dir() or is_plain(file)))
        for file in files[:_LOOKED_AT]
    )


# -- unknown layouts -----------------------------------------------------------------------------

ROW_FORM = (
    '{"person": "u7", "messages": [{"role": "user", "content": "hi"}, '
    '{"role": "assistant", "content": "hello"}]}'
)


def unknown_layout(path: Path, files: Sequence[ExportFile]) -> DataError:
    """The error for an export without a known layout: the nearest three and the line to write."""
    candidates = [file for file in files if file.is_readable]
    if not candidates:
        packed = any(file.name.lower().endswith(".zip") for file in files)
        return DataError(
            f"'{path}' contains no conversations.",
            f"It has no file that ends in {', '.join(READABLE)}." if files else "It is empty.",
            "Unpack the .zip file in it, and give that."
            if packed
            else "Give the export as JSON, CSV, Parquet or text.",
        )
    first = max(candidates, key=lambda file: file.size)
    return DataError(
        f"'{path}' has none of the layouts that soul reads.",
        f"'{first.name}' {nearest_words(sample_of(first))}",
        "Name the columns of a table with one message per row: --columns id=…,role=…,text=… "
        f"Otherwise write one conversation per line: {ROW_FORM}",
    )


def nearest_words(values: Sequence[Any]) -> str:
    """What the keys of records are, and the layouts whose examples share most of them, as the end
    of a sentence."""
    keys = _keys(values)
    if not keys:
        return "holds no JSON object and no table."

    def shared(layout: Layout) -> tuple[float, bool]:
        names = set(re.findall(r'"(\w+)":', layout.example))
        return len(names & keys.keys()) / len(names | keys.keys()), layout.name == "messages"

    near = sorted(LAYOUTS, key=shared, reverse=True)[:3]
    examples = "; ".join(f"{one.name}: {one_line(one.example, 60)}" for one in near)
    have = ", ".join(one_line(key, 16) for key in [*keys][:5])
    return f"has the keys {have}. The nearest layouts are {examples}."


def _keys(values: Sequence[Any], depth: int = 3) -> dict[str, None]:
    """The keys in records and in the values below them, in order."""
    names: dict[str, None] = {}
    for value in values[:5]:
        inner = list(value.values()) if isinstance(value, Mapping) else value
        names |= dict.fromkeys(map(str, value)) if isinstance(value, Mapping) else {}
        if depth and isinstance(inner, list | tuple):
            names |= _keys(inner, depth - 1)
    return names
