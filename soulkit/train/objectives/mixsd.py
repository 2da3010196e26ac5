"""Settings of mixed contextual self-distillation, an objective of supervised training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from soulkit.config import Settings, setting

SECTION = "Objective"


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
        written = [n for n in ("mix_lambda", "mix_samples", "mix_tokens")
                   if n in self.model_fields_set]  # fmt: skip
        if (
            self.objective == "nll"
            and written
            and getattr(self, written[0]) != (type(self).model_fields[written[0]].default)
        ):
            raise ValueError(f"{written[0]} is about --objective mixsd")
        return self
