"""What a method is: its names, its settings, and which sequences a step's records become.

The losses, the advantages and the loop are the same for all of them. To add a method, write one
file here: a class with `names`, and a class of its own settings. The command line, TrainConfig and
the documentation find it. A method of another package is named by an entry point of the group
`soulkit.objectives`, whose name is the method's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from soulkit.config import Settings
from soulkit.train.objectives.sequences import Renders, Slot, TrainSequence
from soulkit.train.objectives.sequences import sequences_of as sequences_of
from soulkit.types import Feedback, Record, Segment

Reader = Literal["none", "self", "other"]
"""Whose distributions a method follows: nobody's, the policy's own, or another model's."""

Lines = tuple[str, str, str]
"""What is wrong, why it matters, the way out."""


class Method:
    """One training method, under one or several names."""

    __slots__ = ()

    names: ClassVar[Mapping[str, str]] = {}
    """Name → what `soul train --help` says of it. Written out: help reads it from the source."""
    settings: ClassVar[type[Settings]] = Settings
    """The settings that this method has beside everybody's."""
    marks: ClassVar[Mapping[str, Sequence[str]]] = {}
    """Name → further traits, for settings that matter to some of the names alone."""

    default_words: ClassVar[Mapping[str, str]] = {}
    """Setting of everybody's → its default here in words, where it is another."""

    @classmethod
    def own_defaults(cls, config: Any) -> dict[str, Any]:
        """The values behind `default_words`, for `config`; what was written goes before them."""
        return {}

    @classmethod
    def traits(cls, name: str) -> frozenset[str]:
        """What settings may be tied to (`only`): the name, and what the method is like."""
        return frozenset({"train", name, *cls.marks.get(name, ())})

    @classmethod
    def remark(cls, config: Any) -> str:
        """What these settings make of the method, where a weight is 0; empty otherwise."""
        return ""

    @classmethod
    def futile(cls, config: Any, highs: Mapping[str, float]) -> Lines | None:
        """Why nothing of the method's own could be learned; `highs`: task → its highest reward."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(Method, ABC):
    """A method of reinforcement; as it stands, one on drafts alone that nobody talks to."""

    uses_feedback: ClassVar[bool] = False
    refines: ClassVar[bool] = False
    """It trains on refined rollouts, so they are sampled."""
    reader: ClassVar[Reader] = "none"

    name: str = ""
    logits: bool = False
    """It compares whole distributions with the teacher's, not only the sampled tokens."""

    @classmethod
    def traits(cls, name: str) -> frozenset[str]:
        likeness = {"rollouts": True, "feedback": cls.uses_feedback, "refined": cls.refines}
        marks = cls.marks.get(name, ())
        return frozenset(
            {"train", "plays", name, *marks, *(t for t, is_so in likeness.items() if is_so)}
        )

    @classmethod
    def of(cls, config: Any) -> Objective:
        """The objective of a configuration, of which it reads its own settings."""
        return cls()

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


def scored_records(records: Sequence[Record], kind: str) -> list[Record]:
    """The scored records of one kind."""
    return [r for r in records if r.kind == kind and r.score.scored]
