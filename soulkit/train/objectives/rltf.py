"""RLTF with self-distillation (algorithms §4): refined rollouts regressed onto the plain prompt.

Each copy is weighted by how far its reward lies above the mean of the prompt's drafts: what
feedback was worth, whoever else was refined. There is no ratio, so nothing is clipped. Drafts and
refined rollouts are trained as the first and the second turn, each with a baseline of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective, no_slot, scored
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RLTF(Objective):
    aux_weight: float = 1.0
    """Weight of the regression."""
    name: str = "rltf-sd"
    uses_feedback: bool = True
    refines: bool = True

    @classmethod
    def of(cls, config: TrainConfig) -> RLTF:
        return cls(aux_weight=config.aux_weight)

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        drafts, refined = scored(records, "draft"), scored(records, "refined")
        baseline = mean_rewards(drafts)
        found = [s for r in drafts for s in sequences_of(r, "draft", renderer)]
        for record in refined:
            found += sequences_of(record, "refined", renderer)
            gain = (record.score.reward or 0.0) - baseline[record.example_id]
            copies = sequences_of(record, "copy", renderer, self.aux_weight)
            found += [replace(c, loss="regression", compared=False, advantage=gain) for c in copies]
        return found


def mean_rewards(drafts: Sequence[Record]) -> dict[str, float]:
    """Mean reward of each example's scored drafts."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for draft in drafts:
        if draft.score.reward is not None:
            rewards[draft.example_id].append(draft.score.reward)
    return {example: fmean(values) for example, values in rewards.items()}
