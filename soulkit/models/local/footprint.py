"""Estimates memory and time of a checkpoint on this machine, without loading it.

Parameters are counted in the headers of the safetensors files and shapes are read from config.json,
in a folder or in the download cache; `SHAPES` lists common models on the Hub. Memory is computed;
time is a roofline estimate with assumed speeds (`SPEEDS`), accurate to a factor of two or three,
and every text that shows it says so.
"""

from __future__ import annotations

import gc
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soulkit.errors import ModelLoadError
from soulkit.models.local.batching import BATCH_TOKENS
from soulkit.models.local.quantize import NF4_BYTES
from soulkit.models.local.weights import cached_folder, json_object, stored_tensors
from soulkit.parse import open_regular
from soulkit.text import byte_size

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class Speed:
    """Assumed sustained rates of a device: floating-point operations and bytes per second."""

    flops: float
    bandwidth: float


SPEEDS = {"cpu": Speed(30e9, 8e9), "cuda": Speed(2e14, 2e12)}
"""Assumed values for one current server core and a current data-centre GPU."""
CARD = 80_000_000_000
"""Bytes of the GPU that a plan assumes where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Memory in bytes and time in seconds that a plan needs here; `words` state the assumptions."""

    memory: int
    seconds: float
    words: str
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes by part; not all of them are in memory at once."""
    fit: str = ""
    """Whether it fits this device, and the settings that make it fit."""
    cards: tuple[str, ...] = ()
    """The same on GPUs of common sizes, one line each; may be empty."""
    ranks: tuple[str, ...] = ()
    """The processes of the job and what travels between them, one line each; empty for one."""


def together(machines: Sequence[Machine]) -> Machine | None:
    """The total of several models on this machine at once; None if none is known."""
    if not any(one.memory or one.seconds for one in machines):
        return None
    parts: Counter[str] = Counter()
    for one in machines:
        parts.update(one.parts)
    return Machine(
        memory=sum(one.memory for one in machines),
        seconds=sum(one.seconds for one in machines),
        words="; ".join(dict.fromkeys(one.words for one in machines)),
        parts=dict(parts),
        fit="; ".join(dict.fromkeys(filter(None, (one.fit for one in machines)))),
        cards=next((one.cards for one in machines if one.cards), ()),
        ranks=next((one.ranks for one in machines if one.ranks), ()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Sizes read from a checkpoint's files, as counts; `itemsize`: bytes per weight on disk."""

    parameters: int
    itemsize: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the feed-forward parts; of a mixture of experts, of those that one token uses."""
    vocabulary: int
    norms: int
    """Width of all norms of a layer together."""

    def cache_bytes(self, rows: int, longest: int, itemsize: int) -> int:
        """Bytes of keys and values for `rows` sequences of `longest` tokens, at most for
        BATCH_TOKENS or one sequence."""
        tokens = min(rows * longest, max(BATCH_TOKENS, longest))
        return tokens * self.layers * 2 * self.keys * itemsize

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all key heads together."""
        return self.kv_heads * self.head_dim

    def weight_bytes(self, size: int, quantize: str) -> int:
        """Bytes of weights of `size` bytes, of which a quantised base packs the linear layers."""
        width = 2 * (self.queries + self.keys) + 3 * self.intermediate
        packed = 0 if quantize == "none" else self.layers * self.hidden * width
        return round(packed * NF4_BYTES) + (self.parameters - packed) * size

    def lora_parameters(self, rank: int) -> int:
        """Parameters of adapters on all linear layers of typical transformer blocks."""
        attention = 4 * self.hidden + 2 * self.queries + 2 * self.keys
        return rank * self.layers * (attention + 3 * (self.hidden + self.intermediate))

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
    """The sizes of a checkpoint folder or of a model on the Hub; None if they are unknown.

    For a model on the Hub, the download cache is read, else `SHAPES`.
    """
    folder = _folder_of(model)
    if folder is None:
        return _known_shape(str(model))
    try:
        text = _language_config(folder)
        tensors = []
        for path in sorted(folder.glob("*.safetensors")):
            with open_regular(path) as file:
                tensors += stored_tensors(file)
    except (OSError, ValueError, ModelLoadError):
        return None
    if not tensors:  # only the configuration is in the cache
        return _known_shape(str(model))
    layers, hidden, heads, vocabulary = (
        _count(text.get(name))
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    )
    if not (layers and hidden and heads and vocabulary):
        return None
    kv_heads = _count(text.get("num_key_value_heads")) or heads
    head_dim = _count(text.get("head_dim")) or hidden // heads
    experts = _count(text.get("num_experts_per_tok")) or 1
    widths = (text.get("moe_intermediate_size"), text.get("intermediate_size"))
    width = next(filter(None, map(_count, widths)), 4 * hidden)
    first = [one for one in tensors if ".layers.0." in one.name and "vision" not in one.name]
    many = {"q_norm": heads, "k_norm": kv_heads}
    norms = sum(
        one.shape[0] * (many.get(one.name.split(".")[-2], 1) if one.shape[0] == head_dim else 1)
        for one in first if one.name.endswith("norm.weight") and len(one.shape) == 1
    )  # fmt: skip
    return Footprint(
        parameters=sum(math.prod(one.shape) for one in tensors),
        itemsize=max(_BYTES.get(one.dtype, 4) for one in tensors),
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        intermediate=width * experts, vocabulary=vocabulary, norms=norms or 2 * hidden,
    )  # fmt: skip


def _count(value: Any) -> int:
    """A positive number of config.json, or the largest of a list for all layers; else 0."""
    numbers = value if isinstance(value, list) else [value]
    return max((one for one in numbers if isinstance(one, int) and one > 0), default=0)


def _folder_of(model: str | Path) -> Path | None:
    """The folder `model`, or that of a Hub id in the download cache; None if there is none."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    where, _, revision = str(model).partition("@")
    return cached_folder(where, revision or None)


SHAPES = {
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151_936, 1, 0),
    "qwen3-1.7b": (28, 2048, 16, 8, 128, 6144, 151_936, 1, 0),
    "qwen3-4b": (36, 2560, 32, 8, 128, 9728, 151_936, 1, 0),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12_288, 151_936, 2, 0),
    "qwen3-14b": (40, 5120, 40, 8, 128, 17_408, 151_936, 2, 0),
    "qwen3-32b": (64, 5120, 64, 8, 128, 25_600, 151_936, 2, 0),
    "qwen3-vl-2b": (28, 2048, 16, 8, 128, 6144, 151_936, 1, 407_000_000),
    "qwen3-vl-4b": (36, 2560, 32, 8, 128, 9728, 151_936, 1, 415_000_000),
    "qwen3-vl-8b": (36, 4096, 32, 8, 128, 12_288, 151_936, 2, 576_000_000),
    "qwen2.5-0.5b": (24, 896, 14, 2, 64, 4864, 151_936, 1, 0),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 128, 8960, 151_936, 1, 0),
    "qwen2.5-3b": (36, 2048, 16, 2, 128, 11_008, 151_936, 1, 0),
    "qwen2.5-7b": (28, 3584, 28, 4, 128, 18_944, 152_064, 2, 0),
    "qwen2.5-14b": (48, 5120, 40, 8, 128, 13_824, 152_064, 2, 0),
    "qwen2.5-32b": (64, 5120, 40, 8, 128, 27_648, 152_064, 2, 0),
    "llama-3.2-1b": (16, 2048, 32, 8, 64, 8192, 128_256, 1, 0),
    "llama-3.2-3b": (28, 3072, 24, 8, 128, 8192, 128_256, 1, 0),
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14_336, 128_256, 2, 0),
    "meta-llama-3-8b": (32, 4096, 32, 8, 128, 14_336, 128_256, 2, 0),
}
"""Published bfloat16 models by the start of their name: layers, hidden size, heads, key heads,
width of a head, feed-forward width, vocabulary, embedding matrices (1: the head shares it),
parameters of the vision part."""
_QUANTISED = re.compile(r"awq|gptq|gguf|fp8|int[48]|[48]bit|mlx|w[48]a")


def _known_shape(name: str) -> Footprint | None:
    short = name.partition("@")[0].rpartition("/")[2].lower()
    if _QUANTISED.search(short):
        return None
    shape = next((SHAPES[one] for one in SHAPES if f"{short}-".startswith(f"{one}-")), None)
    if shape is None:
        return None
    layers, hidden, heads, kv_heads, head_dim, width, vocabulary, tables, vision = shape
    both = (heads + kv_heads) * head_dim
    return Footprint(
        parameters=layers * hidden * (2 * both + 3 * width) + tables * vocabulary * hidden + vision,
        itemsize=2, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, intermediate=width, vocabulary=vocabulary,
        norms=2 * hidden + both * short.startswith("qwen3"),  # Qwen3 norms queries and keys
    )  # fmt: skip


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
        try:
            import torch

            index = device.partition(":")[2]
            return int(torch.cuda.mem_get_info(int(index) if index else None)[0])
        except (ImportError, RuntimeError, AssertionError, ValueError):  # no such GPU here
            return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else int(free) * 1024


def device_memory(device: str) -> tuple[int | None, str]:
    """Free bytes of `device`, of a card of CARD bytes if that GPU is not here, and words for it."""
    free = free_bytes(device)
    if free is None and device_speed(device)[0] == "cuda":
        return CARD, f"{CARD / 1e9:.0f} GB (assumed: this machine has no such GPU)"
    return free, "" if free is None else f"the {byte_size(free)} that are free"


def free_memory() -> None:
    """Release the memory of a model that is no longer referenced."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def context_of(model: str | Path) -> int | None:
    """Maximum context of a model's folder or download, in tokens; None if unknown."""
    folder = _folder_of(model)
    if folder is None:
        return None
    try:
        context = _language_config(folder).get("max_position_embeddings")
    except ModelLoadError:
        return None
    return context if isinstance(context, int) and context > 0 else None


def _language_config(folder: Path) -> dict[str, Any]:
    """The settings of the language part; ModelLoadError if config.json cannot be read."""
    config = json_object(folder / "config.json")
    inner = config.get("text_config")
    return {**config, **(inner if isinstance(inner, dict) else {})}
