"""What a person is told about a step, beside its numbers: sentences read off its line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.train.rollouts.feedback import MISSING

WAYS = (
    "try more drafts of a prompt (--group-size), a higher --temperature, or rows that are neither "
    "always solved nor never"
)


def remarks(line: Mapping[str, Any]) -> list[str]:
    """Feedback that nobody could use, and groups in which no rollout is better than another."""
    return [*line.get(MISSING, {}).values(), *filter(None, [flat_groups(line)])]


def flat_groups(line: Mapping[str, Any]) -> str:
    """`8 of 8 groups have equal rewards: nothing is learned; try …`; empty when one has spread."""
    groups, single, flat = (line.get(n, 0) for n in ("groups", "groups_single", "groups_flat"))
    moved = bool(line.get("grad_norm"))
    # Under protocol reference a group of one keeps its reward: what moved may be that.
    if not groups or single + flat < groups or (single and moved):
        return ""
    what = (
        "equal rewards" if not single else "one rollout or equal rewards" if flat else "one rollout"
    )
    lesson = "nothing is learned from rewards" if moved else "nothing is learned"
    return f"{groups} of {groups} groups have {what}: {lesson}; {WAYS}"
