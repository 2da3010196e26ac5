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
        help="Train on the conversations as they are (nll), or on texts that the model writes "
             "first, with the row's fact in context for some of the tokens (mixsd).",
    )  # fmt: skip
    mix_lambda: float = _sft(
        0.5,
        ge=0,
        le=1,
        help="mixsd: share of the tokens that are sampled with the fact in context.",
    )
    mix_samples: int = _sft(4, gt=0, help="mixsd: number of texts to write per fact.")
    mix_tokens: int = _sft(
        512, gt=0, flag=None, help="mixsd: maximum tokens per text; longer texts are left out."
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
        help="Chat logs to learn from instead of tasks: --data FILE[:RATIO] without --task.",
    )  # fmt: skip
    side: str | None = _task(
        None, metavar="human|assistant|NAME", unset="set by each source",
        help="Chat logs: side to learn.",
    )  # fmt: skip
    strip_system: bool = _task(False, help="Chat logs: remove the system prompts (ablation).")
    turns: int | None = _task(
        None, gt=0, unset="all, or set by each source",
        help="Chat logs: learn the last N turns of a conversation; earlier turns become context.",
    )  # fmt: skip
    validation: tuple[SourceSettings, ...] = _task(
        (), metavar="FILE", unset="the validation files of shard folders",
        help="Chat logs to measure the validation loss on; they are never trained on. "
             "Repeatable.",
    )  # fmt: skip
    validation_limit: int = _task(
        200, gt=0, flag=None,
        help="Measure at most N conversations per validation file, always the same ones.",
    )  # fmt: skip
    lesson_tokens: int | None = setting(
        None, gt=0, section="Optimizer and memory", unset="the model's context length",
        help="Chat logs: maximum tokens per conversation; the oldest turns of longer ones are "
             "dropped.",
    )  # fmt: skip
    window: int = _task(10_000, gt=0, help="Chat logs: number of rows to shuffle at a time.")
    preset: str | None = _task(
        None, metavar="NAME", unset="none",
        help="Start from published settings, such as osim-midtrain. Options and --config files "
             "override them.",
    )  # fmt: skip


class SftSettings(CorpusSettings, MixSettings):
    full: bool = _task(False, flag="--full/--lora", help="Train all weights instead of an adapter.")
    sft_batch: int = setting(
        32,
        gt=0,
        section="Optimizer and memory",
        flag="--batch",
        help="Examples per optimizer update.",
    )
    sft_feedback: float = setting(
        0.0,
        ge=0,
        le=1,
        section="Feedback",
        flag="--feedback",
        help="Share of prompts that contain feedback on a made-up draft.",
    )
    sft_feedback_always: dict[str, str] = setting(
        factory=dict,
        section="Feedback",
        flag=None,
        help="Tag → regular expression: the prompts of matching rows always contain such feedback.",
    )
    sft_prompt_weight: float = setting(
        0.0,
        ge=0,
        section="Objective",
        flag=None,
        help="Weight of the loss on prompt tokens (mean per token), as in plain language "
        "modelling.",
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
