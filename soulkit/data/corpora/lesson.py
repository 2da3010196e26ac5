"""What supervised training learns from: a conversation, and which of its messages are learned."""

from __future__ import annotations

from dataclasses import dataclass

from soulkit.data.corpora.table import ASSISTANT, HUMAN
from soulkit.types import Segment

OPENING = "(Nobody has spoken yet. You begin.)"
"""What somebody replies to who opens a conversation without a system prompt."""


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
    side: str = HUMAN
    """Who is learned: `human`, `assistant`, or a speaker's name."""

    def speaker(self, segment: Segment) -> str:
        """Who says a segment, in the words of the conversation and not in its roles."""
        if segment.role not in ("user", "assistant"):
            return segment.role
        if segment.text == OPENING:
            return "opening"
        own = {HUMAN: "person", ASSISTANT: "assistant"}.get(self.side, self.side)
        other = {HUMAN: "assistant", ASSISTANT: "person"}.get(self.side, "others")
        return own if segment.role == "assistant" else other
