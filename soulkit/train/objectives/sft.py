"""Supervised fine-tuning: the replies of the tasks' gold episodes. `train/sft.py` does a step."""

from __future__ import annotations

from typing import Any, ClassVar

from soulkit.config import Settings, setting
from soulkit.train.objectives.base import Method


class SftSettings(Settings):
    full: bool = setting(
        False,
        section="Task and model",
        flag="--full/--lora",
        help="Train all weights instead of an adapter.",
    )
    sft_batch: int = setting(
        32, gt=0, section="Optimizer and memory", flag="--batch", help="Examples an update."
    )
    sft_feedback: float = setting(
        0.0,
        ge=0,
        le=1,
        section="Feedback",
        flag="--feedback",
        help="Share of prompts that hold feedback on a made-up draft.",
    )
    sft_feedback_always: dict[str, str] = setting(
        factory=dict,
        section="Feedback",
        flag=None,
        help="Tag → regular expression: rows that match always hold it.",
    )
    sft_prompt_weight: float = setting(
        0.0,
        ge=0,
        section="Objective",
        flag=None,
        help="Weight of the prompts' own tokens (mean per token): plain language modelling.",
    )


class SFT(Method):
    """Its own learning rates: the full one is that of published midtraining (algorithms §5), an
    adapter takes ten times as much, and a model of random weights has everything to learn."""

    names: ClassVar = {"sft": "Imitate the tasks' gold episodes."}
    settings: ClassVar = SftSettings
    default_words: ClassVar = {
        "lr": "1e-4, with --full 1e-5, of the model tiny 2e-3",
        "lr_schedule": "cosine",
        "warmup_steps": "a twentieth of the steps, 50 at most",
    }

    @classmethod
    def own_defaults(cls, config: Any) -> dict[str, Any]:
        trained = 1e-5 if config.full else 1e-4
        lr = 2e-3 if config.model == "tiny" else trained
        return {"lr": lr, "lr_schedule": "cosine", "warmup_steps": min(config.steps // 20, 50)}
