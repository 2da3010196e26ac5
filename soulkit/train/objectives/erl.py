"""ERL (algorithms §4): imitate refined rollouts that improved, and train both turns with RL.

A copy is imitated (cross-entropy under the plain prompt) if its rollout beats the draft that got
the feedback or, with `accept_from`, if its reward is high enough. Other copies remain as sequences
of weight 0, so that the accepted share can be counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from soulkit.config import setting
from soulkit.train.objectives.base import Lines, Objective, no_slot, scored_records
from soulkit.train.objectives.rltf import AuxSettings, aux_remark
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record


class ErlSettings(AuxSettings):
    accept_from: float | None = setting(
        None, section="Objective", unset="if better than the draft",
        help="Imitate refined rollouts with at least this reward.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ERL(Objective):
    names: ClassVar = {"erl": "Imitate refined rollouts that beat their draft."}
    settings: ClassVar = ErlSettings
    uses_feedback: ClassVar = True
    refines: ClassVar = True

    aux_weight: float = 1.0
    """Weight of the imitation."""
    accept_from: float | None = None
    """Smallest reward to imitate; None: more than the reward of the draft."""
    name: str = "erl"

    @classmethod
    def of(cls, config: ErlSettings) -> ERL:
        return cls(aux_weight=config.aux_weight, accept_from=config.accept_from)

    @classmethod
    def remark(cls, config: ErlSettings) -> str:
        return aux_remark(config)

    @classmethod
    def futile(cls, config: ErlSettings, highs: Mapping[str, float]) -> Lines | None:
        least = config.accept_from
        names = [n for n, high in highs.items() if least is not None and high < least]
        if least is None or not names:
            return None
        return (
            f"accept_from {least:g} of 'erl' is above the highest reward of "
            f"{', '.join(f'{name} ({highs[name]:g})' for name in names)}.",
            "No refined rollout would be imitated.",
            "Lower accept_from, or remove it to imitate every refined rollout that beats its "
            "draft.",
        )

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        drafts, refined = scored_records(records, "draft"), scored_records(records, "refined")
        before = {(d.example_id, d.rollout): d.score.reward for d in drafts}
        sequences = [s for r in drafts for s in sequences_of(r, "draft", renderer)]
        for record in refined:
            sequences += sequences_of(record, "refined", renderer)
            draft = before.get((record.example_id, record.rollout))
            weight = self.aux_weight if self.accepts(draft, record.score.reward) else 0.0
            copies = sequences_of(record, "copy", renderer, weight)
            sequences += [replace(c, loss="imitation", compared=False) for c in copies]
        return sequences

    def accepts(self, draft: float | None, refined: float | None) -> bool:
        """Whether a refined rollout with this reward is imitated."""
        if refined is None:
            return False
        if self.accept_from is not None:
            return refined >= self.accept_from
        return draft is not None and refined > draft
