"""What an objective is: which sequences a step's records become, and in which groups.

The loss, the advantages and the loop are the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from soulkit.train.sequences import Renders, TrainSequence
from soulkit.types import Record


class Objective(Protocol):
    """One training method."""

    @property
    def name(self) -> str: ...

    @property
    def uses_feedback(self) -> bool: ...

    def sequences(self, records: Sequence[Record], renderer: Renders) -> list[TrainSequence]:
        """The step's scored records as trained sequences; unscored ones give none."""
        ...
