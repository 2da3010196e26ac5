"""Runs between soulkit and a server that it started, so that neither outlives the other.

    soulkit ──stdin──▶ supervisor ──▶ server ──▶ its workers       one session, one process group

    supervisor.py PARENT GRACE_S COMMAND [ARGUMENT …]

Needs only the standard library. When soulkit ends (its end of the pipe closes, or it is no longer
the parent), when the server ends, or on a signal, the server is asked to stop, and after a grace
period the whole group is killed. Reports to soulkit in lines: `started PID`, `failed WHY`, `ended
CODE` (-N after signal N).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

EVERY_S = 0.2
"""Seconds between checks of both sides."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

requests: list[int] = []
"""Signals received that ask this process to end."""


def tell(line: str) -> None:
    """Send one line to soulkit, if it is still there."""
    with suppress(OSError):
        os.write(1, f"{line}\n".encode())


def started(command: list[str]) -> int:
    """Start the server and return its process id; its output goes to our stderr, a log file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    actions = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    # Python ignores these two signals, and child processes would inherit that.
    usual = [signal.SIGPIPE, signal.SIGXFSZ]
    return os.posix_spawnp(
        command[0], command, os.environ, file_actions=actions, setsigdef=usual, setsigmask=[]
    )


def exit_code(server: int) -> int | None:
    """The server's exit code; None while it runs."""
    process, status = os.waitpid(server, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if process else None


def soulkit_is_there(parent: int, wait_s: float) -> bool:
    """Whether soulkit is alive; waits at most `wait_s`.

    A closed pipe shows at once that it has ended, but a process forked from soulkit may hold the
    pipe open, so the parent id is checked too.
    """
    ready, _, _ = select.select([0], [], [], wait_s)
    return os.getppid() == parent and not (ready and not os.read(0, 4096))


def living(group: int) -> list[int]:
    """Living processes of `group`; empty if the system does not list them."""
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    return [int(name) for name in names if name.isdigit() and _lives_in(group, name)]


def _lives_in(group: int, process: str) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # A program's name may contain spaces and brackets; it ends at the last bracket.
            state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in (b"Z", b"X")


def others() -> list[int]:
    """Other living processes of this group."""
    return [process for process in living(os.getpgrp()) if process != os.getpid()]


def shared_memory(group: int) -> set[str]:
    """Existing shared-memory files that Python created for processes of `group`.

    A killed process does not remove them, and they use memory until the machine restarts.
    """
    paths = set()
    for process in living(group):
        with suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8") as lines:
            paths |= {line.split()[-1] for line in lines if "/dev/shm/psm_" in line}
    return {path for path in paths if os.path.exists(path)}


def remove(paths: set[str]) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)


def end_group(server: int | None, grace_s: float) -> None:
    """Stop the server, then its remaining processes, and kill the group, including this process."""
    end, memory = time.monotonic() + grace_s, shared_memory(os.getpgrp())
    if server is not None:
        os.kill(server, signal.SIGTERM)
    while server is not None and time.monotonic() < end:
        code = exit_code(server)
        if code is not None:
            tell(f"ended {code}")
            server = None
        else:
            time.sleep(0.02)
    if others():
        os.killpg(0, signal.SIGTERM)
    while others() and time.monotonic() < end:
        time.sleep(0.02)
    remove(memory)
    os.killpg(0, signal.SIGKILL)


def watch(server: int, parent: int) -> int | None:
    """Wait until soulkit or the server ends, or a signal arrives; returns the server process if it
    is still running."""
    while soulkit_is_there(parent, EVERY_S) and not requests:
        code = exit_code(server)
        if code is not None:
            tell(f"ended {code}")
            return None
    return server


def take_note(number: int, frame: FrameType | None) -> None:
    """Record a signal instead of being interrupted during start or shutdown: stopping the group
    sends the same signal to this process."""
    requests.append(number)


def stand_guard(arguments: list[str]) -> None:
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    for number in ENDING:
        signal.signal(number, take_note)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    server = None
    try:
        server = started(command)
        tell(f"started {server}")
        server = watch(server, parent)
    except OSError as error:
        tell(f"failed {' '.join(str(error).split())}")
    end_group(server, grace_s)


if __name__ == "__main__":
    stand_guard(sys.argv[1:])
