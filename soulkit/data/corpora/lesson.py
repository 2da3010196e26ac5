"""What supervised training learns from: a conversation, and which of its messages are learned."""

from __future__ import annotations

from dataclasses import dataclass

from soulkit.types import Segment


@dataclass(frozen=True, slots=True)
class Lesson:
    """One conversation after its side was chosen: what is learned stands under `assistant`."""

    segments: tuple[Segment, ...]
    """In order; those with `token_ids` hold exactly what somebody emitted, for `tokenizer`."""
    trained: tuple[bool, ...]
    """Per segment: whether its words are a target. True under `assistant` alone, at least once."""
    source: str
    """The name of its source in this run."""
    key: str
    """`file:row`, for whoever wants to look at it."""
    fact: str = ""
    """What only an expert is told, in mixed contextual self-distillation."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer that `token_ids` belong to; empty where there are none."""
