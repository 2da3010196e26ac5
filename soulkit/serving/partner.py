"""A scripted partner, served over HTTP like any model.

It lets you try tasks with two speakers on a laptop without an API key: an OpenAI-compatible server
on loopback that calls the function named by `scripted_partner` in the task's declaration.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

Speak = Callable[[Sequence[Mapping[str, str]]], str]
"""Returns the next line of a conversation given as chat messages."""


class _Handler(BaseHTTPRequestHandler):
    speak: ClassVar[Speak]
    model: ClassVar[str]
    protocol_version = "HTTP/1.1"
    # Send head and body in one packet: Nagle's algorithm delays a second small one by 40 ms.
    wbufsize = -1

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: only the command that uses the partner prints to the console."""

    def do_GET(self) -> None:
        self._reply(200, {"object": "list", "data": [{"id": self.model, "object": "model"}]})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        try:
            body = json.loads(self.rfile.read(length))
            line = type(self).speak(body["messages"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            self._reply(
                400, {"error": {"message": f"the script cannot answer this request: {error!r}"}}
            )
            return
        words = sum(len(str(m.get("content")).split()) for m in body["messages"])
        self._reply(200, _completion(self.model, line, words))

    def _reply(self, status: int, payload: Mapping[str, Any]) -> None:
        raw = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _completion(model: str, line: str, prompt_words: int) -> dict[str, Any]:
    return {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": line}}
        ],
        "usage": {
            "prompt_tokens": prompt_words,
            "completion_tokens": len(line.split()),
            "total_tokens": prompt_words + len(line.split()),
        },
    }


class _Server(ThreadingHTTPServer):
    # A run opens all its conversations at once; the default queue of 5 would reject most of them.
    request_queue_size = 512


def make_server(
    speak: Speak, model: str, host: str = "127.0.0.1", port: int = 0
) -> ThreadingHTTPServer:
    """A server bound to `host:port` (0: any free port); call `serve_forever()` to run it."""
    # staticmethod: a plain function in a class body would become a method.
    handler = type("_Partner", (_Handler,), {"speak": staticmethod(speak), "model": model})
    server = _Server((host, port), handler)
    server.daemon_threads = True
    return server
