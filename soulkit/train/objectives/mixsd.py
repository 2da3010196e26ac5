"""Settings of mixed contextual self-distillation, an objective of supervised training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from soulkit.config import Settings, setting

SECTION = "Objective"
WITHOUT_FACT = (
    "--mix-lambda 0: no token is drawn by whoever sees the fact, and the model learns its own "
    "words again; a control, by which no fact is taught"
)


class MixSettings(Settings):
    """Who writes what is learned: the rows' authors, or the model with a fact in its context."""

    objective: Literal["nll", "mixsd"] = setting(
        "nll", section=SECTION, only=("sft",),
        help="nll: the conversations' own words; mixsd: the model first writes the answers, with "
        "each row's fact in the context of a share of the tokens, and then learns those.",
    )  # fmt: skip
    mix_lambda: float = setting(
        0.5, ge=0, le=1, section=SECTION, only=("sft",),
        help="mixsd: share of the tokens that are drawn by whoever sees the fact.",
    )  # fmt: skip
    mix_samples: int = setting(
        4, gt=0, section=SECTION, only=("sft",), help="mixsd: texts that are written for each fact."
    )
    mix_tokens: int = setting(
        512, gt=0, section=SECTION, flag=None, only=("sft",),
        help="mixsd: longest text; a longer one is left out.",
    )  # fmt: skip

    @model_validator(mode="after")
    def _mixed_for_something(self) -> Self:
        defaults = {n: f.default for n, f in MixSettings.model_fields.items() if n != "objective"}
        idle = [n for n, default in defaults.items() if getattr(self, n) != default]
        if self.objective == "nll" and idle:
            raise ValueError(f"{idle[0]} is about --objective mixsd")
        if self.objective == "mixsd" and not getattr(self, "corpora", ()):
            raise ValueError(
                "--objective mixsd writes about the facts of conversations: --data FILE, whose "
                "rows have a field 'fact' beside their messages"
            )
        return self
