"""What an objective is: which sequences a step's records become, in which groups, with which loss.

The losses, the advantages and the loop are the same for all of them. To add a method, write one
file here and one line in `registry.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence
from soulkit.types import Feedback, Record, Segment

Reader = Literal["none", "self", "other"]
"""Whose distributions a method follows: nobody's, the policy's own, or another model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """One training method; as it stands, one on drafts alone that nobody talks to."""

    name: str = ""
    uses_feedback: bool = False
    refines: bool = False
    """It trains on refined rollouts, so they are sampled."""
    reader: Reader = "none"
    logits: bool = False
    """It compares whole distributions with the teacher's, not only the sampled tokens."""

    @abstractmethod
    def sequences(
        self, records: Sequence[Record], renderer: Renders, slot: Slot
    ) -> list[TrainSequence]:
        """The step's scored records as trained sequences; unscored ones give none.

        `slot` gives the message of a record's seat with feedback in it.
        """


def no_slot(record: Record, seat: str, feedback: Feedback) -> Segment:
    """For methods that never ask for the slot."""
    raise LookupError(f"no task to fill the feedback slot of {record.key} with")


def scored(records: Sequence[Record], kind: str) -> list[Record]:
    """The scored records of one kind."""
    return [r for r in records if r.kind == kind and r.score.scored]
