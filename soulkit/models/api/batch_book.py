"""Which batches a run has sent, written down before and after each step, so that a kill at any
moment costs nothing: the same command finds the very batch again.

    batches.json        the run's own mark, what servers were found to refuse, and every batch:

        written ──▶ uploaded ──▶ created ──▶ ended ──▶ used
        on disk     file id      batch id    replies    replies are
        only        is known     is known    on disk    in the ledger

    batches/0001.requests.jsonl, 0001.replies.N.jsonl    until the batch is used

Nothing here holds a key or a header.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from soulkit.errors import RunError
from soulkit.runs.jsonl import write_aside, write_json

BOOK, FILES = "batches.json", "batches"
Stage = Literal["written", "uploaded", "created", "ended", "used"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """One batch of a run."""

    number: int
    base_url: str
    model: str
    requests: int
    cost_limit: float
    """US dollars that all its replies cost at most; 0 where no price is known."""
    written: float
    """Unix seconds."""
    stage: Stage = "written"
    file_id: str = ""
    batch_id: str = ""
    status: str = ""
    """In the service's words, once it has ended."""
    words: str = ""
    """Why it failed."""


@dataclass
class ServerLore:
    """What was learnt of a server by asking it live, and holds for the batches, too."""

    refused: list[str] = field(default_factory=list)
    longest: int | None = None
    """Tokens of a reply that it gives to anybody."""
    taken: list[str] = field(default_factory=list)
    """Sets of parameters of which one request was answered."""


class BatchBook:
    """The batches of the run in `folder`. RunError when its file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.path, self.files = folder / BOOK, folder / FILES
        self.run = uuid.uuid4().hex
        self.states: dict[int, BatchState] = {}
        self.lore: dict[str, ServerLore] = {}
        if self.path.is_file():
            self._read()
        self._earlier = set(self.states)

    def _read(self) -> None:
        try:
            book = json.loads(self.path.read_text(encoding="utf-8"))
            self.run = str(book["run"])
            states = [BatchState(**one) for one in book["batches"]]
            self.lore = {name: ServerLore(**lore) for name, lore in book["servers"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RunError(
                f"'{self.path}' cannot be read: {error}.",
                "It says which batches were sent; without it they would be paid for twice.",
                "Restore the file. To pay for new batches instead, give another folder with --out.",
            ) from error
        self.states = {state.number: state for state in states}

    def lore_of(self, base_url: str, model: str) -> ServerLore:
        return self.lore.setdefault(f"{model} at {base_url}", ServerLore())

    def save(self, state: BatchState | None = None) -> None:
        """Write everything down, with this new state of a batch."""
        if state is not None:
            self.states[state.number] = state
        write_json(self.path, {
            "version": 1, "run": self.run,
            "servers": {name: asdict(lore) for name, lore in self.lore.items()},
            "batches": [asdict(one) for one in self.states.values()],
        })  # fmt: skip

    def add(
        self, base_url: str, model: str, lines: Iterable[bytes], cost_limit: float
    ) -> BatchState:
        """A new batch, its requests on disk."""
        number, requests = max(self.states, default=0) + 1, list(lines)
        write_aside(self.requests_file(number), b"".join(requests))
        state = BatchState(number=number, base_url=base_url, model=model, requests=len(requests),
                           cost_limit=cost_limit, written=time.time())  # fmt: skip
        self.save(state)
        return state

    def mark(self, state: BatchState) -> dict[str, str]:
        """What tells a batch from all others at the service."""
        return {"soulkit_run": self.run, "soulkit_batch": str(state.number)}

    def unused(self) -> Iterator[BatchState]:
        """The batches whose replies are not all in the ledger."""
        return (state for state in self.states.values() if state.stage != "used")

    def take_over(self, base_url: str, model: str) -> list[BatchState]:
        """The unused batches of a model that an earlier process left; each is given once."""
        left = [
            state
            for state in self.unused()
            if state.number in self._earlier and (state.base_url, state.model) == (base_url, model)
        ]
        self._earlier -= {state.number for state in left}
        return left

    def requests_file(self, number: int) -> Path:
        return self.files / f"{number:04d}.requests.jsonl"

    def replies_file(self, number: int, part: int) -> Path:
        return self.files / f"{number:04d}.replies.{part}.jsonl"

    def requests(self, state: BatchState) -> Iterator[tuple[str, bytes]]:
        """custom_id and line of each of its requests; RunError when the file is gone or damaged."""
        try:
            with self.requests_file(state.number).open("rb") as stream:
                for line in stream:
                    yield str(json.loads(line)["custom_id"]), line
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"The requests of batch {state.number} cannot be read: {error}.",
                f"'{self.path}' says that it was sent as {state.batch_id or 'a new batch'}.",
                "Restore the folder 'batches', or give another folder with --out.",
            ) from error

    def replies(self, number: int) -> dict[str, Mapping[str, Any]]:
        """custom_id → the service's line. A line that cannot be read is none: it is asked again."""
        lines: dict[str, Mapping[str, Any]] = {}
        for path in sorted(self.files.glob(f"{number:04d}.replies.*.jsonl")):
            with path.open("rb") as stream:
                for line in filter(None, map(_object_or_none, stream)):
                    lines.setdefault(str(line.get("custom_id")), line)
        return lines

    def is_whole(self, path: Path) -> bool:
        """Whether a file of replies has lines, and each of them belongs to a request."""
        empty = True
        with path.open("rb") as stream:
            for raw in filter(bytes.strip, stream):
                line = _object_or_none(raw)
                if line is None or not isinstance(line.get("custom_id"), str):
                    return False
                empty = False
        return not empty

    def clear(self, state: BatchState) -> None:
        """Remove what the ledger holds by now."""
        for path in self.files.glob(f"{state.number:04d}.*"):
            path.unlink(missing_ok=True)


def _object_or_none(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None
