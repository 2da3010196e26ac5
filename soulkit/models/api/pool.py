"""Connections to one server, in groups: what a request costs must not grow with its neighbours.

The HTTP library looks at every connection of a pool whenever a request comes or goes, so with 512
in flight it spends more time on that than on the request. Several pools of a few connections each
do the same work without it; a new one is made when all the others are full. Every connection is
kept: a pool that closes idle ones early opens them again for the next wave.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from httpx2 import AsyncClient as Client

CONNECTIONS = 8
"""Connections of one pool: few enough to look at; a pool itself costs a third of a millisecond."""


@dataclass
class _PooledClient:
    client: Client
    busy: int = 0


class ClientPool:
    """Clients of one server for one event loop; `make` makes one for a number of connections."""

    def __init__(self, make: Callable[[int], Client], concurrency: int) -> None:
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
