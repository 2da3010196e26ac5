"""Whether runs that stand side by side were measured the same way, and in what they differ if not.

A report puts no difference between runs; whoever reads two means side by side takes one all the
same. So it says which of them are no pair, and what of the actor's sampling and limits differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.eval.conditions import read_conditions
from soulkit.eval.likeness import condition_differences, grouped, likeness_remarks
from soulkit.report.load import RunData

NOT_ALIKE = "not measured the same way"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlikePair:
    """Two runs of the same tasks that differ in more than the model."""

    a: str
    b: str
    mixed: tuple[str, ...]
    """Why no difference may be put between them; empty: it may."""
    remarks: tuple[str, ...]
    """What differs and is part of what is compared, and what was not recorded."""

    def lines(self) -> list[str]:
        """What a reader is told of them, a sentence each."""
        pair = f"{self.a} against {self.b}"
        return [
            *(f"{pair}, {NOT_ALIKE}: {line}" for line in self.mixed),
            *(f"{pair}: {line}" for line in self.remarks),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"a": self.a, "b": self.b, "mixed": [*self.mixed], "remarks": [*self.remarks]}


def unlike_pairs(runs: Sequence[RunData]) -> list[UnlikePair]:
    """Every run beside the first that has a task with it, as far as they differ.

    RunError or DataError when a file that tells the conditions of a run is damaged.
    """
    tasks: dict[tuple[int, int], list[str]] = {}
    for task in dict.fromkeys(task for run in runs for task in run.tasks):
        first, *others = (i for i, run in enumerate(runs) if task in run.tasks)
        for other in others:
            tasks.setdefault((first, other), []).append(task)
    places = {place for pair in tasks for place in pair}
    conditions = {i: read_conditions(runs[i].path, runs[i].records or None) for i in places}
    differing = []
    for (i, j), shared in sorted(tasks.items()):
        names, sides = (runs[i].name, runs[j].name), (conditions[i], conditions[j])
        pair = UnlikePair(
            a=names[0], b=names[1],
            mixed=grouped(
                (task, line) for task in shared for line in condition_differences(*sides, task)
            ),
            remarks=grouped(
                (task, line) for task in shared for line in likeness_remarks(*sides, task, names)
            ),
        )  # fmt: skip
        differing += [pair] if pair.mixed or pair.remarks else []
    return differing
