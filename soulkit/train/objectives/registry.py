"""Every training method by its name. A new one is a file beside this one and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from soulkit.errors import ConfigError, did_you_mean
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.ditto import Ditto
from soulkit.train.objectives.erl import ERL
from soulkit.train.objectives.grpo import GRPO
from soulkit.train.objectives.opd import OPD
from soulkit.train.objectives.rltf import RLTF
from soulkit.train.objectives.sdpo import SDPO

METHODS: Mapping[str, Callable[[TrainConfig], Objective]] = {
    "grpo": GRPO.of,
    "ditto": Ditto.of,
    "rltf-sd": RLTF.of,
    "erl": ERL.of,
    "sdpo-token": SDPO.of,
    "sdpo-logits": SDPO.of,
    "sdpo-token+grpo": SDPO.of,
    "sdpo-logits+grpo": SDPO.of,
    "opd": OPD.of,
}


def make_objective(config: TrainConfig) -> Objective:
    """The objective of `config.method`; ConfigError when there is none of that name."""
    if config.method not in METHODS:
        raise ConfigError(
            f"'{config.method}' is no method of reinforcement.",
            f"The methods are {', '.join(METHODS)}.",
            did_you_mean(config.method, METHODS),
        )
    return METHODS[config.method](config)
