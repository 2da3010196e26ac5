"""A vLLM server that soulkit starts, watches and stops.

It listens on this machine alone, asks for a key that is made anew for every start, writes its log
into the run's folder, and ends with soulkit whatever becomes of either (supervisor.py).

vLLM asks for its key below /v1 alone: what it serves beside that (/invocations, /adapters) is open
to other users of the same machine.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from soulkit import keys
from soulkit.errors import UserError
from soulkit.models.vllm.command import (
    BASE_NAME,
    HOST,
    ServerSpec,
    server_command,
    server_environment,
)
from soulkit.models.vllm.diagnosis import Diagnosis, diagnosis, last_line
from soulkit.models.vllm.group import Supervised
from soulkit.models.vllm.version import VllmInstall, vllm_version

START_S = 300.0
"""For a server to answer; the first start of an installation compiles for minutes."""
_LOOK_S, _TELL_S = 0.2, 1.0
"""Between two looks at a server that starts, and two words about it."""
_PORTS = 3
"""That are tried where somebody takes one between its choice and its use."""

Watch = Callable[[float, str], None]
"""Is told about once a second of a start: seconds so far, and the newest line of the log."""


class ServerFailed(UserError):
    """A server did not come up, or did not go."""


class ServerDied(UserError):
    """A server ended while it was needed; what was played is kept."""


class VllmServer:
    """One running server. `with` stops it; so does the end of this process, in any way."""

    def __init__(self, spec: ServerSpec, install: VllmInstall, log: Path, port: int) -> None:
        """Start it without waiting; `start` does both."""
        self.log = log
        """Where everything goes that it writes."""
        self.served = BASE_NAME
        """What the model is called there."""
        self.version = install.version
        """Of vLLM."""
        self.port = port
        self.key = secrets.token_urlsafe(32)
        """The bearer token that it asks for."""
        keys.remember(self.key)
        self._model, self._stopped = spec.model, False
        command = server_command(spec, install, port)
        environment = server_environment(spec, install, self.key)
        with log.open("ab", buffering=0) as output:
            self._since = output.seek(0, os.SEEK_END)
            self._running = Supervised(command, environment, output.fileno())

    @classmethod
    def start(
        cls,
        spec: ServerSpec,
        folder: Path,
        *,
        limit_s: float = START_S,
        watch: Watch | None = None,
    ) -> VllmServer:
        """A server of `spec` that answers; its log is a new file in `folder`.

        Blocks for `limit_s` seconds at most. ServerFailed, with what the log says, for one that
        does not come up; ConfigError for settings that no server can be started with. Whatever
        `watch` raises, or an interruption, ends the start and leaves nothing behind.
        """
        install = vllm_version(spec.python)
        if install is None:
            raise _no_vllm(spec)
        end, log = time.monotonic() + limit_s, _new_log(folder, spec.model)
        for last in (*[False] * (_PORTS - 1), True):
            server = cls(spec, install, log, free_port())
            try:
                if server._comes_up(end, watch) or last:
                    break
            except BaseException:
                server.stop()
                raise
            server.stop()
        if server._running.ended:
            server.stop()
            raise server._not_up(diagnosis(log, server._since))
        return server

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def group(self) -> int:
        """The id of the process group that all of its processes are in."""
        return self._running.group

    def check(self) -> None:
        """ServerDied, with the end of its log, when it has ended and nobody stopped it."""
        if self._running.ended and not self._stopped:
            words = diagnosis(self.log, self._since)
            raise ServerDied(
                f"The vLLM server of '{self._model}' died{self._how()}.",
                f"Its log ends: {words.lines}",
                f"What was played is kept. {self._help(words)}",
            )

    def stop(self) -> None:
        """End it; returns when no process of it and no listener on its port is left.

        A second time does nothing. ServerFailed for processes that not even a kill ends.
        """
        if self._stopped:
            return
        self._stopped = True
        left = self._running.stop()
        if left:
            raise ServerFailed(
                f"The vLLM server of '{self._model}' does not end.",
                f"Killed, and still there: {', '.join(map(str, left))}; a driver may hold them.",
                "Everything of this run is saved; restart the machine where they stay.",
            )
        end = time.monotonic() + 2.0
        while _listens(self.port) and time.monotonic() < end:  # longer: somebody else's by now
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _comes_up(self, end: float, watch: Watch | None) -> bool:
        """Whether it answers; False where its port was taken. ServerFailed for all else."""
        begin = due = time.monotonic()
        while not self._answers():
            if self._running.ended:
                words = diagnosis(self.log, self._since)
                if words.port_taken:
                    return False
                raise self._not_up(words)
            now = time.monotonic()
            if now >= end:
                raise self._too_slow(now - begin)
            if watch is not None and now >= due:
                due = now + _TELL_S
                watch(now - begin, last_line(self.log, self._since))
            self._running.wait(_LOOK_S)
        return True

    def _answers(self) -> bool:
        """Whether a server with our key names our model: another's on this port would not."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5.0)
        try:
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {self.key}"})
            models = json.loads(connection.getresponse().read())["data"]
            return not self._running.ended and any(one["id"] == self.served for one in models)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return False
        finally:
            connection.close()

    def _how(self) -> str:
        code = self._running.code
        if code is None:
            return " with the process that watches it"
        if code >= 0:
            return f" with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        out_of_memory = "; where nobody killed it, the machine ran out of memory"
        return f" of {name}{out_of_memory if code == -signal.SIGKILL else ''}"

    def _not_up(self, words: Diagnosis) -> ServerFailed:
        failure = self._running.failure
        return ServerFailed(
            f"The vLLM server of '{self._model}' did not start: it ended{self._how()}."
            if not failure else f"The vLLM server of '{self._model}' could not be started.",
            failure or f"Its log says: {words.lines}",
            self._help(words),
        )  # fmt: skip

    def _help(self, words: Diagnosis) -> str:
        """What helps: where somebody killed it, its log knows of no cause."""
        killed = self._running.code in (None, -signal.SIGKILL, -signal.SIGTERM)
        again = "Run the same command again."
        return f"{again if killed and not words.is_known else words.way_out} Log: {self.log}"

    def _too_slow(self, seconds: float) -> ServerFailed:
        return ServerFailed(
            f"The vLLM server of '{self._model}' did not answer within {seconds:.0f} s.",
            f"Its log ends: {last_line(self.log, self._since) or 'it is empty'}",
            f"Give it longer (--vllm-start SECONDS), or read its log: {self.log}",
        )


def free_port() -> int:
    """A port of this machine that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def _new_log(folder: Path, model: str) -> Path:
    """An empty file named after the model; one of an earlier start stays."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", Path(model).name).strip("-.") or "model"
    number = 1
    while True:
        path = folder / (f"{stem}.log" if number == 1 else f"{stem}-{number}.log")
        try:
            path.open("x").close()
            return path
        except FileExistsError:
            number += 1


def _no_vllm(spec: ServerSpec) -> ServerFailed:
    return ServerFailed(
        f"The interpreter '{spec.interpreter}' has no vLLM.",
        f"A server of '{spec.model}' is to be started with it.",
        "Name the one that has: --vllm-python PATH/bin/python, attach a server that runs: "
        "--engine vllm@URL, or use --engine local.",
    )
