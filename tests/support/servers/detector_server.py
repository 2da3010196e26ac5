"""A detection service that follows a script, on a real loopback socket.

    with DetectorServer(replies=[(500, "busy"), (200, {"fraction_human": 0.8})]) as server:
        Detector(url=server.url)

Each request takes the next reply; the last one stays. A reply is a status and a JSON value or text.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.servers.loopback import Loopback

Reply = tuple[int, Any]


class DetectorServer(Loopback):
    """Serves POST in threads of its own until it is left."""

    def __init__(
        self,
        replies: Sequence[Reply],
        *,
        headers: Mapping[str, str] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        """Of every request, names in lower case."""
        self._replies, self._sent, self._delay_s = list(replies), dict(headers or {}), delay_s
        self._lock = threading.Lock()
        super().__init__(ThreadingHTTPServer(("127.0.0.1", 0), self._handler()))

    @property
    def url(self) -> str:
        return f"{super().url}/v3"

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        """The next reply."""
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            return self._replies[min(len(self.requests), len(self._replies)) - 1]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                named = {name.lower(): value for name, value in self.headers.items()}
                status, reply = owner.answer(json.loads(raw), named)
                time.sleep(owner._delay_s)
                content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
                self.send_response(status)
                for name, value in owner._sent.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(ConnectionError):  # a client need not read to the end
                    self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet: tests read `requests` instead of a log."""

        return Handler
