"""Contenders of a benchmark, each in a process of its own, with its time and its memory.

Importing torch and transformers takes seconds, so one server per Python imports them once and
forks: every contender starts from the same loaded libraries and shares nothing that it writes.
The two Pythons need not have the same packages; this file uses the standard library alone until a
contender runs. Requests and replies are lines of JSON over a local socket.

Memory is the resident set as Linux counts it: `rss` once the contender is built, before its first
step, and `peak`, the highest since. Whatever an allocator keeps back counts as used.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

Json = dict[str, Any]

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` adds up the threads of the process."""


class Contender(Protocol):
    """What is measured: `run` does it once and returns what it wants to say beside its time."""

    def run(self, request: Json) -> Json: ...


Builder = Callable[[Json], Contender]


class Failed(RuntimeError):
    """A contender or its server did not do what it was asked; holds its traceback."""


class Server:
    """A Python that has loaded its libraries and forks contenders."""

    def __init__(self, command: Sequence[str], folder: Path, threads: int) -> None:
        """Starts `command`, whose program calls `serve`. What it prints goes to `folder`."""
        self._folder, self._count = folder, 0
        self._log = folder / f"{Path(command[-1]).stem}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True
            )

    def start(self, kind: str, **spec: Any) -> Client:
        """A new process with a contender built from `spec`. Failed when it cannot be built."""
        self._count += 1
        path = self._folder / f"{self._log.stem}-{self._count}.sock"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(1)
            connection = self._accept(listener, path)
        path.unlink()
        client = Client(connection)
        client.built = client.ask({"build": kind, "spec": spec})
        return client

    def _accept(self, listener: socket.socket, path: Path) -> socket.socket:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(str(path)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Failed(self._log.read_text()[-4000:]) from error
        while self._process.poll() is None:  # it may still be importing
            with suppress(TimeoutError):
                return listener.accept()[0]
        raise Failed(self._log.read_text()[-4000:])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Client:
    """The parent's side of one contender."""

    built: Json
    """Its first reply: `rss`, the bytes that were resident before its first run."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._file = connection.makefile("rw")
        self._connection = connection

    def run(self, **request: Any) -> Json:
        """Run once: what the contender says, `seconds`, and `peak` bytes since it was built."""
        return self.ask({"run": request})

    def ask(self, message: Json) -> Json:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()
        line = self._file.readline()
        reply: Json = json.loads(line) if line else {"error": "the process died"}
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def close(self) -> None:
        """The process sees the end of its input and leaves."""
        self._file.close()
        self._connection.close()


def serve(builders: Mapping[str, Builder]) -> None:
    """Read socket paths from stdin and fork a process for each, until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    # The buffer of `sys.stdin` would be inherited half read.
    requests = os.fdopen(os.dup(0), "r", buffering=1)
    while line := requests.readline():
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _live(json.loads(line), builders)
            sys.stdout.flush()
            os._exit(0)


def _live(path: str, builders: Mapping[str, Builder]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        file = connection.makefile("rw")
        contender: Contender | None = None
        while line := file.readline():
            message = json.loads(line)
            try:
                if contender is None:
                    contender = builders[message["build"]](message["spec"])
                    reply: Json = {"rss": forget_peak()}
                else:
                    reply = _run(contender, message["run"])
            except Exception:  # noqa: BLE001 - whatever it is, the parent prints it
                reply = {"error": traceback.format_exc()}
            _answer(file, reply)


def _run(contender: Contender, request: Json) -> Json:
    start = time.perf_counter()
    reply = contender.run(request)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, **reply, "peak": memory("VmHWM")}


def _answer(file: TextIO, reply: Json) -> None:
    file.write(json.dumps(reply) + "\n")
    file.flush()


class Versions:
    """What a side of soulkit and transformers is made of."""

    def __init__(self, spec: Json) -> None:
        self.spec = spec

    def run(self, request: Json) -> Json:
        import peft
        import torch
        import transformers

        import soulkit

        return {
            "soulkit": soulkit.__version__, "torch": torch.__version__,
            "transformers": transformers.__version__, "peft": peft.__version__,
        }  # fmt: skip


def memory(name: str) -> int:
    """Bytes that Linux reports of this process: VmRSS (resident now) or VmHWM (at most)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise Failed(f"/proc/self/status has no {name}: memory is measured on Linux only.")


def forget_peak() -> int:
    """Start a new peak at what is resident now, which is returned in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def machine() -> str:
    """Processor, cores and load of this machine in one line."""
    import platform

    cpu = Path("/proc/cpuinfo").read_text()
    models = [line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model n")]
    name = models[0] if models else platform.processor() or platform.machine()
    load = os.getloadavg()[0]
    return f"{name}, {os.cpu_count()} cores, load {load:.1f} at the start, {platform.system()}"
