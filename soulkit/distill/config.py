"""Settings of a distillation, and its folder.

    OUT/config.yaml         the settings            OUT/selected.jsonl    the generalist's rows
    OUT/samples/TASK/       a run of each expert    OUT/selection.json    counts by task
    OUT/rows.json           ids of the rows chosen by default

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
from soulkit.eval.config import GateSettings
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


class DistillConfig(GateSettings, PlayConfig):
    """Settings of one distillation."""

    WHOLE: ClassVar[frozenset[str]] = PlayConfig.WHOLE | {"experts"}
    OUTSIDE_IDENTITY: ClassVar[frozenset[str]] = PlayConfig.OUTSIDE_IDENTITY | {
        "concurrency", "batch_size", *GateSettings.model_fields,
    }  # fmt: skip

    experts: dict[str, str] = _task(
        metavar="[TASK=]FOLDER", min_length=1,
        help="Folder with one expert per task: adapters or runs, at any depth. TASK=FOLDER names "
             "the task of an expert that does not record it, TASK=endpoint:MODEL@URL a served "
             "expert. Repeatable.",
    )  # fmt: skip
    data: dict[str, str] = _task(
        factory=dict, metavar="[TASK=]ROWS",
        unset="the rows each expert was trained on, else the downloaded files",
        help="Rows to sample from: a file, a folder, or synth:N to generate N. Repeatable for "
             "single tasks.",
    )  # fmt: skip
    model: str | None = _task(  # type: ignore[assignment]
        None, min_length=1, metavar="MODEL", unset="the base model recorded by the experts",
        help="Base model of the experts and the generalist, if it has moved.",
    )  # fmt: skip

    # -- sample --
    samples: int = _sampling(4, gt=0, help="Replies to sample per training prompt.")
    temperature: float = _sampling(1.0, gt=0, help="Sampling temperature of the experts.")
    max_tokens: int | None = _sampling(
        None, gt=0, unset="set by the task, else 8192",
        help="Maximum tokens per reply, fewer if the context has less room.",
    )  # fmt: skip

    # -- select --
    keep_top: int = _rollouts(1, gt=0, help="Keep at most the N best samples per prompt.")
    min_reward: float | None = _rollouts(
        None, unset="the full reward if scores are 0 or 1, else above the prompt's mean",
        help="Reject samples below this reward.",
    )  # fmt: skip
    quota: int | None = _rollouts(
        None, gt=0, metavar="N", unset="all samples that pass",
        help="Keep at most N samples per task, spread over its prompts.",
    )  # fmt: skip
    near: float = _rollouts(
        0.8,
        gt=0,
        le=1,
        help="Minimum share of common word triples at which two texts count as duplicates.",
    )
    exclude_overlap: bool = _rollouts(
        False,
        help="Leave out training rows that overlap with evaluation rows, instead of stopping.",
    )

    # -- train --
    by: Literal["sft", "opd"] = _objective(
        "sft",
        help="Fine-tune on the selected samples (sft), or have each task's expert score the "
             "generalist's own replies (opd).",
    )  # fmt: skip
    opd_form: Literal["token", "logits"] = _objective(
        "logits",
        help="opd: compare whole distributions (logits) or only the sampled tokens (token).",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd"] = _objective(
        "reverse_kl", help="opd with logits: divergence between the two distributions."
    )
    epochs: float = _optimizer(3.0, gt=0, help="Number of passes over the selected samples.")
    batch: int | None = _optimizer(
        None, gt=0, unset="3% of the selected samples, from 4 to 32; opd: 32",
        help="Samples per optimizer update.",
    )  # fmt: skip
    lr: float | None = _optimizer(
        None, gt=0, unset="set by the method", help="Learning rate (AdamW)."
    )
    lora: LoraSettings = _task(LoraSettings(), flag=None, help="LoRA adapter of the generalist.")

    # -- report --
    held_out: dict[str, str] = _task(
        factory=dict, metavar="[TASK=]ROWS",
        unset="the experts' dev rows, else one fifth of the training clusters",
        help="Rows to evaluate on, written like --data. Repeatable.",
    )  # fmt: skip
    held_out_limit: int | None = _task(
        None, gt=0, unset="all", help="Use at most N held-out rows per task."
    )
    retention: bool = setting(
        False, section="Run", help="Also evaluate the `general` suite on base and generalist."
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
    """The stages that these settings affect: the first that reads one, and all later ones."""
    first = min((STAGES.index(_FIRST_READ.get(key, "sample")) for key in keys), default=len(STAGES))
    return STAGES[first:]


def open_distillation(out: Path, config: DistillConfig, reporter: Reporter = SILENT) -> Run:
    """The folder of a new or resumed distillation; RunError if it holds a different distillation.

    A setting may change if no stage that it affects has started.
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
