"""A service runtime on a real loopback socket, whose every domain is a made desk.

    with DeskRuntime(faults={("/step", 1): "hang up"}) as runtime:
        RuntimeServer(runtime.url)

A fault is keyed by the path and the so-many-th request for it (from 0): a status, or
`hang up` (nothing was done), `done, then hang up`, or `forget` (the environment is gone).
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from soulkit.tasks.tau_usi.desk import Desk, desk
from tests.support.servers.loopback import Asked, JsonServer, Reply

GONE = Reply(404, {"detail": "no such runtime"})


class DeskRuntime(JsonServer):
    """Serves POST in threads of its own until it is left."""

    def __init__(
        self, faults: Mapping[tuple[str, int], int | str] | None = None, port: int = 0
    ) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        """Path and body of every request, in order of arrival."""
        self.desks: dict[str, Desk] = {}
        self._faults, self._counts = dict(faults or {}), Counter[str]()
        self._lock = threading.Lock()
        super().__init__(port)

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def answer(self, asked: Asked) -> Reply | None:
        path, body = asked.target, asked.body
        with self._lock:
            self.requests.append((path, body))
            fault = self._faults.get((path, self._counts[path]))
            self._counts[path] += 1
            if fault == "hang up":
                return None
            if isinstance(fault, int):
                return Reply(fault, {"detail": "scripted fault"})
            if fault == "forget":
                self.desks.pop(body["runtime_id"], None)
            reply = self._served(path, body)
            return None if fault == "done, then hang up" else reply

    def _served(self, path: str, body: dict[str, Any]) -> Reply:
        if path == "/create":
            assert body["env_type"] == "tau"
            number = json.loads(body["params"])["task_index"]
            name = f"desk-{len(self.desks)}-{self._counts[path]}"
            self.desks[name] = desk(number)
            return Reply(
                200, {"runtime_id": name, "meta_info": json.dumps(self.desks[name].meta())}
            )
        place = self.desks.get(body["runtime_id"])
        if path == "/ping":
            return Reply(200, {"exists": place is not None})
        if place is None:
            return GONE
        if path == "/reward":
            return Reply(200, {"reward": place.reward()})
        call = json.loads(body["params"])
        return Reply(200, {"result": place.step(call["name"], call["arguments"])})
