"""Ditto (algorithms §3): drafts and copies share one group; refined rollouts have their own.

A copy is a refined rollout without the feedback in its prompt. Raising its probability under the
plain prompt teaches the actor to do without feedback what it did with feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from soulkit.config import Settings, setting
from soulkit.train.objectives.base import Objective, no_slot
from soulkit.train.objectives.sequences import Part, Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record


class DittoSettings(Settings):
    lambda_fb: float = setting(
        1.0, ge=0, section="Objective", help="Weight of the loss on rollouts that saw feedback."
    )
    only_copy: bool = setting(False, section="Objective", help="Ablation: train only on copies.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ditto(Objective):
    names: ClassVar = {"ditto": "Learn from verbal feedback to act without it."}
    settings: ClassVar = DittoSettings
    uses_feedback: ClassVar = True
    refines: ClassVar = True

    lambda_fb: float = 1.0
    """Weight of the feedback-conditioned component."""
    only_copy: bool = False
    """Ablation: train only copies. Drafts still set the baseline."""
    name: str = "ditto"

    @classmethod
    def of(cls, config: DittoSettings) -> Ditto:
        return cls(lambda_fb=config.lambda_fb, only_copy=config.only_copy)

    @classmethod
    def remark(cls, config: DittoSettings) -> str:
        alone = config.lambda_fb == 0
        return "lambda_fb is 0: refined rollouts are trained only as copies" if alone else ""

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        weights: dict[Part, float] = {
            "draft": 0.0 if self.only_copy else 1.0,
            "copy": 1.0,
            "refined": 0.0 if self.only_copy else self.lambda_fb,
        }
        sequences: list[TrainSequence] = []
        for record in records:
            parts: tuple[Part, ...] = ("draft",) if record.kind == "draft" else ("copy", "refined")
            if record.score.scored:
                for part in parts:
                    sequences += sequences_of(record, part, renderer, weights[part])
        if self.lambda_fb == 0 and not self.only_copy:
            # An ablation over λ must not change the denominator of the other parts.
            return [replace(s, counted=s.part == "refined") for s in sequences]
        return sequences
