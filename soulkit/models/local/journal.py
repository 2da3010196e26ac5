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
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from soulkit.errors import DataError
from soulkit.runs.jsonl import JsonlWriter, form_of, json_line, parsed_object, placed_objects
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
    prompt_ids: tuple[int, ...] = field(compare=False)
    policy: str
    prompt: str = ""
    """Hash of the prompt ids, which are missing in keys from a file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", self.prompt or _hash(self.prompt_ids))


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

    def keys(self) -> Iterator[JournalKey]:
        """The key of each row. IndexError if a row's prompt is missing."""
        for row in self.rows:
            prompt = row.prompt
            prompt = prompt if isinstance(prompt, str) else _hash(self.prompts[prompt])
            yield JournalKey(row.call, row.sampling, (), self.policy, prompt)


def _dump(keys: Sequence[JournalKey], replies: Sequence[Completion]) -> bytes:
    rows = [_Row(key.call, key.sampling, key.prompt, replace(reply, prompt_ids=()))
            for key, reply in zip(keys, replies, strict=True)]  # fmt: skip
    batch = form_of(_Batch).dump_python(_Batch(keys[0].policy, rows), mode="json")
    return json_line(batch, compact=True)


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
        self._places: dict[JournalKey, tuple[int, int]] = {}
        """Key → (offset of its line, row)."""
        self._batches: dict[tuple[JournalKey, ...], int] = {}
        """Keys of a batch → offset of its line."""
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
        self._lines = JsonlWriter(self.path)

    def _find(self, offset: int, line: Mapping[str, Any]) -> None:
        if VOID in line:
            void: _Void = form_of(_Void).validate_python(line[VOID])
            self._forget(void.policy, void.step)
            return
        batch: _Batch = form_of(_Batch).validate_python(line)
        self._batches[keys := tuple(batch.keys())] = offset
        self._places.update((key, (offset, row)) for row, key in enumerate(keys))

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
        return self._reply(key, *self._places[key]) if key in self._places else None

    def batch(self, keys: Sequence[JournalKey]) -> list[Completion] | None:
        """The recorded replies of exactly this batch, in this order; None if there are none."""
        offset = self._batches.get(tuple(keys))
        if offset is None:
            return None
        return [self._reply(key, offset, row) for row, key in enumerate(keys)]

    def _reply(self, key: JournalKey, offset: int, row: int) -> Completion:
        return replace(self._line(offset).rows[row].reply, prompt_ids=key.prompt_ids)

    def write(self, keys: Sequence[JournalKey], replies: Sequence[Completion]) -> None:
        """Record a batch; it is on disk when this returns."""
        self._writer.submit(self._append, _dump(keys, replies)).result()

    async def record(self, key: JournalKey, reply: Completion) -> None:
        """Record a batch of one reply; it is on disk when this returns.

        Replies that arrive during a write share the next one. A cancelled caller's is written too.
        """
        in_thread = partial(asyncio.get_running_loop().run_in_executor, self._writer)
        await asyncio.shield(in_thread(lambda: self._waiting.append(_dump([key], [reply]))))
        await in_thread(self._append)

    def _append(self, line: bytes = b"") -> None:
        """Write the waiting lines and this one with one sync; after an error they wait on."""
        if lines := b"".join([*self._waiting, line]):
            self._lines.write_lines(lines)
        self._waiting.clear()

    def void(self, policy: str, step: int, why: str) -> None:
        """Withdraw the recorded replies for `step` of the weights `policy`.

        The record is on disk when this returns. Replies of other steps stay valid.
        """
        line = json_line({VOID: asdict(_Void(policy, step, why))}, compact=True)
        self._writer.submit(self._append, line).result()
        self._forget(policy, step)

    def clear(self) -> None:
        """Delete all batches: those before a checkpoint are no longer needed."""
        self._writer.submit(os.truncate, self.path, 0).result()
        self._places.clear()
        self._batches.clear()
        self._line.cache_clear()

    def close(self) -> None:
        self._writer.shutdown()
        self._append()
        self._lines.close()

    def _forget(self, policy: str, step: int) -> None:
        gone = {a for a in self._places if a.policy == policy and a.call.step == step}
        self._places = {a: place for a, place in self._places.items() if a not in gone}
        self._batches = {keys: offset for keys, offset in self._batches.items()
                         if gone.isdisjoint(keys)}  # fmt: skip
