"""The application of `soul serve`: in a thread of the test, or as a process of its own."""

from __future__ import annotations

import select
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from soulkit.serving.app import make_app, make_listener, make_server
from soulkit.serving.backend import ChatBackend
from tests.support.evaluation import start


@contextmanager
def served(backend: ChatBackend, **options: Any) -> Iterator[str]:
    """Serve `backend` with these options of `make_app`; gives the base URL."""
    server = make_server(make_app(backend, **options))
    with make_listener("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def serve_process(
    *arguments: object, port: int = 0, env: dict[str, str] | None = None, limit_s: float = 120.0
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`soul serve` with these arguments, and the address that it prints."""
    process = start("serve", *arguments, "--port", port, env=env)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], limit_s)[0], "it prints no address"
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()
