"""RLTF with self-distillation (algorithms §4): refined rollouts regressed onto the plain prompt.

Each copy is weighted by its reward minus the mean reward of the prompt's drafts, which is the gain
from feedback. There is no ratio, so nothing is clipped. Drafts and refined rollouts are trained as
first and second turn, each with its own baseline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar

from soulkit.config import Settings, setting
from soulkit.train.objectives.base import Objective, no_slot, scored_records
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record


class AuxSettings(Settings):
    """Settings of methods that teach the plain prompt from refined rollouts, along with RL."""

    aux_weight: float = setting(
        1.0,
        ge=0,
        section="Objective",
        help="Weight of the loss that teaches refined rollouts without feedback.",
    )


def aux_remark(config: AuxSettings) -> str:
    """A remark if the weight is 0; else empty."""
    if config.aux_weight > 0:
        return ""
    return "aux_weight is 0: refined rollouts teach nothing about prompts without feedback"


@dataclass(frozen=True, slots=True, kw_only=True)
class RLTF(Objective):
    names: ClassVar = {"rltf-sd": "Reward-weighted regression on refined rollouts."}
    settings: ClassVar = AuxSettings
    uses_feedback: ClassVar = True
    refines: ClassVar = True

    aux_weight: float = 1.0
    """Weight of the regression."""
    name: str = "rltf-sd"

    @classmethod
    def of(cls, config: AuxSettings) -> RLTF:
        return cls(aux_weight=config.aux_weight)

    @classmethod
    def remark(cls, config: AuxSettings) -> str:
        return aux_remark(config)

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        drafts, refined = scored_records(records, "draft"), scored_records(records, "refined")
        baseline = mean_rewards(drafts)
        sequences = [s for r in drafts for s in sequences_of(r, "draft", renderer)]
        for record in refined:
            sequences += sequences_of(record, "refined", renderer)
            gain = (record.score.reward or 0.0) - baseline[record.example_id]
            copies = sequences_of(record, "copy", renderer, self.aux_weight)
            sequences += [
                replace(c, loss="regression", compared=False, advantage=gain) for c in copies
            ]
        return sequences


def mean_rewards(drafts: Sequence[Record]) -> dict[str, float]:
    """Mean reward of each example's scored drafts."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for draft in drafts:
        if draft.score.reward is not None:
            rewards[draft.example_id].append(draft.score.reward)
    return {example: fmean(values) for example, values in rewards.items()}
