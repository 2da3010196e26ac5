"""What a sampler has produced since the last checkpoint, so that a killed step loses nothing.

One line a batch, on the disk before anybody sees its replies. A reply is found again by who asked
(the call), how (the sampling), what (the prompt's ids) and of which weights (the policy version);
all four must agree. `batch` gives a whole recorded batch or nothing: a sampler that must repeat
itself to the bit may not take half a batch from here and compute the other half in smaller company.

A void record takes back what was recorded before it for one step of one policy version:

    {"policy": …, "prompts": […], "rows": […]}                    a batch
    {"void": {"policy": …, "step": 3, "why": …}}                  those replies count no more

Replies that are recorded after it count again, under the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from soulkit.errors import DataError
from soulkit.runs.jsonl import JsonlWriter, read_jsonl
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


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


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
            if VOID in line:
                self._forget(*_read_void(line, self.path, number))
            else:
                keys, replies = _read(line, self.path, number)
                self._replies.update(zip(keys, replies, strict=True))
                self._batches.add(tuple(keys))
        self._lines = JsonlWriter(self.path)

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
        self._lines.write(_line(keys, replies))

    def void(self, policy: str, step: int, why: str) -> None:
        """Take back the replies recorded so far for `step` of the weights `policy`.

        The record is on the disk on return. Replies of other steps stay valid.
        """
        self._lines.write({VOID: {"policy": policy, "step": step, "why": why}})
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


def _line(keys: Sequence[JournalKey], replies: Sequence[Completion]) -> dict[str, Any]:
    def plain(kind: type, value: object) -> Any:
        return _adapter(kind).dump_python(value, mode="json")

    prompts = list(dict.fromkeys(a.prompt_ids for a in keys))
    place = {prompt: index for index, prompt in enumerate(prompts)}
    rows = [
        {
            "call": plain(Call, a.call),
            "sampling": plain(Sampling, a.sampling),
            "prompt": place[a.prompt_ids],
            "reply": {**plain(Completion, reply), "prompt_ids": []},
        }
        for a, reply in zip(keys, replies, strict=True)
    ]
    return {"policy": keys[0].policy, "prompts": prompts, "rows": rows}


def _read(
    line: Mapping[str, Any], path: Path, number: int
) -> tuple[list[JournalKey], list[Completion]]:
    keys, replies = [], []
    try:
        for row in line["rows"]:
            prompt = line["prompts"][row["prompt"]]
            call = _adapter(Call).validate_python(row["call"])
            sampling = _adapter(Sampling).validate_python(row["sampling"])
            reply = {**row["reply"], "prompt_ids": prompt}
            keys.append(JournalKey(call, sampling, tuple(prompt), line["policy"]))
            replies.append(_adapter(Completion).validate_python(reply))
    except (ValidationError, KeyError, IndexError, TypeError) as error:
        raise _unreadable(path, number, error) from error
    return keys, replies


def _read_void(line: Mapping[str, Any], path: Path, number: int) -> tuple[str, int]:
    """The policy version and the step that a void record names."""
    try:
        return str(line[VOID]["policy"]), int(line[VOID]["step"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, number, error) from error


def _unreadable(path: Path, number: int, error: Exception) -> DataError:
    return DataError(
        f"Line {number} of '{path}' is no batch of a sampler.",
        f"It cannot be read: {type(error).__name__}.",
        "Remove the file; the replies of the interrupted step are then sampled again.",
    )
