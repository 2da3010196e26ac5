"""Scripts and processes of `soul serve` for tests."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from soulkit.serving.app import make_app, make_listener, make_server
from soulkit.serving.backend import ChatBackend

PERSON = ("hi, where is my lamp", "order 4711, its been nine days", "ok thanks ###STOP###")
MARKS = ("###TRANSFER###", "###OUT-OF-SCOPE###", "bye ###STOP###")
Messages = Sequence[Mapping[str, str]]


def person(messages: Messages) -> str:
    """The next line of a person whose prompt has a persona."""
    if messages[0]["role"] != "system" or "lamp" not in messages[0]["content"]:
        raise ValueError("there is no prompt of a person")
    hint = "9 days!! " if "Hint:" in messages[0]["content"] else ""
    return hint + PERSON[min(sum(m["role"] == "assistant" for m in messages), len(PERSON) - 1)]


def marks(messages: Messages) -> str:
    """End marks of other frameworks; the first line repeats the client's prompt."""
    turn = sum(m["role"] == "assistant" for m in messages)
    return f"{messages[0]['content']} {MARKS[min(turn, len(MARKS) - 1)]}"


@contextmanager
def served(function: str, *options: object) -> Iterator[str]:
    """The address of `soul serve --script` with a function of this module, in its own process."""
    command = (sys.executable, "-m", "soulkit", "serve", "--script", f"{Path(__file__)}:{function}",
               "--port", "0", "--model-name", "sim", *map(str, options))  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextmanager
def in_thread(backend: ChatBackend) -> Iterator[str]:
    """The address of a server with this backend in a thread of the test."""
    listener, server = make_listener("127.0.0.1", 0), make_server(make_app(backend))
    thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
