"""Requests to one server: what is sent beside the body, and how much may come back.

httpx2 is asked directly, without an SDK around it: the openai package takes as long again as a
call needs, reads whatever a server sends into memory and follows redirects, so that prompts could
end at a host that nobody named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from soulkit.errors import ModelLoadError
from soulkit.keys import printable
from soulkit.models.api.address import is_loopback
from soulkit.version import __version__

if TYPE_CHECKING:
    from httpx2 import AsyncClient as Client
    from httpx2 import Response

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
