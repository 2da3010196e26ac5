"""Stands between soulkit and a server that it started, so that no part of it outlives either.

    soulkit ──stdin──▶ supervisor ──▶ server ──▶ its workers       one session, one process group

    supervisor.py PARENT GRACE_S COMMAND [ARGUMENT …]

It runs in a plain interpreter with the standard library alone. When soulkit goes (its end of the
pipe closes, or it is no longer the parent), when the server goes, or on a signal to end, the server
is asked to end and after a grace the whole group is killed. It writes lines to soulkit: `started
PID`, `failed WHY`, `ended CODE` (-N after signal N).
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
"""Between two looks at whether both sides are there."""
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

requests: list[int] = []
"""Signals by which somebody has asked this process to end."""


def tell(line: str) -> None:
    """One line to soulkit, if it is there to read it."""
    with suppress(OSError):
        os.write(1, f"{line}\n".encode())


def started(command: list[str]) -> int:
    """The process id of the server; its output goes to this process's stderr, a log file."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    actions = [(os.POSIX_SPAWN_DUP2, nothing, 0), (os.POSIX_SPAWN_DUP2, 2, 1)]
    # Python ignores these two, and what is ignored stays so in the program that is started.
    usual = [signal.SIGPIPE, signal.SIGXFSZ]
    return os.posix_spawnp(
        command[0], command, os.environ, file_actions=actions, setsigdef=usual, setsigmask=[]
    )


def exit_code(server: int) -> int | None:
    """How the server ended; None while it runs."""
    process, status = os.waitpid(server, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if process else None


def soulkit_is_there(parent: int, wait_s: float) -> bool:
    """Whether soulkit lives, after at most `wait_s`.

    The pipe tells at once; a process that soulkit forked may hold it open, so its id counts too.
    """
    ready, _, _ = select.select([0], [], [], wait_s)
    return os.getppid() == parent and not (ready and not os.read(0, 4096))


def living(group: int) -> list[int]:
    """Processes of `group` that live; none where the system does not list them."""
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else []
    return [int(name) for name in names if name.isdigit() and _lives_in(group, name)]


def _lives_in(group: int, process: str) -> bool:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The name of a program may hold blanks and brackets; it ends at the last bracket.
            state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
    except (OSError, ValueError):
        return False
    return int(its_group) == group and state not in (b"Z", b"X")


def others() -> list[int]:
    """Living processes of this group beside this one."""
    return [process for process in living(os.getpgrp()) if process != os.getpid()]


def shared_memory(group: int) -> set[str]:
    """Files of shared memory that Python made for processes of `group`, and that are still there.

    Who is killed does not remove them, and they hold memory until the machine is restarted.
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
    """Ask the server to end, then whoever it leaves, and kill the group: this process as well."""
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
    """Wait until soulkit or the server goes, or somebody asks; the server where it still runs."""
    while soulkit_is_there(parent, EVERY_S) and not requests:
        code = exit_code(server)
        if code is not None:
            tell(f"ended {code}")
            return None
    return server


def take_note(number: int, frame: FrameType | None) -> None:
    """Nothing is cut short by a signal: not the start, and not the end of the group, which is sent
    the same one."""
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
