"""Forms batches of requests to a local model: queues, and waves that do not depend on timing.

Judges answer in any order, so a sampler that batches all waiting requests would give different
batches each time. Therefore participants register at the event loop's barrier, and deterministic
samplers serve them in waves: a wave opens when every participant waits at such a sampler, contains
exactly the waiting requests, and is served before the next one opens. A wave thus depends only on
what the participants ask, not on when. All samplers of a loop share one barrier; otherwise two
participants at two samplers would wait for each other.

A queue belongs to one model in one event loop. Calls outside a participant are served at once, in
batches of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakKeyDictionary, WeakSet

from soulkit.errors import ProviderError, RunStopped
from soulkit.types import Call, Completion, Sampling

_CURRENT: ContextVar[Participant | None] = ContextVar("participant", default=None)


class WaveBarrier:
    """The participants of one event loop, and the samplers at which they may wait."""

    def __init__(self) -> None:
        self.participants: set[Participant] = set()
        self.queues: WeakSet[Queue] = WeakSet()

    def ready(self) -> bool:
        """Whether every participant waits and no request is being served."""
        if any(queue.busy() for queue in self.queues):
            return False
        asking: set[Participant] = set().union(*(queue.asking() for queue in self.queues))
        return bool(asking) and self.participants <= asking

    def open(self) -> None:
        """Open the wave at all samplers at once."""
        for queue in self.queues:
            queue.open_wave()
        self.wake()

    def wake(self) -> None:
        for queue in self.queues:
            queue.wake()


_BARRIERS: WeakKeyDictionary[asyncio.AbstractEventLoop, WaveBarrier] = WeakKeyDictionary()


def loop_barrier() -> WaveBarrier:
    """The barrier of the running event loop."""
    return _BARRIERS.setdefault(asyncio.get_running_loop(), WaveBarrier())


def current_participant() -> Participant | None:
    """The participant that runs now, also in tasks that it started."""
    return _CURRENT.get()


class Participant:
    """One participant, from creation until `leave`. Calls inside its `with` block belong to it.

    Without a barrier, waves do not wait for it.
    """

    def __init__(self, barrier: WaveBarrier | None) -> None:
        self._barrier = barrier
        self._before: Token[Participant | None] | None = None
        if barrier is not None:
            barrier.participants.add(self)

    @property
    def waited_for(self) -> bool:
        """Whether waves wait for it."""
        return self._barrier is not None

    def leave(self) -> None:
        """Waves no longer wait for it. May be called twice."""
        if self._barrier is not None and self in self._barrier.participants:
            self._barrier.participants.discard(self)
            self._barrier.wake()

    def __enter__(self) -> Self:
        if self._barrier is not None:
            self._before = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _CURRENT.reset(self._before)
            self._before = None
        self.leave()


def participants(models: Iterable[object], count: int) -> list[Participant]:
    """`count` participants. Waves wait for them if one of the models is deterministic.

    Waves do not wait for participants that are created inside another one, since waves already wait
    for that one.
    """
    deterministic = any(getattr(model, "deterministic", False) for model in models)
    barrier = loop_barrier() if deterministic and current_participant() is None else None
    return [Participant(barrier) for _ in range(count)]


BATCH_TOKENS = 262_144
"""Maximum tokens that a batch holds in memory; long rows make smaller batches."""
EXPECTED = 1024
"""Reply tokens that a batch reserves per row, since few replies reach their limit. The number is
fixed, so that equal requests make equal batches. If longer replies do not fit, some rows wait."""


@dataclass(frozen=True, slots=True)
class ExpertPrompt:
    """The second prompt of a reply that is drawn from two contexts."""

    ids: list[int]
    share: float
    """Expected share of tokens drawn from this prompt."""


@dataclass(slots=True, eq=False)
class GenerationRequest:
    ids: list[int]
    sampling: Sampling
    call: Call
    dropped: tuple[str, ...]
    future: asyncio.Future[Completion]
    room: int
    """Maximum tokens of the reply: `max_tokens`, or what the context leaves."""
    participant: Participant | None = None
    expert: ExpertPrompt | None = None

    @property
    def group(self) -> tuple[float, float, int, float, int, bool]:
        """Requests of one group can share a batch; seeds, stops and reasoning may differ."""
        s = self.sampling
        return s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens, self.expert is not None

    def size(self, expected: float) -> float:
        """Tokens that a batch reserves for this row. Rows with two contexts cannot wait for space,
        so they get it for the longest reply."""
        if self.expert is None:
            return len(self.ids) + min(self.room, expected)
        return len(self.ids) + len(self.expert.ids) + 2 * self.room

    @property
    def order(self) -> tuple[int | str, ...]:
        # Similar lengths first, to reduce padding; then the call, so that equal sets of requests
        # make equal batches in any order of arrival.
        c = self.call
        who = (c.step, c.example_id, c.rollout, c.kind, c.turn, c.sample, c.role)
        return (len(self.ids).bit_length(), *who)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Queue:
    """The waiting requests of one event loop, and the task that serves them.

    `barrier` is set for deterministic samplers; `wave` is the rest of the open wave, `serving` the
    current batch.
    """

    barrier: WaveBarrier | None = None
    waiting: list[GenerationRequest] = field(default_factory=list)
    wave: list[GenerationRequest] = field(default_factory=list)
    serving: list[GenerationRequest] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def asking(self) -> set[Participant]:
        """Participants with a waiting request."""
        alive = [r for r in self.waiting if not r.future.done()]
        return {r.participant for r in alive if r.participant is not None}

    def busy(self) -> bool:
        """Whether a wave is still being served."""
        left = any(not r.future.done() for r in self.wave)
        return left or any(r.participant is not None for r in self.serving)

    def open_wave(self) -> None:
        """Move the waiting requests of all participants into the wave."""
        self.wave = [r for r in self.waiting if r.participant is not None]
        self.waiting = [r for r in self.waiting if r.participant is None]

    def wake(self) -> None:
        self.changed.set()

    def drop_cancelled(self) -> bool:
        """Remove cancelled requests; returns whether any are left."""
        self.waiting = [r for r in self.waiting if not r.future.done()]
        self.wave = [r for r in self.wave if not r.future.done()]
        return bool(self.waiting or self.wave)

    def pool(self) -> list[GenerationRequest]:
        """The requests from which the next batch may be formed."""
        if self.barrier is None:
            return self.waiting
        if not self.wave and self.barrier.ready():
            self.barrier.open()
        return self.wave or [r for r in self.waiting if r.participant is None]

    def remove(self, batch: list[GenerationRequest]) -> None:
        taken = {id(r) for r in batch}
        self.waiting = [r for r in self.waiting if id(r) not in taken]
        self.wave = [r for r in self.wave if id(r) not in taken]


def batches_of(
    requests: list[GenerationRequest], most: int, tokens: int, expected: float
) -> list[list[GenerationRequest]]:
    """Split into batches of at most `most` rows and rows × longest size ≤ `tokens`, with at least
    one row."""
    batches: list[list[GenerationRequest]] = []
    longest = 0.0
    for request in requests:
        longest = max(longest, request.size(expected))
        full = batches and (len(batches[-1]) + 1) * longest > tokens
        if not batches or full or len(batches[-1]) == most:
            batches.append([])
            longest = request.size(expected)
        batches[-1].append(request)
    return batches


def fail(request: GenerationRequest, error: Exception) -> None:
    if not request.future.done() and isinstance(error, RunStopped):
        request.future.set_exception(error)
    elif not request.future.done():
        wrapped = ProviderError(f"{type(error).__name__}: {error}")
        wrapped.__cause__ = error
        request.future.set_exception(wrapped)
