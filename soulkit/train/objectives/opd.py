"""On-policy distillation (algorithms §4): a teacher model scores the actor's own drafts.

The teacher is a bigger model or an expert on the task. It reads what the actor read, without
feedback, and gives its log-probability of each token. In a mixture, each task may have its own
expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from soulkit.config import section
from soulkit.errors import ConfigError
from soulkit.option_texts import ADAPTERS
from soulkit.train.objectives.base import Lines, Objective, no_slot, scored_records
from soulkit.train.objectives.sdpo import DistillSettings, taught, unweighted
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record

_opd = section("Objective")


class OpdSettings(DistillSettings):
    teacher_model: str | None = _opd(
        None, metavar="MODEL", unset="the student's base model, with --teacher-adapter",
        help="Teacher model: a local folder or a Hub id.",
    )  # fmt: skip
    teacher_adapter: str | None = _opd(
        None, metavar=ADAPTERS,
        help="LoRA adapter of the teacher, such as a task expert. TASK=ADAPTER sets it for one "
             "task. Repeatable.",
    )  # fmt: skip
    teacher_adapters: dict[str, str] = _opd(
        factory=dict, flag=None,
        help="Task → adapter that teaches it.",
    )  # fmt: skip
    opd_form: Literal["token", "logits"] = _opd(
        "token",
        help="Compare with the teacher on the sampled tokens (token) or on whole "
        "distributions (logits).",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OPD(Objective):
    names: ClassVar = {"opd": "Distil a teacher model on the actor's own drafts."}
    settings: ClassVar = OpdSettings
    marks: ClassVar = {"opd": ("token", "logits")}
    reader: ClassVar = "other"

    weight: float = 1.0
    name: str = "opd"

    @classmethod
    def of(cls, config: OpdSettings) -> OPD:
        """Raises ConfigError if no teacher is named."""
        named = (config.teacher_model, config.teacher_adapter, *config.teacher_adapters)
        if not any(named):
            raise ConfigError(
                "The method 'opd' needs a teacher.",
                "It distils another model into the trained one.",
                "Name a model with --teacher-model, or a LoRA adapter of the trained model with "
                "--teacher-adapter; with both, the adapter is loaded on that teacher model.",
            )
        weight = 1.0 if config.distill_weight is None else config.distill_weight
        return cls(logits=config.opd_form == "logits", weight=weight)

    @classmethod
    def futile(cls, config: OpdSettings, highs: Mapping[str, float]) -> Lines | None:
        return unweighted(config)

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        sequences: list[TrainSequence] = []
        for record in scored_records(records, "draft"):
            for sequence in sequences_of(record, "draft", renderer):
                self_taught = replace(sequence, teacher=sequence.span)
                sequences += taught(self_taught, self.logits, rewarded=False, weight=self.weight)
        return sequences
