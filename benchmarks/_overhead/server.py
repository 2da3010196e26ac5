"""A chat server that answers every request after a fixed delay, however many arrive at once.

It runs in its own process and counts requests in memory that it shares with the measuring process.

Example: `server, url = started(context, 0.05, seen)` returns when the server is up;
`seen.replies.value` is the number of replies.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from _processes import Json

MODEL = "scripted"
LOOK_S = 0.01
"""Seconds between two polls of another process."""


class Chat(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection; each reply is sent a fixed delay after its request."""

    def __init__(self, latency_s: float, seen: Seen) -> None:
        self.latency_s, self.seen, self.buffer = latency_s, seen, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            length_line = re.search(rb"(?i)\r\ncontent-length: *(\d+)", self.buffer[: end + 2])
            whole = end + 4 + (int(length_line[1]) if length_line else 0)
            if len(self.buffer) < whole:
                return
            is_get = self.buffer.startswith(b"GET ")
            body, self.buffer = self.buffer[end + 4 : whole], self.buffer[whole:]
            if is_get:  # a request for the list of models: not counted as a call
                self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
                continue
            self.seen.arrived()
            asyncio.get_running_loop().call_later(self.latency_s, self.reply, body)

    def reply(self, body: bytes) -> None:
        if not self.transport.is_closing():
            content = json.dumps(completion(json.loads(body or b"{}"))).encode()
            head = f"Content-Type: application/json\r\nContent-Length: {len(content)}"
            self.transport.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + content)
        self.seen.replied()


def completion(body: Json) -> Json:
    """Answers with the last container in the story, which is right for about half the questions."""
    messages = body.get("messages") or [{"content": ""}]
    places = re.findall(r"The (\w+) stood in", json.dumps(messages[-1]["content"]))
    text = f"<answer>{places[-1] if places else 'nowhere'}</answer>"
    return {
        "id": "chatcmpl-bench", "object": "chat.completion", "created": 0, "model": MODEL,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text},
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 150, "completion_tokens": 5, "total_tokens": 155},
    }  # fmt: skip


class Seen:
    """Counts and times of requests, in memory that both processes share."""

    def __init__(self, context: Any) -> None:
        self.requests, self.replies = context.Value("q", 0), context.Value("q", 0)
        self.open, self.most = context.Value("q", 0), context.Value("q", 0)
        self.first, self.last = context.Value("d", 0.0), context.Value("d", 0.0)

    def arrived(self) -> None:
        if self.requests.value == 0:
            self.first.value = time.monotonic()  # the same clock in every process
        self.requests.value += 1
        self.open.value += 1
        self.most.value = max(self.most.value, self.open.value)

    def replied(self) -> None:
        self.replies.value += 1
        self.open.value -= 1
        self.last.value = time.monotonic()

    def forget(self) -> None:
        """Reset all counts; call it between contenders, while no request is open."""
        for count in (self.requests, self.replies, self.open, self.most):
            count.value = 0


def serve(port: Any, latency_s: float, seen: Seen) -> None:
    """The server process: stores its port in `port` and runs until it is stopped."""

    async def listen() -> None:
        loop = asyncio.get_running_loop()
        chat = lambda: Chat(latency_s, seen)  # noqa: E731 - one connection's protocol
        server = await loop.create_server(chat, "127.0.0.1", 0, backlog=1024)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    asyncio.run(listen())


def started(context: Any, latency_s: float, seen: Seen) -> tuple[Any, str]:
    """The running server and its base URL."""
    port = context.Value("q", 0)
    server = context.Process(target=serve, args=(port, latency_s, seen), daemon=True)
    server.start()
    while port.value == 0:
        if not server.is_alive():
            raise SystemExit("the server did not start")
        time.sleep(LOOK_S)
    return server, f"http://127.0.0.1:{port.value}/v1"
