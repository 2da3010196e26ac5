"""Published arithmetic of Hi-ToM and ParaToMi that no command runs: what vectors alone check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any


def hitom_aggregates(results: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Accuracy overall and by deception, length and order, as the reference's helper groups it."""
    scores = [r for r in results if r is not None]
    if not scores:
        return {}
    groups: dict[str, list[float]] = defaultdict(list)
    for result in scores:
        reward = float(result.get("reward") or 0.0)
        groups["accuracy_overall"].append(reward)
        groups[f"accuracy_deception_{result.get('deception', 'unknown')}"].append(reward)
        groups[f"accuracy_length_{result.get('story_length', 'unknown')}"].append(reward)
        groups[f"accuracy_order_{result.get('question_order', 'unknown')}"].append(reward)
    return {name: sum(values) / len(values) for name, values in groups.items()}


def tomi_aggregates(results: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Accuracy per question type and overall, as the reference's helper groups it."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result is not None:
            reward = float(result.get("reward") or 0.0)
            groups[f"accuracy_{result.get('question_type', 'unknown')}"].append(reward)
            groups["accuracy_overall"].append(reward)
    return {name: sum(values) / len(values) for name, values in groups.items()}
