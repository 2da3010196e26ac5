"""HTTP requests to one server, and the connections that they use.

httpx2 is asked directly: the openai package takes as long again as a call needs, reads whatever a
server sends into memory and follows redirects to hosts that nobody named.

The HTTP library looks at every connection of a pool for every request, which is slow with 512 in
flight: several pools of a few connections each do the same work. A connection is an open file, and
a process may have only so many: a pool raises the soft limit where the system allows it, and
`fitted` says how many connections each server may have.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from soulkit.api_keys import printable
from soulkit.errors import ModelLoadError
from soulkit.models.api.addresses import is_loopback
from soulkit.version import __version__

if TYPE_CHECKING:
    from httpx2 import AsyncClient as Client
    from httpx2 import Response


T = TypeVar("T")
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


class PerLoop(Generic[T]):
    """A value for each event loop that asks for one: connections and locks belong to a loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """The value of this loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            # A value may refer to its loop, so a dead loop's entry would never go by itself.
            self._values = {k: v for k, v in self._values.items() if not k.is_closed()}
            self._values[loop] = self._make()
        return self._values[loop]

    def pop(self) -> T | None:
        """The value of this loop, which is forgotten; None where there is none."""
        return self._values.pop(asyncio.get_running_loop(), None)

    def values(self) -> list[T]:
        return list(self._values.values())


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
        # The first of them, not the emptiest: connections that were used last are the most alive.
        member = next((member for member in self._members if member.busy < self._size), None)
        if member is None:
            member = _PooledClient(self._make(self._size))
            self._members.append(member)
        member.busy += 1
        try:
            yield member.client
        finally:
            member.busy -= 1

    async def close(self) -> None:
        """Close every connection."""
        for member in self._members:
            await member.client.aclose()
        self._members.clear()


_USUAL = {"Content-Type": "application/json", "User-Agent": f"soulkit/{__version__}"}
IDLE_S = 5.0
"""Seconds for which a connection without a request stays open; many servers close theirs then."""
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


class TooLong(Exception):
    """A reply beyond what is read of one."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a server sent back, whatever its status."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    text: str


@cache
def _certificates(outside: bool, *named: str | None) -> Any:
    """What servers are trusted with; read once, since that takes longer than all the rest of a
    client. `named` is what the environment says, which is honoured `outside` this machine."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=outside)


def make_client(base_url: str, timeout_s: float | None, connections: int) -> Client:
    """A client that keeps `connections`. Raises ModelLoadError when this machine's settings for
    proxies or certificates, or the address, allow none."""
    import httpx2 as http

    limits = http.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_S
    )
    # A proxy of the environment cannot reach a server on this machine's loopback.
    outside = not is_loopback(base_url)
    try:
        client = http.AsyncClient(
            timeout=timeout_s, limits=limits, trust_env=outside, follow_redirects=False,
            verify=_certificates(outside, *(os.environ.get(name) for name in _CERTIFICATES)),
        )  # fmt: skip
        client.build_request("POST", base_url)
    except (ImportError, OSError, ValueError, http.InvalidURL) as error:
        raise ModelLoadError(
            f"No connection to '{base_url}' can be prepared: {type(error).__name__}.",
            f"The HTTP package says: {printable(' '.join(str(error).split()))}",
            "Check the address, and what HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, SSL_CERT_FILE and "
            "SSL_CERT_DIR say (NO_PROXY lists hosts that need no proxy).",
        ) from error
    return client


async def post(
    client: Client, url: str, headers: Mapping[str, str], body: Mapping[str, Any], most: int
) -> Received:
    """The reply to a POST of `body`, read up to `most` bytes.

    Raises TooLong, or an httpx2.HTTPError when no reply came.
    """
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    sent = {**_USUAL, **headers}
    return await _receive(client.stream("POST", url, content=content, headers=sent), most)


async def get(client: Client, url: str, headers: Mapping[str, str], most: int) -> Received:
    """The reply to a GET, read up to `most` bytes; raises as `post` does."""
    return await _receive(client.stream("GET", url, headers={**_USUAL, **headers}), most)


async def _receive(asking: AbstractAsyncContextManager[Response], most: int) -> Received:
    async with asking as reply:
        pieces, size = [], 0
        async for piece in reply.aiter_bytes():
            size += len(piece)
            if size > most:
                raise TooLong
            pieces.append(piece)
        # JSON is UTF-8, whatever the header says.
        text = b"".join(pieces).decode("utf-8", "replace")
        return Received(reply.status_code, dict(reply.headers), text)
