"""A proxy in front of a server: it passes requests on, and lies where it is told to.

    with TinyVllm(model) as server, Proxy(server.url) as proxy:
        proxy.change = lambda body: {**body, "model": "another"}

Requests and replies go through unchanged but for those that sample: a completion under the name of
an adapter. `change` makes another request of such a one, `alter` another reply. `sampled` counts
them. `load` gives the server behind an adapter of the test's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.support.servers.loopback import Asked, JsonServer, Reply

Body = dict[str, Any]


class Proxy(JsonServer):
    """Serves until it is left; `target` is the address of the server behind it."""

    def __init__(self, target: str, key: str = "") -> None:
        self.target, self.key = target, key
        self.change: Callable[[Body], Body] = lambda body: body
        self.alter: Callable[[Body], Body] = lambda reply: reply
        self.sampled: list[str] = []
        """Names of the adapters that were asked for replies, request by request."""
        super().__init__()

    @property
    def adapters(self) -> list[str]:
        """The adapters that were sampled from, in the order in which they first were."""
        return list(dict.fromkeys(self.sampled))

    def load(self, name: str, folder: Path) -> None:
        """Have the server behind load an adapter."""
        body = {"lora_name": name, "lora_path": str(folder)}
        status, content = self.ask("POST", "/v1/load_lora_adapter", self._headers(), body)
        assert status == 200, content

    def ask(
        self, method: str, path: str, headers: Mapping[str, str], body: Body | None
    ) -> tuple[int, bytes]:
        """Status and content of what the server behind answers."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self.target}{path}", data, dict(headers), method=method)
        try:
            with urlopen(request, timeout=300) as reply:
                return reply.status, reply.read()
        except HTTPError as error:
            return error.code, error.read()

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return {"Content-Type": "application/json", **key}

    def answer(self, asked: Asked) -> Reply:
        return Reply(*self._pass_on(asked))

    def _pass_on(self, asked: Asked) -> tuple[int, bytes]:
        method, path, body = asked.method, asked.target, asked.body if asked.raw else None
        names = ("authorization", "content-type")
        kept = {name: asked.headers[name] for name in names if asked.headers.get(name)}
        name = str((body or {}).get("model", ""))
        samples = path == "/v1/completions" and "prompt_logprobs" not in (body or {})
        if body is None or not samples or not name.startswith("soulkit-"):
            return self.ask(method, path, kept, body)
        self.sampled.append(name)
        status, content = self.ask(method, path, kept, self.change(dict(body)))
        if status != 200:
            return status, content
        return status, json.dumps(self.alter(json.loads(content))).encode()
