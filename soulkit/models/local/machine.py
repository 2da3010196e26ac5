"""This machine: the memory and time that a checkpoint takes here, and the threads of a run.

Nothing is loaded: the parameters are counted in the headers of the safetensors files, the shapes
stand in config.json. Memory is arithmetic; time is a roofline with assumed speeds (`SPEEDS`), good
to a factor of two or three, and every figure that uses it says so.

Threads: what was asked for, else what the run has had so far, else one where sums must come out the
same, else the cores that are idle. Threads of one sum wait for each other: two of them on a busy
machine can take ten times as long as one.
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
"""Numbers kept for each token, layer and hidden unit for the backward pass, about."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Assumed sustained rates of a device: floating-point operations and bytes per second."""

    flops: float
    bandwidth: float


SPEEDS = {"cpu": Speed(30e9, 8e9), "cuda": Speed(2e14, 2e12)}
"""`cpu` is one core. Assumed, not measured: a current server core and a current data-centre GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a plan takes on this machine, in bytes and seconds; `words` tell the assumptions."""

    memory: int
    seconds: float
    words: str


def together(machines: Sequence[Machine]) -> Machine | None:
    """All of them at once on one machine; None where nothing is known of any."""
    if not any(one.memory or one.seconds for one in machines):
        return None
    words = "; ".join(dict.fromkeys(one.words for one in machines))
    memory, seconds = sum(one.memory for one in machines), sum(one.seconds for one in machines)
    return Machine(memory=memory, seconds=seconds, words=words)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a checkpoint's files say. Sizes are counts, `itemsize` bytes of one weight on disk."""

    parameters: int
    itemsize: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def cache_bytes(self, rows: int, longest: int, itemsize: int) -> int:
        """Keys and values of `rows` sequences of `longest` tokens."""
        return rows * longest * self.layers * 2 * self.kv_heads * self.head_dim * itemsize

    def training_bytes(self, tokens: int, rank: int, itemsize: int, full: bool) -> int:
        """Activations of one pass over `tokens`, with the trained weights and their optimizer."""
        activations = tokens * self.hidden * self.layers * _ACTIVATIONS * itemsize
        trained = self.parameters if full else self.lora_parameters(rank)
        return activations + tokens * self.vocabulary * 8 + 16 * trained

    def lora_parameters(self, rank: int) -> int:
        """Of adapters on all linear layers of the usual block, about."""
        kv = self.kv_heads * self.head_dim
        attention = 4 * self.hidden + 2 * kv + 2 * self.heads * self.head_dim
        return rank * self.layers * (attention + 3 * 5 * self.hidden)

    def seconds(
        self, prompt: float, reply: float, trained: float, batch: int, speed: Speed
    ) -> float:
        """Sampling `reply` tokens after `prompt` ones in batches of `batch`, and training on
        `trained` tokens (three times the work of a forward pass)."""
        work = 2 * self.parameters
        decode = max(work * batch / speed.flops, self.parameters * self.itemsize / speed.bandwidth)
        return (prompt + 3 * trained) * work / speed.flops + reply / batch * decode

    def number_bytes(self, dtype: str, device: str) -> int:
        """Bytes of one number of the loaded model: float32 on a CPU, else as the files have it."""
        kind, _ = device_speed(device)
        named = {"float32": 4, "bfloat16": 2, "float16": 2}
        return named.get(dtype, 4 if kind == "cpu" else self.itemsize)

    def on(
        self, device: str, memory: float, *, prompt: float = 0, reply: float = 0,
        trained: float = 0, batch: int = 1,
    ) -> Machine:  # fmt: skip
        """What `seconds` says of so many tokens on `device`, with its assumptions in words."""
        kind, speed = device_speed(device)
        millions = self.parameters / 1e6
        count = f"{millions / 1e3:.1f} billion" if millions >= 1e3 else f"{millions:.1f} million"
        return Machine(
            memory=round(memory),
            seconds=self.seconds(prompt, reply, trained, batch, speed),
            words=f"{count} parameters on {kind} at an assumed {speed.flops / 1e9:,.0f} GFLOP/s; "
            "right to a factor of two or three",
        )


def footprint(folder: Path) -> Footprint | None:
    """The footprint of a checkpoint folder; None when it is no folder, or not understood."""
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
    """The kind of `device` (`auto`: a GPU when torch sees one) and what is assumed of it."""
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
    """Memory of `device` (`cpu`, `cuda:0`, `auto`) that nobody uses; None where it is not told."""
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
    """Give back the memory of a model that nothing holds any more."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def context_of(folder: Path) -> int | None:
    """Tokens that the model in `folder` has positions for; None where nothing there says so."""
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
