"""Which play of an example something belongs to."""

from __future__ import annotations

import random
from dataclasses import dataclass

from soulkit.types import Call, Example, Feedback, Kind, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Which play of an example this is: keys every random stream and every call in it."""

    index: int = 0
    kind: Kind = "draft"
    step: int = 0
    seed: int = 0
    feedback: Feedback | None = None

    def call(
        self, role: Role, example: Example, turn: int = 0, sample: int = 0, *, seat: str = "",
        purpose: str = "",
    ) -> Call:  # fmt: skip
        """A call of this play; `seat` and `purpose` where role and turn do not tell it apart."""
        return Call(
            role=role,
            example_id=example.id,
            rollout=self.index,
            kind=self.kind,
            turn=turn,
            sample=sample,
            step=self.step,
            seat=seat,
            purpose=purpose,
        )

    def rng(self, example: Example, purpose: str) -> random.Random:
        """A stream of its own for choices that a task makes by chance."""
        return random.Random(f"{self.seed}/{example.id}/{self.index}/{self.kind}/{purpose}")
