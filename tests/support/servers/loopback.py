"""What servers of tests have in common: a real loopback socket, served until it is left."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer
from typing import Self


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
        self._http.shutdown()
        self._http.server_close()
