"""Published arithmetic and readers of Sotopia that no command runs: what vectors alone check."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.judge.verdict import remove_think
from soulkit.tasks.sotopia.actions import (
    KINDS,
    NONE,
    SPEAK,
    Action,
    action_json,
    narrate,
    parse_action,
)
from soulkit.tasks.sotopia.judging import DIMENSIONS, Dimension, average, reference_reward
from soulkit.types import Kind


def narrated(name: str, action: Mapping[str, Any]) -> str:
    """The reference's line for an action as a mapping: an unknown kind is speech."""
    kind = action.get("action_type", NONE)
    spoken_kind = kind if kind in (*KINDS, NONE) else SPEAK
    return narrate(name, Action(spoken_kind, str(action.get("argument", ""))))


def extract_json(text: str | None, repair: Callable[[str], str]) -> tuple[Any, int]:
    """(value, calls of `repair`): what holds no value, or an empty one, is given to `repair`."""
    if not text:
        return None, 0
    value = action_json(text)
    return (value, 0) if value else (action_json(repair(text) or ""), 1)


def parse_rollout(output: str, actor: str, partner: str) -> list[dict[str, Any]]:
    """The turns of a saved rollout, as the reference splits it: at role words that end a line."""
    parts = re.split(r"(assistant|user)\s*\n", output)
    turns = []
    for turn, (role, content) in enumerate(zip(parts[1::2], parts[2::2], strict=True), 1):
        content = remove_think(content, remove_unclosed=True)
        if not content:
            continue
        action = parse_action(content) if role == "assistant" else Action(SPEAK, content)
        line = narrate(actor, action) if role == "assistant" else content
        who = actor if role == "assistant" else partner
        turns.append(
            {"turn": turn, "agent": who, "action_type": action.kind,
             "argument": action.argument, "natural_language": line}
        )  # fmt: skip
    return turns


LOWEST = average({name: d.low for name, d in DIMENSIONS.items()}) / 10


HIGHEST = average({name: d.high for name, d in DIMENSIONS.items()}) / 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceScores:
    """What the reference makes of one judged episode."""

    raw: dict[str, int]
    average: float
    weighted: float
    """With the auditor's penalty, in training."""
    reward: float
    risk: str


def reference_scores(
    verdict: Mapping[str, Any] | None, audit: Mapping[str, Any] | None, *,
    is_train: bool, kind: Kind = "draft", audited: bool = True, thought_aloud: bool = False,
) -> ReferenceScores:  # fmt: skip
    """The reference's numbers for a verdict and an audit as they came, None when none came.

    `audited`: the auditor had something to see; `thought_aloud`: a turn began with a thinking tag.
    ValueError or OverflowError for a score that is not finite, as there.
    """
    raw = {name: lenient_score(name, verdict) for name in DIMENSIONS}
    has_audit = audited and isinstance(audit, Mapping)
    risk = str(audit.get("risk_level", "low")) if has_audit and audit else "low"
    share, reward = reference_reward(
        raw, risk, is_train=is_train, kind=kind, thought_aloud=thought_aloud
    )
    return ReferenceScores(raw=raw, average=average(raw), weighted=share, reward=reward, risk=risk)


def lenient_score(name: str, verdict: Mapping[str, Any] | None) -> int:
    """A dimension's score in a verdict of any shape; the middle of its range when there is none."""
    entry = verdict.get(name) if isinstance(verdict, Mapping) else None
    return _lenient(name, entry.get("score") if isinstance(entry, Mapping) else None)


def middle(dimension: Dimension) -> int:
    """The middle of a range, rounded down: the score for no score."""
    return (dimension.low + dimension.high) // 2


def _lenient(name: str, score: Any) -> int:
    dimension = DIMENSIONS[name]
    if not isinstance(score, int | float):  # a bool is an int, here as there
        return middle(dimension)
    return dimension.clamped(int(score))


def shares(raw: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Dimension → its raw and its normalised score."""
    return {name: {"raw": raw[name], "normalized": d.normal(raw[name])}
            for name, d in DIMENSIONS.items()}  # fmt: skip


def extract_old_scores(rollout: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The scores in a saved rollout: a missing one is 0, one that is no number the middle."""
    return shares({name: _lenient(name, rollout.get(f"sotopia/{name}", 0)) for name in DIMENSIONS})


def reference_aggregates(results: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means over the results with a reward: of it, and of each dimension of the judged seat."""
    scored = [result for result in results if result.get("reward") is not None]
    means: dict[str, float] = {}
    for name in DIMENSIONS:
        entries = [entry for result in scored if (entry := _ratings(result).get(name)) is not None]
        if entries:
            count = len(entries)
            means[f"{name}_avg"] = sum(entry["normalized"] for entry in entries) / count
            means[f"{name}_raw_avg"] = sum(entry["raw"] for entry in entries) / count
    if scored:
        means["overall_reward"] = sum(result["reward"] for result in scored) / len(scored)
    return means


def _ratings(result: Mapping[str, Any]) -> Mapping[str, Any]:
    seat = 1 if result.get("eval_position", "agent1") == "agent1" else 2
    scores: Mapping[str, Any] = result.get(f"agent_{seat}_scores") or {}
    return scores


def evaluate_text(ask: Callable[[], str], attempts: int = 3) -> tuple[dict[str, int], int]:
    """(raw scores, calls): the reference's reading of a judge that answers in free text.

    A reply without JSON is given to a repair call (`ask` again); a reply that names no dimension is
    asked for anew. Without a usable one every score is the middle of its range.
    """
    calls = 0

    def again(_: str = "") -> str:
        nonlocal calls
        calls += 1
        return ask()

    for _ in range(attempts):
        value, _repairs = extract_json(again(), again)
        if isinstance(value, Mapping) and any(name in value for name in DIMENSIONS):
            return {name: lenient_score(name, value) for name in DIMENSIONS}, calls
    return {name: middle(d) for name, d in DIMENSIONS.items()}, calls
