"""Waves: batches that do not depend on the clock.

Judges answer in any order, and a sampler that takes whoever waits would batch its rows in any order
too. So participants take a seat at the event loop's table, and samplers that are deterministic
serve seated callers in waves: a wave opens when everybody who has a seat waits at some such
sampler, it holds exactly what waits then, and the next one cannot open before it is served. What a
wave holds is thus a function of what its participants ask, never of when. One table for all
samplers of a loop: were there one for each, two participants at two samplers would wait for each
other.

Callers without a seat are served at once, in batches of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar, Token
from typing import Protocol, Self
from weakref import WeakKeyDictionary, WeakSet

_HERE: ContextVar[Seat | None] = ContextVar("seat", default=None)


class Counter(Protocol):
    """A sampler's queue, as the table sees it."""

    def asking(self) -> set[Seat]:
        """The seats with a call that waits."""

    def busy(self) -> bool:
        """Whether a wave is still being served."""

    def open_wave(self) -> None:
        """Take every seated call that waits into the wave."""

    def wake(self) -> None:
        """Look again whether there is something to do."""


class Table:
    """The seats of one event loop and the samplers at which their owners may wait."""

    def __init__(self) -> None:
        self.seats: set[Seat] = set()
        self.counters: WeakSet[Counter] = WeakSet()

    def ready(self) -> bool:
        """Whether everybody waits and nobody is being served."""
        if any(counter.busy() for counter in self.counters):
            return False
        asking: set[Seat] = set().union(*(counter.asking() for counter in self.counters))
        return bool(asking) and self.seats <= asking

    def open(self) -> None:
        """Open the wave at every sampler at once."""
        for counter in self.counters:
            counter.open_wave()
        self.wake()

    def wake(self) -> None:
        for counter in self.counters:
            counter.wake()


_TABLES: WeakKeyDictionary[asyncio.AbstractEventLoop, Table] = WeakKeyDictionary()


def table() -> Table:
    """The table of the running event loop."""
    return _TABLES.setdefault(asyncio.get_running_loop(), Table())


def seated() -> Seat | None:
    """The seat of the code that runs now, tasks that it started included."""
    return _HERE.get()


class Seat:
    """One participant, from its creation until `leave`; within `with seat:` it is the caller.

    Without a table it is a seat in name only.
    """

    def __init__(self, at: Table | None) -> None:
        self._table = at
        self._before: Token[Seat | None] | None = None
        if at is not None:
            at.seats.add(self)

    @property
    def counts(self) -> bool:
        """Whether waves wait for it."""
        return self._table is not None

    def leave(self) -> None:
        """Give the seat up; leaving twice is leaving once."""
        if self._table is not None and self in self._table.seats:
            self._table.seats.discard(self)
            self._table.wake()

    def __enter__(self) -> Self:
        if self._table is not None:
            self._before = _HERE.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            _HERE.reset(self._before)
            self._before = None
        self.leave()


def seats(models: Iterable[object], count: int) -> list[Seat]:
    """`count` seats when one of the models is deterministic, else as many in name only.

    Who is seated already keeps that seat: a new one beside it would wait for its own owner.
    """
    firm = any(getattr(model, "deterministic", False) for model in models)
    at = table() if firm and seated() is None else None
    return [Seat(at) for _ in range(count)]
