"""What a sampler has produced since the last checkpoint, so that a killed step loses nothing.

    {"policy": …, "prompts": […], "rows": […]}                    a batch
    {"void": {"policy": …, "step": 3, "why": …}}                  those replies count no more

One line a batch, on the disk before anybody sees its replies. A reply is found again by its call,
its sampling, the ids of its prompt and the policy version. `batch` gives a whole recorded batch or
nothing: a sampler that must repeat itself to the bit may not compute half a batch in smaller
company. Replies that are recorded after a void record count again, under the same keys.
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
"""The journal of a training, in its run's folder."""
VOID = "void"
"""The member that makes a line a void record."""


@dataclass(frozen=True, slots=True)
class JournalKey:
    """One request as the journal knows it."""

    call: Call
    sampling: Sampling
    prompt_ids: tuple[int, ...]
    policy: str


@dataclass(frozen=True, slots=True)
class _Row:
    call: Call
    sampling: Sampling
    prompt: int
    """Its place in the prompts of the batch."""
    reply: Completion
    """Without the ids of its prompt."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A line with what was sampled together."""

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
        """IndexError for a prompt that is not there."""
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
    """An append-only file of batches. Opening it reads what is there; a torn last line is no line.

    What is written goes to the disk alone: only the next process asks for it, and fifty steps of
    replies would fill the memory of this one. Raises DataError when the file holds something else.
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
                    f"Line {number} of '{self.path}' is no batch of a sampler.",
                    f"It cannot be read: {type(error).__name__}.",
                    "Remove the file; the replies of the interrupted step are then sampled again.",
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
        """How many batches can be replayed: those that were there when it was opened."""
        return len(self._batches)

    def one(self, key: JournalKey) -> Completion | None:
        """The recorded reply, None without one."""
        return self._replies.get(key)

    def batch(self, keys: Sequence[JournalKey]) -> list[Completion] | None:
        """The recorded replies of exactly this batch in this order, None without it."""
        if tuple(keys) not in self._batches:
            return None
        return [self._replies[a] for a in keys]

    def write(self, keys: Sequence[JournalKey], replies: Sequence[Completion]) -> None:
        """Record a batch; it is on the disk on return."""
        self._lines.write(form_of(_Batch).dump_python(_Batch.of(keys, replies), mode="json"))

    def void(self, policy: str, step: int, why: str) -> None:
        """Take back the replies recorded so far for `step` of the weights `policy`.

        The record is on the disk on return. Replies of other steps stay valid.
        """
        self._lines.write({VOID: asdict(_Void(policy, step, why))})
        self._forget(policy, step)

    def clear(self) -> None:
        """Forget everything: what led to a checkpoint is not needed again."""
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
