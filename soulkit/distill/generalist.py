"""One generalist from many experts: an ordinary training run in OUT/generalist.

    --by sft    train on the selected samples, with the token ids that the experts sampled
    --by opd    on-policy distillation: each expert scores the generalist's replies on its task

Both start from the experts' common base with a new adapter. On-policy distillation samples as many
replies as rejection sampling: every training prompt `samples` times (a few prompts twice if their
number is not a multiple of the step size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soulkit.distill.config import SELECTED, DistillConfig
from soulkit.distill.experts import Expert, common_base
from soulkit.distill.measure import GENERALIST
from soulkit.distill.sample import (
    find_overlaps,
    open_roles_filled,
    refuse_other_teachers,
    training_work,
    work_aside,
)
from soulkit.distill.select import SampleSelection
from soulkit.errors import ConfigError
from soulkit.play.settings import PlayConfig
from soulkit.runs.folder import Run, is_run
from soulkit.train.config import TrainConfig
from soulkit.train.setup.data import load_training_data

BATCH = 32
"""Largest default number of samples per update."""
LEAST_BATCH = 4
"""Smallest default number of samples per update."""
BATCH_SHARE = 0.03
"""Default share of the samples per update, within these bounds: three epochs make about 100
updates. With 20 updates on 207 samples a small model kept none of the gains of two experts; with 78
updates on the same samples it kept 64%."""
PROMPTS = 16
"""Largest number of prompts per step of on-policy distillation; small steps stay on-policy."""
_MACHINE = ("seed", "device", "dtype", "quantize", "threads")
"""Settings passed on to training on conversations."""


def generalist_folder(out: Path) -> Path:
    """The run in which the generalist is trained."""
    return out / GENERALIST


def generalist_config(
    config: DistillConfig,
    experts: Sequence[Expert],
    out: Path,
    selection: SampleSelection | None = None,
) -> TrainConfig:
    """The training settings of the generalist; --by sft needs the selection."""
    if config.by == "opd":
        return _on_policy(config, experts)
    assert selection is not None, "training by sft needs a selection"
    return imitation_config(config, experts, out, selection.lines)


def imitation_config(
    config: DistillConfig, experts: Sequence[Expert], out: Path, lines: int
) -> TrainConfig:
    """Settings for training on `lines` selected samples for `epochs` epochs."""
    batch = config.batch or usual_batch(lines)
    settings = {name: getattr(config, name) for name in _MACHINE}
    source = {"path": str(out / SELECTED), "side": "assistant", "name": "selected"}
    return _with_rate(config, {
        **settings, "method": "sft", "model": common_base(experts, config), "corpora": [source],
        "steps": max(1, math.ceil(config.epochs * lines / batch)), "sft_batch": batch,
        "lora": config.lora,
    })  # fmt: skip


def usual_batch(lines: int) -> int:
    """Default number of samples per update for `lines` selected samples.

    It does not depend on the number of epochs, so more epochs give more updates.
    """
    return max(LEAST_BATCH, min(BATCH, int(BATCH_SHARE * lines)))


def _on_policy(config: DistillConfig, experts: Sequence[Expert]) -> TrainConfig:
    """Settings that play every training prompt once, with `samples` drafts each."""
    teachers = {expert.task: str(expert.adapter) for expert in experts if expert.adapter}
    _refuse_other_teachers(experts)
    settings: dict[str, Any] = {
        **_shared(config), "method": "opd", "model": common_base(experts, config),
        "tasks": dict.fromkeys(teachers, 1.0), "teacher_adapters": teachers,
        "opd_form": config.opd_form, "divergence": config.divergence,
        "group_size": config.samples, "temperature": config.temperature, "lora": config.lora,
        **_clean_rows(config, experts),
        "task_players": {
            task: who for one in experts
            for task, who in open_roles_filled(config, one).items()
        },
    }  # fmt: skip
    rows = len(load_training_data(TrainConfig.model_validate({**settings, "steps": 1})).pool)
    prompts = prompts_a_step(rows)
    steps = math.ceil(rows / prompts)
    update = max(1, (config.batch or BATCH) // config.samples)
    return _with_rate(config, {
        **settings, "prompts_per_step": prompts, "mini_batch_prompts": min(update, prompts),
        "steps": steps,
    })  # fmt: skip


def prompts_a_step(rows: int) -> int:
    """Prompts per step: the largest number up to PROMPTS that repeats the fewest rows."""
    sizes = range(min(PROMPTS, rows), max(1, min(PROMPTS, rows) // 2) - 1, -1)
    return min(sizes, key=lambda size: -rows % size)


def _clean_rows(config: DistillConfig, experts: Sequence[Expert]) -> dict[str, Any]:
    """Settings that select training rows by id if some are left out; DataError for an overlap that
    is not allowed."""
    work = training_work(config, experts)
    overlaps = find_overlaps(config, work, work_aside(config, experts))
    own = {
        one.task: {} if one.rows.source is None else {one.task: one.rows.source}
        for one in experts if one.rows is not None
    }  # fmt: skip
    if not own and not any(overlaps.values()):
        return {}
    # Ids have no task: a row of another task with the same id is left out, too.
    left_out = {row for matches in overlaps.values() for row in matches}
    rows = [example.id for part in work for example in part.examples]
    chosen: dict[str, Any] = {"example": tuple(row for row in rows if row not in left_out)}
    if own:
        named = {one.task: config.rows_source(one.task) for one in experts if one.task not in own}
        data = {task: source for task, source in named.items() if source}
        for sources in own.values():
            data |= sources
        chosen |= {"data": data, "where": {}, "limit": None}
    return chosen


def _shared(config: DistillConfig) -> dict[str, Any]:
    """The common settings (players, protocol, seed …) that the user has set."""
    other = {"model", "adapter", "suite", "playable"}
    names = (set(PlayConfig.model_fields) - other) & config.model_fields_set
    return {**{name: getattr(config, name) for name in names}, "max_tokens": config.max_tokens}


def _with_rate(config: DistillConfig, settings: dict[str, Any]) -> TrainConfig:
    rate = {} if config.lr is None else {"lr": config.lr}
    return TrainConfig.model_validate({**settings, **rate})


def _refuse_other_teachers(experts: Sequence[Expert]) -> None:
    others = [expert.task for expert in experts if expert.adapter is None]
    if others:
        raise ConfigError(
            f"--by opd needs adapters, but the experts of {', '.join(others)} are not adapters.",
            "On-policy distillation applies them as adapters on the generalist's base.",
            "Use --by sft, which only needs their replies, or name adapters.",
        )


def is_trained(config: TrainConfig, out: Path) -> bool:
    """Whether the generalist of this configuration is finished; RunError if the folder has another
    configuration or other teachers."""
    folder = generalist_folder(out)
    if not is_run(folder):
        return False
    Run.open(folder, f"train {config.method}", config.identity())
    refuse_other_teachers(folder, config.teacher_adapters)
    return (folder / "summary.json").is_file()
