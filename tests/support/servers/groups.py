"""Process groups of tests: whether they are there, and waiting until they are or are not."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from soulkit.models.vllm.supervisor import living

PATIENCE_S = 60.0
"""Until a test gives up: a machine may be busy, and no test measures time."""


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether `condition` comes true, however slow the machine is."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(5.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def children(process: int) -> list[int]:
    """Processes that `process` has started and that still run."""
    listings = []
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            listings += thread.read_text().split()
    return [int(child) for child in listings if command_line(int(child))]


def command_line(process: int) -> list[str]:
    """What a process was started with; nothing when it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def is_gone(group: int, port: int) -> bool:
    """Whether neither a process of the group nor a listener on its port is left."""
    return not living(group) and not listens(port)
