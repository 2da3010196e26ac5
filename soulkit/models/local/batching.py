"""Which requests of a local model share a batch: queues, and waves that do not depend on the clock.

Judges answer in any order, and a sampler that takes what waits would batch its rows in any order
too. So participants register at the event loop's barrier, and samplers that are deterministic serve
them in waves: a wave opens when every participant waits at some such sampler, it holds exactly what
waits then, and the next one cannot open before it is served. What a wave holds is thus a function
of what its participants ask, never of when. One barrier serves all samplers of a loop: were there
one for each, two participants at two samplers would wait for each other.

A queue belongs to one model in one event loop. Callers that are no participants are served at once,
in batches of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Self
from weakref import WeakKeyDictionary, WeakSet

from soulkit.errors import ProviderError
from soulkit.types import Call, Completion, Sampling

_CURRENT: ContextVar[Participant | None] = ContextVar("participant", default=None)


class WaveBarrier:
    """The participants of one event loop and the samplers at which they may wait."""

    def __init__(self) -> None:
        self.participants: set[Participant] = set()
        self.queues: WeakSet[Queue] = WeakSet()

    def ready(self) -> bool:
        """Whether everybody waits and nobody is being served."""
        if any(queue.busy() for queue in self.queues):
            return False
        asking: set[Participant] = set().union(*(queue.asking() for queue in self.queues))
        return bool(asking) and self.participants <= asking

    def open(self) -> None:
        """Open the wave at every sampler at once."""
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
    """The participant that runs now, tasks that it started included."""
    return _CURRENT.get()


class Participant:
    """One participant, from its creation until `leave`; within its `with` it is the caller.

    Without a barrier no wave waits for it.
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
        """No wave waits for it from now on; leaving twice is leaving once."""
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
    """`count` of them, for which waves wait when one of the models is deterministic.

    Within a participant no wave waits for new ones: they would wait for the one around them.
    """
    deterministic = any(getattr(model, "deterministic", False) for model in models)
    barrier = loop_barrier() if deterministic and current_participant() is None else None
    return [Participant(barrier) for _ in range(count)]


BATCH_TOKENS = 262_144
"""Rows x (longest prompt + room of its reply) of one batch; fewer rows run when they are long."""


@dataclass(frozen=True, slots=True)
class ExpertPrompt:
    """What a reply of two contexts is drawn from beside its own prompt."""

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
    def group(self) -> tuple[float, float, int, float, int, bool]:
        """Requests of one group can share a batch: seeds, stops and thinking may differ."""
        s = self.sampling
        return s.temperature, s.top_p, s.top_k, s.min_p, s.max_tokens, self.expert is not None

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
        """The participants with a call that waits."""
        alive = [r for r in self.waiting if not r.future.done()]
        return {r.participant for r in alive if r.participant is not None}

    def busy(self) -> bool:
        """Whether a wave is still being served."""
        left = any(not r.future.done() for r in self.wave)
        return left or any(r.participant is not None for r in self.serving)

    def open_wave(self) -> None:
        """Take every participant's call that waits into the wave."""
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
