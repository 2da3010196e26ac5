"""The memory of a forward and backward pass in training, and the choice of its size.

A pass holds the weights, the trained weights with gradients and AdamW moments, what the layers save
for the backward pass, and a few chunks of logits. Activation checkpointing saves only the input of
every layer, and computes one layer at a time again. The formulas follow from the tensors that
transformers' layers save, and agree with measured peaks within 15 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from soulkit.errors import RunError
from soulkit.models.local.footprint import Footprint, device_speed, footprint, free_bytes
from soulkit.runs.folder import BEGUN, latest_note, note_start
from soulkit.text import byte_size, one_line
from soulkit.train.config import TOKENS_PER_BATCH, TrainConfig
from soulkit.train.ranks.launch import place_in_job

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda"]
CHUNK = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Number of logits computed at once, by device."""
ALIVE = 5
"""Chunks of logits in memory at once: logits, scaled logits, their gradients and temporary ones."""
WORKSPACE = {"cpu": 0, "cuda": 1 << 30}
"""Bytes that the driver and the libraries of a device take."""
USABLE = 0.9
"""Share of the free memory that a pass may fill; the rest is lost between blocks."""
LARGE, ROOMY = 4, 0.25
"""A pass on a CPU has so many times the default tokens if it fits this share of the free memory.
Only large groups fill it (`packing.ENOUGH`)."""
AT_ONCE = 3
"""Layers whose pieces a rank of a sharded job has put together: the layer in use, the next one, and
the buffer of the exchange. Assumed, not measured."""
LEAST = 1024
"""The smallest number of tokens per pass that is chosen."""
NAME = "pass"
"""Field of `environment.json` with the choice of a start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes by part."""

    weights: int
    """The base and a teacher model; with all weights trained, they count as `trained`."""
    trained: int
    """The adapter, or all weights, with gradients and AdamW moments."""
    activations: int
    logits: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(astuple(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassChoice:
    """Size of a forward pass in tokens, and whether its activations are computed again."""

    checkpointing: bool
    tokens: int
    """Of a normal pass; a longer sequence has a pass of its own."""
    memory: TrainingMemory | None
    """None for a model of unknown size."""
    words: str = ""
    """The choice and its reason in one line."""

    @property
    def needs(self) -> int:
        return self.memory.total if self.memory else 0

    @property
    def size(self) -> str:
        again = "on" if self.checkpointing else "off"
        return f"{self.tokens:,} tokens per pass, activation checkpointing {again}"

    def fits(self, free: int | None) -> bool:
        return free is None or self.needs <= USABLE * free


def training_memory(
    config: TrainConfig, model: Footprint, *, tokens: int, checkpointing: bool, kind: Kind
) -> TrainingMemory:
    """The memory of a forward and backward pass over `tokens`."""
    size = 4 if config.full else model.number_bytes(config.dtype, kind)
    trained = model.parameters if config.full else model.lora_parameters(config.lora.r)
    logits = ALIVE * 4 * min(CHUNK[kind], tokens * model.vocabulary)
    saved, width = tokens * _layer_bytes(config, model, size), model.hidden  # of one layer
    whole = 4 * width if config.full else 0  # times a height: the gradient of one matrix
    # Start of the backward pass: embeddings, last norm and the states that are read, with chunks of
    # logits or five tensors of the norm in float32.
    first = tokens * width * (4 + 2 * size)
    first += max(logits + whole * model.vocabulary, 20 * tokens * width)
    # Backward pass of a feed-forward part: four tensors.
    second = 2 * tokens * size * (model.intermediate + width) + whole * model.intermediate
    if config.quantize != "none":  # one matrix is unpacked for a product
        second += size * width * model.intermediate
    if checkpointing:
        saved, second = tokens * width * size, second + saved
    ranks, head = split_ranks(config), model.vocabulary * model.hidden
    each = 20 if config.teacher == "ema" else 16  # bytes of a trained weight
    base = 0 if config.full else model.weight_bytes(size, config.quantize)
    rest = 8 * (model.parameters - head) if config.full else base - size * head
    at_once = AT_ONCE * rest // model.layers if ranks > 1 else 0
    return TrainingMemory(
        weights=_teacher_bytes(config, size) + _of_rank(base, size * head, ranks) + at_once,
        trained=_of_rank(each * trained, each * (head if config.full else trained), ranks),
        activations=model.layers * saved + max(first, second) - logits,
        logits=logits,
        workspace=WORKSPACE[kind],
    )


def _teacher_bytes(config: TrainConfig, size: int) -> int:
    """Bytes of a second model that scores drafts; 0 if there is none or its size is unknown."""
    name = config.teacher_model or (config.model if config.method == "opd" else None)
    teacher = footprint(name) if name else None
    if teacher is None:
        return 0
    head = teacher.vocabulary * teacher.hidden
    return _of_rank(teacher.parameters * size, head * size, split_ranks(config))


def split_ranks(config: TrainConfig) -> int:
    """Number of ranks over which the weights of the base are split; 1 without --shard."""
    return max(place_in_job()[1], config.training_gpus) if config.shard else 1


def _of_rank(total: int, whole: int, ranks: int) -> int:
    """Bytes on each rank, of which `whole` are not split (nothing, if there is nothing)."""
    return total and whole - (whole - total) // ranks


def _layer_bytes(config: TrainConfig, model: Footprint, size: int) -> int:
    """Bytes that a layer saves per token, with numbers of `size` bytes."""
    # Queries, the output of attention and its copy; keys and values, whole and in parts.
    attention = 3 * model.queries + 4 * model.keys
    products = 2 * model.hidden + 4 * model.intermediate
    # Norms save their input in float32; trained ones also its normalised form.
    ours = model.norms if config.full else 7 * config.lora.r
    if config.quantize != "none" and size < 4:
        # PEFT's layers keep a float32 copy of their input, and quantised ones nothing else.
        ours += 9 * model.hidden + model.queries + model.intermediate + 7 * config.lora.r
    return 4 * model.norms + 4 * model.heads + size * (attention + products + ours)


# --- the choice -----------------------------------------------------------------------------------


def choose_pass(
    config: TrainConfig, model: Footprint | None, kind: Kind, free: int | None
) -> PassChoice:
    """The pass of a training on a device of this `kind` with `free` bytes; None: unknown.

    Activations are stored if the default pass fits with them. Else they are computed again, and the
    pass is halved until it fits or has LEAST tokens. With much free memory a CPU's pass is larger.
    """
    wanted = config.activation_checkpointing
    tokens = config.tokens_per_batch or TOKENS_PER_BATCH[kind]
    if model is None:
        again = wanted == "on" or (wanted == "auto" and kind == "cuda")
        only = PassChoice(checkpointing=again, tokens=tokens, memory=None)
        return replace(only, words=f"{only.size}: the size of {config.model} is unknown")
    sizes = [(again, tokens) for again, other in ((False, "on"), (True, "off")) if wanted != other]
    large = (wanted == "on", LARGE * tokens)
    # A lesson is not cut: it gets a pass of its own, and smaller passes than it save nothing.
    longest = config.lesson_tokens or 0
    while config.tokens_per_batch is None and tokens > max(LEAST, longest):
        tokens //= 2
        sizes.append((wanted != "off", tokens))
    roomy, *options = [
        PassChoice(checkpointing=again, tokens=size, memory=training_memory(
            config, model, tokens=max(size, longest), checkpointing=again, kind=kind))
        for again, size in (large, *sizes)
    ]  # fmt: skip
    if kind == "cpu" and config.tokens_per_batch is None and free and roomy.needs <= ROOMY * free:
        options = [roomy]
    chosen = next((one for one in options if one.fits(free)), options[-1])
    of = "" if free is None else f" of {byte_size(free)} free"
    words = f"{chosen.size}: about {byte_size(chosen.needs)}{of}"
    if chosen.checkpointing and not options[0].checkpointing:
        words += f" (without checkpointing {byte_size(options[0].needs)})"
    return replace(chosen, words=words if chosen.fits(free) else f"{words}; this may not fit")


def pass_beside(
    config: TrainConfig, model: Footprint | None, kind: Kind, free: int | None, kept_free: int
) -> PassChoice:
    """As `choose_pass`, but it leaves `kept_free` bytes of the free memory to vLLM if it can."""
    if kept_free and free is not None:
        room = free - kept_free
        choice = choose_pass(config, model, kind, room)
        if choice.fits(room):
            words = f"{choice.words}, with {byte_size(kept_free)} left to vLLM"
            return replace(choice, words=words)
    return choose_pass(config, model, kind, free)


def take_pass(config: TrainConfig, base: str, folder: Path, kept_free: int = 0) -> PassChoice:
    """The pass of the run in `folder`: as at its start, else chosen by the free memory."""
    model, kind, free = footprint(base), device_kind(config.device), free_bytes(config.device)
    match latest_note(folder, NAME):
        case {"checkpointing": bool(again), "tokens": int(tokens)} if tokens > 0:
            longest = max(tokens, config.lesson_tokens or 0)
            memory = None if model is None else training_memory(
                config, model, tokens=longest, checkpointing=again, kind=kind
            )  # fmt: skip
            choice = PassChoice(checkpointing=again, tokens=tokens, memory=memory)
            return replace(choice, words=f"{choice.size}: {BEGUN}")
    return pass_beside(config, model, kind, free, kept_free)


def note_pass(folder: Path, choice: PassChoice) -> None:
    """Record the choice with the run's latest start."""
    note_start(folder, {NAME: {"checkpointing": choice.checkpointing, "tokens": choice.tokens}})


@contextmanager
def memory_advice(config: TrainConfig, out: Path) -> Iterator[None]:
    """Context in which a GPU out of memory is a RunError that names the settings that save it."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        noted = latest_note(out, NAME) or {}
        half = max(1, noted.get("tokens", TOKENS_PER_BATCH["cuda"]) // 2)
        ways = [] if noted.get("checkpointing") else ["--activation-checkpointing on"]
        ways += [f"--tokens-per-batch {half}", "a lower --batch-size or --max-tokens"]
        ways += ["--quantize nf4"] if config.quantize == "none" and not config.full else []
        raise RunError(
            "The GPU ran out of memory.",
            one_line(str(error), 200),
            f"Start a new run (another --out) with {', '.join(ways[:-1])} or {ways[-1]}. "
            "If other programs use this GPU, stop them, and run the same command again.",
        ) from error


def device_kind(device: str) -> Kind:
    return "cuda" if device_speed(device)[0] == "cuda" else "cpu"


# --- vLLM servers on the same card ----------------------------------------------------------------


SERVER_WORKSPACE, ASLEEP = 4 << 30, 2 << 30
"""Assumed bytes of a server without weights and cache (CUDA context, activations of a prefill,
log-probs of a batch, CUDA graphs), and of a server that sleeps. Not measured."""
CACHED = 1 << 17
"""Tokens in the cache of a server that samples well: about 100 rollouts at once."""
SPARE, SHARES = 0.02, 1000
"""Share of a card that stays free, and the number of parts in which a card is divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Memory of a GPU in bytes; `held`: what this process has reserved."""

    total: int
    free: int
    held: int

    def room(self, needed: int) -> int:
        """Bytes for servers if the training needs `needed` in all. The trained model is loaded
        before servers start, so its part is not free any more."""
        return self.free - max(needed - self.held, 0) - int(self.total * SPARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """What a vLLM server takes. `weights` and `token` (keys and values of one token) are in bytes;
    the cache must hold a sequence of `context` tokens; `requests` are served at once."""

    weights: int
    token: int
    context: int
    requests: int

    def with_cache(self, tokens: int) -> int:
        """Bytes with a cache of `tokens`, at least one sequence."""
        return self.weights + SERVER_WORKSPACE + max(tokens, self.context) * self.token

    @property
    def least(self) -> int:
        return self.with_cache(self.context)


def server_memory(
    model: Footprint, dtype: str, *, context: int, requests: int, rank: int
) -> ServerMemory:
    """The memory of a server of `model` that holds two adapters of `rank` (0: none)."""
    size, adapters = model.number_bytes(dtype, "cuda"), 2 * model.lora_parameters(rank)
    return ServerMemory(
        weights=size * (model.parameters + adapters), token=model.cache_bytes(1, 1, size),
        context=context, requests=requests,
    )  # fmt: skip


def gpu_split(card: Card, needed: int, servers: Sequence[ServerMemory]) -> float | None:
    """The share of `card` for each of the servers if the training needs `needed` bytes in all; None
    if they do not fit beside it. No server gets more than a cache for all of its requests, at a
    quarter of the context each."""
    if card.room(needed) <= 0:  # a full card may count as one without memory
        return None
    step = card.total / SHARES
    most = max(one.with_cache(one.requests * one.context // 4) for one in servers)
    parts = min(int(card.room(needed) / len(servers) / step), math.ceil(most / step))
    fits = all(parts * step >= one.least for one in servers)
    return parts / SHARES if fits else None


def card_of(device: torch.device) -> Card:
    """The memory of a GPU now."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return Card(total=total, free=free, held=torch.cuda.memory_reserved(device))


# --- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """What a training takes on a device, by part and in all."""

    choice: PassChoice
    parts: dict[str, int]
    total: int
    fits: bool


def planned_memory(
    config: TrainConfig, model: Footprint, kind: Kind, free: int | None, cache: int = 0
) -> PlannedMemory:
    """The memory on a device with `free` bytes; `cache`: keys and values while it samples, which
    on a GPU are limited to half of what is free then."""
    choice = choose_pass(config, model, kind, free)
    assert choice.memory is not None
    memory = choice.memory
    steady = memory.total - memory.activations - memory.logits
    if kind == "cuda" and free is not None:
        cache = max(0, min(cache, (free - steady) // 2))
    total = max(memory.total, steady + cache)  # the model samples and trains in turns
    trained = "trained weights" if config.full else "adapter"
    parts = {
        "weights": memory.weights, f"{trained}, gradients and optimizer": memory.trained,
        "activations": memory.activations, "logits": memory.logits, "sampler cache": cache,
        "workspace": memory.workspace,
    }  # fmt: skip
    return PlannedMemory(
        choice=choice, parts={name: size for name, size in parts.items() if size}, total=total,
        fits=choice.fits(free) and (free is None or total <= free),
    )  # fmt: skip


CARDS = tuple(size * 10**9 for size in (24, 48, 80))


def card_lines(
    config: TrainConfig, model: Footprint, cache: int, beside: Callable[[int], str]
) -> Iterator[str]:
    """The plan on GPUs of common sizes. `beside`: free bytes → words about other models there."""
    for size in CARDS:
        plan = planned_memory(config, model, "cuda", size, cache)
        verdict, most = "fits", byte_size(plan.total)
        if not plan.fits:
            verdict, most = "does not fit", f"{most}; a pass may fill {USABLE:.0%}"
        words = settings_that_fit(config, model, "cuda", plan, size, beside)
        yield f"on {size / 1e9:.0f} GB: {verdict} ({most}): {words}"


def way_to_fit(config: TrainConfig, model: Footprint, kind: Kind, free: int) -> str:
    """The settings that together make the pass fit in `free` bytes, or the base that would."""
    changes: list[tuple[bool, str, dict[str, object]]] = [
        (config.activation_checkpointing == "off", "remove --activation-checkpointing off",
         {"activation_checkpointing": "auto"}),
        (config.tokens_per_batch is not None, "remove --tokens-per-batch",
         {"tokens_per_batch": None}),
        (config.full, "train an adapter with --lora instead of all weights", {"full": False}),
        (config.training_gpus > 1 and not config.shard, "--shard", {"shard": True}),
        (config.quantize == "none", "--quantize nf4", {"quantize": "nf4"}),
    ]  # fmt: skip
    ways: list[str] = []
    for useful, words, change in changes:
        if useful:
            config, ways = config.model_copy(update=change), [*ways, words]
            if planned_memory(config, model, kind, free).fits:
                return " and ".join(ways)
    most = USABLE * free / planned_memory(config, model, kind, free).total * model.parameters
    smaller = f"a base of at most {most / 1e9:.1f} billion parameters"
    return " and ".join([*ways, "lower --lesson-tokens" if config.lesson_tokens else smaller])


def settings_that_fit(
    config: TrainConfig, model: Footprint, kind: Kind, plan: PlannedMemory, free: int,
    beside: Callable[[int], str],
) -> str:  # fmt: skip
    """The pass of a plan that fits in `free` bytes, else the settings that make it fit."""
    fits = f"{plan.choice.size}{beside(free)}"
    return fits if plan.fits else way_to_fit(config, model, kind, free)
