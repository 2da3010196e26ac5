"""Who plays in a training, on which rows: what its folder keeps, so that no mean mixes two."""

from __future__ import annotations

from typing import Any

from soulkit.eval.provenance import actor_print, measured_model, provenance
from soulkit.models.roles.players import Players
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.material.assemble import Material
from soulkit.train.planning import work_of
from soulkit.types import Sampling


def training_provenance(
    config: TrainConfig, players: Players, material: Material, policy: Policy
) -> dict[str, Any]:
    """The provenance of a run: players, rows, limits, and the weights that it starts from."""
    limits = {name: config.reply_limit(task.spec.sampling) for name, task in material.tasks.items()}
    sampling = {
        name: Sampling(temperature=config.temperature, max_tokens=limit, thinking=config.thinking)
        for name, limit in limits.items()
    }
    actor = actor_print(config.model_dump())
    record = provenance(config, players, work_of(material), actor, sampling)
    suite = {"suite": config.suite, "left_out": dict(material.left_out)} if config.suite else {}
    return {"actor": measured_model(config.model_dump(), policy), **record, **suite}
