"""One run of one contender: a new process whose time and memory are measured from outside.

Example: `measure(contender, folder / "run-0", seen, 200).seconds` is the wall-clock time of a run
with 200 requests.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from _overhead.server import LOOK_S, Seen

EARLY = 200
"""Memory is read for the first time after this many replies."""
MINUTES = 5
"""A run that takes longer is stopped."""


@dataclass(frozen=True)
class Contender:
    name: str
    command: Callable[[Path], list[str]]
    """Command line for a run in its own empty folder."""
    accuracy: Callable[[Path, str], float] | None
    """Reads the accuracy from that folder and stdout; None if the contender does not score."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    asked_before: int = 0
    """Requests before the first episode that check whether the server answers."""


@dataclass(frozen=True)
class Sample:
    """Measurements of one run in seconds and bytes."""

    seconds: float
    before: float
    asking: float
    after: float
    cpu: float
    grown: int
    peak: int
    most_open: int
    accuracy: float | None


class Watch(threading.Thread):
    """Watches the memory of a process until it ends."""

    def __init__(self, pid: int, seen: Seen) -> None:
        super().__init__(daemon=True)
        self.path, self.seen = Path(f"/proc/{pid}/status"), seen
        self.early = self.highest = self.peak = 0

    def run(self) -> None:
        while (memory := self._memory()) is not None:
            resident, self.peak = memory[1], max(self.peak, memory[0])
            if self.seen.replies.value >= EARLY:
                self.early = self.early or resident
                self.highest = max(self.highest, resident)
            time.sleep(LOOK_S)

    def _memory(self) -> tuple[int, int] | None:
        """(peak, current) in bytes; None if the process has ended."""
        try:
            sizes = re.findall(r"Vm(?:HWM|RSS):\s+(\d+) kB", self.path.read_text())
        except (FileNotFoundError, ProcessLookupError):
            return None
        return (int(sizes[0]) * 1024, int(sizes[1]) * 1024) if len(sizes) == 2 else None


def measure(contender: Contender, folder: Path, seen: Seen, episodes: int) -> Sample:
    """Run a contender once; SystemExit with its output if it failed or sent too few requests."""
    folder.mkdir()
    seen.forget()
    settings = {**os.environ, "NO_PROXY": "127.0.0.1", **contender.settings}
    with (folder / "out.txt").open("w") as out, (folder / "err.txt").open("w") as err:
        start = time.monotonic()
        process = subprocess.Popen(
            contender.command(folder), stdout=out, stderr=err, cwd=folder, env=settings
        )
        watch, late = Watch(process.pid, seen), threading.Timer(60 * MINUTES, process.kill)
        watch.start()
        late.start()
        _, status, used = os.wait4(process.pid, 0)
        end = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
    late.cancel()
    watch.join()
    output, errors = (folder / "out.txt").read_text(), (folder / "err.txt").read_text()
    if process.returncode or seen.replies.value != contender.asked_before + episodes:
        raise SystemExit(
            f"{contender.name}: exit {process.returncode}, {seen.replies.value} of {episodes} "
            f"requests\n{(output + errors)[-3000:]}"
        )
    return Sample(
        seconds=end - start, before=seen.first.value - start,
        asking=seen.last.value - seen.first.value, after=end - seen.last.value,
        cpu=used.ru_utime + used.ru_stime, grown=watch.highest - watch.early, peak=watch.peak,
        most_open=seen.most.value,
        accuracy=contender.accuracy(folder, output) if contender.accuracy else None,
    )  # fmt: skip


def sync_ms(folder: Path) -> float:
    """Median milliseconds to write and sync a record of 2 kB to the disk."""
    taken = []
    with (folder / "sync").open("wb", buffering=0) as file:
        for _ in range(100):
            file.write(bytes(2048))
            start = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - start)
    return 1000 * statistics.median(taken)
