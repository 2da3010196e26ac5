"""Requests to one vLLM server, for as long as it takes, and the news that it has died.

A generation may take an hour, so no request has a time limit of its own. Instead the server is
asked for its health while a request waits: one that refuses connections or says that its engine is
dead is `ServerGone`, and so is one that has been silent for SILENT times in a row (a busy machine
may miss one). What it refuses is `ServerRefused`. A broken connection to a server that lives, a
status of trouble that passes, and a reply that is none are tried again, TRIES times in all; what is
asked must therefore be such that asking twice does no harm.

Connections belong to one event loop; a client may be used from several in turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from soulkit.errors import SoulError
from soulkit.models.api import http
from soulkit.models.api.faults import clean_detail, connection_fault, error_of
from soulkit.models.api.pool import ClientPool
from soulkit.models.api.wire import ERROR_CHARS, error_message, json_or_none

if TYPE_CHECKING:
    from httpx2 import AsyncClient as Client

HEALTH = "/health"
HEALTH_S = 5.0
"""How long a server may take to say that it is well."""
WATCH_S = 15.0
"""Between two questions for its health while a request waits."""
SILENT = 8
"""Questions without an answer in a row that make a server count as dead."""
PAUSES_S = (0.5, 2.0)
"""Before a request is tried again."""
TRIES = len(PAUSES_S) + 1
MAX_BYTES = 256 * 1024 * 1024
"""Of a reply: a hundred thousand tokens with their log-probs and texts need some ten of them."""
CONCURRENCY = 1024
_PASSES = frozenset((408, 409, 425, 429))
"""Statuses below 500 that say nothing about the request."""
_DEAD = ("EngineCore encountered", "EngineDead", "engine is dead", "engine died")
"""Words of a server whose engine has ended; its HTTP part may outlive that by a moment."""

Health = Literal["well", "silent", "dead"]

log = logging.getLogger(__name__)


class ServerRefused(SoulError):
    """A server's answer to a request that it will not do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status} {message}")
        self.status, self.message = status, message


class ServerGone(SoulError):
    """A server that answers nobody any more; what it was asked may be asked elsewhere."""


@dataclass(frozen=True)
class Address:
    """Where a server is asked."""

    url: str
    """Without a path: http://127.0.0.1:8000."""
    key: str = field(default="", repr=False)
    """Sent as the bearer token; empty: none."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


@dataclass
class _Trouble(Exception):
    """Why one try brought nothing, where another one may."""

    error: SoulError


class VllmClient:
    """Asks one server; `watch_s` and `pauses_s` are for tests."""

    def __init__(
        self, address: Address, *, watch_s: float = WATCH_S,
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:  # fmt: skip
        self.address = address
        self._watch_s, self._pauses_s = watch_s, pauses_s
        self._pools: dict[asyncio.AbstractEventLoop, ClientPool] = {}

    def __repr__(self) -> str:
        return f"VllmClient({self.address.url!r})"

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`; {"text": …} where the server answers with something else.

        Raises ServerRefused, ServerGone.
        """
        return await self._ask(path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the server answers to `body`, as `get` has it; raises as `get` does."""
        return await self._ask(path, body)

    async def alive(self) -> bool:
        """Whether the server says within HEALTH_S that it is well."""
        return await self._health() == "well"

    async def close(self) -> None:
        """Close this event loop's connections."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.close()

    async def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        for pause in (*self._pauses_s, None):
            try:
                return await self._try(path, body)
            except _Trouble as trouble:
                if pause is None:
                    raise trouble.error from None
                log.info("%s: %s; asked again.", self.address.url, trouble.error)
                await asyncio.sleep(pause)
        raise AssertionError("the last try returns or raises")

    async def _try(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        import httpx2 as errors

        try:
            received = await self._watched(asyncio.create_task(self._exchange(path, body)))
        except http.TooLong:
            raise ServerRefused(200, f"a reply of more than {MAX_BYTES >> 20} MB") from None
        except errors.HTTPError as error:
            fault = connection_fault(error)
            why = clean_detail(fault.detail)
            if fault.server != "unasked" and await self._health() == "dead":
                raise self._gone(why) from None
            raise _Trouble(self._gone(why)) from None
        return await self._answer(received)

    async def _answer(self, received: http.Received) -> dict[str, Any]:
        """What came back as a value, or the error that it is."""
        status, body = received.status, json_or_none(received.text)
        if 200 <= status < 300:
            return body if isinstance(body, dict) else {"text": received.text}
        message = clean_detail(error_message(received.text if body is None else error_of(body)))
        refused = ServerRefused(status, message)
        if status < 500 and status not in _PASSES:
            raise refused
        text = received.text[:ERROR_CHARS]
        if any(words in text for words in _DEAD) or await self._health() == "dead":
            raise self._gone(f"HTTP {status} {message}")
        raise _Trouble(refused)

    async def _watched(self, asking: asyncio.Task[http.Received]) -> http.Received:
        """The reply, however long it takes a server that is well."""
        silent = 0
        try:
            while not (await asyncio.wait({asking}, timeout=self._watch_s))[0]:
                health = await self._health()
                silent = silent + 1 if health == "silent" else 0
                if not asking.done() and (health == "dead" or silent >= SILENT):
                    raise self._gone("it does not answer when asked for its health")
            return asking.result()
        finally:
            asking.cancel()  # the server gives up what nobody waits for
            with suppress(asyncio.CancelledError, Exception):
                await asking

    async def _health(self) -> Health:
        import httpx2 as errors

        try:
            async with asyncio.timeout(HEALTH_S):
                received = await self._exchange(HEALTH, None)
        except (TimeoutError, errors.TimeoutException):
            return "silent"
        except errors.HTTPError as error:  # without a free file nothing is known of the server
            return "silent" if connection_fault(error).server == "unasked" else "dead"
        except http.TooLong:
            return "dead"
        # Whatever else it answers, it answers: a gateway may know no such path.
        return "well" if received.status < 500 else "dead"

    async def _exchange(self, path: str, body: Mapping[str, Any] | None) -> http.Received:
        url, headers = f"{self.address.url}{path}", self.address.headers
        async with self._pool().client() as client:
            if body is None:
                return await http.get(client, url, headers, MAX_BYTES)
            return await http.post(client, url, headers, body, MAX_BYTES)

    def _gone(self, why: str) -> ServerGone:
        return ServerGone(f"The vLLM server at {self.address.url} is gone: {why}.")

    def _pool(self) -> ClientPool:
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            # A pool refers to its loop, so a dead loop's entry would never go by itself.
            for dead in [other for other in self._pools if other.is_closed()]:
                del self._pools[dead]
            make = partial(_make_client, self.address.url)
            self._pools[loop] = ClientPool(make, CONCURRENCY)
        return self._pools[loop]


def _make_client(url: str, connections: int) -> Client:
    return http.make_client(url, None, connections)
