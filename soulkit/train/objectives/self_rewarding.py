"""Self-Rewarding (Yuan et al. 2024, arXiv 2401.10020): DPO on drafts that the actor judges itself.

The judge is the actor with its current weights and the task's own judge prompts. The best and the
worst draft y⁺, y⁻ of a prompt x are a pair; equal rewards give none. DPO (Rafailov et al. 2023,
arXiv 2305.18290) with β = 0.1 and, as reference, the weights at the start of the iteration:

    ℓ = −log σ(m)    m = β [log π_θ(y⁺|x) − log π_ref(y⁺|x) − log π_θ(y⁻|x) + log π_ref(y⁻|x)]

log π(y|x) is a sum over the tokens of all turns and seats, ℓ a mean over pairs. In the paper an
iteration is a whole data set, sampled and judged in advance. Here it is `iteration_steps` steps,
each sampled and judged with its own weights. The paper also teaches the model to judge first.
"""

from __future__ import annotations

import math
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
    preference_beta: float = _objective(
        0.1, gt=0, flag=None, help="DPO's β: how strongly a pair keeps near the reference."
    )


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
        state = "live" if config.iteration_steps == 1 else "ema"
        return {"judge": (RoleSettings(model="actor", kind="actor"),), "teacher": state}

    @classmethod
    def of(cls, config: Any) -> SelfRewarding:
        """ConfigError for settings that do not work with pairs."""
        usual = type(config).model_fields
        changed = [n for n in OTHER_LOSSES if getattr(config, n) != usual[n].default]
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
        """All scored drafts, for the statistics of the groups; only pairs have a weight. The sign
        of a sequence's advantage says which side of the pair it is."""
        groups: dict[str, list[Record]] = {}
        for record in scored_records(records, "draft"):
            groups.setdefault(record.example_id, []).append(record)
        return [
            replace(one, loss="preference")
            for group in groups.values()
            for record, weight in _weighted(group)
            for one in sequences_of(record, "draft", renderer, weight)
        ]


def _weighted(group: Sequence[Record]) -> list[tuple[Record, float]]:
    """The drafts of a prompt; the first best and the first worst have weight 1 unless they are
    equally good, all others 0."""
    rewards = [r.score.reward or 0.0 for r in group]
    best, worst = max(rewards), min(rewards)
    tie = math.isclose(best, worst, abs_tol=1e-12)
    pair = () if tie else (rewards.index(best), rewards.index(worst))
    return [(record, float(place in pair)) for place, record in enumerate(group)]
