"""Which experts there are, as what lies beside their weights says: no folder's name counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from soulkit.distill.config import DistillConfig
from soulkit.models.roles.settings import RoleSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One expert of one task, checked: its files fit each other and those of the other experts."""

    task: str
    folder: Path | None
    """Where its weights lie; None of a served one."""
    adapter: Path | None
    """`folder` where it is an adapter; None of a model with weights of its own, or a served one."""
    base: str
    """Folder or hub id (owner/name@revision) of what it was trained from; "" of a served one."""
    base_print: str = ""
    """What tells the weights of the base; "" of a served one."""
    tokenizer_print: str = ""
    """What tells its vocabulary and chat template; "" of a served one."""
    weights: str = ""
    """What tells its own weights."""
    note: Mapping[str, Any] = field(default_factory=dict)
    """What soulkit.json beside the weights says; empty of a foreign adapter."""
    endpoint: RoleSettings | None = None

    @property
    def model(self) -> str:
        """What is loaded, or its name on its server."""
        if self.endpoint is not None:
            return self.endpoint.model
        return self.base if self.adapter is not None else str(self.folder)


def find_experts(config: DistillConfig) -> tuple[Expert, ...]:
    """The experts that `config` names, by task, in the order of their tasks' names.

    ConfigError or ModelLoadError, by name, for whatever keeps them from becoming one model.
    """
    raise NotImplementedError
