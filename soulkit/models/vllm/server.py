"""A vLLM server that soulkit starts, monitors and stops, and the diagnosis of its log.

It listens on this machine only (with Ray, on the network address of its host), requires a new key
at every start, and writes its log into the run folder. It always ends with soulkit: supervisor.py
runs it in one process group, which is killed if soulkit or the supervisor ends. vLLM requires the
key only below /v1; its other paths are open to all users of the machine (or network).

Logs may contain anything from model files and drivers, so excerpts are sanitised, shortened and
without keys.
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
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

from soulkit import api_keys
from soulkit.api_keys import printable
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
from soulkit.parse import parse_yaml
from soulkit.text import one_line

CAUSES = Path(__file__).with_name("causes.yaml")
TAIL_BYTES = 256_000
"""Maximum bytes read from a log; vLLM's usage text alone has 40,000."""
_SHOWN = 3
_WIDTH = 300

_ORIGIN = re.compile(r"^\((?:\w+|\w+ )[^()]*pid=\d+\) ?")
_STAMP = re.compile(r"^(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)(?:: |$)"
    r"|^\S+\.py: error: |^\S*/python[\d.]*: "
)
_WRAPPERS = re.compile(r"Engine core initialization failed|WorkerProc initialization failed")
"""Exceptions that vLLM raises because of an earlier one."""


class Cause(NamedTuple):
    """A known reason why a server ends: its pattern in the log, and the fix."""

    sign: re.Pattern[str]
    way_out: str
    port_taken: bool = False


@cache
def causes() -> tuple[Cause, ...]:
    """The entries of causes.yaml; the first one that matches the end of a log applies."""
    listed = parse_yaml(CAUSES.read_bytes(), ours=True)
    return tuple(
        Cause(re.compile("|".join(one["signs"]), re.IGNORECASE), one["way_out"],
              one.get("port_taken", False))
        for one in listed
    )  # fmt: skip


class LogLine(NamedTuple):
    """A log line without vLLM's prefix."""

    text: str
    level: str
    """INFO, ERROR …; empty if the line has none."""


class Diagnosis(NamedTuple):
    """Why a server ended."""

    lines: str
    """Excerpt of the log, on one line."""
    way_out: str
    port_taken: bool
    is_known: bool
    """Whether the cause is in causes.yaml."""


def diagnosis(log: Path, since: int = 0) -> Diagnosis:
    """Find out from `log`, from byte `since` on, why a server ended."""
    lines = list(plain_lines(log, since))
    at = _root(lines)
    tail = lines[-_SHOWN:] if at is None else _from(lines, at)
    shown = [line.text for line in tail]
    text = " ".join(shown)
    cause = next((one for one in causes() if one.sign.search(text)), None)
    return Diagnosis(
        one_line(text, _WIDTH) or "Its log is empty.",
        cause.way_out if cause else "Read the log; the first error in it is the cause.",
        cause is not None and cause.port_taken,
        cause is not None,
    )


def last_line(log: Path, since: int = 0) -> str:
    """The last line of a log, shortened; empty if there is none."""
    lines = list(plain_lines(log, since, tail=4096))
    return one_line(lines[-1].text, 120) if lines else ""


def plain_lines(log: Path, since: int = 0, tail: int = TAIL_BYTES) -> Iterator[LogLine]:
    """The last non-empty lines of a log without vLLM's prefixes."""
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
        if line.level not in ("", lines[at].level):  # about something else
            return
        yield line


def _root(lines: list[LogLine]) -> int | None:
    """Index of the root exception: the last one that does not wrap another."""
    places = [n for n, line in enumerate(lines) if _EXCEPTION.match(line.text)]
    telling = [n for n in places if not _WRAPPERS.search(lines[n].text)] or places
    return telling[-1] if telling else None


GRACE_S = 5.0
"""Seconds between the request to end and the kill of the group."""
_SPARE_S = 5.0
"""Extra seconds for a slow supervisor before soulkit kills the group itself."""

_links: set[int] = set()
"""Our ends of the pipes to supervisors."""


class Supervised:
    """A running program under a supervisor; `group` is its process group."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: int,
        grace_s: float = GRACE_S,
    ) -> None:  # fmt: skip
        """Start `command`; its output goes to the file descriptor `output`."""
        self.code: int | None = None
        """Exit code, or minus the number of a signal."""
        self.process: int | None = None
        """Process id of the program itself."""
        self.failure = ""
        """Why it could not be started."""
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
            self.let_go()
            os.close(self._status)
            raise
        finally:
            os.close(read_end)
            os.close(write_end)
        self.group = self._supervisor.pid
        threading.Thread(target=self._listen, name="vllm-watch", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Whether the program or its supervisor has ended."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for its end; returns whether it has ended."""
        return self._ended.wait(seconds)

    def stop(self, limit_s: float = 30.0) -> list[int]:
        """Stop it, by force if needed. Returns processes still alive after `limit_s`, usually none.

        Does nothing in a process that was forked from the one that started it.
        """
        if os.getpid() != self._owner:
            return []
        end = time.monotonic() + limit_s
        self.let_go()
        try:
            self._gone.wait(self._grace_s + _SPARE_S)
        finally:  # also if the wait is interrupted
            if not self._gone.is_set():
                kill_group(self.group)
        while (left := living(self.group)) and time.monotonic() < end:
            time.sleep(0.02)
        return left

    def let_go(self) -> None:
        """Ask the supervisor to stop it, without waiting for that."""
        if self._link in _links:
            _links.remove(self._link)
            os.close(self._link)

    def _listen(self) -> None:
        """Read the supervisor's messages until it ends; then kill the group."""
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
    """Kill every process of a group. A missing group is not an error."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _close_links() -> None:
    """Close the pipes in a forked process, so that supervisors do not take it for soulkit."""
    while _links:
        os.close(_links.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_links)


START_S = 300.0
"""Seconds a server may take to answer; the first start compiles for minutes."""
_LOOK_S, _TELL_S = 0.2, 1.0
"""Seconds between checks of a starting server, and between its progress lines."""
_PORTS = 3
"""Number of ports to try, in case another program takes one before the server does."""


class ServerFailed(UserError):
    """A server did not start, or did not stop."""


class ServerDied(UserError):
    """A server ended while it was needed; finished work is kept."""


class VllmServer:
    """A running server. Leaving the `with` block stops it, and so does the end of this process."""

    def __init__(self, spec: ServerSpec, install: VllmInstall, log: Path, port: int) -> None:
        """Start it without waiting for an answer; `start_all` also waits."""
        self.log = log
        """File with all its output."""
        self.served = BASE_NAME
        """Served name of the model."""
        self.version = install.version
        """vLLM's version."""
        self.host, self.port = spec.host, port
        self.key = secrets.token_urlsafe(32)
        """The bearer token that it requires."""
        api_keys.remember(self.key)
        self._model, self._stopped = spec.model, False
        command = server_command(spec, install, port)
        environment = server_environment(spec, install, self.key)
        with log.open("ab", buffering=0) as output:
            self._since = output.seek(0, os.SEEK_END)
            self._running = Supervised(command, environment, output.fileno())

    @classmethod
    def start_all(
        cls, specs: Sequence[ServerSpec], folder: Path, *, limit_s: float = START_S,
        watch: Callable[[float, str], None] | None = None,
    ) -> list[VllmServer]:  # fmt: skip
        """Start servers together and wait until all answer; each log is a new file in `folder`.

        Blocks for at most `limit_s` seconds. ServerFailed, with the cause from the log, if one does
        not start; ConfigError for invalid settings. `watch` gets the seconds so far and the last
        line of a log about once a second. If it raises, on an interrupt, or if a server does not
        start, all are stopped.
        """
        install = vllm_version(specs[0].python)
        if install is None:
            raise no_vllm(specs[0].interpreter, attachable=True)
        begin, servers = time.monotonic(), list[VllmServer]()
        try:
            for spec in specs:
                servers.append(
                    cls(spec, install, _new_log(folder, spec.model), free_port(spec.host))
                )
            for n, spec in enumerate(specs):
                tries = 1
                while not servers[n]._comes_up(begin, limit_s, watch):
                    servers[n].stop()
                    if tries == _PORTS:
                        raise servers[n]._not_up(diagnosis(servers[n].log, servers[n]._since))
                    again = cls(spec, install, servers[n].log, free_port(spec.host))
                    servers[n], tries = again, tries + 1
        except BaseException:
            stop_all(servers)
            raise
        return servers

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def group(self) -> int:
        """Process group id of all its processes."""
        return self._running.group

    def check(self) -> None:
        """ServerDied, with the end of its log, if it ended without being stopped."""
        if self._running.ended and not self._stopped:
            words = diagnosis(self.log, self._since)
            raise ServerDied(
                f"The vLLM server of '{self._model}' died{self._how()}.",
                f"Its log ends: {words.lines}",
                f"Finished work is kept. {self._help(words)}",
            )

    def let_go(self) -> None:
        """Ask it to stop, without waiting for that."""
        self._running.let_go()

    def send(self, folder: Path) -> None:
        """Make a folder of this host readable for the server, under the same path."""

    def remove(self, folder: Path) -> None:
        """Delete what `send` copied."""

    def stop(self) -> None:
        """Stop it; returns when no process of it is left and its port is free.

        May be called twice. ServerFailed for processes that cannot be killed.
        """
        if self._stopped:
            return
        self._stopped = True
        left = self._running.stop()
        if left:
            raise ServerFailed(
                f"The vLLM server of '{self._model}' cannot be stopped.",
                f"These processes survived a kill: {', '.join(map(str, left))}. A driver may block "
                "them.",
                "Everything of this run is saved. If the processes stay, restart the machine.",
            )
        end = time.monotonic() + 2.0
        while time.monotonic() < end:  # after that, the port probably belongs to another program
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((self.host, self.port)) != 0:
                    return
            time.sleep(0.05)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _comes_up(
        self, begin: float, limit_s: float, watch: Callable[[float, str], None] | None
    ) -> bool:
        """Whether it answers within `limit_s` after `begin`; False if its port was taken.
        ServerFailed for any other failure."""
        due = begin
        while not self._answers():
            if self._running.ended:
                words = diagnosis(self.log, self._since)
                if words.port_taken:
                    return False
                raise self._not_up(words)
            now = time.monotonic()
            if now >= begin + limit_s:
                raise ServerFailed(
                    f"The vLLM server of '{self._model}' did not answer within {limit_s:.0f} s.",
                    f"Its log ends: {last_line(self.log, self._since) or 'it is empty'}",
                    f"Allow more time (--vllm-start SECONDS), or read its log: {self.log}",
                )
            if watch is not None and now >= due:
                due = now + _TELL_S
                watch(now - begin, last_line(self.log, self._since))
            self._running.wait(_LOOK_S)
        return True

    def _answers(self) -> bool:
        """Whether the server lists our model and accepts our key; another program would not."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=5.0)
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
            return " together with its supervisor"
        if code >= 0:
            return f" with exit code {code}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        out_of_memory = "; unless someone killed it, the machine ran out of memory"
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
        """The fix; if the server was killed, its log usually shows no cause."""
        killed = self._running.code in (None, -signal.SIGKILL, -signal.SIGTERM)
        again = "Run the same command again."
        return f"{again if killed and not words.is_known else words.way_out} Log: {self.log}"


def stop_all(servers: Sequence[VllmServer]) -> None:
    """Stop servers at the same time; ServerFailed as in `stop`, once all have been stopped."""
    with ExitStack() as stops:
        for server in servers:
            server.let_go()
            stops.callback(server.stop)


def free_port(host: str = HOST) -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
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
