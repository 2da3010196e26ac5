"""Scripted Sotopia: a competent player, a rude one, a partner that fits every scene, and verdicts.

For self-checks and canaries. The lines name no goal and no secret, so that they fit any row; what
they are worth in a given scene only a judge can say, and the verdicts here stand for one.
"""

from __future__ import annotations

import json

from soulkit.tasks.sotopia.actions import GESTURE, LEAVE, SPEAK, Action
from soulkit.tasks.sotopia.scores import DIMENSIONS

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


def verdict(form: str, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: the top of every scale, or the bottom."""
    if form in ("Ratings", "LooseRatings"):
        why = "as scripted"
        marks = {name: {"reasoning": why, "score": d.high if perfect else d.low}
                 for name, d in DIMENSIONS.items()}  # fmt: skip
        return json.dumps(marks)
    if form == "Audit":
        return json.dumps({"risk_level": "low", "reason": "as scripted"})
    return None
