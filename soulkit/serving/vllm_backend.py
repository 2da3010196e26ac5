"""Passes chat requests on to a vLLM server.

The client's body and the server's reply pass unchanged, with these exceptions: the served name of
the model, neutral sampling settings that the client left out (a server may otherwise use those of
the model's generation_config), and a seed made of the messages, so that equal requests get equal
replies.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from soulkit.errors import UserError
from soulkit.models.api.transport import TooLong, make_client, pieces_of
from soulkit.models.api.wire import NEUTRAL
from soulkit.models.vllm.client import Address
from soulkit.parse import parse_json
from soulkit.serving.backend import JOINED, LISTS, Body, Chunk, RequestError

PATH, CONNECTIONS = "/v1/chat/completions", 1024
MOST = 64_000_000
"""Maximum bytes of a streamed reply."""
USUAL = {"temperature": 1.0, **NEUTRAL, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sent where the client left a setting out."""


class VllmBackend:
    """The model `served` of a vLLM server, under the id `name`.

    `check` raises UserError once a server that soulkit started has ended.
    """

    def __init__(
        self, address: Address, served: str, *, name: str = "", context_limit: int | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.address, self.served, self.name = address, served, name or served
        self.context_limit, self._check = context_limit, check
        self._client: Any = make_client(address.url, None, CONNECTIONS)

    def check(self) -> None:
        """RequestError if the server has ended."""
        try:
            if self._check is not None:
                self._check()
        except UserError as error:
            raise RequestError("The vLLM server has ended.", status=503) from error

    @asynccontextmanager
    async def relay(self, body: Body) -> AsyncIterator[tuple[int, bytes, AsyncIterator[bytes]]]:
        """The server's reply as status, content type and parts, with our name of the model."""
        async with self._sent(body) as reply:
            kind = reply.headers.get("content-type", "application/json").encode("latin-1")
            yield _status(reply), kind, self._parts(reply)

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        """See `ChatBackend`."""
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        async with self._sent({**body, **stream}) as reply:
            if _status(reply) != 200:
                raise _refusal(
                    reply.status_code, b"".join([p async for p in _events(reply, most=MOST)])
                )
            async for lines in _events(reply, b"\n", MOST):
                for chunk in filter(None, map(_chunk, lines.split(b"\n"))):
                    yield {**chunk, "model": self.name}

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    @asynccontextmanager
    async def _sent(self, body: Body) -> AsyncIterator[Any]:
        import httpx2 as errors

        seed = hashlib.sha256(json.dumps(body["messages"], sort_keys=True).encode()).digest()
        usual = {**USUAL, "seed": int.from_bytes(seed[:4], "big") >> 1}
        url, headers = f"{self.address.url}{PATH}", self.address.headers
        sent = {**usual, **body, "model": self.served}
        try:
            async with self._client.stream("POST", url, json=sent, headers=headers) as reply:
                yield reply
        except errors.HTTPError as error:
            self.check()
            raise RequestError("The vLLM server does not answer.", status=503) from error

    async def _parts(self, reply: Any) -> AsyncIterator[bytes]:
        theirs, ours = (f'"model":{json.dumps(one)}'.encode() for one in (self.served, self.name))
        async for events in _events(reply):
            yield b"\n\n".join(one.replace(theirs, ours, 1) for one in events.split(b"\n\n"))


async def _events(reply: Any, end: bytes = b"\n\n", most: float = math.inf) -> AsyncIterator[bytes]:
    """The body in pieces that end with `end`, but for the last. RequestError if it or one piece is
    too long."""
    rest = bytearray()
    try:
        async for piece in pieces_of(reply, most):
            if len(rest) > MOST:
                raise TooLong
            searched = max(len(rest) - 1, 0)
            rest += piece
            if (at := rest.rfind(end, searched)) >= 0:
                yield bytes(rest[: at + len(end)])
                del rest[: at + len(end)]
    except TooLong as error:
        raise RequestError("The reply is too long.", status=502) from error
    yield bytes(rest)


def _status(reply: Any) -> int:
    """The status of a reply or of an error; RequestError for any other."""
    status: int = reply.status_code
    if status != 200 and not 400 <= status < 600:
        raise RequestError(f"The vLLM server answers with status {status}.", status=502)
    return status


def _chunk(line: bytes) -> Chunk | None:
    """The chunk in a line of a stream, if any. RequestError for an error or an odd chunk."""
    data = line.removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return None
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        chunk: Chunk = parse_json(data)
        if "error" in chunk:
            raise _refusal(500, data)
        usage, choices = chunk.get("usage") or {}, chunk["choices"]
        fields: list[tuple[Any, type]] = [(one.get("finish_reason"), str) for one in choices]
        fields += [(one["delta"].get(name), list if name in LISTS else str)
                   for one in choices for name in JOINED]  # fmt: skip
        counts = [usage.get(name, 0) for name in ("prompt_tokens", "completion_tokens")]
        counts += [one["index"] for one in choices]
        if all(value is None or isinstance(value, kind) for value, kind in fields) and all(
            type(count) is int and 0 <= count < 1 << 53 for count in counts
        ):
            return chunk
    raise RequestError("The server's stream cannot be read.", status=502)


def _refusal(status: int, raw: bytes) -> RequestError:
    """The error in a server's reply."""
    try:
        error = parse_json(raw)
        error = error.get("error", error)
        message, code = str(error["message"])[:2000], error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, code = "The vLLM server failed to answer.", None
    return RequestError(message, status=status, code=code if isinstance(code, str) else None)
