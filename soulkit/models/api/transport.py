"""HTTP requests to one server, and its connections.

Requests use httpx2 directly: the openai package doubles the time of a call, reads replies of any
size into memory and follows redirects to other hosts.

The HTTP library scans all connections of a pool for every request, which is slow with 512 in
flight, so several small pools are used. Each connection is an open file, and their number is
limited: a pool raises the soft limit if the system allows it, and `fitted` computes how many
connections each server may have.
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
"""Open files of a run besides its connections: ledgers, logs, pipes, Python's own."""
OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))
CONNECTIONS = 8
"""Connections per pool: few enough to scan quickly; creating a pool takes 0.3 ms."""


def file_limits() -> tuple[int, int] | None:
    """(soft limit, hard limit) on open files of this process; -1: no limit. None if unknown."""
    try:
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return None
    unlimited = resource.RLIM_INFINITY
    return (-1 if soft == unlimited else soft), (-1 if hard == unlimited else hard)


def open_files() -> int:
    """Number of open files of this process; 0 if the system does not list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def allow_files(needed: int) -> int | None:
    """Raise the soft limit to `needed`, as far as the hard limit allows, and return it. None if
    there is no limit or it is unknown."""
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
    except (OSError, ValueError):  # some systems enforce a lower limit than they report
        return soft
    return goal


def fitted(concurrency: int, servers: int, before: int) -> int:
    """Connections per server: at most `concurrency`, at least 1, given `before` files already
    open."""
    limit = allow_files(before + BESIDE + concurrency * servers)
    if limit is None:
        return concurrency
    return max(1, min(concurrency, (limit - before - BESIDE) // max(1, servers)))


def lowered_line(asked: int, used: int, servers: int, before: int) -> str:
    """The warning that `fitted` lowered the concurrency, with the fix."""
    limit, needed = (file_limits() or (0, 0))[0], before + BESIDE + asked * servers
    each = f" for each of {servers} servers" if servers > 1 else ""
    return (
        f"The concurrency is lowered from {asked} to {used}{each}: this process may only open "
        f"{limit} files. To raise the limit, run: ulimit -n {needed}"
    )


class PerLoop(Generic[T]):
    """One value per event loop: connections and locks belong to a loop."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: dict[asyncio.AbstractEventLoop, T] = {}

    def get(self) -> T:
        """The value of the current loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._values:
            # A value may refer to its loop, so entries of closed loops must be removed here.
            self._values = {k: v for k, v in self._values.items() if not k.is_closed()}
            self._values[loop] = self._make()
        return self._values[loop]

    def pop(self) -> T | None:
        """Remove and return the value of the current loop; None if there is none."""
        return self._values.pop(asyncio.get_running_loop(), None)

    def values(self) -> list[T]:
        return list(self._values.values())


@dataclass
class _PooledClient:
    client: Client
    busy: int = 0


class ClientPool:
    """HTTP clients for one server and event loop; `make` creates one for N connections."""

    def __init__(self, make: Callable[[int], Client], concurrency: int) -> None:
        allow_files(open_files() + BESIDE + concurrency)
        self._make = make
        self._size = min(concurrency, CONNECTIONS)
        self._members: list[_PooledClient] = []

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client with a free connection, for one request."""
        # Take the first, not the emptiest: its connections were used most recently.
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
"""Seconds that an idle connection stays open; many servers close theirs after that."""
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


class TooLong(Exception):
    """A reply exceeds the maximum size."""


@dataclass(frozen=True, slots=True)
class Received:
    """A response of any status."""

    status: int
    headers: Mapping[str, str]
    """Header names in lower case."""
    text: str


@cache
def _certificates(outside: bool, *named: str | None) -> Any:
    """The SSL context, cached because it is slow to create. `named` are the environment's
    certificate settings, used only `outside` this machine."""
    import httpx2

    return httpx2.create_ssl_context(trust_env=outside)


def make_client(base_url: str, timeout_s: float | None, connections: int) -> Client:
    """A client with `connections` connections. ModelLoadError if the address or the machine's proxy
    or certificate settings are unusable."""
    import httpx2 as http

    limits = http.Limits(
        max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=IDLE_S
    )
    # A proxy cannot reach a server on this machine's loopback.
    outside = not is_loopback(base_url)
    try:
        client = http.AsyncClient(
            timeout=timeout_s, limits=limits, trust_env=outside, follow_redirects=False,
            verify=_certificates(outside, *(os.environ.get(name) for name in _CERTIFICATES)),
        )  # fmt: skip
        client.build_request("POST", base_url)
    except (ImportError, OSError, ValueError, http.InvalidURL) as error:
        raise ModelLoadError(
            f"No connection to '{base_url}' can be set up: {type(error).__name__}.",
            f"The HTTP package says: {printable(' '.join(str(error).split()))}",
            "Check the address, and the variables HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, "
            "SSL_CERT_FILE and SSL_CERT_DIR (NO_PROXY lists hosts that need no proxy).",
        ) from error
    return client


async def post(
    client: Client, url: str, headers: Mapping[str, str], body: Mapping[str, Any], most: int
) -> Received:
    """POST `body` and read up to `most` bytes of the reply.

    Raises TooLong, or an httpx2.HTTPError if there is no reply.
    """
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    sent = {**_USUAL, **headers}
    return await _receive(client.stream("POST", url, content=content, headers=sent), most)


async def get(client: Client, url: str, headers: Mapping[str, str], most: int) -> Received:
    """GET and read up to `most` bytes of the reply; raises as `post` does."""
    return await _receive(client.stream("GET", url, headers={**_USUAL, **headers}), most)


async def pieces_of(reply: Response, most: float) -> AsyncIterator[bytes]:
    """The unpacked body, piece by piece. TooLong after `most` bytes, or if it is packed twice: a
    few bytes of such a body can keep the unpacker busy without giving any."""
    if "," in reply.headers.get("content-encoding", ""):
        raise TooLong
    size = 0
    async for piece in reply.aiter_bytes():
        size += len(piece)
        if size > most:
            raise TooLong
        yield piece


async def _receive(asking: AbstractAsyncContextManager[Response], most: int) -> Received:
    async with asking as reply:
        pieces = [piece async for piece in pieces_of(reply, most)]
        # JSON is UTF-8, even if the header says otherwise.
        text = b"".join(pieces).decode("utf-8", "replace")
        return Received(reply.status_code, dict(reply.headers), text)
