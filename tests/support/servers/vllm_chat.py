"""A server that speaks vLLM's chat API: streamed and whole replies, its errors, its list of models.

It answers with the words of the last message. Messages that contain `break` end the connection in
mid-stream, and `fail` ends the stream with an error.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.servers.loopback import Loopback

HEAD = {"id": "chatcmpl-b4", "created": 1, "model": "base"}
ERROR = {"message": "This model's maximum context length is 64 tokens.", "type": "BadRequestError",
         "param": "input_tokens", "code": 400}  # fmt: skip


class VllmChat(Loopback):
    """Serves the model `base`; `bodies` are the requests it got, `left` those that clients left."""

    def __init__(self, key: str = "", pause_s: float = 0.0) -> None:
        self.key, self.pause_s = key, pause_s
        self.bodies: list[dict[str, Any]] = []
        self.left = 0
        super().__init__(ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)))


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _handler(server: VllmChat) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._json(200, {"data": [{"id": "base", "object": "model", "max_model_len": 64}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.bodies.append(body)
            words = str(body["messages"][-1]["content"]).split()
            if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                self._json(401, {"error": "Unauthorized"})
            elif len(words) > 64:
                self._json(400, {"error": ERROR})
            elif body.get("stream"):
                try:
                    self._stream(words, body)
                except OSError:
                    server.left += 1
            else:
                message = {"role": "assistant", "content": " ".join(words)}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                self._json(200, {**HEAD, "object": "chat.completion", "choices": [choice],
                                 "usage": _usage(words), "kv_transfer_params": None})  # fmt: skip

        def _stream(self, words: list[str], body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for word in words:
                time.sleep(server.pause_s)
                if word.startswith("odd:"):
                    self._part(f"data: {word[4:]}\n\n".encode("utf-8", "surrogatepass"))
                    continue
                if word == "break":
                    self.close_connection = True
                    return
                if word == "fail":
                    self._event({"error": {"message": "EngineCore died", "code": 500}})
                    break
                delta = {"content": f"{word} ", "reasoning": None}
                self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])
            else:
                self._chunk([{"index": 0, "delta": {"content": ""}, "finish_reason": "stop"}])
                if (body.get("stream_options") or {}).get("include_usage"):
                    self._chunk([], usage=_usage(words))
            self._part(b"data: [DONE]\n\n")
            self._part(b"")

        def _chunk(self, choices: list[Any], **more: Any) -> None:
            self._event({**HEAD, "object": "chat.completion.chunk", "choices": choices, **more})

        def _event(self, payload: Any) -> None:
            raw = b"data: " + _dump(payload) + b"\n\n"
            self._part(raw[:40])  # an event may come in two parts
            self._part(raw[40:])

        def _part(self, raw: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
            self.wfile.flush()

        def _json(self, status: int, payload: Any) -> None:
            raw = _dump(payload)
            with suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    return Handler


def _usage(words: list[str]) -> dict[str, int]:
    return {"prompt_tokens": 7, "total_tokens": 7 + len(words), "completion_tokens": len(words)}
