"""Settings of what is measured beside the training itself: what it costs elsewhere, what it brings.

They stand apart from the training's own, because no weight depends on any of them.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import field_validator, model_validator

from soulkit.config import Settings, setting

SFT = ("sft",)
NOTHING_TO_PLAY = (
    "conversations have no rows to play: say which with --eval-task TASK --eval-data WHERE"
)


class BesideSettings(Settings):
    """What is measured of the weights while, before and after they are trained."""

    retention: bool = setting(
        False,
        help="Measure general ability (the suite `general`: forms of reply that rules can check) "
        "before the first step and after the last.",
    )  # fmt: skip
    retention_tokens: int | None = setting(
        None, gt=0, flag=None, unset="the tasks' own",
        help="Limit of a reply there; a model that thinks needs more than one that answers.",
    )  # fmt: skip
    eval_task: tuple[str, ...] = setting(
        (), only=SFT, complete="tasks", metavar="TASK", unset="the tasks that are imitated",
        help="Tasks that are played greedily every --eval-every steps, on a dev split of their "
        "training rows; the best weights are those that play best.",
    )  # fmt: skip
    eval_data: dict[str, str] = setting(
        factory=dict, only=SFT, metavar="[TASK=]WHERE", unset="what was pulled",
        help="Rows of --eval-task, as --data names those of a task; may be repeated.",
    )  # fmt: skip
    probe_every: int | None = setting(
        None, gt=0, only=SFT, unset="never",
        help="Steps between probes: a short reinforcement from a snapshot of the weights, measured "
        "before and after, and thrown away.",
    )  # fmt: skip
    probe_steps: int = setting(5, gt=0, only=SFT, help="Steps of a probe.")
    probe_method: str = setting("ditto", only=SFT, metavar="METHOD", help="What a probe trains by.")
    probe_lr: float | None = setting(
        None, gt=0, flag=None, only=SFT, unset="that of the method", help="Its learning rate."
    )

    @field_validator("eval_task", mode="before")
    @classmethod
    def _names(cls, names: Any) -> Any:
        return [names] if isinstance(names, str) else names

    @model_validator(mode="after")
    def _about_what_is_played(self) -> Self:
        """Settings that nothing would read are refused."""
        method, tasks = getattr(self, "method", ""), getattr(self, "tasks", {})
        if method != "sft" and (self.eval_task or self.eval_data or self.probe_every):
            raise ValueError("--eval-task, --eval-data and --probe-every are for sft")
        if self.eval_data and not self.eval_task:
            raise ValueError("--eval-data has the rows of --eval-task TASK")
        if strange := set(self.eval_data) - {*self.eval_task, "*"}:
            raise ValueError(f"--eval-data has rows for '{min(strange)}', which is not evaluated")
        if self.eval_task and not (getattr(self, "eval_every", None) or self.probe_every):
            raise ValueError(
                "--eval-task is played every --eval-every STEPS or --probe-every STEPS"
            )
        if self.probe_every and not (self.eval_task or tasks):
            raise ValueError(NOTHING_TO_PLAY)
        return self
