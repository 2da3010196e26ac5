"""Coaching a Sotopia player: what a model coach is shown, what rules can say, and scripted players.

Feedback goes to a player who knows one side of the scene. So under `paper` a coach is told nothing
that only the other side knows. The judge knew both sides: of its reasoning the coach gets the
sentences that do not echo the other's private texts.

    “It is Omar's rent that decides it. Maya never asked why he hesitates.”  →  the second sentence

The scripts are for self-checks and canaries: a competent player, a rude one, a partner that fits
every scene, and verdicts. Their lines name no goal and no secret, so they fit any row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from soulkit.judge.leaks import LeakView, content, tokens
from soulkit.tasks.kit.coaching import (
    first_verdict,
    longest_text,
    remarks_without_secrets,
    repeated_texts,
)
from soulkit.tasks.kit.prompting import Texts
from soulkit.tasks.sotopia.actions import LEAVE, NONE, SPEAK, Action
from soulkit.tasks.sotopia.scores import DIMENSIONS
from soulkit.types import Score

TEXTS = Texts(__file__)
RUBRIC = (
    "believability", "social rules", "financial and material benefits", "risk level",
    "relationship score", "knowledge score", "goal completion",
)  # fmt: skip
"""Words of the rubric that nobody in a scene would use."""
LONG_LINE = 120
"""Words above which one turn is a speech."""
EARLY = 4
"""A player who leaves with fewer turns than this has hardly begun."""
CANARY_TURNS = 4


def marks(metrics: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The scored dimensions as the coach's template shows them."""
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
    """The reasoning of the first readable judge, fenced, without what echoes a private text."""
    said = first_verdict(score, "score")
    reasons = [(TEXTS["titles"][name][0], str(said[name]["reasoning"]))
               for name in DIMENSIONS if name in said]  # fmt: skip
    return remarks_without_secrets(reasons, view)


# -- rules ---------------------------------------------------------------------------------------


def goal_lesson(acts: Sequence[Action], goal: str, turns: int) -> str:
    """What rules can tell from the player's own actions; `turns` is how many the scene allows."""
    remarks = [*_remarks(acts, turns), *_goal_missed(acts, goal)]
    return " ".join([*remarks, advice("" if remarks else goal)])


def advice(goal: str) -> str:
    """What can be said before anything was played."""
    opening = f"You came for this: {_brief(goal)} " if goal.strip() else ""
    return f"{opening}{TEXTS['advice']}"


def _remark(name: str, **values: Any) -> str:
    text: str = TEXTS["remarks"][name]
    return text.format(**values)


def _remarks(acts: Sequence[Action], turns: int) -> Iterator[str]:
    """On form, length, repetitions, and how the player's part ended."""
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
    line = " ".join(goal.split())
    return line if line.endswith((".", "!", "?")) else f"{line}."


# -- scripts -------------------------------------------------------------------------------------


def scripted_replies(player: str) -> tuple[str, ...]:
    """The replies of the `competent` player, or of the `rude` one."""
    return tuple(Action(kind, text).json() for kind, text in TEXTS[player])


def scripted_ratings(form: str, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: the top of every scale, or the bottom."""
    if form in ("Ratings", "LooseRatings"):
        why = "as scripted"
        marks = {name: {"reasoning": why, "score": d.high if perfect else d.low}
                 for name, d in DIMENSIONS.items()}  # fmt: skip
        return json.dumps(marks)
    if form == "Audit":
        return json.dumps({"risk_level": "low", "reason": "as scripted"})
    return None
