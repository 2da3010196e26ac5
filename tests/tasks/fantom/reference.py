"""Published arithmetic of the benchmark that no command runs: what vectors alone check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any


def reference_aggregates(results: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Means by question type, by accessibility, and over all that is no fact."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result is None:
            continue
        reward, kind = (
            float(result.get("reward") or 0.0),
            str(result.get("question_type", "unknown")),
        )
        fact = kind.startswith("fact")
        groups[f"f1_{kind}" if fact else f"accuracy_{kind}"].append(reward)
        access = result.get("missed_info_accessibility", "unknown")
        groups[f"accuracy_accessibility_{access}"].append(reward)
        if not fact:
            groups["accuracy_tom_overall"].append(reward)
    return {name: sum(values) / len(values) for name, values in groups.items()}
