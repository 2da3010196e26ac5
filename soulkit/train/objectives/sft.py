"""Settings of supervised fine-tuning, on tasks and conversations, and of mixed self-distillation.

`train/sft/` runs it: on the gold episodes of tasks, or on one side of conversations.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from soulkit.config import Settings, section, setting
from soulkit.data.corpora.settings import SourceSettings
from soulkit.train.objectives.base import Method

SECTION = "Objective"
WITHOUT_FACT = (
    "mix_lambda is 0: no token is sampled with the fact in the context, so no fact is taught; use "
    "this only as a control"
)
_task = section("Task and model")
_sft = section(SECTION, only=("sft",))


class MixSettings(Settings):
    """Source of the trained words: the conversations, or the model with a fact in its context."""

    objective: Literal["nll", "mixsd"] = _sft(
        "nll",
        help="nll: the conversations' own words; mixsd: the model first writes the answers, with "
        "each row's fact in the context of a share of the tokens, and then learns those.",
    )  # fmt: skip
    mix_lambda: float = _sft(
        0.5, ge=0, le=1, help="mixsd: share of the tokens that are drawn by whoever sees the fact."
    )
    mix_samples: int = _sft(4, gt=0, help="mixsd: texts that are written for each fact.")
    mix_tokens: int = _sft(
        512, gt=0, flag=None, help="mixsd: longest text; a longer one is left out."
    )

    @model_validator(mode="after")
    def _mixed_for_something(self) -> Self:
        defaults = {n: f.default for n, f in MixSettings.model_fields.items() if n != "objective"}
        idle = [n for n, default in defaults.items() if getattr(self, n) != default]
        if self.objective == "nll" and idle:
            raise ValueError(f"{idle[0]} only works with --objective mixsd")
        if self.objective == "mixsd" and not getattr(self, "corpora", ()):
            raise ValueError(
                "--objective mixsd needs conversations with facts: --data FILE, whose rows have a "
                "field 'fact' next to their messages"
            )
        return self


SOURCE = "FILE[:RATIO]"


class CorpusSettings(Settings):
    """Conversations to train on, and how they are shortened."""

    corpora: tuple[SourceSettings, ...] = _task(
        (), flag=None,
        help="Conversations instead of tasks; --data FILE[:RATIO] without a task names them.",
    )  # fmt: skip
    side: str | None = _task(
        None, metavar="human|assistant|NAME", unset="that of each source",
        help="Of conversations: whose words are learned.",
    )  # fmt: skip
    strip_system: bool = _task(
        False, help="Of conversations: without their system prompts, an ablation."
    )
    turns: int | None = _task(
        None, gt=0, unset="all, or the source's own",
        help="Of a conversation the last so many; what came before is folded into context.",
    )  # fmt: skip
    validation: tuple[SourceSettings, ...] = _task(
        (), metavar="FILE", unset="those of shard folders",
        help="Conversations whose loss is measured, never learned; may be repeated.",
    )  # fmt: skip
    validation_limit: int = _task(
        200, gt=0, flag=None,
        help="Conversations of each validation file that are measured at most: always the same.",
    )  # fmt: skip
    lesson_tokens: int | None = setting(
        None, gt=0, section="Optimizer and memory", unset="the model's context",
        help="Longest conversation; of a longer one the oldest turns leave.",
    )  # fmt: skip
    window: int = _task(10_000, gt=0, help="Rows of a source that are shuffled at a time.")
    preset: str | None = _task(
        None, metavar="NAME", unset="none",
        help="Published settings by name, osim-midtrain; options and files go before them.",
    )  # fmt: skip


class SftSettings(CorpusSettings, MixSettings):
    full: bool = _task(False, flag="--full/--lora", help="Train all weights instead of an adapter.")
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
    """Supervised fine-tuning. With --full the learning rate is that of published midtraining
    (algorithms §5); an adapter gets ten times that, the tiny model two hundred times."""

    names: ClassVar = {"sft": "Fine-tune on gold answers or on chat logs (--data)."}
    settings: ClassVar = SftSettings
    marks: ClassVar = {"sft": ("plays",)}
    default_words: ClassVar = {
        "lr": "1e-4; 1e-5 with --full; 2e-3 for the model tiny",
        "lr_schedule": "cosine",
        "warmup_steps": "5 % of the steps, at most 50",
    }

    @classmethod
    def own_defaults(cls, config: Any) -> dict[str, Any]:
        trained = 1e-5 if config.full else 1e-4
        lr = 2e-3 if config.model == "tiny" else trained
        return {"lr": lr, "lr_schedule": "cosine", "warmup_steps": min(config.steps // 20, 50)}

    @classmethod
    def remark(cls, config: Any) -> str:
        return WITHOUT_FACT if config.objective == "mixsd" and not config.mix_lambda else ""
