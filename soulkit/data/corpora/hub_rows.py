"""Streams the rows of a Hub dataset without downloading or storing it first.

    owner/name[@revision][/configuration][:split]

The library `datasets` reads the shards one after the other, in a new order in every pass. Its own
shuffle buffer is not used, because its content would be lost when a run stops. A window starts at a
state that the library can restore. The commit is fixed when the stream is opened; a resumed stream
continues at the same commit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from soulkit.data.corpora.file_rows import Window
from soulkit.data.corpora.settings import CorpusPart
from soulkit.data.files import SourcedRow
from soulkit.errors import DataError, MissingPackage
from soulkit.reporting import SILENT, Reporter

_BATCH = 256
_SHARD_ROWS = 1 << 40
"""More rows than any shard has. The ordinal of a row is shard number × this + row number."""


class HubStore:
    """A split of a dataset. A start holds the shard's place in the pass and the state to load."""

    def __init__(
        self, address: re.Match[str], window: int, limit: int, salt: str, part: CorpusPart,
        reporter: Reporter = SILENT,
    ) -> None:  # fmt: skip
        """DataError if the Hub does not have the dataset."""
        self.repo, self._config = address["repo"], address["config"]
        self._split = address["split"] or part
        self._size, self._limit, self._salt, self._reporter = window, limit, salt, reporter
        self._commit = self._resolve(address["revision"])
        self._reading: tuple[Any, Iterator[Any], Any] | None = None

    def _resolve(self, revision: str | None) -> str:
        from huggingface_hub import HfApi

        with _refusals(self.repo):
            return str(HfApi().dataset_info(self.repo, revision=revision).sha)

    @cached_property
    def _dataset(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise MissingPackage("datasets", "reading a Hub dataset row by row") from error
        with _refusals(self.repo):
            loaded = datasets.load_dataset(
                self.repo, self._config, split=self._split, revision=self._commit, streaming=True
            )
            return loaded.with_format("arrow")

    # -- size and identity -------------------------------------------------------------------------

    @property
    def rows(self) -> int | None:
        """The number of rows, from the dataset's metadata or from `count`."""
        return self._rows or None

    @property
    def span(self) -> int | None:
        """None with several shards, because the size of each is unknown."""
        return self.rows if self._dataset.num_shards == 1 else None

    @cached_property
    def _rows(self) -> int:
        split = (self._dataset.info.splits or {}).get(self._split)
        return int(split.num_examples or 0) if split is not None else 0

    def count(self) -> int:
        """The number of rows; without metadata, all rows are read once to count them."""
        if not self._rows:
            self._reporter.note(
                f"counting the rows of {self.repo}: the dataset does not state their number"
            )
            with _refusals(self.repo):
                self._rows = sum(len(table) for table in self._dataset.iter(batch_size=1000))
        return self._rows

    @property
    def data_sources(self) -> frozenset[str]:
        """Empty: unknown before the rows are read."""
        return frozenset()

    def identity(self) -> dict[str, Any]:
        return {"repo": self.repo, "commit": self._commit, "config": self._config,
                "split": self._split}  # fmt: skip

    def check(self, identity: Any) -> None:
        """Go back to the commit of `identity`; DataError if it is another dataset."""
        if {**identity, "commit": ""} != {**self.identity(), "commit": ""}:
            raise DataError(
                f"The corpus has changed: now it is {self.repo}, split {self._split}.",
                f"When the run started, it was {identity['repo']}, split {identity['split']}.",
                "Use the original dataset, or start a new run.",
            )
        if identity["commit"] != self._commit:
            self._commit, self._reading = str(identity["commit"]), None
            self.__dict__.pop("_dataset", None)
            self.__dict__.pop("_rows", None)

    # -- windows -----------------------------------------------------------------------------------

    def first(self, epoch: int, shuffled: bool) -> dict[str, Any]:
        return _start(0, None, 0)

    def window(
        self, start: dict[str, Any], epoch: int, shuffled: bool
    ) -> tuple[Window, dict[str, Any]] | None:
        shards = list(range(self._dataset.num_shards))
        if shuffled:
            random.Random(f"{self._salt}/{epoch}/order").shuffle(shards)
        while start["shard"] < len(shards):
            shard = shards[start["shard"]]
            with _refusals(self.repo):
                tables, state = self._read(shard, start)
            rows = sum(len(table) for table in tables)
            if rows:
                following = _start(start["shard"], state, start["number"] + rows)
                self._reading = self._reading and ((shard, following), *self._reading[1:])
                return self._unpacked(tables, shard, start["number"], rows), following
            self._reading = None
            start = _start(start["shard"] + 1, None, 0)
        return None

    def _read(self, shard: int, start: dict[str, Any]) -> tuple[list[Any], Any]:
        """Read tables until they fill a window; return them and the state after them."""
        # Compare the shard too: in another pass, the same start may refer to another shard.
        if self._reading is None or self._reading[0] != (shard, start):
            dataset = self._dataset.shard(self._dataset.num_shards, shard)
            if start["state"] is not None:
                dataset.load_state_dict(start["state"])
            self._reading = (
                (shard, start),
                iter(dataset.iter(batch_size=min(_BATCH, self._size))),
                dataset,
            )
        _, batches, dataset = self._reading
        tables: list[Any] = []
        rows = size = 0
        for table in batches:
            tables.append(table)
            rows, size = rows + len(table), size + table.nbytes
            if rows >= self._size or size >= self._limit:
                break
        return tables, dataset.state_dict()

    def _unpacked(self, tables: list[Any], shard: int, first: int, rows: int) -> Window:
        import pyarrow as pa

        table = pa.concat_tables(tables, promote_options="permissive")
        base = shard * _SHARD_ROWS + first

        def row(place: int) -> SourcedRow:
            values = table.slice(place, 1).to_pylist()[0]
            return f"{self.repo}/{shard}:{first + place + 1}", values

        return Window(range(base, base + rows), row)


def _start(shard: int, state: Any, number: int) -> dict[str, Any]:
    return {"shard": shard, "state": state, "number": number}


@contextmanager
def _refusals(repo: str) -> Iterator[None]:
    """Convert errors of the Hub and the library to DataError."""
    import httpx2
    import pyarrow as pa

    refusals = (OSError, ValueError, TypeError, RuntimeError, pa.ArrowException, httpx2.HTTPError)
    try:
        yield
    except refusals as error:
        raise DataError(
            f"The Hub dataset '{repo}' cannot be read.",
            f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}.",
            "If you meant a local path, check it. Else check the name, the split and HF_ENDPOINT, "
            "or download the files and give their path.",
        ) from error
