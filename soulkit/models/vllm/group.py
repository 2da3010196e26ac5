"""A program with everything that it starts, as one process group that soulkit cannot outlive.

soulkit's side of supervisor.py. The two hold a pipe each way: soulkit's end closes when it goes,
the supervisor's when it goes, and whoever is left kills the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from soulkit.models.vllm.supervisor import living, remove, shared_memory

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
        """Until the supervisor has gone: what it says. Then the group goes, before its id can be
        anybody else's: the supervisor is waited for last."""
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
