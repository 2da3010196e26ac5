"""Records replies sampled since the last checkpoint, so that an interrupted step loses nothing.

    {"policy": …, "prompts": […], "rows": […]}                    a batch
    {"void": {"policy": …, "step": 3, "why": …}}                  these replies are withdrawn

Each batch is one line, written to disk before its replies are used. A reply is identified by its
call, sampling, prompt ids and policy version. `batch` returns a whole recorded batch or nothing:
sampling only the missing half, in a smaller batch, would not reproduce every bit. Replies recorded
after a void record are valid again, under the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from soulkit.errors import DataError
from soulkit.runs.jsonl import JsonlWriter, form_of, read_jsonl
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


@dataclass(frozen=True, slots=True)
class _Row:
    call: Call
    sampling: Sampling
    prompt: int
    """Index into the prompts of the batch."""
    reply: Completion
    """The reply without its prompt ids."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """One line: replies that were sampled together."""

    policy: str
    prompts: list[tuple[int, ...]]
    rows: list[_Row]

    @classmethod
    def of(cls, keys: Sequence[JournalKey], replies: Sequence[Completion]) -> Self:
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(a.prompt_ids for a in keys))}
        rows = [
            _Row(a.call, a.sampling, place[a.prompt_ids], replace(reply, prompt_ids=()))
            for a, reply in zip(keys, replies, strict=True)
        ]
        return cls(keys[0].policy, list(place), rows)

    def replies(self) -> Iterator[tuple[JournalKey, Completion]]:
        """(key, reply) of each row. IndexError if a row's prompt is missing."""
        for row in self.rows:
            prompt = self.prompts[row.prompt]
            key = JournalKey(row.call, row.sampling, prompt, self.policy)
            yield key, replace(row.reply, prompt_ids=prompt)


@dataclass(frozen=True, slots=True)
class _Void:
    policy: str
    step: int
    why: str = ""


class Journal:
    """An append-only file of batches. Opening it reads existing batches, except an incomplete last
    line.

    New batches are only written to disk, not kept in memory: only the next process needs them.
    DataError if the file contains anything else.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._replies: dict[JournalKey, Completion] = {}
        self._batches: set[tuple[JournalKey, ...]] = set()
        for number, line in enumerate(read_jsonl(self.path, repair=True), 1):
            try:
                self._read(line)
            except (ValidationError, IndexError) as error:
                raise DataError(
                    f"Line {number} of '{self.path}' is not a sampled batch.",
                    f"It cannot be read: {type(error).__name__}.",
                    "Delete the file; the replies of the interrupted step are then sampled again.",
                ) from error
        self._lines = JsonlWriter(self.path)

    def _read(self, line: Mapping[str, Any]) -> None:
        if VOID in line:
            void: _Void = form_of(_Void).validate_python(line[VOID])
            self._forget(void.policy, void.step)
            return
        batch: _Batch = form_of(_Batch).validate_python(line)
        replies = list(batch.replies())
        self._replies.update(replies)
        self._batches.add(tuple(key for key, _ in replies))

    def __len__(self) -> int:
        """Number of batches that can be replayed: those present when the file was opened."""
        return len(self._batches)

    def one(self, key: JournalKey) -> Completion | None:
        """The recorded reply; None if there is none."""
        return self._replies.get(key)

    def batch(self, keys: Sequence[JournalKey]) -> list[Completion] | None:
        """The recorded replies of exactly this batch, in this order; None if there are none."""
        if tuple(keys) not in self._batches:
            return None
        return [self._replies[a] for a in keys]

    def write(self, keys: Sequence[JournalKey], replies: Sequence[Completion]) -> None:
        """Record a batch; it is on disk when this returns."""
        self._lines.write(form_of(_Batch).dump_python(_Batch.of(keys, replies), mode="json"))

    def void(self, policy: str, step: int, why: str) -> None:
        """Withdraw the recorded replies for `step` of the weights `policy`.

        The record is on disk when this returns. Replies of other steps stay valid.
        """
        self._lines.write({VOID: asdict(_Void(policy, step, why))})
        self._forget(policy, step)

    def clear(self) -> None:
        """Delete all batches: those before a checkpoint are no longer needed."""
        self._lines.close()
        self.path.write_bytes(b"")
        self._lines = JsonlWriter(self.path)
        self._replies.clear()
        self._batches.clear()

    def close(self) -> None:
        self._lines.close()

    def _forget(self, policy: str, step: int) -> None:
        gone = {a for a in self._replies if a.policy == policy and a.call.step == step}
        self._replies = {a: reply for a, reply in self._replies.items() if a not in gone}
        self._batches = {batch for batch in self._batches if gone.isdisjoint(batch)}
