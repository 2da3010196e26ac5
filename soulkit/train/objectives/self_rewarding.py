"""Self-Rewarding (Yuan et al. 2024, arXiv 2401.10020): DPO on drafts that the actor judges itself.

The judge is the actor with its current weights and the task's own judge prompts. The best and the
worst draft y⁺, y⁻ of a prompt x are a pair; equal rewards give none. DPO (Rafailov et al. 2023,
arXiv 2305.18290) with β = 0.1 and, as reference, the weights at the start of the iteration:

    ℓ = −log σ(m)    m = β [log π_θ(y⁺|x) − log π_ref(y⁺|x) − log π_θ(y⁻|x) + log π_ref(y⁻|x)]

log π(y|x) is a sum over all turns and seats, ℓ a mean over pairs. In the paper an iteration is a
whole data set, judged in advance; here it is `iteration_steps` steps, judged as they are played.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from soulkit.config import Settings, section
from soulkit.errors import ConfigError
from soulkit.models.players.settings import RoleSettings
from soulkit.train.objectives.base import Objective, no_slot, scored_records
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence, sequences_of
from soulkit.types import Record

_objective = section("Objective")
OTHER_LOSSES = (
    "advantage_std", "aggregation", "clip_ratio_c", "denominator", "entropy_coef", "eps_high",
    "eps_low", "kl_coef", "mask_truncated", "norm_length", "ratio", "sampler_cap",
)  # fmt: skip


class SelfRewardingSettings(Settings):
    iteration_steps: int = _objective(
        1, gt=0, metavar="N",
        help="Steps per iteration. The reference of DPO is the weights at its start.",
    )  # fmt: skip
    preference_beta: float = _objective(0.1, gt=0, flag=None, help="β of DPO (self-rewarding).")

    @property
    def reference_steps(self) -> int:
        """Steps between two copies of the weights as reference; 0 if there is no such copy."""
        used = getattr(self, "method", "") == "self-rewarding" and self.iteration_steps > 1
        return self.iteration_steps * used


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfRewarding(Objective):
    names: ClassVar = {"self-rewarding": "DPO on drafts that the actor judges itself."}
    settings: ClassVar = SelfRewardingSettings
    default_words: ClassVar = {"judge": "actor"}
    reader: ClassVar = "self"
    judges_itself: ClassVar = True
    name: str = "self-rewarding"

    @classmethod
    def own_defaults(cls, config: Any) -> dict[str, Any]:
        """The judge, and the state of the policy that is the reference."""
        judge = RoleSettings(model="actor", kind="actor")
        return {"judge": (judge,), "teacher": "ema" if config.reference_steps else "live"}

    @classmethod
    def of(cls, config: Any) -> SelfRewarding:
        """ConfigError for settings that do not work with pairs."""
        fields = type(config).model_fields
        changed = [name for name in OTHER_LOSSES if getattr(config, name) != fields[name].default]
        changed += ["teacher"] * (config.teacher != cls.own_defaults(config)["teacher"])
        if changed or config.group_size == 1:
            raise ConfigError(
                f"self-rewarding does not work with {', '.join(changed) or '--group-size 1'}.",
                "It compares the best draft of each prompt with the worst, by the loss of DPO.",
                "Leave the default, or set another value only for other methods (grpo:NAME=VALUE).",
            )
        return cls()

    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot = no_slot
    ) -> list[TrainSequence]:
        """Pairs, and all scored drafts with weight 0 for the statistics of their groups."""
        drafts = scored_records(records, "draft")
        sequences = [s for r in drafts for s in sequences_of(r, "draft", renderer, 0.0)]
        for example in dict.fromkeys(r.example_id for r in drafts):
            group = [r for r in drafts if r.example_id == example]
            best, worst = (end(group, key=lambda r: r.score.reward or 0.0) for end in (max, min))
            ends = ((best, 1.0), (worst, -1.0)) if best.score.reward != worst.score.reward else ()
            sequences += [
                replace(s, loss="preference", compared=False, advantage=side)
                for record, side in ends
                for s in sequences_of(record, "draft", renderer)
            ]
        return sequences
