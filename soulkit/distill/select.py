"""Rejection: which samples the generalist learns from, and what became of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from soulkit.distill.config import DistillConfig
from soulkit.distill.experts import Expert


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSelection:
    """What became of the samples of one task. Counts are of episodes unless they say otherwise."""

    prompts: int
    """Rows that were played."""
    sampled: int
    scored: int
    """Of these neither unscored nor cut, refused, forged or hacked."""
    passed: int
    """Of these with reward enough."""
    overlaps: int
    """Samples of rows that overlap evaluation rows."""
    duplicates: int
    taken: int
    prompts_taken: int
    lines: int
    """Rows in selected.jsonl: one for each acted seat and sequence."""
    tokens: int
    """Trained tokens of these, as sampled."""
    acceptance: float | None
    """passed / sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The contents of selection.json."""

    tasks: dict[str, TaskSelection]
    sha256: str
    """Of selected.jsonl."""
    reused: bool = False
    """Whether it stood there already."""

    @property
    def lines(self) -> int:
        return sum(part.lines for part in self.tasks.values())


def select(
    config: DistillConfig, experts: Sequence[Expert], out: Path, *,
    say: Callable[[str], None] | None = None,
) -> Selection:  # fmt: skip
    """Write selected.jsonl and selection.json of the samples in `out`, or find them written.

    RunError while samples are missing, DataError where rows overlap evaluation rows or nothing of a
    task passes.
    """
    raise NotImplementedError


def read_selection(out: Path) -> Selection:
    """What `select` wrote; RunError where it did not."""
    raise NotImplementedError
