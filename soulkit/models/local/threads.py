"""Chooses the number of threads of a process, and tries strangers' code in a child process.

The number requested, else the number the run has used so far, else one if sums must be
reproducible, else the number of idle cores. Threads of one sum wait for each other: on a busy
machine, two can take ten times as long as one. The processes of a training job share the cores of
their machine.

Templates and patterns can compute forever. `trial` runs them once in a child process with limits.
"""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from soulkit.runs.folder import BEGUN, latest_note, note_start

NAME = "threads"
"""Field of `environment.json` with the number of threads of a start."""
VARIABLE = "OMP_NUM_THREADS"
MOST_THREADS = 1024
"""More than the cores of any machine; with millions, the numeric libraries crash."""
WATCHED = 0.3
"""Seconds for which cores are measured. Load averages still count a command that has just ended,
and not yet one that has just started."""
ALMOST = 0.3
"""Share of a core that may be in use while the core still counts as idle."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
STAT = Path("/proc/stat")
TRIAL_S, TRIAL_MB, LONGEST_S = 2, 512, 60
"""Processor time, additional memory and clock time of a trial."""


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """A number of threads and its reason."""

    number: int
    why: str
    asked: bool = False
    """Whether the user set the number; if not, it is printed."""

    def words(self) -> str:
        """`1 thread (0.4 of 2 cores idle; --threads N)`."""
        return f"{self.number} thread{'s' * (self.number != 1)} ({self.why})"


def take_threads(asked: int | None, folder: Path | None, *, alike: bool = False) -> ThreadChoice:
    """Choose and set the number of threads of this process. `folder`: the run's folder, which may
    not exist yet; `alike`: sums must be reproducible."""
    import torch

    choice = choose_threads(asked, recorded_threads(folder), alike=alike)
    usual_threads()  # cache torch's default before it is changed
    torch.set_num_threads(choice.number)
    return choice


def choose_threads(asked: int | None, recorded: int | None, *, alike: bool) -> ThreadChoice:
    """The number requested, else the recorded one, else one if `alike`, else the idle cores."""
    if asked is not None:
        return ThreadChoice(asked, "--threads", asked=True)
    if (number := _of_variable(os.environ.get(VARIABLE, ""))) is not None:
        return ThreadChoice(number, VARIABLE, asked=True)
    if recorded is not None and (alike or local_processes() == 1):
        return ThreadChoice(recorded, BEGUN)
    return ThreadChoice(1, "for reproducible sums") if alike else idle_core_threads()


def _of_variable(text: str) -> int | None:
    """The first number of `4` or `4,2`; None for anything else or above MOST_THREADS."""
    first = text.partition(",")[0].strip()
    number = int(first) if first.isdecimal() and len(first) <= len(str(MOST_THREADS)) else 0
    return number if 0 < number <= MOST_THREADS else None


@cache
def idle_core_threads() -> ThreadChoice:
    """The number of idle cores at the first call, at least one and at most torch's default."""
    cores, idle, processes = len(allowed_cores()), idle_cores(), local_processes()
    if processes > 1:  # the others may be starting: which cores are idle says little
        idle, why = cores / processes, f"{cores} cores for {processes} processes"
    else:
        why = f"{idle:.1f} of {cores} cores idle"
    number = max(1, min(usual_threads(), math.floor(idle + ALMOST)))
    return ThreadChoice(number, f"{why}; change with --threads N")


def local_processes() -> int:
    """Number of processes of this training job on this machine, as its launcher set it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if re.fullmatch("[1-9][0-9]{0,4}", text) else 1


@cache
def usual_threads() -> int:
    """torch's default: one thread per physical core."""
    import torch

    return torch.get_num_threads()


def allowed_cores() -> set[int]:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def idle_cores() -> float:
    """Number of allowed cores that are idle now, limited by the container's quota."""
    cores = allowed_cores()
    before = core_times(cores)
    time.sleep(WATCHED if before else 0)
    share = idle_share(before, core_times(cores))
    if share is None:  # no /proc/stat: use the mean load of the last minute
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        share = max(0.0, 1 - load / (os.cpu_count() or 1))
    return min(share * len(cores), cpu_quota())


def core_times(cores: set[int], stat: Path = STAT) -> dict[int, tuple[int, int]]:
    """Core → (idle ticks, all ticks) since boot, from the kernel."""
    try:
        lines = [line.split() for line in stat.read_text(encoding="ascii").splitlines()]
        named = {int(w[0][3:]): [int(n) for n in w[1:9]] for w in lines
                 if w and w[0].startswith("cpu") and w[0] != "cpu"}  # fmt: skip
    except (OSError, ValueError):
        return {}
    # user nice system idle iowait irq softirq steal; waiting for a disk counts as idle
    return {core: (n[3] + n[4], sum(n)) for core, n in named.items() if core in cores}


def idle_share(
    before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]
) -> float | None:
    """Idle ticks / all ticks between two readings, for cores in both; None if there are none."""
    pairs = [(before[core], after[core]) for core in before.keys() & after.keys()]
    ticks = sum(late[1] - early[1] for early, late in pairs)
    idle = sum(late[0] - early[0] for early, late in pairs)
    return min(max(idle / ticks, 0.0), 1.0) if ticks > 0 else None


def cpu_quota(file: Path = QUOTA) -> float:
    """Number of cores that the container's quota allows; infinity without a quota."""
    try:
        limit, period = file.read_text(encoding="ascii").split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # `max`, or no such file
        return math.inf


# -- stored with a run -----------------------------------------------------------------------------


def recorded_threads(folder: Path | None) -> int | None:
    """Threads of the run's latest start; None for a new run or an older one."""
    number = latest_note(folder, NAME)
    return number if isinstance(number, int) and number > 0 else None


def note_threads(folder: Path, choice: ThreadChoice) -> None:
    """Record the number of threads with the run's latest start."""
    note_start(folder, {NAME: choice.number})


def trial(function: Callable[[], object], megabytes: int = TRIAL_MB) -> str:
    """Run `function` in a child process; returns why this process should not run it, or "".

    The child may take TRIAL_S seconds and `megabytes` more memory than this process. Its ordinary
    errors do not count: the caller handles them when it runs the function itself.
    """
    if not hasattr(os, "fork"):
        return ""
    if not (child := os.fork()):
        _try(function, megabytes)
    end = time.monotonic() + LONGEST_S
    while not (waited := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(waited[1])
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"it takes more than {TRIAL_S} s"
    return f"it takes more than {megabytes} MB of memory" if code else ""


def _try(function: Callable[[], object], megabytes: int) -> None:
    """The child: run `function` and end the process, with 1 if the memory did not suffice."""
    import resource

    code = 0
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (TRIAL_S, TRIAL_S + 1))
        if (size := Path("/proc/self/statm")).exists():
            most = int(size.read_text().split()[0]) * resource.getpagesize() + (megabytes << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        function()
    except MemoryError:
        code = 1
    finally:
        os._exit(code)
