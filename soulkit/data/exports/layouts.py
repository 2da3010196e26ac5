"""The contract between export files and the readers of their layouts.

A reader yields rows in the form that training reads:

    {"id": "c1", "person": "u7", "messages": [{"role": "user", "content": "hi"},
                                              {"role": "assistant", "content": "hello"}]}

Between people, messages have `speaker` (the name as exported) instead of `role`, and the row has no
`person`. A message may have `time` (ISO 8601) and `attachments` (a list of kinds: image, file).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, BinaryIO

from soulkit.data.files import BadRow

HEAD = 1 << 18
"""Bytes at the beginning of a file that are looked at to recognise its layout."""
SAMPLE = 20
"""Records at the beginning of a file that are looked at."""
READABLE = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt", ".log")
"""Endings of files that may hold conversations."""


@dataclass(frozen=True)
class ExportFile:
    """One file of an export: on disk, or a member of a .zip file."""

    name: str
    """With forward slashes, relative to its folder or .zip file: `conversations.json`."""
    opener: Callable[[], BinaryIO]
    size: int

    @property
    def is_readable(self) -> bool:
        """Whether it may hold conversations, by its ending."""
        return self.name.lower().endswith(READABLE)

    @cached_property
    def head(self) -> bytes:
        """The first bytes."""
        with self.opener() as file:
            return file.read(HEAD)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of `soul data import chats` that readers may use."""

    branches: bool = False
    """Yield every branch of a conversation, not only the one that was continued."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """For tables: id, role, text, person, time → name of the column."""
    left_out: Counter[str] = field(default_factory=Counter)
    """What is left out although nothing is wrong with it, by kind in the plural: `empty
    conversations`. What is malformed is a BadRow instead."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One layout: how to recognise and read it.

    The first layout in `reading.LAYOUTS` that fits a file is used, so special ones stand first.
    """

    name: str
    """As printed: `ChatGPT export`."""
    example: str
    """What a file looks like, in one line, for the error about an unknown layout."""
    fits: Callable[[ExportFile], bool]
    """Whether a file has this layout. Only `head` is read, and unknown bytes never raise."""
    rows: Callable[[Sequence[ExportFile], ReadOptions], Iterator[dict[str, Any] | BadRow]]
    """The conversations of all files with this layout in one export, and what cannot be read. Ids
    may be missing or repeated; `reading` makes them unique."""
    columns: bool = False
    """Whether this layout reads files whose columns are named with --columns."""
