"""Published arithmetic of the benchmark that no command runs: what vectors alone check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any


def reference_aggregates(results: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Accuracy per dimension and overall, as the reference's helper groups it."""
    groups: dict[str, list[float]] = defaultdict(list)
    for result in results:
        if result is None:
            continue
        logged = (result.get("extra_fields") or {}).get("reward_extra_info") or {}
        dimension = logged.get("twinvoice/dimension") or result.get("dimension") or "unknown"
        reward = float(result.get("reward") or 0.0)
        groups[f"accuracy_{dimension}"].append(reward)
        groups["accuracy_overall"].append(reward)
    return {name: sum(values) / len(values) for name, values in groups.items()}
