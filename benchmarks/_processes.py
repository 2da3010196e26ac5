"""Runs each contender of a benchmark in its own process and measures its time and memory.

Importing torch and transformers takes seconds. So one server per Python imports them once and forks
a process per contender; contenders share no writable memory. The two Pythons may have different
packages: this file uses only the standard library until a contender runs. Requests and replies are
lines of JSON over a local socket.

Memory is the resident set that Linux reports: `rss` after the contender is built and before its
first step, `peak` the maximum since then. Memory that an allocator caches counts as used.
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
"""`cpu` is the total over all threads of the process."""


class Contender(Protocol):
    """The measured work: `run` does it once and returns extra fields for the reply."""

    def run(self, request: Json) -> Json: ...


Builder = Callable[[Json], Contender]


class Failed(RuntimeError):
    """A contender or its server failed; the message is its traceback."""


class Server:
    """A Python process that has imported its libraries and forks contenders."""

    def __init__(self, command: Sequence[str], folder: Path, threads: int) -> None:
        """Start `command`, whose program calls `serve`, with its output in a log in `folder`."""
        self._folder, self._count = folder, 0
        self._log = folder / f"{Path(command[-1]).stem}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True
            )

    def start(self, kind: str, **spec: Any) -> Client:
        """A new process with a contender built from `spec`; Failed if it cannot be built."""
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
    """The first reply: `rss`, the resident bytes before the first run."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._file = connection.makefile("rw")
        self._connection = connection

    def run(self, **request: Any) -> Json:
        """Run once; returns the contender's fields, `seconds`, and `peak` bytes since building."""
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
        """Close the connection; the process then exits."""
        self._file.close()
        self._connection.close()


def serve(builders: Mapping[str, Builder]) -> None:
    """Read socket paths from stdin and fork a process for each, until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap children automatically
    # Not `sys.stdin`: children would inherit its partly read buffer.
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
            except Exception:  # noqa: BLE001 - the parent prints every error
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
    """The versions of soulkit, torch, transformers and peft."""

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
    """Memory of this process in bytes: VmRSS (resident now) or VmHWM (peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise Failed(f"/proc/self/status has no {name}: memory can only be measured on Linux.")


def forget_peak() -> int:
    """Reset the peak to the memory that is resident now; returns it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def place_rank(spec: Json) -> None:
    """Set the environment of rank `rank` of `size` processes, as launchers do."""
    size, rank = spec["size"], str(spec["rank"])
    if size > 1:
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "RANK": rank,
                       "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(spec["port"])}  # fmt: skip


def sent_bytes() -> int:
    """Bytes that the loopback device of this process's network has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise Failed("/proc/net/dev has no lo: traffic can only be measured on Linux.")


def machine() -> str:
    """Processor, number of cores and load of this machine in one line."""
    import platform

    cpu = Path("/proc/cpuinfo").read_text()
    models = [line.split(":")[1].strip() for line in cpu.splitlines() if line.startswith("model n")]
    name = models[0] if models else platform.processor() or platform.machine()
    load = os.getloadavg()[0]
    return f"{name}, {os.cpu_count()} cores, load {load:.1f} at the start, {platform.system()}"
