"""SDPO (algorithms §4): the actor that has read the feedback teaches the actor that has not.

Both read the same draft; the teacher's prompts hold the feedback that the draft earned. In token
form the log-ratio of the two is a per-token advantage of the clipped loss, in logit form their
distributions are pulled together. A draft without usable feedback has no teacher: it teaches
nothing in the pure forms and keeps its group's advantage in the sums with GRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective, Reader, no_slot, scored
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, told_sequences
from soulkit.types import Record

TOKEN_SHARE, LOGIT_SHARE = 0.1, 1.0
"""What the teacher's part counts for beside the rewards, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SDPO(Objective):
    rewarded: bool = False
    """The sum with GRPO on the drafts."""
    weight: float = 1.0
    """Of the teacher's part."""
    name: str = "sdpo-token"
    uses_feedback: bool = True
    reader: Reader = "self"

    @classmethod
    def of(cls, config: TrainConfig) -> SDPO:
        form, _, sum_ = config.method.partition("+")
        logits, rewarded = form == "sdpo-logits", bool(sum_)
        share = TOKEN_SHARE if rewarded and not logits else LOGIT_SHARE
        weight = share if config.distill_weight is None else config.distill_weight
        return cls(name=config.method, logits=logits, rewarded=rewarded, weight=weight)

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        found: list[TrainSequence] = []
        for record in scored(records, "draft"):
            for sequence in told_sequences(record, renderer, slot):
                found += taught(sequence, self.logits, self.rewarded, self.weight)
        return found


def taught(
    sequence: TrainSequence, logits: bool, rewarded: bool, weight: float
) -> list[TrainSequence]:
    """A draft's sequence with its teacher's part: beside the rewarded one, in it, or alone."""
    plain = replace(sequence, teacher=None)
    if sequence.teacher is None or weight == 0:
        return [plain] if rewarded else []
    if logits:
        followed = replace(sequence, loss="divergence", compared=False, weight=weight)
        return [plain, followed] if rewarded else [followed]
    return [replace(sequence, compared=rewarded, teacher_weight=weight)]
