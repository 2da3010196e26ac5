"""Published arithmetic of Humanual that no command runs: what vectors alone check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.tasks.humanual.judging import AXES, clip_share, length_factor, lexical_f1, sides_mean


def reference_numbers(
    verdict: Mapping[str, Any] | None, generated: str, original: str | None
) -> dict[str, float]:
    """Likeness and its parts for whatever a judge call gave; 0 for one that gave nothing.

    Raises KeyError, TypeError or ValueError for a verdict with a side that is no number.
    """
    factor, shared = length_factor(generated, original), lexical_f1(generated, original)
    if verdict is None:
        return {"likeness": 0.0}
    judged = sides_mean({axis: float(verdict[axis]["score"]) for axis in AXES})
    return {
        "likeness": clip_share(judged * factor), "sides_mean": judged,
        "length_factor": factor, "lexical_f1": shared,
        **{f"axis/{axis}": verdict[axis]["score"] for axis in AXES},
    }  # fmt: skip


def judge_response(verdict: Mapping[str, Any] | None) -> float:
    """The score of one number, clipped; TypeError for a text."""
    return 0.0 if verdict is None else clip_share(verdict["score"])


def judge_response_subscores(verdict: Mapping[str, Any] | None) -> float:
    """Coverage of the points less the penalty; 0 for no verdict and for no points."""
    if verdict is None:
        return 0.0
    points = [float(point["score"]) for point in verdict["key_points"]]
    coverage = sum(points) / len(points) if points else 0.0
    return clip_share(coverage - float(verdict["P"]))


def reference_aggregates(results: Sequence[Mapping[str, Any] | None]) -> dict[str, float]:
    """Means by side, data set and category; an unknown category covers an unknown data set."""
    rows = [_logged(result) for result in results if result is not None]
    if not rows:
        return {}
    scored = [row for row in rows if row.get("humanual/score") is not None]
    means = {"parse_success_rate": sum(bool(r.get("humanual/parse_success")) for r in rows)
             / len(rows)}  # fmt: skip
    if scored:
        means |= _group("overall", scored, hundredfold=True)
    for key, missing in (("dimension", "response"), ("dataset", "unknown"),
                         ("category", "unknown")):  # fmt: skip
        groups = defaultdict(list)
        for row in scored:
            groups[row.get(f"humanual/{key}") or missing].append(row)
        for name, members in groups.items():
            means |= _group(name, members, hundredfold=key == "dimension")
    return means


def _logged(result: Mapping[str, Any]) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = (result.get("extra_fields") or {}).get("reward_extra_info") or {}
    return fields


def _group(name: str, rows: Sequence[Mapping[str, Any]], *, hundredfold: bool) -> dict[str, float]:
    mean = sum(row["humanual/score"] for row in rows) / len(rows)
    more = {f"{name}/score_x100": 100 * mean} if hundredfold else {}
    return {f"{name}/score": mean, **more, f"{name}/count": float(len(rows))}
