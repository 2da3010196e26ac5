"""Estimates memory and time of a checkpoint on this machine, and chooses the number of threads.

Nothing is loaded: parameters are counted from the headers of the safetensors files, shapes come
from config.json. Memory is computed; time is a roofline estimate with assumed speeds (`SPEEDS`),
accurate to a factor of two or three, and every text that shows it says so.

Threads: the number requested, else the number the run has used so far, else one if sums must be
reproducible, else the number of idle cores. Threads of one sum wait for each other: on a busy
machine, two can take ten times as long as one.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from soulkit.errors import RunError
from soulkit.models.local.weights import stored_tensors
from soulkit.runs.folder import is_run, note_start, read_environment

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
_ACTIVATIONS = 14
"""Approximate numbers stored per token, layer and hidden unit for the backward pass."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Assumed sustained rates of a device: floating-point operations and bytes per second."""

    flops: float
    bandwidth: float


SPEEDS = {"cpu": Speed(30e9, 8e9), "cuda": Speed(2e14, 2e12)}
"""`cpu` is one core. Assumed values for a current server core and a current data-centre GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory in bytes and time in seconds that a plan needs here; `words` state the assumptions."""

    memory: int
    seconds: float
    words: str


def together(machines: Sequence[Machine]) -> Machine | None:
    """The total of `machines` that run at once on this machine; None if none is known."""
    if not any(one.memory or one.seconds for one in machines):
        return None
    words = "; ".join(dict.fromkeys(one.words for one in machines))
    memory, seconds = sum(one.memory for one in machines), sum(one.seconds for one in machines)
    return Machine(memory=memory, seconds=seconds, words=words)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Sizes read from a checkpoint's files, as counts; `itemsize`: bytes per weight on disk."""

    parameters: int
    itemsize: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def cache_bytes(self, rows: int, longest: int, itemsize: int) -> int:
        """Bytes of keys and values for `rows` sequences of `longest` tokens."""
        return rows * longest * self.layers * 2 * self.kv_heads * self.head_dim * itemsize

    def training_bytes(self, tokens: int, rank: int, itemsize: int, full: bool) -> int:
        """Bytes of activations for `tokens`, and of the trained weights and their optimizer
        state."""
        activations = tokens * self.hidden * self.layers * _ACTIVATIONS * itemsize
        trained = self.parameters if full else self.lora_parameters(rank)
        return activations + tokens * self.vocabulary * 8 + 16 * trained

    def lora_parameters(self, rank: int) -> int:
        """Approximate parameters of adapters on all linear layers of typical transformer blocks."""
        kv = self.kv_heads * self.head_dim
        attention = 4 * self.hidden + 2 * kv + 2 * self.heads * self.head_dim
        return rank * self.layers * (attention + 3 * 5 * self.hidden)

    def seconds(
        self, prompt: float, reply: float, trained: float, batch: int, speed: Speed
    ) -> float:
        """Seconds to sample `reply` tokens after `prompt` tokens in batches of `batch`, and to
        train on `trained` tokens (three times the work of a forward pass)."""
        work = 2 * self.parameters
        decode = max(work * batch / speed.flops, self.parameters * self.itemsize / speed.bandwidth)
        return (prompt + 3 * trained) * work / speed.flops + reply / batch * decode

    def number_bytes(self, dtype: str, device: str) -> int:
        """Bytes per weight of a model loaded as `dtype`; auto: 4 on a CPU, else as in the files."""
        kind, _ = device_speed(device)
        named = {"float32": 4, "bfloat16": 2, "float16": 2}
        return named.get(dtype, 4 if kind == "cpu" else self.itemsize)

    def on(
        self, device: str, memory: float, *, prompt: float = 0, reply: float = 0,
        trained: float = 0, batch: int = 1,
    ) -> Machine:  # fmt: skip
        """`memory` and the estimated time on `device`, with the assumptions in words."""
        kind, speed = device_speed(device)
        millions = self.parameters / 1e6
        count = f"{millions / 1e3:.1f} billion" if millions >= 1e3 else f"{millions:.1f} million"
        return Machine(
            memory=round(memory),
            seconds=self.seconds(prompt, reply, trained, batch, speed),
            words=f"{count} parameters on {kind} at an assumed {speed.flops / 1e9:,.0f} GFLOP/s; "
            "accurate to a factor of two or three",
        )


def footprint(folder: Path) -> Footprint | None:
    """The sizes of a checkpoint folder; None if it is not a folder or cannot be read."""
    try:
        text = _language_config(folder)
        tensors = []
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                tensors += stored_tensors(file)
    except (OSError, ValueError):
        return None
    count = sum(math.prod(one.shape) for one in tensors)
    shape = [text.get(k) for k in ("num_hidden_layers", "hidden_size", "num_attention_heads",
                                   "vocab_size")]  # fmt: skip
    if not count or not all(isinstance(n, int) and n > 0 for n in shape):
        return None
    layers, hidden, heads, vocabulary = (int(n) for n in shape if n is not None)
    return Footprint(
        parameters=count,
        itemsize=max(_BYTES.get(one.dtype, 4) for one in tensors),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or hidden // heads),
        vocabulary=vocabulary,
    )


def device_speed(device: str) -> tuple[str, Speed]:
    """The kind of `device` (`auto`: a GPU if torch finds one) and its assumed speed."""
    if device == "auto":
        try:
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        except ImportError:
            device = "cpu"
    if device.startswith("cuda"):
        return "cuda", SPEEDS["cuda"]
    cores, one = os.cpu_count() or 1, SPEEDS["cpu"]
    return "cpu", Speed(one.flops * cores, one.bandwidth * min(cores, 4))


def free_bytes(device: str) -> int | None:
    """Free memory of `device` (`cpu`, `cuda:0`, `auto`) in bytes; None if unknown."""
    kind, _ = device_speed(device)
    if kind == "cuda":
        import torch

        index = device.partition(":")[2]
        return int(torch.cuda.mem_get_info(int(index) if index else None)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else int(free) * 1024


def free_memory() -> None:
    """Release the memory of a model that is no longer referenced."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def context_of(folder: Path) -> int | None:
    """Maximum context of the model in `folder`, in tokens; None if unknown."""
    try:
        context = _language_config(folder).get("max_position_embeddings")
    except (OSError, ValueError):
        return None
    return context if isinstance(context, int) and context > 0 else None


def _language_config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {**config, **(config.get("text_config") or {})}


# -- threads ---------------------------------------------------------------------------------------


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
    if recorded is not None:
        return ThreadChoice(recorded, "as at the start of this run")
    return ThreadChoice(1, "for reproducible sums") if alike else idle_core_threads()


def _of_variable(text: str) -> int | None:
    """The first number of `4` or `4,2`; None for anything else or above MOST_THREADS."""
    first = text.partition(",")[0].strip()
    number = int(first) if first.isdecimal() and len(first) <= len(str(MOST_THREADS)) else 0
    return number if 0 < number <= MOST_THREADS else None


@cache
def idle_core_threads() -> ThreadChoice:
    """The number of idle cores at the first call, at least one and at most torch's default."""
    cores, idle = len(allowed_cores()), idle_cores()
    number = max(1, min(usual_threads(), math.floor(idle + ALMOST)))
    return ThreadChoice(number, f"{idle:.1f} of {cores} cores idle; change with --threads N")


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
    if folder is None or not is_run(folder):
        return None
    try:
        noted = read_environment(folder)
    except RunError:  # reported when the run is opened
        return None
    starts = [noted, *(one for one in noted.get("resumed", ()) if isinstance(one, dict))]
    numbers = [one[NAME] for one in starts if isinstance(one.get(NAME), int)]
    return numbers[-1] if numbers and numbers[-1] > 0 else None


def note_threads(folder: Path, choice: ThreadChoice) -> None:
    """Record the number of threads with the run's latest start."""
    note_start(folder, {NAME: choice.number})
