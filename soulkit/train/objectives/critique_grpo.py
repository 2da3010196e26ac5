"""Critique-GRPO (Zhang et al. 2025, arXiv 2506.03106): GRPO over drafts and shaped copies.

Copies of refined rollouts (read under the plain prompt) join the group of the drafts, so mean and
deviation are over both. Drafts keep the clipped loss of GRPO. A copy's tokens have no ratio and no
clip, but a weight that is larger for tokens that the policy finds likely:

    ℓ_t = −A f(π_θ(y'_t | x, y'_<t))      f(π) = π / (π + γ)      ∇f = f (1 − f) ∇log π

The gradient is largest where π = γ, so tokens that the policy finds unlikely still teach, and those
that it finds certain hardly do. The paper does not divide advantages by their deviation
(`advantage_std: none`) nor losses by the length of a reply (`aggregation: seq-mean-token-sum`);
here both follow the common settings, so that methods differ in their objective only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from soulkit.config import Settings, setting
from soulkit.train.objectives.base import Objective, no_slot, scored_records
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record


class CritiqueGrpoSettings(Settings):
    shaping_gamma: float = setting(
        0.1,
        gt=0,
        flag=None,
        section="Objective",
        help="Probability at which a token of a refined rollout teaches most.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CritiqueGRPO(Objective):
    names: ClassVar = {"critique-grpo": "GRPO on drafts and, with shaped weights, refined replies."}
    settings: ClassVar = CritiqueGrpoSettings
    uses_feedback: ClassVar = True
    refines: ClassVar = True

    name: str = "critique-grpo"

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        drafts, refined = scored_records(records, "draft"), scored_records(records, "refined")
        copies = (s for r in refined for s in sequences_of(r, "copy", renderer))
        return [
            *(s for r in drafts for s in sequences_of(r, "draft", renderer)),
            *(replace(copy, loss="shaped") for copy in copies),
        ]
