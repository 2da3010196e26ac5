"""What supervised training is measured on while it runs: settings of a reinforcement it might be.

Greedy dev scores and probes are those of a reinforcement of the same weights on the same rows, with
the same players. So its settings are made here from those of the supervised run, and everything
that makes, checks and counts such a run serves for both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soulkit.train.beside import BesideSettings
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.registry import method_class
from soulkit.train.objectives.sft import SftSettings

PLAIN = "grpo"
"""The method whose settings stand for greedy play alone: it needs nobody who gives feedback."""
_ALL_ROWS: dict[str, Any] = {"limit": None, "where": {}, "example": (), "rows_per_task": None}
_OWN = ("lr", "lr_schedule", "warmup_steps")
"""Of the optimizer: a probe has those of its method."""


def measured_settings(config: TrainConfig) -> TrainConfig | None:
    """Settings of the reinforcement whose dev rows, players and steps a supervised run is measured
    with; None for a run that plays nothing."""
    played = config.eval_every or config.probe_every
    if config.method != "sft" or not played or not (config.eval_task or config.tasks):
        return None
    method = config.probe_method if config.probe_every else PLAIN
    update: dict[str, Any] = {
        **_defaults(SftSettings), **_defaults(BesideSettings), **_defaults(TrainConfig, _OWN),
        "method": method, "steps": config.probe_steps, "eval_every": config.probe_steps,
        "checkpoint_every": 1, "keep_last": 1, "keep_best": 0, "track": "none",
    }  # fmt: skip
    if config.eval_task:
        tasks = dict.fromkeys(config.eval_task, 1.0)
        update |= {**_ALL_ROWS, "tasks": tasks, "data": config.eval_data, "suite": None,
                   "playable": False}  # fmt: skip
    plain = config.model_copy(update=update)
    usual = method_class(method).own_defaults(plain)
    lr = {"lr": config.probe_lr} if config.probe_lr else {}
    return plain.model_copy(update={**usual, **lr})


def probe_settings(
    measured: TrainConfig, *, model: Path | str, adapter: Path | None, threads: int
) -> TrainConfig:
    """Those of one probe: from the snapshot of the weights, on the threads that this process has
    already."""
    return measured.model_copy(
        update={"model": str(model), "adapter": adapter and str(adapter), "threads": threads}
    )


def _defaults(kind: Any, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Field → default, of the settings that `kind` declares, or of those that are named."""
    fields = kind.model_fields
    return {name: fields[name].get_default(call_default_factory=True) for name in names or fields}
