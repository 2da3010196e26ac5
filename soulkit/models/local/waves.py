"""Waves: batches that do not depend on the clock.

Judges answer in any order, and a sampler that takes whoever waits would batch its rows in any order
too. So participants register at the event loop's barrier, and samplers that are deterministic serve
them in waves: a wave opens when every participant waits at some such sampler, it holds exactly what
waits then, and the next one cannot open before it is served. What a wave holds is thus a function
of what its participants ask, never of when. One barrier for all samplers of a loop: were there one
for each, two participants at two samplers would wait for each other.

Callers that are no participants are served at once, in batches of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar, Token
from typing import Protocol, Self
from weakref import WeakKeyDictionary, WeakSet

_CURRENT: ContextVar[Participant | None] = ContextVar("participant", default=None)


class WaveQueue(Protocol):
    """A sampler's queue, as the barrier sees it."""

    def asking(self) -> set[Participant]:
        """The participants with a call that waits."""

    def busy(self) -> bool:
        """Whether a wave is still being served."""

    def open_wave(self) -> None:
        """Take every participant's call that waits into the wave."""

    def wake(self) -> None:
        """Look again whether there is something to do."""


class WaveBarrier:
    """The participants of one event loop and the samplers at which they may wait."""

    def __init__(self) -> None:
        self.participants: set[Participant] = set()
        self.queues: WeakSet[WaveQueue] = WeakSet()

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
