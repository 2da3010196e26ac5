"""What servers of tests have in common: a real loopback socket, served until it is left."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class Loopback:
    """Serves in threads of its own between `__enter__` and `__exit__`."""

    def __init__(self, http: ThreadingHTTPServer) -> None:
        self._http = http
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.001,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._http.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._http.shutdown()
        self._http.server_close()


@dataclass(frozen=True)
class Asked:
    """One request; the names of its headers are in lower case."""

    method: str
    target: str
    """The path with its query."""
    headers: Mapping[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.raw)
        return loaded

    def has_key(self, key: str) -> bool:
        """Whether the key came with it; an empty one is not asked for."""
        return not key or self.headers.get("authorization") == f"Bearer {key}"


@dataclass(frozen=True)
class Reply:
    status: int = 200
    content: Any = field(default_factory=dict)
    """Bytes or text as they are; anything else as JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    last: bool = False
    """The connection is closed behind it."""


class JsonServer(Loopback):
    """Answers by `answer`; connections stay open, and a reply is one packet."""

    def __init__(self, port: int = 0) -> None:
        self.connections: set[socket.socket] = set()
        super().__init__(ThreadingHTTPServer(("127.0.0.1", port), _handler(self)))

    def answer(self, asked: Asked) -> Reply | None:
        """The reply to a request; None closes the connection without one."""
        raise NotImplementedError


def _handler(server: JsonServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body in one packet: two small ones wait 40 ms for each other (Nagle).
        wbufsize = -1

        def setup(self) -> None:
            super().setup()
            server.connections.add(self.connection)

        def finish(self) -> None:
            server.connections.discard(self.connection)
            with suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = server.answer(Asked(self.command, self.path, headers, raw))
            if reply is None:
                self.close_connection = True
                return
            content, kind = reply.content, "text/plain"
            if not isinstance(content, str):
                kind = "application/json"
                content = content if isinstance(content, bytes) else json.dumps(content)
            content = content.encode() if isinstance(content, str) else content
            with suppress(OSError):  # a client may have gone
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                self.wfile.flush()
            self.close_connection = self.close_connection or reply.last

        do_POST = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet: tests read what the server keeps."""

    return Handler
