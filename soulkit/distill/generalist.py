"""One generalist from many experts: an ordinary training run in OUT/generalist.

    --by sft    the selected samples are imitated, with the very ids that the experts emitted
    --by opd    the experts read what the generalist says, each on its own task

Either way it starts at the base that the experts share, with a new adapter. On-policy it samples
as many replies as rejection sampling would: every training prompt, `samples` times (and a few
prompts twice where no size of a step divides their number).
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
"""Samples an update at most, unless told otherwise."""
LEAST_BATCH = 4
"""Samples an update at least, unless told otherwise."""
BATCH_SHARE = 0.03
"""Share of the samples in an update, within these bounds: three epochs make about 100 updates. With
20 updates on 207 samples a small model kept none of the gains of two experts, with 78 updates on
the same samples 64%."""
PROMPTS = 16
"""Prompts a step of on-policy distillation at most: many small steps follow more closely what the
generalist says by then."""
_MACHINE = ("seed", "device", "dtype", "threads")
"""Settings that training on conversations takes over."""


def generalist_folder(out: Path) -> Path:
    """The run in which the generalist is trained."""
    return out / GENERALIST


def generalist_config(
    config: DistillConfig,
    experts: Sequence[Expert],
    out: Path,
    selection: SampleSelection | None = None,
) -> TrainConfig:
    """The training of the generalist; by imitation it needs to know what was selected."""
    if config.by == "opd":
        return _on_policy(config, experts)
    assert selection is not None, "imitation needs what was selected"
    return imitation_config(config, experts, out, selection.lines)


def imitation_config(
    config: DistillConfig, experts: Sequence[Expert], out: Path, lines: int
) -> TrainConfig:
    """Training on `lines` selected samples, `epochs` times over."""
    batch = config.batch or usual_batch(lines)
    settings = {name: getattr(config, name) for name in _MACHINE}
    source = {"path": str(out / SELECTED), "side": "assistant", "name": "selected"}
    return _with_rate(config, {
        **settings, "method": "sft", "model": common_base(experts, config), "corpora": [source],
        "steps": max(1, math.ceil(config.epochs * lines / batch)), "sft_batch": batch,
        "lora": config.lora,
    })  # fmt: skip


def usual_batch(lines: int) -> int:
    """Samples an update, of so many selected ones. It does not depend on the epochs, so that more
    epochs are more updates."""
    return max(LEAST_BATCH, min(BATCH, int(BATCH_SHARE * lines)))


def _on_policy(config: DistillConfig, experts: Sequence[Expert]) -> TrainConfig:
    """Steps for every training prompt once, `samples` drafts of each."""
    teachers = {expert.task: str(expert.adapter) for expert in experts if expert.adapter}
    _refuse_other_teachers(experts)
    settings: dict[str, Any] = {
        **_shared(config), "method": "opd", "model": common_base(experts, config),
        "tasks": dict.fromkeys(teachers, 1.0), "teacher_adapters": teachers,
        "opd_form": config.opd_form, "divergence": config.divergence,
        "group_size": config.samples, "temperature": config.temperature, "lora": config.lora,
        "batch_size": config.batch_size, **_clean_rows(config, experts),
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
    """Prompts a step so that whole steps take every row once: the largest number, of those up to
    PROMPTS, that takes the fewest rows twice."""
    sizes = range(min(PROMPTS, rows), max(1, min(PROMPTS, rows) // 2) - 1, -1)
    return min(sizes, key=lambda size: -rows % size)


def _clean_rows(config: DistillConfig, experts: Sequence[Expert]) -> dict[str, Any]:
    """The training rows by name where some are left out; DataError for an overlap otherwise."""
    work = training_work(config, experts)
    overlaps = find_overlaps(config, work, work_aside(config, experts))
    own = {
        one.task: {} if one.rows.source is None else {one.task: one.rows.source}
        for one in experts if one.rows is not None
    }  # fmt: skip
    if not own and not any(overlaps.values()):
        return {}
    # Rows are named without their task: one that another task has by the same name goes, too.
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
    """What was set of the settings that every command has that plays: players, protocol, seed …"""
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
            f"The experts of {', '.join(others)} are no adapters on the base.",
            "On-policy distillation reads with them token by token, on the generalist's own base.",
            "Use --by sft, which needs their replies alone, or name adapters.",
        )


def is_trained(config: TrainConfig, out: Path) -> bool:
    """Whether the generalist of this very configuration is finished; RunError for another's, and
    for one whose teachers were other weights."""
    folder = generalist_folder(out)
    if not is_run(folder):
        return False
    Run.open(folder, f"train {config.method}", config.identity())
    refuse_other_teachers(folder, config.teacher_adapters)
    return (folder / "summary.json").is_file()
