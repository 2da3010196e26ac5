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
import re
from collections.abc import Mapping, Sequence
from typing import Any

from soulkit.judge.leaks import content, echoes_private, tokens
from soulkit.tasks.sotopia.actions import GESTURE, LEAVE, NONE, SPEAK, Action
from soulkit.tasks.sotopia.scores import DIMENSIONS
from soulkit.types import Score

TITLES = {
    "believability": (
        "coming across as this person",
        "whether a real person, and this one, speaks",
    ),
    "relationship": ("how the two get on", "whether they part on better or worse terms"),
    "knowledge": ("finding out", "what was learned that matters and was not known before"),
    "secret": ("keeping to oneself", "what should have stayed hidden and came out"),
    "social_rules": ("decency", "whether laws, promises and good manners were kept"),
    "financial_and_material_benefits": ("gains and losses", "what was won or lost in things"),
    "goal": ("getting what one came for", "how much of the goal was reached"),
}
"""Dimension → what it is called before players, and what it asks."""

RUBRIC = (
    "believability", "social rules", "financial and material benefits", "risk level",
    "relationship score", "knowledge score", "goal completion",
)  # fmt: skip
"""Words of the rubric that nobody in a scene would use."""

LONG_LINE = 120
"""Words above which one turn is a speech."""
EARLY = 4
"""Whoever leaves with fewer turns than this has hardly begun."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")


def marks(metrics: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """The scored dimensions as the coach's template shows them."""
    entries = []
    for name, dimension in DIMENSIONS.items():
        raw = metrics.get(name)
        if raw is None:
            continue
        title, asks = TITLES[name]
        entries.append(
            {"title": title, "asks": asks, "importance": dimension.importance,
             "score": f"{raw:g}", "low": dimension.low, "high": dimension.high,
             "percent": round(100 * dimension.normal(raw))}
        )  # fmt: skip
    return entries


def reasonings(score: Score) -> dict[str, str]:
    """Dimension → what the first judge that could be read wrote about it."""
    for verdict in score.verdicts:
        if verdict.purpose == "score" and verdict.said:
            return {name: str(verdict.said[name]["reasoning"]) for name in DIMENSIONS}
    return {}


def judge_notes(score: Score, private: Sequence[str], public: str) -> str:
    """The judge's reasoning for a coach, without the sentences that echo a private text."""
    lines = []
    for name, reasoning in reasonings(score).items():
        sentences = [sentence for sentence in _SENTENCE.split(reasoning)
                if not any(echoes_private(sentence, text, public) for text in private)]  # fmt: skip
        if any(sentences):
            lines.append(f"{TITLES[name][0]}: {' '.join(sentences)}")
    return "\n".join(lines)


# -- rules ---------------------------------------------------------------------------------------


def turn_remarks(acts: Sequence[Action], goal: str, turns: int) -> list[str]:
    """What rules can tell from the player's own actions; `turns` is how many the scene allows."""
    spoken = [act.argument for act in acts if act.kind == SPEAK]
    texts = [*_form(acts), *_length(spoken), *_repeats(spoken), *_end(acts, turns)]
    if any(act.kind != NONE for act in acts):
        texts += _goal([act.argument for act in acts], goal)
    return texts


def advice(goal: str) -> str:
    """What can be said before anything was played."""
    opening = f"You came for this: {_brief(goal)} " if goal.strip() else ""
    return (
        f"{opening}Bring it up within your first turns, in your own way, and ask what stands in "
        "the way before you offer anything. Give a reason with every wish, answer what was just "
        "said, keep to yourself what is nobody's business, and settle something definite before "
        "you part. One JSON object a turn, a few sentences in it, never the same line twice."
    )


def _brief(goal: str) -> str:
    line = " ".join(goal.split())
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _form(acts: Sequence[Action]) -> list[str]:
    silent = sum(act.status in ("empty", "malformed") for act in acts)
    loose = sum(act.status == "salvaged" for act in acts)
    texts = []
    if silent:
        texts.append(
            f"In {silent} of your {len(acts)} turns nothing could be read, so you did nothing "
            "there: say something in every turn."
        )
    if loose:
        texts.append(
            f"{loose} of your {len(acts)} turns were not the JSON object that was asked for: write "
            'it alone, {"action_type": "speak", "argument": "..."}.'
        )
    return texts


def _length(spoken: Sequence[str]) -> list[str]:
    longest = max((len(text.split()) for text in spoken), default=0)
    if longest <= LONG_LINE:
        return []
    return [f"One of your turns runs to {longest} words: nobody talks that long. Make one point."]


def _repeats(spoken: Sequence[str]) -> list[str]:
    seen = [" ".join(tokens(text)) for text in spoken]
    doubled = next(
        (text for text, key in zip(spoken, seen, strict=True) if seen.count(key) > 1), ""
    )
    if not doubled.strip():
        return []
    start = " ".join(doubled.split()[:12])
    return [f"You said the same thing more than once (“{start} …”): bring something new each time."]


def _end(acts: Sequence[Action], turns: int) -> list[str]:
    real_acts = [act for act in acts if act.kind != NONE]
    if acts and acts[-1].kind == LEAVE and len(real_acts) < EARLY:
        return ["You left before much could happen: stay, and try another way before you give up."]
    if len(acts) >= turns // 2 and real_acts and real_acts[-1].kind != LEAVE:
        return ["You ran out of turns: come to a proposal earlier, and bring it to a close."]
    return []


def _goal(speeches: Sequence[str], goal: str) -> list[str]:
    goal_words = content(tokens(goal))
    raised = goal_words & content(tokens("\n".join(speeches)))
    if not goal_words or len(raised) >= min(2, len(goal_words)):
        return []
    return [f"Hardly a word of what you came for was raised: {_brief(goal)} Lead the talk there."]


COMPETENT = tuple(
    action.json()
    for action in (
        Action(SPEAK, "Good to see you. How have you been, and what is on your mind?"),
        Action(SPEAK, "Thank you for telling me. There is something I hope for today, and I would "
               "like to hear first what would make it hard for you."),
        Action(GESTURE, "leans forward and nods slowly, listening"),
        Action(SPEAK, "Then let us each give a little: you get what matters most to you, I get "
               "what matters most to me, and we write down when and how."),
        Action(SPEAK, "We agree, then. I will keep my part of it by the end of the week."),
        Action(LEAVE),
    )
)  # fmt: skip
RUDE = tuple(
    action.json()
    for action in (
        Action(SPEAK, "I have no time for this, so just do as I say."),
        Action(SPEAK, "You never listen, and nobody likes you for it."),
        Action("action", "shoves the chair aside"),
        Action(LEAVE),
    )
)
NEUTRAL = (
    "Hello. I am glad that we talk.",
    "I see. Tell me more about what you have in mind.",
    "That is one way to look at it. I would have to think about it.",
    "I understand what you say. It is not easy for me either.",
    "Perhaps we can find something that works for both of us.",
    "All right. Is there anything else?",
    "I will keep it in mind.",
    "Let me think about that for a moment.",
    "Fine by me.",
    "It was good to talk about it.",
)
"""A partner that says nothing in particular, ten turns long."""
CANARY_TURNS = 4


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
