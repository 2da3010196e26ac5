"""Sotopia's seven dimensions, feedback from a verdict, and scripted players.

Raw scores are integers, each with its own range; secret and social_rules only subtract:

    average  = Σ raw / 7                                  −4.286 … 5.714
    weighted = Σ weight · (raw − low) / (high − low) / 6        0 … 1

`paper` rewards every episode with average / 10. `reference` rewards a draft with average / 10 and a
refined episode with `weighted`, and replaces a missing score by the middle of its range. The judge
knows both sides of the scene: under `paper` a coach gets the sentences of its reasoning that do not
repeat the other side's private texts. The scripted players name no goal or secret, so they work for
any row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soulkit.judge.coach import auditable_texts
from soulkit.judge.leaks import LeakView, content, tokens
from soulkit.judge.structured import dimension_shape, rated_part
from soulkit.tasks.kit.coaching import (
    first_verdict,
    longest_text,
    remarks_without_secrets,
    repeated_texts,
)
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.sotopia.actions import KINDS_WITH_TEXT, LEAVE, NONE, SPEAK, Action
from soulkit.text import with_stop
from soulkit.types import Kind, Score


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension: its range, its weight in `weighted`, and its priority in coaching."""

    low: int
    high: int
    weight: float
    importance: str

    def clamped(self, raw: int) -> int:
        return max(self.low, min(self.high, raw))

    def normal(self, raw: float) -> float:
        """`raw` as a share of the range; outside [0, 1] if it is outside the range."""
        return (raw - self.low) / (self.high - self.low)


DIMENSIONS: dict[str, Dimension] = {
    "believability": Dimension(0, 10, 0.5, "medium"),
    "relationship": Dimension(-5, 5, 1.0, "high"),
    "knowledge": Dimension(0, 10, 1.0, "high"),
    "secret": Dimension(-10, 0, 0.5, "medium"),
    "social_rules": Dimension(-10, 0, 0.5, "medium"),
    "financial_and_material_benefits": Dimension(-5, 5, 0.5, "medium"),
    "goal": Dimension(0, 10, 2.0, "critical"),
}
TOTAL_WEIGHT = sum(dimension.weight for dimension in DIMENSIONS.values())


def average(raw: Mapping[str, float]) -> float:
    """The mean of the seven raw scores."""
    return sum(raw[name] for name in DIMENSIONS) / len(DIMENSIONS)


def weighted(raw: Mapping[str, float]) -> float:
    """The weighted mean of the seven scores as shares of their ranges, 0 to 1."""
    parts = (d.weight * d.normal(raw[name]) for name, d in DIMENSIONS.items())
    return sum(parts) / TOTAL_WEIGHT


# -- verdicts ------------------------------------------------------------------------------------


RANGES = {(0, 10): "_Gain", (-5, 5): "_Change", (-10, 0): "_Loss"}
"""The range of a score → the name of its schema."""
_PARTS = {ends: rated_part(name, int, "reasoning", ends) for ends, name in RANGES.items()}
Ratings = dimension_shape(
    "Ratings", "A judge's seven scores, each within its range.",
    {name: _PARTS[d.low, d.high] for name, d in DIMENSIONS.items()},
)  # fmt: skip
LooseRatings = dimension_shape(
    "LooseRatings",
    "The same under `reference`, where a score outside its range is moved to its end.",
    dict.fromkeys(DIMENSIONS, rated_part("_Any", int, "reasoning")),
)


def raw_score(dimension: str, ratings: Any) -> float:
    """A judge's score, clipped to its range."""
    return float(DIMENSIONS[dimension].clamped(getattr(ratings, dimension).score))


# -- the reference -------------------------------------------------------------------------------

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.IGNORECASE | re.DOTALL)


def audited_lines(actions: Sequence[Action]) -> list[str]:
    """The actor's arguments that the reference's auditor sees.

    Left out: arguments that start like JSON, a list or a call (`word (`), leaving, silence, and
    marked thinking in any case.
    """
    spoken = (_THOUGHT.sub("", a.argument) for a in actions if a.kind in KINDS_WITH_TEXT)
    return auditable_texts(spoken, "reference")


def reference_reward(
    raw: Mapping[str, float], risk: str, *, is_train: bool, kind: Kind, thought_aloud: bool
) -> tuple[float, float]:
    """The logged weighted share, and the learner's reward, for clipped raw scores."""
    share = weighted(raw) / ({"medium": 2, "high": 4}.get(risk, 1) if is_train else 1)
    badly_formed = is_train and thought_aloud
    if kind == "refined":
        reward = 0.0 if risk in ("medium", "high") else weighted(raw)
        return share, reward / 2 if badly_formed else reward
    return share, share / 2 if badly_formed else average(raw) / 10


TEXTS = Texts(__file__)
RUBRIC = (
    "believability", "social rules", "financial and material benefits", "risk level",
    "relationship score", "knowledge score", "goal completion",
)  # fmt: skip
"""Rubric terms that no character in a scene would use."""
LONG_LINE = 120
"""Words above which a turn counts as a speech."""
EARLY = 4
"""Leaving after fewer turns than this counts as early."""
CANARY_TURNS = 4


def marks(metrics: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The scored dimensions for the coach's template."""
    entries = []
    for name, dimension in DIMENSIONS.items():
        raw = metrics.get(name)
        if raw is None:
            continue
        title, asks = TEXTS["titles"][name]
        entries.append(
            {"title": title, "asks": asks, "importance": dimension.importance,
             "score": f"{raw:g}", "low": dimension.low, "high": dimension.high,
             "percent": round(100 * dimension.normal(raw))}
        )  # fmt: skip
    return entries


def judge_notes(score: Score, view: LeakView) -> str:
    """The first readable judge's reasoning, fenced, without repetitions of private texts."""
    said = first_verdict(score, "score")
    reasons = [(TEXTS["titles"][name][0], str(said[name]["reasoning"]))
               for name in DIMENSIONS if name in said]  # fmt: skip
    return remarks_without_secrets(reasons, view)


# -- rules ---------------------------------------------------------------------------------------


def goal_lesson(acts: Sequence[Action], goal: str, turns: int) -> str:
    """Rule-based feedback on the actor's own actions; `turns` is the scene's turn limit."""
    remarks = [*_remarks(acts, turns), *_goal_missed(acts, goal)]
    return " ".join([*remarks, advice("" if remarks else goal)])


def advice(goal: str) -> str:
    """Advice before anything was played."""
    opening = f"You came for this: {_brief(goal)} " if goal.strip() else ""
    return f"{opening}{TEXTS['advice']}"


def _remark(name: str, **values: Any) -> str:
    text: str = TEXTS["remarks"][name]
    return text.format(**values)


def _remarks(acts: Sequence[Action], turns: int) -> Iterator[str]:
    if unread := sum(act.status in ("empty", "malformed") for act in acts):
        yield _remark("unread", n=unread, turns=len(acts))
    if loose := sum(act.status == "salvaged" for act in acts):
        yield _remark("loose", n=loose, turns=len(acts))
    speeches = [act.argument for act in acts if act.kind == SPEAK]
    _, longest = longest_text(speeches)
    if longest > LONG_LINE:
        yield _remark("long", words=longest)
    if repeated := repeated_texts(speeches):
        yield _remark("repeated", start=" ".join(speeches[repeated[0]].split()[:12]))
    real_acts = [act for act in acts if act.kind != NONE]
    if acts and acts[-1].kind == LEAVE and len(real_acts) < EARLY:
        yield _remark("left_early")
    elif len(acts) >= turns // 2 and real_acts and real_acts[-1].kind != LEAVE:
        yield _remark("no_end")


def _goal_missed(acts: Sequence[Action], goal: str) -> Iterator[str]:
    goal_words = content(tokens(goal))
    raised = goal_words & content(tokens("\n".join(act.argument for act in acts)))
    silent = all(act.kind == NONE for act in acts)
    if not silent and goal_words and len(raised) < min(2, len(goal_words)):
        yield _remark("goal_missed", goal=_brief(goal))


def _brief(goal: str) -> str:
    return with_stop(" ".join(goal.split()))


# -- scripts -------------------------------------------------------------------------------------


def scripted_replies(player: str) -> tuple[str, ...]:
    """The replies of the `competent` or the `rude` scripted player."""
    return tuple(Action(kind, text).json() for kind, text in TEXTS[player])


def scripted_ratings(form: str, perfect: bool) -> str | None:
    """A judge's scripted answer for `form`: the top or the bottom of every scale."""
    if form in ("Ratings", "LooseRatings"):
        why = "as scripted"
        marks = {name: {"reasoning": why, "score": d.high if perfect else d.low}
                 for name, d in DIMENSIONS.items()}  # fmt: skip
        return json.dumps(marks)
    if form == "Audit":
        return json.dumps({"risk_level": "low", "reason": "as scripted"})
    return None
