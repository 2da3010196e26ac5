"""A vLLM server that soulkit starts, watches and stops, and what its log says when it fails.

It listens on this machine alone, asks for a key that is made anew for every start, writes its log
into the run's folder, and ends with soulkit in every case: supervisor.py runs it in one process
group, and soulkit and the supervisor kill the group when the other one goes. vLLM asks for its key
below /v1 alone; what it serves beside that is open to other users of the same machine.

Logs hold whatever a model's files and a driver put there, so what is shown of them is sanitised,
without keys, and short.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import yaml

from soulkit import api_keys
from soulkit.api_keys import printable
from soulkit.config import once_loader
from soulkit.errors import UserError
from soulkit.models.vllm.command import (
    BASE_NAME,
    HOST,
    ServerSpec,
    server_command,
    server_environment,
)
from soulkit.models.vllm.settings import VllmInstall, no_vllm, vllm_version
from soulkit.models.vllm.supervisor import living, remove, shared_memory
from soulkit.text import one_line

CAUSES = Path(__file__).with_name("causes.yaml")
TAIL_BYTES = 256_000
"""Of a log that are read at most; a usage text of vLLM has 40,000."""
_SHOWN = 3
_WIDTH = 300

_ORIGIN = re.compile(r"^\((?:\w+|\w+ )[^()]*pid=\d+\) ?")
_STAMP = re.compile(r"^(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)(?:: |$)"
    r"|^\S+\.py: error: |^\S*/python[\d.]*: "
)
_WRAPPERS = re.compile(r"Engine core initialization failed|WorkerProc initialization failed")
"""What vLLM raises because of an exception that stands further up."""


class Cause(NamedTuple):
    """A known reason for a server to end: how its log tells, and what helps."""

    sign: re.Pattern[str]
    way_out: str
    port_taken: bool = False


@cache
def causes() -> tuple[Cause, ...]:
    """The causes in causes.yaml; the first one with a sign in the end of a log is taken."""
    listed = yaml.load(CAUSES.read_text(encoding="utf-8"), Loader=once_loader(fast=True))
    return tuple(
        Cause(re.compile("|".join(one["signs"]), re.IGNORECASE), one["way_out"],
              one.get("port_taken", False))
        for one in listed
    )  # fmt: skip


class LogLine(NamedTuple):
    """A line without what vLLM writes before it."""

    text: str
    level: str
    """INFO, ERROR …; empty where the line has none."""


class Diagnosis(NamedTuple):
    """What is to be said of a server that ended."""

    lines: str
    """What its log says, on one line."""
    way_out: str
    port_taken: bool
    is_known: bool
    """Whether the cause is one of causes.yaml."""


def diagnosis(log: Path, since: int = 0) -> Diagnosis:
    """What `log` says from byte `since` on about an end."""
    lines = list(plain_lines(log, since))
    at = _root(lines)
    tail = lines[-_SHOWN:] if at is None else _from(lines, at)
    shown = [line.text for line in tail]
    text = " ".join(shown)
    cause = next((one for one in causes() if one.sign.search(text)), None)
    return Diagnosis(
        one_line(text, _WIDTH) or "Its log is empty.",
        cause.way_out if cause else "Read the log; what it names first is the cause.",
        cause is not None and cause.port_taken,
        cause is not None,
    )


def last_line(log: Path, since: int = 0) -> str:
    """The newest line of a log in short; empty where it has none."""
    lines = list(plain_lines(log, since, tail=4096))
    return one_line(lines[-1].text, 120) if lines else ""


def plain_lines(log: Path, since: int = 0, tail: int = TAIL_BYTES) -> Iterator[LogLine]:
    """The last lines of a log without what vLLM writes before each; empty ones are left out."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(since, size - tail))
            text = file.read(tail).decode("utf-8", "replace")
    except OSError:
        return
    for line in printable(text).splitlines():
        words = _ORIGIN.sub("", line)
        stamp = _STAMP.match(words)
        plain = words[stamp.end() if stamp else 0 :].rstrip()
        if plain:
            yield LogLine(plain, stamp["level"] if stamp else "")


def _from(lines: list[LogLine], at: int) -> Iterator[LogLine]:
    yield lines[at]
    for line in lines[at + 1 : at + _SHOWN]:
        if line.text.startswith("Traceback") or _EXCEPTION.match(line.text):
            return
        if line.level not in ("", lines[at].level):  # of something else
            return
        yield line


def _root(lines: list[LogLine]) -> int | None:
    """Where the exception stands that is behind the others: the last that wraps none."""
    places = [n for n, line in enumerate(lines) if _EXCEPTION.match(line.text)]
    telling = [n for n in places if not _WRAPPERS.search(lines[n].text)] or places
    return telling[-1] if telling else None


GRACE_S = 5.0
"""From the request to end until the group is killed."""
_SPARE_S = 5.0
"""For a supervisor on a busy machine, before soulkit kills the group itself."""

_links: set[int] = set()
"""This process's ends of the pipes to its supervisors."""


class Supervised:
    """A running program; `group` is the id of its process group, from the start."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        grace_s: float = GRACE_S,
    ) -> None:
        """Start `command`, whose output goes to the descriptor `output`."""
        self.code: int | None = None
        """How it ended: an exit code, or minus the number of a signal."""
        self.process: int | None = None
        """The program itself, without its supervisor and its children."""
        self.failure = ""
        """Why it could not be started at all."""
        self._grace_s = grace_s
        self._owner = os.getpid()
        self._ended, self._gone = threading.Event(), threading.Event()
        script = Path(__file__).with_name("supervisor.py")
        words = [sys.executable, "-I", "-S", str(script), str(self._owner), str(grace_s), *command]
        read_end, self._link = os.pipe()
        _links.add(self._link)
        self._status, write_end = os.pipe()
        try:
            self._supervisor = subprocess.Popen(
                words, stdin=read_end, stdout=write_end, stderr=output, env=dict(environment),
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self._let_go()
            os.close(self._status)
            raise
        finally:
            os.close(read_end)
            os.close(write_end)
        self.group = self._supervisor.pid
        threading.Thread(target=self._listen, name="vllm-watch", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the program, or what watches it, has ended."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait for an end, at most so long; whether there was one."""
        return self._ended.wait(seconds)

    def stop(self, limit_s: float = 30.0) -> list[int]:
        """End it: kindly, then by force. The processes that are left after `limit_s`; none, mostly.

        In a process that was forked from the one that started it, nothing happens.
        """
        if os.getpid() != self._owner:
            return []
        end = time.monotonic() + limit_s
        self._let_go()
        try:
            self._gone.wait(self._grace_s + _SPARE_S)
        finally:  # also when somebody interrupts the waiting
            if not self._gone.is_set():
                kill_group(self.group)
        while (left := living(self.group)) and time.monotonic() < end:
            time.sleep(0.02)
        return left

    def _let_go(self) -> None:
        if self._link in _links:
            _links.remove(self._link)
            os.close(self._link)

    def _listen(self) -> None:
        """Read what the supervisor says until it has ended; then end the group."""
        rest = b""
        while chunk := os.read(self._status, 4096):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._hear(line.decode("utf-8", "replace"))
        memory = shared_memory(self.group)
        kill_group(self.group)
        remove(memory)
        self._ended.set()
        self._supervisor.wait()
        os.close(self._status)
        self._gone.set()

    def _hear(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "started":
            self.process = int(rest)
        elif word == "ended":
            self.code = int(rest)
            self._ended.set()
        elif word == "failed":
            self.failure = rest
            self._ended.set()


def kill_group(group: int) -> None:
    """Kill every process of a group at once; one that is gone already is no error."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _close_links() -> None:
    """In a forked process: it must not look like the soulkit that the supervisors wait for."""
    while _links:
        os.close(_links.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_links)


START_S = 300.0
"""For a server to answer; the first start of an installation compiles for minutes."""
_LOOK_S, _TELL_S = 0.2, 1.0
"""Between two looks at a server that starts, and two words about it."""
_PORTS = 3
"""That are tried where somebody takes one between its choice and its use."""


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
        api_keys.remember(self.key)
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
        watch: Callable[[float, str], None] | None = None,
    ) -> VllmServer:
        """A server of `spec` that answers; its log is a new file in `folder`.

        Blocks for `limit_s` seconds at most. ServerFailed, with what the log says, for one that
        does not come up; ConfigError for settings that no server can be started with. `watch` gets
        the seconds so far and the newest line of the log, about once a second; whatever it raises,
        or an interruption, ends the start and leaves nothing behind.
        """
        install = vllm_version(spec.python)
        if install is None:
            raise no_vllm(spec.interpreter, attachable=True)
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
        while time.monotonic() < end:  # longer: somebody else's by now
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((HOST, self.port)) != 0:
                    return
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _comes_up(self, end: float, watch: Callable[[float, str], None] | None) -> bool:
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


def _new_log(folder: Path, model: str) -> Path:
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
