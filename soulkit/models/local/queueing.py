"""What waits for a local model, and which of it shares a batch.

A queue belongs to one model in one event loop. Where waves decide (`waves.py`) it
belongs to the loop's barrier and hands out the open wave first; otherwise everything that waits may
be taken.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from soulkit.errors import ProviderError
from soulkit.models.local.waves import Participant, WaveBarrier
from soulkit.types import Call, Completion, Sampling

BATCH_TOKENS = 262_144
"""Rows x (longest prompt + room of its reply) of one batch; fewer rows run when they are long."""


@dataclass(frozen=True, slots=True)
class ExpertPrompt:
    """What a reply of two contexts is drawn from beside its own prompt (`mixed.py`)."""

    ids: list[int]
    share: float
    """Of the tokens, those that it draws, in expectation."""


@dataclass(slots=True, eq=False)
class GenerationRequest:
    ids: list[int]
    sampling: Sampling
    call: Call
    dropped: tuple[str, ...]
    future: asyncio.Future[Completion]
    room: int
    """Tokens that its reply may have: `max_tokens`, or what the context leaves of them."""
    participant: Participant | None = None
    expert: ExpertPrompt | None = None

    @property
    def group(self) -> tuple[float, float, int, bool]:
        """Requests of one group can share a batch: seeds, stops and thinking may differ."""
        s = self.sampling
        return s.temperature, s.top_p, s.max_tokens, self.expert is not None

    @property
    def size(self) -> int:
        """Tokens that a row like this one keeps in memory at its end."""
        expert = 0 if self.expert is None else len(self.expert.ids) + self.room
        return len(self.ids) + self.room + expert

    @property
    def order(self) -> tuple[int | str, ...]:
        # Similar lengths first, to waste little on padding; then the key, so that equal sets of
        # requests make equal batches in whatever order they came.
        c = self.call
        who = (c.step, c.example_id, c.rollout, c.kind, c.turn, c.sample, c.role)
        return (len(self.ids).bit_length(), *who)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Queue:
    """What waits in one event loop, and the task that serves it while anything does.

    `barrier` is set where waves decide; `wave` is what is left of the open one, and `serving` the
    batch under way.
    """

    barrier: WaveBarrier | None = None
    waiting: list[GenerationRequest] = field(default_factory=list)
    wave: list[GenerationRequest] = field(default_factory=list)
    serving: list[GenerationRequest] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def asking(self) -> set[Participant]:
        alive = [r for r in self.waiting if not r.future.done()]
        return {r.participant for r in alive if r.participant is not None}

    def busy(self) -> bool:
        left = any(not r.future.done() for r in self.wave)
        return left or any(r.participant is not None for r in self.serving)

    def open_wave(self) -> None:
        self.wave = [r for r in self.waiting if r.participant is not None]
        self.waiting = [r for r in self.waiting if r.participant is None]

    def wake(self) -> None:
        self.changed.set()

    def drop_cancelled(self) -> bool:
        """Whether anything is left to serve."""
        self.waiting = [r for r in self.waiting if not r.future.done()]
        self.wave = [r for r in self.wave if not r.future.done()]
        return bool(self.waiting or self.wave)

    def pool(self) -> list[GenerationRequest]:
        """The requests from which the next batch may be taken."""
        if self.barrier is None:
            return self.waiting
        if not self.wave and self.barrier.ready():
            self.barrier.open()
        return self.wave or [r for r in self.waiting if r.participant is None]

    def remove(self, batch: list[GenerationRequest]) -> None:
        taken = {id(r) for r in batch}
        self.waiting = [r for r in self.waiting if id(r) not in taken]
        self.wave = [r for r in self.wave if id(r) not in taken]


def batches_of(requests: list[GenerationRequest], most: int) -> list[list[GenerationRequest]]:
    """Cuts into runs of at most `most` rows and BATCH_TOKENS tokens (one row always fits)."""
    batches: list[list[GenerationRequest]] = []
    longest = 0
    for request in requests:
        longest = max(longest, request.size)
        full = batches and (len(batches[-1]) + 1) * longest > BATCH_TOKENS
        if not batches or full or len(batches[-1]) == most:
            batches.append([])
            longest = request.size
        batches[-1].append(request)
    return batches


def fail(request: GenerationRequest, error: Exception) -> None:
    if not request.future.done():
        wrapped = ProviderError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        request.future.set_exception(wrapped)
