"""SDPO (algorithms §4): the actor with feedback in its prompt teaches the actor without it.

Both read the same draft; the teacher's prompts also hold the feedback on that draft. In token form
the log-ratio of the two is a per-token advantage of the clipped loss; in logit form the divergence
between their distributions is minimised. A draft without usable feedback has no teacher: the pure
forms skip it, and the sums with GRPO train it on its group advantage alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from soulkit.config import Settings, section
from soulkit.train.objectives.base import Lines, Objective, no_slot, scored_records
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, feedback_sequences
from soulkit.types import Record

TOKEN_SHARE, LOGIT_SHARE = 0.1, 1.0
"""Default weight of the teacher's part relative to the rewards."""
_tokens = section("Objective", only=("token",))
_logits = section("Objective", only=("logits",))
_objective = section("Objective")


class DistillSettings(Settings):
    """Settings of all methods with a teacher."""

    method: str
    distill_weight: float | None = _objective(
        None, ge=0, only=("sum",), unset="0.1 for the token form, 1.0 for the logits form",
        help="Weight of the teacher's loss when it is added to another loss.",
    )  # fmt: skip
    distill_clip: float = _tokens(
        5.0, gt=0, flag=None, help="Maximum absolute distillation advantage per token."
    )
    distill_centred: bool = _tokens(
        False, flag=None, help="Subtract the group mean from distillation advantages."
    )
    estimator: Literal["local", "sum", "discount", "window"] = _tokens(
        "local",
        help="How many later tokens count in a token's distillation advantage: none "
        "(local), all (sum), all with a discount, or a window.",
    )
    estimator_discount: float = _tokens(
        0.99,
        gt=0,
        le=1,
        flag=None,
        help="Discount factor per trained token for --estimator discount.",
    )
    estimator_window: int = _tokens(
        32, ge=0, flag=None, help="Number of later trained tokens for --estimator window."
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = _logits(
        "reverse_kl", help="Divergence between student and teacher distributions."
    )
    divergence_top_k: int | None = _logits(
        10, gt=0, unset="the whole vocabulary",
        help="Compare only the student's N most likely tokens; null in a file means the whole "
             "vocabulary.",
    )  # fmt: skip
    divergence_tail: Literal["renorm", "bucket"] = _logits(
        "renorm",
        help="Probability outside the top N tokens: renormalise without it (renorm), "
        "or treat it as one more outcome (bucket).",
    )
    divergence_temperature: float = _logits(
        1.0, gt=0, flag=None, help="Temperature of both distributions."
    )
    jsd_beta: float = _logits(
        0.5, gt=0, lt=1, flag=None, help="Weight of the teacher in the mixture for jsd."
    )


class SdpoSettings(DistillSettings):
    teacher: Literal["live", "base", "ema"] = _objective(
        "live",
        help="Teacher that sees the feedback: the current weights (live), the frozen base model "
             "(base), or a moving average of the weights (ema).",
    )  # fmt: skip
    ema_tau: float = _objective(
        0.05,
        gt=0,
        le=1,
        help="Share of the student's weights mixed into the ema teacher after each update.",
    )


def unweighted(config: DistillSettings) -> Lines | None:
    """The error for a weight of 0 in a method that trains only the teacher's part."""
    if config.distill_weight != 0:
        return None
    return (
        f"distill_weight of '{config.method}' is 0.",
        "This method trains only the teacher's part, so nothing would be learned.",
        "Remove distill_weight, or train on rewards alone with soul train grpo.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SDPO(Objective):
    names: ClassVar = {
        "sdpo-token": "Self-distil with feedback, token by token.",
        "sdpo-logits": "Self-distil with feedback, on whole distributions.",
        "sdpo-token+grpo": "Combine sdpo-token and grpo in one loss.",
        "sdpo-logits+grpo": "Combine sdpo-logits and grpo in one loss.",
    }
    settings: ClassVar = SdpoSettings
    marks: ClassVar = {
        "sdpo-token": ("token",),
        "sdpo-logits": ("logits",),
        "sdpo-token+grpo": ("token", "sum"),
        "sdpo-logits+grpo": ("logits", "sum"),
    }
    uses_feedback: ClassVar = True
    reader: ClassVar = "self"

    rewarded: bool = False
    """Whether GRPO on the drafts is added."""
    weight: float = 1.0
    """Weight of the teacher's part."""
    name: str = "sdpo-token"

    @classmethod
    def of(cls, config: SdpoSettings) -> SDPO:
        form, _, sum_ = config.method.partition("+")
        logits, rewarded = form == "sdpo-logits", bool(sum_)
        share = TOKEN_SHARE if rewarded and not logits else LOGIT_SHARE
        weight = share if config.distill_weight is None else config.distill_weight
        return cls(name=config.method, logits=logits, rewarded=rewarded, weight=weight)

    @classmethod
    def remark(cls, config: SdpoSettings) -> str:
        if not config.method.endswith("+grpo") or config.distill_weight != 0:
            return ""
        return "distill_weight is 0: the teacher's part has no effect, so this is plain grpo"

    @classmethod
    def futile(cls, config: SdpoSettings, highs: Mapping[str, float]) -> Lines | None:
        return None if config.method.endswith("+grpo") else unweighted(config)

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        sequences: list[TrainSequence] = []
        for record in scored_records(records, "draft"):
            for sequence in feedback_sequences(record, renderer, slot):
                sequences += taught(sequence, self.logits, self.rewarded, self.weight)
        return sequences


def taught(
    sequence: TrainSequence, logits: bool, rewarded: bool, weight: float
) -> list[TrainSequence]:
    """The sequences of a draft: with the teacher's part in the same sequence or a second one."""
    plain = replace(sequence, teacher=None)
    if sequence.teacher is None or weight == 0:
        return [plain] if rewarded else []
    if logits:
        followed = replace(sequence, loss="divergence", compared=False, weight=weight)
        return [plain, followed] if rewarded else [followed]
    return [replace(sequence, compared=rewarded, teacher_weight=weight)]
