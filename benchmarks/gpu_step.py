"""One training step of an 8B model on one GPU: seconds, utilisation, memory.

The model has the shape of Qwen3-8B and random bfloat16 weights created on the GPU, with a LoRA
adapter (r = 32, α = 64, all linear layers). A step is GRPO on one prompt of 8,192 tokens with 16
responses of 256: 12,288 unique tokens, 135,168 as padded rows. It runs
`soulkit.train.model.update`: packing, forward, loss, backward, clipping and AdamW are all timed.

Utilisation is FLOPs / seconds / the measured rate of a bfloat16 matrix product (8192³). *Model*
FLOPs are the minimum that the step needs: 2 per weight and token forward, 2 for the gradient of the
input (not below the first adapter), 6 per adapter weight, the head only where the next token is
trained, and attention over exactly the visible pairs (4 per pair and channel forward, 8 backward).
*Hardware* FLOPs also count recomputation: layers under activation checkpointing, the chunks of the
head, and attention scores in the backward pass.

    python -m benchmarks.gpu_step --json out.json         # the table, about five minutes
    python -m benchmarks.gpu_step --only fused,compiled --profile
    python -m benchmarks.gpu_step --small                 # a tiny model on a CPU

If TRL is installed, its trainer runs the same update.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from soulkit.models.local.tiny import tiny_tokenizer
from soulkit.train.config import TrainConfig
from soulkit.train.model.fused import FusedPart, fuse, fused_parts
from soulkit.train.model.packing import Pack, pack_entries
from soulkit.train.model.policy import Policy
from soulkit.train.model.prepare import prepare_step
from soulkit.train.model.update import Tally, update
from soulkit.train.objectives.sequences import Span, TrainSequence
from soulkit.train.step import with_advantages

MODULES, COMPILE = fused_parts("modules"), fused_parts("compile")


@dataclass(frozen=True)
class Case:
    """The shapes of the model and of the step."""

    model: dict[str, int]
    prompt: int
    group: int
    new: int
    r: int
    device: str
    dtype: str
    matrix: int
    """Side of the square matrices whose product measures the rate."""


LARGE = Case(
    model={
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
        "vocab_size": 151_936, "max_position_embeddings": 40_960,
    },
    prompt=8192, group=16, new=256, r=32, device="cuda", dtype="bfloat16", matrix=8192,
)  # fmt: skip
SMALL = Case(
    model={
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 192,
        "vocab_size": 1024, "max_position_embeddings": 1024,
    },
    prompt=96, group=4, new=16, r=4, device="cpu", dtype="float32", matrix=256,
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One way to compute the same step."""

    name: str
    fused: tuple[FusedPart, ...] = ()
    checkpointing: bool = False
    rows: int | None = None
    """Sequences per micro-batch of padded rows; None: packed."""
    flex_mode: str | None = None
    """torch.compile's mode for the attention kernel."""
    trl: bool = False
    """Use TRL's update, in micro-batches of `rows`."""


VARIANTS = (
    Variant("fused", MODULES),
    Variant("fused+checkpointing", MODULES, checkpointing=True),
    Variant("compiled", COMPILE),
    Variant("compiled+checkpointing", COMPILE, checkpointing=True),
    Variant("plain+checkpointing", (), checkpointing=True),
    Variant("rows1+fused", MODULES, rows=1),
    Variant("rows4+fused+checkpointing", MODULES, checkpointing=True, rows=4),
    Variant("trl1+checkpointing", (), checkpointing=True, rows=1, trl=True),
    Variant("plain", ()),
    Variant("lora+checkpointing", ("lora",), checkpointing=True),
    Variant("rows1+plain+checkpointing", (), checkpointing=True, rows=1),
    Variant("fused+autotune", MODULES, flex_mode="max-autotune-no-cudagraphs"),
)
"""The most informative variants come first, because time may run out."""

ENOUGH = 12.0
"""A step that takes more seconds is timed only once."""


@dataclass(frozen=True)
class Work:
    """FLOPs of one step."""

    model: float
    hardware: float


@dataclass(frozen=True)
class Measured:
    """One row of the table; `seconds` is the median of the timed steps."""

    name: str
    seconds: float
    spread: float
    """Slowest minus fastest timed step, in seconds."""
    planning: float
    """Seconds of the step that the CPU spends on packing."""
    first: float
    """Seconds of the first step, including compilation."""
    passes: int
    computed: int
    """Tokens that the model processed, including padding."""
    unique: int
    mfu: float
    hfu: float
    gib: float | None
    """Peak memory of the GPU's allocator."""
    fused: dict[str, int]


# --- the step -------------------------------------------------------------------------------------


def build_policy(case: Case, variant: Variant) -> tuple[Policy, dict[str, int]]:
    """A new model with random weights and an adapter whose B is not zero."""
    torch.manual_seed(0)
    model = with_adapter(random_model(case), case.r)
    tokenizer = tiny_tokenizer(["word"])
    policy = Policy(
        model,
        tokenizer,
        packing="auto" if variant.rows is None else "off",
        attention="flex" if case.device == "cuda" else "sdpa",
        activation_checkpointing=variant.checkpointing and not variant.trl,
        fused="off",  # counted below
    )
    return policy, fuse(policy.decoder, variant.fused)


def random_model(case: Case) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**case.model, tie_word_embeddings=False, dtype=case.dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, case.dtype))
    try:
        with torch.device(case.device):
            model: Any = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(case.device).manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, 0.02, generator=generator)
    return model


def with_adapter(model: Any, r: int) -> Any:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=r, lora_alpha=2 * r, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    adapted: Any = get_peft_model(model, lora, adapter_name="policy")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.01)
    return adapted


def group_of(case: Case) -> list[TrainSequence]:
    """The sequences of all responses to one prompt, with random rewards."""
    rng = random.Random(0)
    words = case.model["vocab_size"]
    prompt = [rng.randrange(words) for _ in range(case.prompt)]
    members = []
    for rollout in range(case.group):
        ids = (*prompt, *(rng.randrange(words) for _ in range(case.new)))
        trained = (False,) * case.prompt + (True,) * case.new
        members.append(
            TrainSequence(
                Span(ids, trained, ()), "draft", "x", ("x", "reader"), str(rollout), rng.random()
            )
        )
    return members


class Step:
    """One update, from sequences to new weights; call it repeatedly."""

    def __init__(self, case: Case, variant: Variant) -> None:
        self.policy, self.fused = build_policy(case, variant)
        length = case.prompt + case.new
        budget = (
            case.prompt + case.group * case.new if variant.rows is None else variant.rows * length
        )
        self.config = TrainConfig(
            method="grpo", model="random", tasks={"tomi": 1.0}, tokens_per_batch=budget,
            activation_checkpointing=variant.checkpointing,
        )  # fmt: skip
        self.sequences = with_advantages(group_of(case), self.config)
        trained = [parameter for _, parameter in self.policy.trained]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-6)
        self.theirs: Callable[[], float] | None = None
        if variant.trl:
            from benchmarks._gpu_trl import trl_update

            again, rows = variant.checkpointing, variant.rows or 1
            policy = self.policy
            self.theirs = trl_update(policy.model, policy.tokenizer, self.sequences, rows, again)

    def packs(self) -> list[Pack]:
        spans = [s.span for s in self.sequences]
        return self.policy.packs(spans, self.config.tokens_per_batch)

    def __call__(self) -> dict[str, float]:
        if self.theirs is not None:
            return {"loss": self.theirs()}
        prepared = prepare_step(self.policy, self.sequences, self.config)
        chosen = range(len(self.sequences))
        return update(self.policy, self.optimizer, prepared, chosen, self.config, Tally())


# --- counting -------------------------------------------------------------------------------------


def work_of(step: Step, variant: Variant) -> Work:
    """FLOPs of one step, as defined in the module docstring."""
    total = [work_of_pack(step.policy, pack, variant.checkpointing) for pack in step.packs()]
    return Work(sum(w.model for w in total), sum(w.hardware for w in total))


def work_of_pack(policy: Policy, pack: Pack, checkpointing: bool) -> Work:
    config = policy.decoder.config
    tokens, pairs = tokens_and_pairs(pack)
    weights, above, adapter, low = sizes(policy)
    channels = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    linear, lora, attention = 2 * tokens * weights, 2 * tokens * adapter, 4 * pairs * channels
    parents = len(np.unique(pack_entries(pack).parent))
    head = 2 * parents * config.vocab_size * config.hidden_size
    forward = linear + lora + attention
    backward = 2 * tokens * above + 2 * lora - 2 * tokens * low + 2 * attention
    model = forward + backward + 2 * head
    again = forward if checkpointing else 0
    # The chunks of the head and the scores of flash attention are always recomputed.
    return Work(model, model + again + head + attention / 2)


def tokens_and_pairs(pack: Pack) -> tuple[int, int]:
    """Number of positions with a token, and of visible (query, key) pairs without a window."""
    if pack.trie is not None:
        return len(pack.trie), int((pack.trie.depth + 1).sum())
    lengths = [len(span.ids) for span in pack.rows]
    return sum(lengths), sum(n * (n + 1) // 2 for n in lengths)


def sizes(policy: Policy) -> tuple[int, int, int, int]:
    """Numbers of weights: in the layers' matrices, in those whose input needs a gradient, in the
    adapter, and in the A factors whose input needs no gradient."""
    weights = above = adapter = low = 0
    first = policy.decoder.layers[0].self_attn
    lowest = {id(p) for m in (first.q_proj, first.k_proj, first.v_proj) for p in m.parameters()}
    for name, parameter in policy.decoder.layers.named_parameters():
        bottom = id(parameter) in lowest
        if "lora_" in name:
            adapter += parameter.numel()
            low += parameter.numel() if bottom and "lora_A" in name else 0
        elif parameter.ndim == 2:
            weights += parameter.numel()
            above += 0 if bottom else parameter.numel()
    return weights, above, adapter, low


# --- timing ---------------------------------------------------------------------------------------


def matrix_rate(case: Case, repeats: int = 20) -> float:
    """Median FLOPs per second of a product of two random square matrices."""
    shape = (case.matrix, case.matrix)
    a, b = (torch.randn(shape, device=case.device, dtype=getattr(torch, case.dtype)) for _ in "ab")
    for _ in range(5):
        a @ b
    seconds = statistics.median(timed(lambda: a @ b, case.device) for _ in range(repeats))
    return 2 * case.matrix**3 / seconds


def timed(call: Callable[[], Any], device: str) -> float:
    """Seconds of `work`, including the time until the device has finished."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(case: Case, variant: Variant, rate: float, repeats: int, profile: bool) -> Measured:
    """Measure one variant; OutOfMemoryError if it does not fit."""
    with flex_compiled_as(variant.flex_mode):
        step = Step(case, variant)
        if case.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        first = timed(step, case.device)
        seconds: list[float] = []
        while len(seconds) < repeats and sum(seconds) < ENOUGH:
            seconds.append(timed(step, case.device))
        planning = statistics.median(timed(step.packs, "cpu") for _ in range(3))
        if profile:
            print_profile(step, case.device)
    middle, work, packs = statistics.median(seconds), work_of(step, variant), step.packs()
    peak = torch.cuda.max_memory_allocated() / 2**30 if case.device == "cuda" else None
    return Measured(
        name=variant.name, seconds=middle, spread=max(seconds) - min(seconds), planning=planning,
        first=first, passes=len(packs), computed=sum(pack.computed for pack in packs),
        unique=case.prompt + case.group * case.new, mfu=work.model / middle / rate,
        hfu=work.hardware / middle / rate, gib=peak, fused=step.fused,
    )  # fmt: skip


@contextmanager
def flex_compiled_as(mode: str | None) -> Iterator[None]:
    """Context in which FlexAttention is recompiled with torch.compile's `mode`."""
    from torch.nn.attention.flex_attention import flex_attention

    from soulkit.train.model import attention

    if mode is None:
        yield
        return
    plain, kernel = attention.flex_kernel, torch.compile(flex_attention, mode=mode)
    torch.compiler.reset()
    attention.flex_kernel = lambda device: kernel  # type: ignore[assignment]
    try:
        yield
    finally:
        attention.flex_kernel = plain
        torch.compiler.reset()


def print_profile(step: Step, device: str) -> None:
    """Print the operations that take most of the time of a step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    kinds = [ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(ProfilerActivity.CUDA)
    with recording(activities=kinds) as recorded:
        step()
        wait(device)
    order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    print(recorded.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=70))


# --- the command ----------------------------------------------------------------------------------


def chosen(only: str | None, case: Case) -> list[Variant]:
    if only is None:
        there = find_spec("trl") is not None
        plain = [v for v in VARIANTS if there or not v.trl]
        return [v for v in plain if v.flex_mode is None or case.device == "cuda"]
    by_name = {variant.name: variant for variant in VARIANTS}
    unknown = [name for name in only.split(",") if name not in by_name]
    if unknown:
        raise SystemExit(f"unknown variant: {', '.join(unknown)}; choose from {', '.join(by_name)}")
    return [by_name[name] for name in only.split(",")]


def run_all(
    case: Case, variants: Sequence[Variant], rate: float, arguments: argparse.Namespace
) -> tuple[list[Measured], dict[str, str]]:
    """The measured variants and why others failed; starts no variant after the time limit."""
    started = time.monotonic()
    measurements: list[Measured] = []
    without: dict[str, str] = {}
    for variant in variants:
        if time.monotonic() - started > arguments.limit:
            without[variant.name] = "no time left"
            continue
        try:
            measurements.append(measure(case, variant, rate, arguments.repeats, arguments.profile))
            print(f"{variant.name}: {measurements[-1].seconds:.3f} s", flush=True)
        except torch.OutOfMemoryError as error:
            without[variant.name] = str(error).split(". ")[0]
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
    return measurements, without


def table_of(measurements: Sequence[Measured], without: dict[str, str], rate: float) -> Table:
    table = Table(title=f"One GRPO step; matrix products run at {rate / 1e12:.3g} TFLOP/s")
    for column in ("variant", "s", "max - min s", "plan s", "first s", "passes", "computed",
                   "unique tok/s", "MFU", "HFU", "GiB"):  # fmt: skip
        table.add_column(column, justify="left" if column == "variant" else "right")
    for m in measurements:
        table.add_row(
            m.name, f"{m.seconds:.3f}", f"{m.spread:.3f}", f"{m.planning:.3f}", f"{m.first:.1f}",
            str(m.passes), f"{m.computed:,}", f"{m.unique / m.seconds:,.0f}", f"{m.mfu:.1%}",
            f"{m.hfu:.1%}", "" if m.gib is None else f"{m.gib:.1f}",
        )  # fmt: skip
    for name, why in without.items():
        table.add_row(name, why)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--only", help="comma-separated variants: " + ", ".join(
        variant.name for variant in VARIANTS))  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each variant")
    parser.add_argument(
        "--limit", type=float, default=300, help="start no variant after this many seconds"
    )
    parser.add_argument("--profile", action="store_true", help="print the slowest operations")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    case = SMALL if arguments.small else LARGE
    rate = matrix_rate(case)
    measurements, without = run_all(case, chosen(arguments.only, case), rate, arguments)
    console = Console(width=150)
    console.print(table_of(measurements, without, rate))
    if arguments.json:
        numbers = {
            "device": torch.cuda.get_device_name() if case.device == "cuda" else "cpu",
            "torch": torch.__version__, "case": asdict(case), "matrix_rate": rate,
            "measured": [asdict(m) for m in measurements], "not_measured": without,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
