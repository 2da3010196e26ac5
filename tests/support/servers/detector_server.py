"""A detection service that follows a script, on a real loopback socket.

    with DetectorServer(replies=[(500, "busy"), (200, {"fraction_human": 0.8})]) as server:
        Detector(url=server.url)

Each request takes the next reply; the last one stays. A reply is a status and a JSON value or text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.servers.loopback import Asked, JsonServer, Reply


class DetectorServer(JsonServer):
    """Serves POST in threads of its own until it is left."""

    def __init__(
        self,
        replies: Sequence[tuple[int, Any]],
        *,
        headers: Mapping[str, str] | None = None,
        delay_s: float = 0.0,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        """Of every request, names in lower case."""
        self._replies, self._sent, self._delay_s = list(replies), dict(headers or {}), delay_s
        self._lock = threading.Lock()
        super().__init__()

    @property
    def url(self) -> str:
        return f"{super().url}/v3"

    def answer(self, asked: Asked) -> Reply:
        with self._lock:
            self.requests.append(asked.body)
            self.headers.append(dict(asked.headers))
            status, value = self._replies[min(len(self.requests), len(self._replies)) - 1]
        time.sleep(self._delay_s)
        return Reply(status, value, self._sent)
