"""Records replies sampled since the last checkpoint, so that an interrupted step loses nothing.

    {"policy": …, "rows": [{"call": …, "sampling": …, "prompt": "9f…", "reply": …}]}   a batch
    {"void": {"policy": …, "step": 3, "why": …}}                  these replies are withdrawn

Each batch is one line, written to disk before its replies are used. A reply is identified by its
call, sampling, prompt ids and policy version. Of the prompt ids only a hash is stored, because a
request for the reply contains them; older files list the prompts of each batch. `batch` returns a
whole recorded batch or nothing: sampling only the missing half, in a smaller batch, would not
reproduce every bit. Replies recorded after a void record are valid again, under the same keys.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from soulkit.errors import DataError
from soulkit.runs.jsonl import JsonlWriter, form_of, parsed_object, placed_objects
from soulkit.types import Call, Completion, Sampling

SAMPLED = "sampled.jsonl"
"""The journal's file name in the run folder of a training."""
VOID = "void"
"""Key of a void record."""


@dataclass(frozen=True, slots=True)
class JournalKey:
    """One request in the journal."""

    call: Call
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    policy: str

    def hashed(self) -> _Hashed:
        return _Hashed(self.call, self.sampling, _hash(self.prompt_ids), self.policy)


@dataclass(frozen=True, slots=True)
class _Hashed:
    """A JournalKey with the hash of its prompt ids."""

    call: Call
    sampling: Sampling
    prompt: str
    policy: str


def _hash(ids: Sequence[int]) -> str:
    return blake2b(array("q", ids).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Row:
    call: Call
    sampling: Sampling
    prompt: str | int
    """Hash of the prompt ids; in older files an index into the prompts of the batch."""
    reply: Completion
    """The reply without its prompt ids."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """One line: replies that were sampled together."""

    policy: str
    rows: list[_Row]
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    """Only in older files."""

    @classmethod
    def of(cls, keys: Sequence[JournalKey], replies: Sequence[Completion]) -> Self:
        rows = [
            _Row(key.call, key.sampling, _hash(key.prompt_ids), replace(reply, prompt_ids=()))
            for key, reply in zip(keys, replies, strict=True)
        ]
        return cls(keys[0].policy, rows)

    def keys(self) -> list[_Hashed]:
        """The key of each row. IndexError if a row's prompt is missing."""
        older = [_hash(ids) for ids in self.prompts]
        hashes = [older[row.prompt] if isinstance(row.prompt, int) else row.prompt
                  for row in self.rows]  # fmt: skip
        return [_Hashed(row.call, row.sampling, prompt, self.policy)
                for row, prompt in zip(self.rows, hashes, strict=True)]  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Void:
    policy: str
    step: int
    why: str = ""


class Journal:
    """An append-only file of batches. Opening it finds existing batches, except an incomplete last
    line; their replies are read from the file when they are asked for.

    New batches are only written to disk, not kept in memory: only the next process needs them. A
    thread of its own writes. DataError if the file contains anything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._places: dict[_Hashed, tuple[int, int]] = {}
        """Key → (offset of its line, row)."""
        self._batches: set[tuple[_Hashed, ...]] = set()
        self._waiting: list[bytes] = []
        """Lines of the next write; only the writer's thread uses them and the file."""
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._line = lru_cache(maxsize=16)(self._read_line)
        lines = placed_objects(self.path) if self.path.exists() else ()
        for number, (offset, line) in enumerate(lines, 1):
            try:
                self._find(offset, line)
            except (ValidationError, IndexError) as error:
                raise DataError(
                    f"Line {number} of '{self.path}' is not a sampled batch.",
                    f"It cannot be read: {type(error).__name__}.",
                    "Delete the file; the replies of the interrupted step are then sampled again.",
                ) from error
        self._lines = JsonlWriter(self.path, compact=True)

    def _find(self, offset: int, line: Mapping[str, Any]) -> None:
        if VOID in line:
            void: _Void = form_of(_Void).validate_python(line[VOID])
            self._forget(void.policy, void.step)
            return
        batch: _Batch = form_of(_Batch).validate_python(line)
        keys = batch.keys()
        self._places.update((key, (offset, row)) for row, key in enumerate(keys))
        self._batches.add(tuple(keys))

    def _read_line(self, offset: int) -> _Batch:
        with self.path.open("rb") as file:
            file.seek(offset)
            batch: _Batch = form_of(_Batch).validate_python(parsed_object(file.readline()))
        return batch

    def __len__(self) -> int:
        """Number of batches that can be replayed: those present when the file was opened."""
        return len(self._batches)

    def one(self, key: JournalKey) -> Completion | None:
        """The recorded reply; None if there is none."""
        if not self._places or (place := self._places.get(key.hashed())) is None:
            return None
        offset, row = place
        return replace(self._line(offset).rows[row].reply, prompt_ids=key.prompt_ids)

    def batch(self, keys: Sequence[JournalKey]) -> list[Completion] | None:
        """The recorded replies of exactly this batch, in this order; None if there are none."""
        if not self._batches or tuple(key.hashed() for key in keys) not in self._batches:
            return None
        return [reply for key in keys if (reply := self.one(key)) is not None]

    def write(self, keys: Sequence[JournalKey], replies: Sequence[Completion]) -> None:
        """Record a batch; it is on disk when this returns."""
        self._writer.submit(self._append, self._dump(keys, replies)).result()

    async def record(self, key: JournalKey, reply: Completion) -> None:
        """Record a batch of one reply; it is on disk when this returns.

        Replies that arrive during a write share the next one. A cancelled caller's is written too.
        """
        loop = asyncio.get_running_loop()
        await asyncio.shield(loop.run_in_executor(self._writer, self._queue, key, reply))
        await loop.run_in_executor(self._writer, self._append)

    def _queue(self, key: JournalKey, reply: Completion) -> None:
        self._waiting.append(self._dump([key], [reply]))

    def _dump(self, keys: Sequence[JournalKey], replies: Sequence[Completion]) -> bytes:
        batch = form_of(_Batch).dump_python(_Batch.of(keys, replies), mode="json")
        return self._lines.line(batch)

    def _append(self, *lines: bytes) -> None:
        """Write the waiting lines and these with one sync; after an error they wait on."""
        if ready := [*self._waiting, *lines]:
            self._lines.write_lines(ready)
        self._waiting.clear()

    def void(self, policy: str, step: int, why: str) -> None:
        """Withdraw the recorded replies for `step` of the weights `policy`.

        The record is on disk when this returns. Replies of other steps stay valid.
        """
        line = self._lines.line({VOID: asdict(_Void(policy, step, why))})
        self._writer.submit(self._append, line).result()
        self._forget(policy, step)

    def clear(self) -> None:
        """Delete all batches: those before a checkpoint are no longer needed."""
        self._writer.submit(self._truncate).result()
        self._places.clear()
        self._batches.clear()
        self._line.cache_clear()

    def _truncate(self) -> None:
        self._lines.close()
        self.path.write_bytes(b"")
        self._lines = JsonlWriter(self.path, compact=True)

    def close(self) -> None:
        self._writer.shutdown()
        self._append()
        self._lines.close()

    def _forget(self, policy: str, step: int) -> None:
        gone = {a for a in self._places if a.policy == policy and a.call.step == step}
        self._places = {a: place for a, place in self._places.items() if a not in gone}
        self._batches = {batch for batch in self._batches if gone.isdisjoint(batch)}
