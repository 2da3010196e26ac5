"""The memory that one forward and backward pass of a training takes, and the choice of its size.

A pass holds the weights, the trained weights with gradients and AdamW moments, what the layers save
for the backward pass, and some chunks of logits. Activation checkpointing saves only the input of
every layer, and computes one layer at a time again.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from soulkit.models.local.footprint import Footprint, device_speed
from soulkit.train.config import TOKENS_PER_BATCH, TrainConfig

Kind = Literal["cpu", "cuda"]
_ACTIVATIONS = 14
"""Approximate numbers stored per token, layer and hidden unit for the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes by part."""

    weights: int
    """The base; with all weights trained, they count as `trained`."""
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
    memory: TrainingMemory | None
    """None for a model of unknown size."""
    words: str
    """The choice and its reason in one line."""


def training_memory(
    config: TrainConfig, model: Footprint, *, tokens: int, checkpointing: bool, kind: Kind
) -> TrainingMemory:
    """The memory of a forward and backward pass over `tokens`."""
    itemsize = 4 if config.full else model.number_bytes(config.dtype, kind)
    # Checkpointing: activations of one layer, inputs of all layers.
    saved = round(tokens * (1 / model.layers + 1 / 14)) if checkpointing else tokens
    trained = model.parameters if config.full else model.lora_parameters(config.lora.r)
    return TrainingMemory(
        weights=0 if config.full else model.parameters * itemsize,
        trained=16 * trained,
        activations=saved * model.hidden * model.layers * _ACTIVATIONS * itemsize,
        logits=saved * model.vocabulary * 8,
        workspace=0,
    )


def choose_pass(
    config: TrainConfig, model: Footprint | None, kind: Kind, free: int | None
) -> PassChoice:
    """The pass of a training on a device of this `kind` with `free` bytes; None: unknown."""
    checkpointing = config.activation_checkpointing
    # A lesson longer than the budget gets a pass of its own.
    tokens = max(config.tokens_per_batch or TOKENS_PER_BATCH[kind], config.lesson_tokens or 0)
    memory = None if model is None else training_memory(
        config, model, tokens=tokens, checkpointing=checkpointing, kind=kind
    )  # fmt: skip
    return PassChoice(checkpointing=checkpointing, tokens=tokens, memory=memory, words="")


def expected_memory(config: TrainConfig, model: Footprint) -> TrainingMemory:
    """The memory of the pass that a training with `config` would choose on this machine."""
    kind: Kind = "cuda" if device_speed(config.device)[0] == "cuda" else "cpu"
    memory = choose_pass(config, model, kind, None).memory
    assert memory is not None
    return memory
