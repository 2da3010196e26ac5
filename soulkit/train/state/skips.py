"""Updates that were not taken, because a number in them was not finite.

One may be bad luck (a reply whose probability underflows); several in a row mean that the model or
the settings are broken, and a run that went on would play rollouts and learn nothing. The count of
those that follow each other stands in the step's line as long as it is not 0, so a run that is
taken up again goes on with it. At `MOST_SKIPS` the run stops behind a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from soulkit.errors import UserError
from soulkit.train.state.lines import StepLine, read_step_lines

MOST_SKIPS = 5
"""Updates that are skipped one after the other, until a run stops."""


@dataclass(slots=True)
class Skips:
    """Counts skipped updates across the steps of a run."""

    row: int = 0
    """Of them, those since the last update that was taken."""

    @classmethod
    def of(cls, metrics: Path) -> Self:
        """That of a run; `metrics` is its file, which knows the count of one that is taken up."""
        return cls(newest_learned(metrics).learned.skipped_row)

    def another(self) -> bool:
        """Count one; whether there were too many in a row."""
        self.row += 1
        return self.row >= MOST_SKIPS

    def none(self) -> None:
        """An update was taken."""
        self.row = 0


def newest_learned(metrics: Path) -> StepLine:
    """The line of a run's newest step that learned; empty before the first."""
    lines = reversed(read_step_lines(metrics))
    return next((line for line in lines if line.learned.skipped is not None), StepLine(step=0))


def skip_remarks(line: StepLine) -> list[str]:
    """`update 2 of 4 skipped: the loss is nan`, for every update that the step did not take."""
    reasons = line.learned.not_finite.items()
    return [
        f"update {which} skipped: {why}; the weights stay as they were" for which, why in reasons
    ]


def too_many_skips(line: StepLine) -> UserError | None:
    """Why a run stops after the step of `line`; None while it may go on."""
    row, reasons = line.learned.skipped_row, list(line.learned.not_finite.items())
    if row < MOST_SKIPS or not reasons:
        return None
    which, why = reasons[-1]
    return UserError(
        f"{row} updates in a row were skipped; in the last one, update {which} of step "
        f"{line.step}, {why}.",
        "What is not a finite number teaches nothing, and one of them in the weights would make "
        "every later number one.",
        "The weights so far are kept, without any of it. Try a smaller --lr, --dtype float32 or a "
        "higher --temperature with another --out; the same command takes one more step, and goes "
        "on if that works.",
    )
