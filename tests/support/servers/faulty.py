"""A chat-completions server that fails by plan, cheap enough for hundreds of calls at once.

    with FaultyServer(FaultPlan(errors=0.1, hangs=0.05), answer=lambda body: "B") as server:
        Endpoint(model="m", base_url=server.base_url)

One thread, asyncio, plain HTTP/1.1 with kept connections. What becomes of a request is drawn
from the seed, from what it asks, and from how often it has been asked: the same in every run,
whatever the order of arrival, and not the same for a retry. A storm (429 for everybody) and an
outage (nobody listens) have times, counted from the first request.

    python -m tests.support.servers.faulty --latency 1 4 --errors 0.1 --port 0

runs it as a process of its own and prints its base URL. There a request for a JSON Schema is
answered with an instance of it, any other with `--answer`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from tests.support.servers.answers import formed
from tests.support.servers.openai_server import completion, echo, is_probe

Body = dict[str, Any]
Answer = Callable[[Body], str]
_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_PHRASES = {200: b"OK", 429: b"Too Many Requests", 500: b"Internal Server Error",
            503: b"Service Unavailable"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """What goes wrong, in shares of the requests, and when."""

    seed: int = 0
    latency_s: tuple[float, float] = (0.0, 0.0)
    """Least and most, drawn evenly."""
    errors: float = 0.0
    """Status 500."""
    hangs: float = 0.0
    """No answer at all; the connection stays open."""
    broken: float = 0.0
    """A reply of status 200 that is no JSON."""
    malformed: float = 0.0
    """Of the requests for a form: an answer that has another."""
    empty: float = 0.0
    """An answer without a character."""
    storm: tuple[float, float] | None = None
    """From and to, in seconds after the first request: status 429."""
    retry_after_s: float = 0.5
    down: tuple[float, float] | None = None
    """From and to, in seconds after the first request: connections are refused."""
    outages_s: float = 0.0
    """Every second period of so many seconds, the server answers with status 503, a dropped
    connection, and a reply that is no JSON, in turn."""

    def outcome_of(self, body: Body, times: int) -> tuple[str, float]:
        """What becomes of a request that was made `times` times before, and its latency."""
        text = json.dumps([self.seed, body.get("messages"), body.get("seed"), times])
        draw = random.Random(hashlib.sha256(text.encode()).digest())
        latency, point = draw.uniform(*self.latency_s), draw.random()
        malformed = self.malformed if wants_form(body) else 0.0
        shares = {"error": self.errors, "hang": self.hangs, "broken": self.broken,
                  "malformed": malformed, "empty": self.empty}  # fmt: skip
        for what, share in shares.items():
            if point < share:
                return what, latency
            point -= share
        return "fine", latency


def wants_form(body: Body) -> bool:
    return "response_format" in body


class FaultyServer:
    """Serves until it is left. `outcomes` counts what became of requests."""

    def __init__(
        self, faults: FaultPlan, answer: Answer = echo, *, host: str = "127.0.0.1", port: int = 0
    ) -> None:
        self.faults, self.answer, self.host, self.port = faults, answer, host, port
        self.outcomes: Counter[str] = Counter()
        self.requests_of_key: Counter[str] = Counter()
        """Digest of messages and seed → requests that asked them."""
        self.in_flight = self.most_in_flight = self.connections = 0
        self.first: float | None = None
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None and self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def serve(self) -> None:
        """Listen until stopped."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self._listen()
        self._ready.set()
        await self._stop.wait()
        self._hide()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), self.host, self.port, backlog=1024, reuse_address=True
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def _hide(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.transport.abort()

    # -- one request -------------------------------------------------------------------------------

    def arrived(self, raw: bytes) -> tuple[Body, str, float]:
        """The request, what becomes of it, and after which time."""
        body: Body = json.loads(raw)
        if is_probe(body):
            return body, "fine", 0.0
        if self.first is None:
            self.first = time.monotonic()
            self._plan_outage()
        question = json.dumps([body["messages"], body.get("seed")])
        key = hashlib.sha256(question.encode()).hexdigest()
        times = self.requests_of_key[key]
        self.requests_of_key[key] += 1
        what, latency = self.faults.outcome_of(body, times)
        if self.faults.storm is not None and self._within(self.faults.storm):
            what, latency = "storm", 0.0
        period = self.faults.outages_s
        if period and (time.monotonic() - self.first) // period % 2:
            what, latency = ("unavailable", "dropped", "broken")[self.outcomes.total() % 3], 0.0
        self.outcomes[what] += 1
        return body, what, latency

    def _within(self, times: tuple[float, float]) -> bool:
        assert self.first is not None
        return times[0] <= time.monotonic() - self.first < times[1]

    def _plan_outage(self) -> None:
        if self.faults.down is not None:
            loop = asyncio.get_running_loop()
            begin, end = self.faults.down
            loop.call_later(begin, self._hide)
            loop.call_later(end, lambda: loop.create_task(self._listen()))

    def reply(self, body: Body, what: str, latency: float = 0.0) -> tuple[int, bytes]:
        """Status and content; a completion says how long the server took over it."""
        if what == "error":
            return 500, _error("scripted fault", "server_error")
        if what == "unavailable":
            return 503, _error("no judge is here", "server_error")
        if what == "storm":
            return 429, _error("slow down", "rate_limit_error")
        if what == "broken":
            return 200, b'{"choices": [{"mess'
        text = {"empty": "", "malformed": '{"overall": "about seven'}.get(what)
        if text is None:  # whoever answers knows the questions of the run, not the one before it
            text = "yes" if is_probe(body) else self.answer(body)
        reply_body = completion(body, text)
        reply_body["latency_s"] = latency
        return 200, json.dumps(reply_body).encode()


class _Connection(asyncio.Protocol):
    """One connection: requests one after the other, each answered a while after its end."""

    def __init__(self, owner: FaultyServer) -> None:
        self.owner, self.buffer = owner, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.owner.connections += 1
        self.owner._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.owner._connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self.buffer, 0, end + 2)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self.buffer) < whole:
                return
            listing = self.buffer.startswith(b"GET ")
            raw, self.buffer = self.buffer[end + 4 : whole], self.buffer[whole:]
            if listing:  # of /models, which says nothing and is in no count
                self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            else:
                self._take(raw)

    def _take(self, raw: bytes) -> None:
        owner = self.owner
        body, what, latency = owner.arrived(raw)
        if what == "hang":
            return
        owner.in_flight += 1
        owner.most_in_flight = max(owner.most_in_flight, owner.in_flight)
        asyncio.get_running_loop().call_later(latency, self._answer, body, what, latency)

    def _answer(self, body: Body, what: str, latency: float) -> None:
        self.owner.in_flight -= 1
        if what == "dropped":
            self.transport.abort()
        if self.transport.is_closing():
            return
        status, content = self.owner.reply(body, what, latency)
        head = b"HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % (
            status, _PHRASES[status], len(content),
        )  # fmt: skip
        if status == 429:
            head += b"Retry-After: %s\r\n" % f"{self.owner.faults.retry_after_s:g}".encode()
        self.transport.write(head + b"\r\n" + content)


def _error(message: str, kind: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind}}).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve chat completions with planned faults.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latency", type=float, nargs=2, default=(0.0, 0.0))
    for share in ("errors", "hangs", "broken", "malformed", "empty", "outages-s"):
        parser.add_argument(f"--{share}", type=float, default=0.0)
    parser.add_argument("--answer", default="I see what you mean.")
    args = vars(parser.parse_args())
    port, otherwise = args.pop("port"), args.pop("answer")
    faults = FaultPlan(latency_s=tuple(args.pop("latency")), **args)
    server = FaultyServer(faults, lambda body: formed(body, otherwise), port=port)

    async def announced() -> None:
        serving = asyncio.create_task(server.serve())
        while not server._ready.is_set():
            await asyncio.sleep(0.01)
        print(server.base_url, flush=True)
        await serving

    asyncio.run(announced())


if __name__ == "__main__":
    main()
