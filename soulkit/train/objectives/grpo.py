"""GRPO (algorithms §2): clipped policy gradient on drafts, normalised within a prompt's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soulkit.train.sequences import Renders, TrainSequence, sequences_of
from soulkit.types import Record


@dataclass(frozen=True, slots=True)
class GRPO:
    name: str = "grpo"
    uses_feedback: bool = False

    def sequences(self, records: Sequence[Record], renderer: Renders) -> list[TrainSequence]:
        drafts = (r for r in records if r.kind == "draft" and r.score.scored)
        return [s for record in drafts for s in sequences_of(record, "draft", renderer)]
