"""How many threads this process computes with: decided once, before a model is loaded.

    asked for (--threads, OMP_NUM_THREADS) ▶ what the run has had so far ▶ one, where sums must come
    out the same ▶ the cores that are idle

Threads of one sum wait for each other. Where others compute on the same cores the slowest decides,
and two threads on a busy machine can take ten times as long as one.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from soulkit.errors import RunError
from soulkit.runs.folder import is_run, note_start, read_environment

NAME = "threads"
"""In `environment.json`: what a start took."""
VARIABLE = "OMP_NUM_THREADS"
MOST_THREADS = 1024
"""More than any machine has cores; with some millions the libraries below end the process."""
WATCHED = 0.3
"""Seconds for which the cores are watched. Load averages over a minute still hold the command that
has just ended, and not yet the one that has just begun."""
ALMOST = 0.3
"""Share of a core that others may take of one that counts as idle."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
STAT = Path("/proc/stat")


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads, and why it is that."""

    number: int
    why: str
    asked: bool = False
    """Whether the user named the number; else it is said aloud."""

    def words(self) -> str:
        """`1 thread (0.4 of 2 cores idle; --threads N)`."""
        return f"{self.number} thread{'s' * (self.number != 1)} ({self.why})"


def take_threads(asked: int | None, folder: Path | None, *, alike: bool = False) -> ThreadChoice:
    """Choose and set the threads of this process. `folder` is that of the run, which may be none
    yet; `alike`: sums must come out the same."""
    import torch

    choice = choose_threads(asked, recorded_threads(folder), alike=alike)
    usual_threads()  # asked for while it is still what torch would take
    torch.set_num_threads(choice.number)
    return choice


def choose_threads(asked: int | None, recorded: int | None, *, alike: bool) -> ThreadChoice:
    """What is asked for, else what was recorded, else one if `alike`, else the idle cores."""
    if asked is not None:
        return ThreadChoice(asked, "--threads", asked=True)
    if (number := _of_variable(os.environ.get(VARIABLE, ""))) is not None:
        return ThreadChoice(number, VARIABLE, asked=True)
    if recorded is not None:
        return ThreadChoice(recorded, "as this run began")
    return ThreadChoice(1, "for equal sums") if alike else idle_core_threads()


def _of_variable(text: str) -> int | None:
    """The first number of `4` or `4,2`; None for anything else, and for more than MOST_THREADS."""
    first = text.partition(",")[0].strip()
    number = int(first) if first.isdecimal() and len(first) <= len(str(MOST_THREADS)) else 0
    return number if 0 < number <= MOST_THREADS else None


@cache
def idle_core_threads() -> ThreadChoice:
    """As many as cores are idle at the first call, at least one and at most torch's own number."""
    cores, idle = len(allowed_cores()), idle_cores()
    number = max(1, min(usual_threads(), math.floor(idle + ALMOST)))
    return ThreadChoice(number, f"{idle:.1f} of {cores} cores idle; --threads N for others")


@cache
def usual_threads() -> int:
    """What torch would take by itself: a thread for each physical core."""
    import torch

    return torch.get_num_threads()


def allowed_cores() -> set[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def idle_cores() -> float:
    """How many of the allowed cores nobody uses now, and no more than the quota of a container."""
    cores = allowed_cores()
    before = core_times(cores)
    time.sleep(WATCHED if before else 0)
    share = idle_share(before, core_times(cores))
    if share is None:  # no such file here: the mean of the last minute, over all cores
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        share = max(0.0, 1 - load / (os.cpu_count() or 1))
    return min(share * len(cores), cpu_quota())


def core_times(cores: set[int], stat: Path = STAT) -> dict[int, tuple[int, int]]:
    """Core → (idle ticks, all ticks) since the machine started, as the kernel counts them."""
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        named = {int(w[0][3:]): [int(n) for n in w[1:9]] for w in lines
                 if w and w[0].startswith("cpu") and w[0] != "cpu"}  # fmt: skip
    except (OSError, ValueError):
        return {}
    # user nice system idle iowait irq softirq steal; who waits for a disk computes nothing
    return {core: (n[3] + n[4], sum(n)) for core, n in named.items() if core in cores}


def idle_share(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]
) -> float | None:
    """Idle ticks / all ticks between two readings, over the cores in both; None without any."""
    pairs = [(before[core], after[core]) for core in before.keys() & after.keys()]
    ticks = sum(late[1] - early[1] for early, late in pairs)
    idle = sum(late[0] - early[0] for early, late in pairs)
    return min(max(idle / ticks, 0.0), 1.0) if ticks > 0 else None


def cpu_quota(file: Path = QUOTA) -> float:
    """Cores' worth of time that a container may use; infinity where nothing bounds it."""
    try:
        limit, period = file.read_text(encoding="ascii").split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # `max`, or no such file
        return math.inf


# -- what a run keeps ------------------------------------------------------------------------------


def recorded_threads(folder: Path | None) -> int | None:
    """What the newest start of the run in `folder` took; None for a new run or an older one."""
    if folder is None or not is_run(folder):
        return None
    try:
        noted = read_environment(folder)
    except RunError:  # whoever opens the run says what is wrong
        return None
    starts = [noted, *(one for one in noted.get("resumed", ()) if isinstance(one, dict))]
    numbers = [one[NAME] for one in starts if isinstance(one.get(NAME), int)]
    return numbers[-1] if numbers and numbers[-1] > 0 else None


def note_threads(folder: Path, choice: ThreadChoice) -> None:
    """Record it with the newest start of the run in `folder`."""
    note_start(folder, {NAME: choice.number})
