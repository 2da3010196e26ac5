"""Estimates memory and time of a checkpoint on this machine, without loading it.

Parameters are counted from the headers of the safetensors files, shapes come from config.json.
Memory is computed; time is a roofline estimate with assumed speeds (`SPEEDS`), accurate to a factor
of two or three, and every text that shows it says so.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.models.local.weights import stored_tensors

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


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


def footprint(model: str | Path) -> Footprint | None:
    """The sizes of a checkpoint folder; None if it is not a folder or cannot be read."""
    folder = Path(model).expanduser()
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
