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
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from soulkit.errors import ConfigError
from soulkit.models.api.addresses import is_loopback
from soulkit.serving.backend import Body, ChatBackend, RequestError, assembled

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

log = logging.getLogger(__name__)

T = TypeVar("T")
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CHAT = "/v1/chat/completions"
CONVERSATION = "x-conversation-id"
"""Header that names a conversation; `metadata.conversation_id` in the body does, too."""
BODY_S = 60.0
"""Seconds in which a body must arrive."""
CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a server."""

    body_bytes: int = 8 << 20
    running: int = 64
    """Replies that are generated at the same time."""
    waiting: int = 1024
    """Requests that may wait for a place; more get status 429."""
    grace_s: float = 30.0
    """Seconds that running replies have to finish when the server stops."""


class ClientLeft(Exception):
    """The client closed the connection."""


# -- the body --------------------------------------------------------------------------------------

KINDS: Mapping[str, tuple[type, str]] = {
    "model": (str, "text"), "messages": (list, "a list"), "stream": (bool, "true or false"),
    "stream_options": (dict, "an object"), "metadata": (dict, "an object"), "user": (str, "text"),
    "tools": (list, "a list"), "response_format": (dict, "an object"),
}  # fmt: skip
"""Field → its type, also in words. Backends check the other fields."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """The request in `raw` without fields that are null; RequestError if it is no chat request."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        if b"\\ud" in raw.lower():
            json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is not text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not valid JSON: {str(error)[:200]}.") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    body = {key: value for key, value in body.items() if value is not None}
    for name, (kind, words) in KINDS.items():
        if not isinstance(body.get(name, kind()), kind):
            raise RequestError(f"'{name}' must be {words}.", param=name)
    for place, message in enumerate(body.get("messages", [])):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(f"'{where}' must be an object with a role.", param=where)
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or any(type(p) is not dict for p in parts):
            words = "text, null or a list of parts"
            raise RequestError(f"'{where}.content' must be {words}.", param=f"{where}.content")
    if "messages" not in body:  # an empty list is the start of a person who writes first
        raise RequestError("'messages' is missing.", param="messages")
    if not all(isinstance(tool, dict) for tool in body.get("tools", [])):
        raise RequestError("'tools' must be a list of objects.", param="tools")
    return body


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


# -- the service -----------------------------------------------------------------------------------


class Service:
    """Answers the requests to one backend, and counts them."""

    def __init__(
        self, backend: ChatBackend, limits: Limits, certificate: Mapping[str, Any] | None
    ) -> None:
        self.backend, self.limits, self.certificate = backend, limits, certificate
        self.created = int(time.time())
        self.requests: Counter[int] = Counter()
        """Status → requests for a reply."""
        self.tokens: Counter[str] = Counter()
        self.seconds = 0.0
        self.running = self.waiting = 0
        self._places = asyncio.Semaphore(limits.running)

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

    def entry(self) -> dict[str, Any]:
        """The model's entry in `/v1/models`."""
        return {
            "id": self.backend.name, "object": "model", "created": self.created,
            "owned_by": "soulkit", "max_model_len": self.backend.context_limit,
            "soulkit": {"certificate": self.certificate},
        }  # fmt: skip

    def check_model(self, name: str | None) -> None:
        """RequestError for a model that is not served; no name means the only one."""
        if name not in (None, self.backend.name):
            raise RequestError(
                f"The model '{name}' does not exist. This server has '{self.backend.name}'.",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip

    def pages(self) -> Mapping[str, Any]:
        """Path → the method that answers it."""
        return {
            CHAT: self.chat, "/v1/models": self.models, "/v1/models/{name:path}": self.model,
            "/health": self.health, "/metrics": self.metrics,
        }  # fmt: skip

    async def models(self, request: Request) -> Response:
        return _json(200, {"object": "list", "data": [self.entry()]})

    async def model(self, request: Request) -> Response:
        self.check_model(request.path_params["name"])
        return _json(200, self.entry())

    async def health(self, request: Request) -> Response:
        if check := getattr(self.backend, "check", None):
            check()
        return _json(200, {"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        from fastapi import Response

        lines = [f'soulkit_requests_total{{status="{s}"}} {n}' for s, n in self.requests.items()]
        lines += [f'soulkit_tokens_total{{kind="{k}"}} {n}' for k, n in self.tokens.items()]
        lines += [f"soulkit_request_seconds_total {self.seconds:.3f}",
                  f"soulkit_requests_running {self.running}",
                  f"soulkit_requests_waiting {self.waiting}"]  # fmt: skip
        names = dict.fromkeys(line.partition(" ")[0].partition("{")[0] for line in lines)
        types = [f"# TYPE {n} {'counter' if n.endswith('total') else 'gauge'}" for n in names]
        return Response("\n".join([*types, *lines, ""]), media_type="text/plain; version=0.0.4")

    async def chat(self, request: Request) -> Any:
        body = parse_body(await self._read(request))
        self.check_model(body.get("model"))
        named = request.headers.get(CONVERSATION) or body.get("metadata", {}).get("conversation_id")
        return _Reply(self, body, str(named or ""))

    async def _read(self, request: Request) -> bytes:
        most, raw = self.limits.body_bytes, bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    raw += message.get("body", b"")
                    more = message.get("more_body", False)
                    if len(raw) > most:
                        raise RequestError(f"The body exceeds {most:,} bytes.", status=413)
        except TimeoutError:
            raise RequestError("The body did not arrive in time.", status=408) from None
        return bytes(raw)


@dataclass(frozen=True, slots=True)
class _Reply:
    """The response to one chat request."""

    service: Service
    body: Body
    conversation: str

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Run it in a task of its own until the client leaves."""
        begun, ended = time.monotonic(), False

        async def watched(message: Message) -> None:
            nonlocal ended
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        task = asyncio.ensure_future(self._answer(watched))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not ended:
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
                await self._relay(relay(body), send)
                return
            chunks: Any = backend.chunks(body, self.conversation)
            async with aclosing(chunks):
                if not body.get("stream"):
                    whole = await assembled(chunks)
                    self._count(whole.get("usage"))
                    await _json(200, whole)({"type": "http"}, _nothing, cast(Any, send))
                    return
                first = await anext(chunks)
                await _start(send, 200, b"text/event-stream; charset=utf-8")
                await self._events(first, chunks, send)

    async def _events(self, first: Mapping[str, Any], chunks: Any, send: Send) -> None:
        with_usage = (self.body.get("stream_options") or {}).get("include_usage")
        await _event(send, first)
        async for chunk in chunks:
            self._count(chunk.get("usage"))
            if chunk["choices"] or with_usage:
                await _event(send, chunk)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _relay(self, upstream: Any, send: Send) -> None:
        """Pass the bytes of another server on; its usage is read from the last of them."""
        tail = b""
        async with upstream as (status, kind, parts):
            await _start(send, status, kind)
            async for part in parts:
                tail = (tail + part)[-4096:]
                await send(_part(part))
        await send({"type": "http.response.body"})
        self._count({name.decode(): int(n) for name, n in _USAGE.findall(tail)})

    def _count(self, usage: Mapping[str, int] | None) -> None:
        for kind in ("prompt", "completion") if usage else ():
            self.service.tokens[kind] += (usage or {}).get(f"{kind}_tokens", 0)


_USAGE = re.compile(rb'"(prompt_tokens|completion_tokens)"\s*:\s*(\d+)')


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


def _part(raw: bytes) -> Message:
    return {"type": "http.response.body", "body": raw, "more_body": True}


async def _start(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _event(send: Send, payload: Mapping[str, Any]) -> None:
    await send(_part(b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n"))


def _json(status: int, payload: Mapping[str, Any]) -> Response:
    from fastapi.responses import JSONResponse

    waits = {"Retry-After": "1"} if status in (429, 503) else {}
    asks = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return JSONResponse(payload, status, {**waits, **asks})


def _as_request_error(error: BaseException) -> RequestError:
    """`error` as the client may see it; an error of the server itself is logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return RequestError("The server is stopping.", status=503)
    log.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
    return RequestError("The server failed to answer this request.", status=500)


# -- the application -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Guard:
    """Checks host and key, turns every failure into an error object, and counts statuses."""

    app: Any
    service: Service
    key: str

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            self._check(scope)
            await self.app(scope, receive, watched)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - told and logged
            if isinstance(error, ClientLeft):
                status = CLIENT_LEFT
                return
            answer = _as_request_error(error)
            if status:  # a stream has started
                await _event(send, answer.payload())
                await send({"type": "http.response.body"})
            else:
                await _json(answer.status, answer.payload())(scope, receive, cast(Any, watched))
        finally:
            if scope["path"] == CHAT:
                self.service.requests[status] += 1

    def _check(self, scope: Message) -> None:
        headers = {name.decode("latin-1"): value for name, value in scope["headers"]}
        if not self.key:
            host, origin = (headers.get(name, b"").decode("latin-1") for name in ("host", "origin"))
            if (host and not _is_local(f"//{host}")) or (origin and not _is_local(origin)):
                raise RequestError(
                    "This server answers only requests to and from this machine. "
                    "Start it with --api-key-env to use other names.", status=403,
                )  # fmt: skip
        elif scope["path"] != "/health":
            proof = headers.get("authorization", b"")
            if not secrets.compare_digest(proof, f"Bearer {self.key}".encode()):
                raise RequestError(
                    "The API key is missing or wrong.", status=401, code="invalid_api_key"
                )


def _is_local(url: str) -> bool:
    try:
        return is_loopback(url)
    except ValueError:
        return False


def make_app(
    backend: ChatBackend, *, limits: Limits | None = None, key: str = "",
    certificate: Mapping[str, Any] | None = None,
) -> FastAPI:  # fmt: skip
    """The application; it closes `backend` when it stops. Without a `key` it answers only requests
    to this machine's own names."""
    from fastapi import FastAPI

    service = Service(backend, limits or Limits(), certificate)

    @asynccontextmanager
    async def life(app: Any) -> AsyncIterator[None]:
        yield
        await backend.close()

    async def refused(request: Any, error: Any) -> Response:
        words = {404: "This path does not exist.", 405: "This path has another method."}
        message = words.get(error.status_code, str(error.detail))
        answer = RequestError(message, status=error.status_code)
        return _json(answer.status, answer.payload())

    app = FastAPI(lifespan=life, openapi_url=None,
                  exception_handlers={404: refused, 405: refused})  # fmt: skip
    for path, answer in service.pages().items():
        app.add_route(path, answer, methods=["POST" if path == CHAT else "GET"])
    app.add_middleware(_Guard, service=service, key=key)
    app.state.service = service
    return app


def make_listener(host: str, port: int) -> socket.socket:
    """A socket bound to the address; ConfigError if it cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"The address {host}:{port} cannot be used.",
            f"The system says: {error}.",
            "Choose another --port; --port 0 picks a free one.",
        ) from error


def make_server(app: FastAPI) -> Any:
    """The uvicorn server of an application; `server.run([listener])` serves until a signal."""
    import uvicorn

    limits = app.state.service.limits
    return uvicorn.Server(uvicorn.Config(
        app, log_config=None, log_level="error", access_log=False, backlog=2048,
        server_header=False, timeout_graceful_shutdown=int(limits.grace_s),
    ))  # fmt: skip
