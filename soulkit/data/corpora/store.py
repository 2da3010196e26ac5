"""The rows of files here, window by window, in an order of their own in every pass."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from soulkit.data.corpora.index import Stretch, index_file
from soulkit.data.corpora.places import hub_address, source_files
from soulkit.data.corpora.windows import Window, WindowReader
from soulkit.data.files import BadRow, SourcedRow, write_lines
from soulkit.errors import DataError


class FileStore:
    """The files of one source; a start is the number of a window in its pass."""

    def __init__(
        self, paths: Sequence[Path], window: int, limit: int, salt: str, marks: bool
    ) -> None:
        """Index `paths`; `salt` sets the orders; `marks`: collect the names in the rows."""
        self._files = [index_file(p, n, window, limit, marks) for n, p in enumerate(paths)]
        self._labels = file_labels(paths)
        self._reader = WindowReader(self._files, self._labels)
        self._salt = salt
        self._orders: dict[int, list[Stretch]] = {}

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self._files)

    @property
    def span(self) -> int:
        return sum(file.span for file in self._files)

    def count(self) -> int:
        return self.rows

    @property
    def data_sources(self) -> frozenset[str]:
        return frozenset[str]().union(*(file.data_sources for file in self._files))

    def first(self, epoch: int, shuffled: bool) -> int:
        return 0

    def window(self, start: int, epoch: int, shuffled: bool) -> tuple[Window, int] | None:
        stretches = self._order(epoch if shuffled else -1)
        if start >= len(stretches):
            return None
        return self._reader.read(stretches[start]), start + 1

    def _order(self, epoch: int) -> list[Stretch]:
        """The stretches of a pass: of all files, in an order of its own; -1: as they stand."""
        if epoch not in self._orders:
            bundles = [bundle for file in self._files for bundle in file.bundles]
            if epoch >= 0:
                random.Random(f"{self._salt}/{epoch}/order").shuffle(bundles)
            self._orders = {epoch: [stretch for bundle in bundles for stretch in bundle]}
        return self._orders[epoch]

    def identity(self) -> list[list[str]]:
        pairs = zip(self._labels, self._files, strict=True)
        return [[label, file.checksum] for label, file in pairs]

    def check(self, identity: Any) -> None:
        before = {str(label): str(checksum) for label, checksum in identity}
        now = {label: file.checksum for label, file in zip(self._labels, self._files, strict=True)}
        changes = [
            *(f"'{name}' has changed" for name in now if before.get(name, now[name]) != now[name]),
            *(f"'{name}' is new" for name in now.keys() - before.keys()),
            *(f"'{name}' is gone" for name in before.keys() - now.keys()),
        ]
        if changes:
            more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
            raise DataError(
                f"The corpus is not what it was: {sorted(changes)[0]}{more}.",
                "Going on would skip rows or repeat them, and nothing would say which.",
                "Put the files of then back, or start a new run.",
            )


def file_labels(paths: Sequence[Path]) -> list[str]:
    """What the files are called in the keys of their rows: by name, where that tells them apart."""
    names = [path.name for path in paths]
    return names if len(set(names)) == len(names) else [path.as_posix() for path in paths]


def source_rows(path: str) -> Iterator[SourcedRow]:
    """(`file:row`, row or BadRow) of every row of the files that `path` names, in their order.

    DataError for a data set of the hub: its rows are not here.
    """
    if hub_address(path) is not None:
        raise DataError(
            f"'{path}' is no file, folder or pattern here.",
            "What is compared row by row must lie on this machine.",
            "Check the path, or download the data set and name its files.",
        )
    store = FileStore(source_files(path), 1024, 8 << 20, "", False)
    start = 0
    while (step := store.window(start, 0, False)) is not None:
        window, start = step
        yield from map(window.row, range(len(window)))


def write_clean(path: str, target: Path, left_out: Container[str]) -> int:
    """Write the rows of `path` whose keys are not in `left_out` as .jsonl; returns how many.

    A file that holds something else is never replaced; DataError then, and where no row is left.
    """
    count = 0

    def lines() -> Iterator[Any]:
        nonlocal count
        for key, row in source_rows(path):
            if key not in left_out and not isinstance(row, BadRow):
                count += 1
                yield row

    write_lines(target, lines())
    return count
