"""GRPO (algorithms §2): clipped policy gradient on drafts, normalised within a prompt's group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from soulkit.train.objectives.base import Objective, no_slot, scored_records
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPO(Objective):
    names: ClassVar = {"grpo": "Reinforcement learning from scalar rewards."}

    name: str = "grpo"

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        return [
            s for r in scored_records(records, "draft") for s in sequences_of(r, "draft", renderer)
        ]
