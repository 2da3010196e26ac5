"""Controls: the anchors that a judge's points are read against.

A judge that is shown two real people calls them alike to some degree, and one that is shown two
simulators does so to another. A score between those two anchors says more than its plain value. A
task declares which controls it has, asks its judges about them (`Task.control`), and makes numbers
of them (`Task.calibrate`). They are scored beside the episodes, by the same judges with the same
samples, and never change an episode's own score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from soulkit.types import CONTROL_PURPOSE, Role


@dataclass(frozen=True, slots=True)
class Control:
    """One kind of control of a task."""

    name: str
    """Unique in the task: `human_human`."""
    per: Literal["row", "episode"]
    """Whether it is asked once a row (what people wrote does not change), or of every draft."""
    calls: Mapping[Role, int]
    """Role → calls of one control at most, with the task's own samples: what a plan counts."""
    pair_calls: int = 0
    """How many of a judge's ask about a pair, both orders together."""


def purpose_of(name: str) -> str:
    """The purpose of the calls of the control `name`."""
    return f"{CONTROL_PURPOSE}{name}"
