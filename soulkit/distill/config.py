"""Settings of a distillation, and its folder.

    OUT/config.yaml         the settings            OUT/selected.jsonl    the generalist's rows
    OUT/samples/TASK/       a run of each expert    OUT/selection.json    counts of the selection
    OUT/rows.json           ids of rows that the command did not name

A folder belongs to one configuration, like every run folder. If a setting has changed, the error
names the stages that would have to be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from soulkit.config import section, setting
from soulkit.errors import RunError
from soulkit.play.settings import PlayConfig
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import Run, is_run, plain_config, read_config, read_environment
from soulkit.train.config import LoraSettings

COMMAND = "distill"
ANY = "*"
"""Key of the value for all (other) tasks, in settings by task."""
SAMPLES, SELECTED, SELECTION = "samples", "selected.jsonl", "selection.json"

Stage = Literal["sample", "select", "train", "report"]
STAGES: tuple[Stage, ...] = ("sample", "select", "train", "report")

_FIRST_READ: dict[str, Stage] = {
    **dict.fromkeys(
        ("keep_top", "min_reward", "quota", "near", "exclude_overlap", "held_out"), "select"
    ),
    **dict.fromkeys(("by", "opd_form", "divergence", "epochs", "batch", "lr", "lora"), "train"),
    **dict.fromkeys(("held_out_limit", "retention"), "report"),
}  # fmt: skip
"""The first stage that reads a setting; `sample` for settings not listed."""


_BEGUN: dict[Stage, str] = {
    "sample": SAMPLES, "select": SELECTION, "train": "generalist", "report": "measured",
}  # fmt: skip
"""Files that exist once a stage has started."""
_task = section("Task and model")
_rollouts = section("Rollouts")
_sampling = section("Sampling")
_objective = section("Objective")
_optimizer = section("Optimizer and memory")


class DistillConfig(PlayConfig):
    """Settings of one distillation."""

    WHOLE: ClassVar[frozenset[str]] = PlayConfig.WHOLE | {"experts"}
    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = PlayConfig.OUTSIDE_IDENTITY | {
        "concurrency", "batch_size", "gate",
    }  # fmt: skip

    experts: dict[str, str] = _task(
        metavar="[TASK=]DIR", min_length=1,
        help="A folder with an expert for each task, adapters or runs in any depth; TASK=FOLDER "
        "names one that says nothing of itself, TASK=endpoint:MODEL@URL a served one; may be "
        "repeated.",
    )  # fmt: skip
    data: dict[str, str] = _task(
        factory=dict, metavar="[TASK=]WHERE",
        unset="the rows that each expert was trained on, else the pulled training files",
        help="Rows to learn from: FILE, FOLDER or synth:N, bare or for one task; may be repeated.",
    )  # fmt: skip
    model: str | None = _task(  # type: ignore[assignment]
        None, min_length=1, unset="the base that the experts name",
        help="The base of the experts and of the generalist, where it lies elsewhere now.",
    )  # fmt: skip

    # -- sample --
    samples: int = _sampling(4, gt=0, help="Replies to each training prompt.")
    temperature: float = _sampling(1.0, gt=0, help="At which the experts are sampled.")
    max_tokens: int | None = _sampling(
        None, gt=0, unset="the task's own, else 8192",
        help="Limit of a reply; the context may leave less.",
    )  # fmt: skip

    # -- select --
    keep_top: int = _rollouts(1, gt=0, help="Samples of each prompt at most, the best first.")
    min_reward: float | None = _rollouts(
        None, unset="the full reward where a score is 0 or 1, else above the mean of the prompt",
        help="Samples below this reward are rejected.",
    )  # fmt: skip
    quota: int | None = _rollouts(
        None, gt=0, metavar="N", unset="all that pass",
        help="Samples of each task at most, spread over its prompts.",
    )  # fmt: skip
    near: float = _rollouts(
        0.8, gt=0, le=1, help="Share of word triples from which two texts count as the same."
    )
    exclude_overlap: bool = _rollouts(
        False, help="Leave out training rows that overlap evaluation rows, instead of stopping."
    )

    # -- train --
    by: Literal["sft", "opd"] = _objective(
        "sft",
        help="sft: the selected samples are imitated; opd: the experts read what the generalist "
        "says, task by task.",
    )  # fmt: skip
    opd_form: Literal["token", "logits"] = _objective(
        "logits", help="By opd: whole distributions are compared, or the sampled tokens alone."
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = _objective(
        "reverse_kl", help="By opd, of whole distributions: how far two are apart."
    )
    epochs: float = _optimizer(3.0, gt=0, help="Passes over the selected samples.")
    batch: int | None = _optimizer(
        None, gt=0, unset="3% of the selected samples, 4 to 32; by opd 32",
        help="Samples an update.",
    )  # fmt: skip
    lr: float | None = _optimizer(
        None, gt=0, unset="the method's own", help="Learning rate of AdamW."
    )
    lora: LoraSettings = _task(LoraSettings(), flag=None, help="The generalist's adapter.")

    # -- report --
    held_out: dict[str, str] = _task(
        factory=dict, metavar="[TASK=]WHERE",
        unset="the experts' dev rows, else a fifth of the clusters of the training rows",
        help="Rows to measure on, as --data names those to learn from; may be repeated.",
    )  # fmt: skip
    held_out_limit: int | None = _task(
        None, gt=0, unset="all", help="Of these rows at most, by task."
    )
    retention: bool = setting(
        False, section="Run", help="Measure general ability of base and generalist, too."
    )
    gate: tuple[str, ...] = setting(
        (), section="Run", metavar="GATE", help="A condition on what is measured; may be repeated."
    )

    @field_validator("experts", mode="before")
    @classmethod
    def _one_folder(cls, value: Any) -> Any:
        return {ANY: str(value)} if isinstance(value, str | Path) else value

    @model_validator(mode="after")
    def _about_experts(self) -> Self:
        if self.adapter is not None:
            raise ValueError("soul distill has no --adapter: name experts with --experts")
        if self.suite is not None or self.playable:
            raise ValueError("soul distill has no --suite: the experts determine the tasks")
        return self

    def held_out_source(self, task: str) -> str | None:
        """The --held-out value of a task: its own, or else the one for all tasks."""
        return self.held_out.get(task) or self.held_out.get(ANY)


def stages_after(keys: Mapping[str, Any] | set[str]) -> tuple[Stage, ...]:
    """The stages affected by a change of these settings: the first that reads one, and all later
    ones."""
    first = min((STAGES.index(_FIRST_READ.get(key, "sample")) for key in keys), default=len(STAGES))
    return STAGES[first:]


def open_distillation(out: Path, config: DistillConfig, reporter: Reporter = SILENT) -> Run:
    """The folder of a distillation, new or resumed; RunError if it belongs to another one.

    A setting may change as long as no affected stage has started.
    """
    settings, sealed = config.identity(), not config.foreign
    try:
        return Run.open(out, COMMAND, settings, sealed=sealed)
    except RunError as error:
        changed = _changed(out, settings)
        stages = stages_after(changed)
        if not stages:
            raise
        if not any((out / _BEGUN[stage]).exists() for stage in stages):
            names = ", ".join(sorted(changed))
            reporter.note(f"changed settings that no finished stage has used: {names}")
            return Run.open(out, COMMAND, settings, sealed=sealed, replacing=True)
        raise RunError(
            error.what,
            f"The stages {', '.join(stages)} would have to be repeated. {error.why}",
            error.way_out,
        ) from error


def _changed(out: Path, settings: Mapping[str, Any]) -> set[str]:
    """The settings that differ from those of the distillation in `out`; empty for other folders."""
    if not is_run(out) or read_environment(out).get("command") != COMMAND:
        return set()
    before, now = read_config(out), plain_config(settings)
    return {key for key in now if before.get(key) != now[key]}
