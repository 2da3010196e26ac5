"""Connections to one server, in groups: what a request costs must not grow with its neighbours.

The HTTP library looks at every connection of a pool whenever a request comes or goes, so with 512
in flight it spends more time on that than on the request. Several pools of a few connections each
do the same work without it; a new one is made when all the others are full. Every connection is
kept: a pool that closes idle ones early opens them again for the next wave.

A connection is an open file, and a process may have only so many. A pool raises the process's own
(soft) limit where the system allows it. Where that is not enough, `fitted` says how many
connections each server may have.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from httpx2 import AsyncClient as Client

BESIDE = 64
"""Files that a run has open beside its connections: ledgers, logs, pipes, what Python loads."""
OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))
CONNECTIONS = 8
"""Connections of one pool: few enough to look at; a pool itself costs a third of a millisecond."""


def file_limits() -> tuple[int, int] | None:
    """Files that this process may open at once: the soft and the hard limit, -1 for no limit. None
    where the system does not say."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return None
    unlimited = resource.RLIM_INFINITY
    return (-1 if soft == unlimited else soft), (-1 if hard == unlimited else hard)


def open_files() -> int:
    """Files that this process has open; 0 where the system does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def allow_files(needed: int) -> int | None:
    """Raise the soft limit to `needed` as far as the hard limit allows, and return it; None for no
    limit, or an unknown one."""
    limits = file_limits()
    if limits is None or limits[0] < 0:
        return None
    soft, hard = limits
    goal = needed if hard < 0 else min(needed, hard)
    if goal <= soft:
        return soft
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
    except (OSError, ValueError):  # some systems have a lower limit than the one they name
        return soft
    return goal


def fitted(concurrency: int, servers: int, before: int) -> int:
    """Connections that each of `servers` may have, at most `concurrency` and at least 1, where
    `before` files are open without them."""
    limit = allow_files(before + BESIDE + concurrency * servers)
    if limit is None:
        return concurrency
    return max(1, min(concurrency, (limit - before - BESIDE) // max(1, servers)))


def lowered_line(asked: int, used: int, servers: int, before: int) -> str:
    """Says that `fitted` gave fewer connections than were asked for, and what helps."""
    limit, needed = (file_limits() or (0, 0))[0], before + BESIDE + asked * servers
    each = f" for each of {servers} servers" if servers > 1 else ""
    return (
        f"The concurrency is lowered from {asked} to {used}{each}: this process may open {limit} "
        f"files at once. For more run: ulimit -n {needed}"
    )


@dataclass
class _PooledClient:
    client: Client
    busy: int = 0


class ClientPool:
    """Clients of one server for one event loop; `make` makes one for a number of connections."""

    def __init__(self, make: Callable[[int], Client], concurrency: int) -> None:
        allow_files(open_files() + BESIDE + concurrency)
        self._make = make
        self._size = min(concurrency, CONNECTIONS)
        self._members: list[_PooledClient] = []

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client with a connection to spare, for one request."""
        member = next(self._free(), None) or self._another()
        member.busy += 1
        try:
            yield member.client
        finally:
            member.busy -= 1

    def _free(self) -> Iterator[_PooledClient]:
        # The first of them, not the emptiest: connections that were used last are the most alive.
        return (member for member in self._members if member.busy < self._size)

    def _another(self) -> _PooledClient:
        self._members.append(_PooledClient(self._make(self._size)))
        return self._members[-1]

    async def close(self) -> None:
        """Close every connection."""
        for member in self._members:
            await member.client.aclose()
        self._members.clear()
