"""The HTTP application of `soul serve`: OpenAI's chat completions in front of a backend.

    request ──▶ guard (host, key, counts) ──▶ body (size, JSON, types) ──▶ place ──▶ backend

Every error is an OpenAI error object. A place is one of the replies generated at the same time;
requests beyond them wait. When a client leaves, its reply is cancelled at once. Without a key the
server answers only requests to this machine's own names, so that no web page can use it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from soulkit.errors import ConfigError
from soulkit.models.api.addresses import is_loopback
from soulkit.parse import ParseError, parse_json
from soulkit.serving.backend import Body, ChatBackend, RequestError, assembled

log = logging.getLogger(__name__)

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Any], Awaitable[None]]

CHAT = "/v1/chat/completions"
CONVERSATION = "x-conversation-id"
"""Header that names a conversation; `metadata.conversation_id` in the body does, too."""
BODY_S = 60.0
"""Seconds in which a body must arrive, and in which a client must take a piece of its reply."""
SLICE = 1 << 16
"""Bytes of a reply that are sent at a time."""
HEADERS_S = 20.0
"""Seconds in which the headers of a request must arrive."""
GRACE_S = 30
"""Seconds that running replies have to finish when the server stops."""
CLIENT_LEFT = 499
STREAM = b"text/event-stream; charset=utf-8"
PATH_ERRORS = {404: "This path does not exist.", 405: "This path has another method."}
_USAGE = re.compile(rb'"(prompt|completion)_tokens"\s*:\s*(\d+)')


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server."""

    body_bytes: int = 8 << 20
    running: int = 64
    """Replies that are generated at the same time."""
    waiting: int = 1024
    """Requests that may wait for a place; more get status 429."""


class ClientLeft(Exception):
    """The client closed the connection."""


KINDS: Mapping[str, tuple[type, str]] = {
    "model": (str, "text"), "messages": (list, "a list"), "stream": (bool, "true or false"),
    "stream_options": (dict, "an object"), "metadata": (dict, "an object"), "user": (str, "text"),
    "tools": (list, "a list"), "response_format": (dict, "an object"),
}  # fmt: skip
"""Field → its type, also in words. Backends check the other fields."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """The request in `raw` without fields that are null; RequestError if it is no chat request."""
    try:
        body = parse_json(raw)
    except ParseError as error:
        raise RequestError(f"The body is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    body = {key: value for key, value in body.items() if value is not None}
    for name, (kind, words) in KINDS.items():
        if not isinstance(body.get(name, kind()), kind):
            raise RequestError(f"'{name}' must be {words}.", param=name)
    if "messages" not in body:  # an empty list is the start of a person who writes first
        raise RequestError("'messages' is missing.", param="messages")
    for place, message in enumerate(body["messages"]):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            where = f"messages[{place}]"
            raise RequestError(f"'{where}' must be an object with a role.", param=where)
    if not all(isinstance(tool, dict) for tool in body.get("tools", [])):
        raise RequestError("'tools' must be a list of objects.", param="tools")
    return body


@dataclass
class ChatService:
    """Answers the requests to one backend, and counts them."""

    backend: ChatBackend
    limits: Limits
    certificate: Mapping[str, Any] | None
    created: int = field(default_factory=lambda: int(time.time()))
    requests: Counter[int] = field(default_factory=Counter)
    """Status → requests for a reply."""
    tokens: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    running: int = 0
    waiting: int = 0

    def __post_init__(self) -> None:
        self._places = asyncio.Semaphore(self.limits.running)
        self.pages: Mapping[str, Any] = {
            CHAT: self.chat, "/v1/models": self.models, "/v1/models/{name:path}": self.models,
            "/health": self.health, "/metrics": self.metrics,
        }  # fmt: skip

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the replies that run at the same time; RequestError if too many wait."""
        if self._places.locked() and self.waiting >= self.limits.waiting:
            raise RequestError(
                f"The server is busy: {self.running} replies are running and {self.waiting} "
                "requests are waiting.", status=429, code="rate_limit_exceeded",
            )  # fmt: skip
        self.waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._places.release()

    def check_model(self, name: str | None) -> None:
        """RequestError for a model that is not served; no name means the only one."""
        if name not in (None, self.backend.name):
            raise RequestError(
                f"The model '{name}' does not exist. This server has '{self.backend.name}'.",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    async def models(self, request: Request) -> Response:
        entry = {
            "id": self.backend.name, "object": "model", "created": self.created,
            "owned_by": "soulkit", "max_model_len": self.backend.context_limit,
            "soulkit": {"certificate": self.certificate},
        }  # fmt: skip
        if "name" not in request.path_params:
            return _json(200, {"object": "list", "data": [entry]})
        self.check_model(request.path_params["name"])
        return _json(200, entry)

    async def health(self, request: Request) -> Response:
        if check := getattr(self.backend, "check", None):
            check()
        return _json(200, {"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        lines = ["# TYPE soulkit_requests_total counter"]
        lines += [f'soulkit_requests_total{{status="{s}"}} {n}' for s, n in self.requests.items()]
        lines += ["# TYPE soulkit_tokens_total counter"]
        lines += [f'soulkit_tokens_total{{kind="{k}"}} {n}' for k, n in self.tokens.items()]
        for name, kind, value in (("request_seconds_total", "counter", round(self.seconds, 3)),
                                  ("requests_running", "gauge", self.running),
                                  ("requests_waiting", "gauge", self.waiting)):  # fmt: skip
            lines += [f"# TYPE soulkit_{name} {kind}", f"soulkit_{name} {value}"]
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def chat(self, request: Request) -> Any:
        body = parse_body(await self._read(request))
        self.check_model(body.get("model"))
        named = body.get("metadata", {}).get("conversation_id")
        return _Reply(self, body, request.headers.get(CONVERSATION) or str(named or ""))

    async def _read(self, request: Request) -> bytes:
        raw, more = bytearray(), True
        try:
            async with asyncio.timeout(BODY_S):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    raw += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(raw) > (most := self.limits.body_bytes):
                        raise RequestError(f"The body exceeds {most:,} bytes.", status=413)
        except TimeoutError:
            raise RequestError("The body did not arrive in time.", status=408) from None
        return bytes(raw)


@dataclass
class _Reply:
    """The response to one chat request."""

    service: ChatService
    body: Body
    conversation: str
    ended: bool = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run it in a task of its own until the client leaves."""
        begun = time.monotonic()
        task = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self.ended:
                raise ClientLeft
            await task
        finally:
            task.cancel()
            leaving.cancel()
            await asyncio.wait({task, leaving})
            self.service.seconds += time.monotonic() - begun

    async def _answer(self, send: Send) -> None:
        backend, body = self.service.backend, self.body
        async with self.service.place():
            if relay := getattr(backend, "relay", None):
                async with relay(body) as (status, kind, parts):
                    await self._send(send, status, kind, parts)
                return
            chunks: Any = backend.chunks(body, self.conversation)
            async with aclosing(chunks):
                if body.get("stream"):
                    await self._send(send, 200, STREAM, self._events(chunks))
                else:
                    await self._send(send, 200, b"application/json", _whole(chunks))

    async def _events(self, chunks: AsyncIterator[Mapping[str, Any]]) -> AsyncIterator[bytes]:
        with_usage = self.body.get("stream_options", {}).get("include_usage")
        async for chunk in chunks:
            if chunk["choices"] or with_usage:
                yield _event(chunk)
            else:
                self._count(_event(chunk))
        yield b"data: [DONE]\n\n"

    async def _send(
        self, send: Send, status: int, kind: bytes, parts: AsyncIterator[bytes]
    ) -> None:
        """Send the parts; a failure before the first one has a status of its own."""
        tail = None
        async for part in parts:
            if tail is None:
                headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
                start = {"type": "http.response.start", "status": status, "headers": headers}
                await send(start)
            tail = ((tail or b"") + part[-4096:])[-4096:]
            for at in range(0, len(part), SLICE):
                body = part[at : at + SLICE]
                await send({"type": "http.response.body", "body": body, "more_body": True})
        self._count(tail or b"")
        self.ended = True
        await send({"type": "http.response.body"})

    def _count(self, tail: bytes) -> None:
        """Add the tokens of the usage at the end of a reply."""
        for kind, number in dict(_USAGE.findall(tail)).items():
            self.service.tokens[kind.decode()] += int(number)


async def _whole(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    yield json.dumps(await assembled(chunks), ensure_ascii=False).encode()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(payload: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"


def _json(status: int, payload: Mapping[str, Any]) -> Response:
    again = {"Retry-After": "1"}
    more = {401: {"WWW-Authenticate": "Bearer"}, 429: again, 503: again}
    return JSONResponse(payload, status, more.get(status))


def _as_request_error(error: BaseException) -> RequestError:
    """`error` as the client may see it; an error of the server itself is logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return RequestError("The server is stopping.", status=503)
    log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return RequestError("The server failed to answer this request.", status=500)


@dataclass(frozen=True, slots=True)
class _Guard:
    """Checks host and key, turns every failure into an error object, and counts statuses."""

    app: Any
    service: ChatService
    key: str

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            try:
                async with asyncio.timeout(BODY_S):
                    await send(message)
            except TimeoutError:
                raise ClientLeft from None

        try:
            self._check(scope)
            await self.app(scope, receive, watched)
        except ClientLeft:
            status = CLIENT_LEFT
        except BaseException as error:
            if isinstance(error, GeneratorExit | KeyboardInterrupt | SystemExit):
                raise
            answer = _as_request_error(error)
            event = {"type": "http.response.body", "body": _event(answer.payload())}
            with suppress(ClientLeft, asyncio.CancelledError):
                if status:  # a stream has started
                    await watched(event)
                else:
                    await _json(answer.status, answer.payload())(scope, receive, cast(Any, watched))
        finally:
            if scope["path"] == CHAT:
                self.service.requests[status] += 1

    def _check(self, scope: Message) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = f"//{headers.get(b'host', 'localhost')}", headers.get(b"origin", "//[::1]")
        if not self.key and not (_is_local(host) and _is_local(origin)):
            raise RequestError(
                "This server answers only requests to and from this machine. "
                "Start it with --api-key-env to use other names.", status=403,
            )  # fmt: skip
        proof = headers.get(b"authorization", "").encode("latin-1")
        right = secrets.compare_digest(proof, f"Bearer {self.key}".encode())
        if self.key and not right and scope["path"] != "/health":
            raise RequestError(
                "The API key is missing or wrong.", status=401, code="invalid_api_key"
            )


def _is_local(url: str) -> bool:
    try:
        return is_loopback(url) and "@" not in url and url.count("/") == 2
    except ValueError:
        return False


def make_app(
    backend: ChatBackend, *, limits: Limits | None = None, key: str = "",
    certificate: Mapping[str, Any] | None = None,
) -> FastAPI:  # fmt: skip
    """The application; it closes `backend` when it stops. Without a `key` it answers only requests
    to this machine's own names."""
    service = ChatService(backend, limits or Limits(), certificate)

    @asynccontextmanager
    async def life(app: Any) -> AsyncIterator[None]:
        yield
        await backend.close()

    async def refuse_path(request: Any, error: Any) -> Response:
        status = error.status_code
        return _json(status, RequestError(PATH_ERRORS[status], status=status).payload())

    app = FastAPI(lifespan=life, openapi_url=None,
                  exception_handlers=dict.fromkeys(PATH_ERRORS, refuse_path))  # fmt: skip
    for path, answer in service.pages.items():
        app.add_route(path, answer, methods=["POST" if path == CHAT else "GET"])
    app.add_middleware(_Guard, service=service, key=key)
    return app


def make_listener(host: str, port: int) -> socket.socket:
    """A socket bound to the address; ConfigError if it cannot be used."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The address {host}:{port} cannot be used.", f"The system says: {error}.",
            "Choose another --port; --port 0 picks a free one.",
        ) from error  # fmt: skip


def make_server(app: FastAPI) -> Any:
    """The uvicorn server of an application; `server.run([listener])` serves until a signal."""
    import uvicorn
    from uvicorn.protocols.http import h11_impl

    idle_state = cast(Any, h11_impl).h11.IDLE

    class Connection(h11_impl.H11Protocol):
        """Closes a connection on which no request has begun, or not all headers have come, in
        HEADERS_S."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._next_look = self.loop.call_later(HEADERS_S, self._look, (None, False))

        def _look(self, idle: Any) -> None:
            """Close the connection if it is as `idle` as before: no request has come since, or the
            client has not taken the rest of a reply."""
            over = self.cycle is not None and self.cycle.response_complete
            closing = self.transport.is_closing()
            still = over or closing or self.conn.their_state is idle_state
            now = (self.cycle, closing) if still else object()
            if now == idle:
                self.transport.abort()
            else:
                self._next_look = self.loop.call_later(HEADERS_S, self._look, now)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._next_look.cancel()

    # httptools, which uvicorn prefers, reads headers without limit.
    return uvicorn.Server(uvicorn.Config(
        app, http=Connection, ws="none", log_config=None, log_level="error", access_log=False,
        backlog=2048, server_header=False, timeout_graceful_shutdown=GRACE_S,
    ))  # fmt: skip
