"""Scripted CoSER: a scene of assistants, verdicts, and somebody who speaks for the surroundings.

For self-checks, canaries and trials without a model (`soul serve partner coser`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence

from soulkit.tasks.coser.anchors import HIGHEST, LOWEST
from soulkit.tasks.coser.flaws import ASPECTS
from soulkit.types import Line

HELPFUL = (
    "Hello! How can I help you today?",
    "That is a great question. There are several things to consider.",
    "I understand both points of view, and I am happy to assist.",
    "In conclusion, communication and respect are what matters most.",
    "Let me know if there is anything else I can do for you!",
    "That is a great question. There are several things to consider.",
)
HAPPENINGS = (
    "Somewhere a door falls shut, and steps go away over stone.",
    "The light changes; for a moment nothing can be heard but the wind.",
    "A cart rattles by outside, and the cups on the shelf answer it.",
    "It has grown colder. Somebody outside laughs, far off.",
)


def in_turn(seats: Sequence[str], texts: Sequence[str]) -> list[Line]:
    """The texts, said by one seat after the other."""
    return [Line(seats[i % len(seats)], text) for i, text in enumerate(texts)]


def scripted_verdict(form: str, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: nothing wrong, or as much as there can be."""
    why = "as scripted"
    if form == "Marks":
        score = HIGHEST if perfect else LOWEST
        marks = {aspect.title: {"reasoning": why, "score": score} for aspect in ASPECTS.values()}
        return json.dumps(marks)
    if form not in ("Flaws", "FlawsAndRepetitions"):
        return None
    flaw = {"instance": "everywhere", "type": "Self-identity", "severity": 5}
    verdict = {"reasoning": why, "flaws": [] if perfect else [flaw] * 5}
    return json.dumps(verdict | ({} if form == "Flaws" else {"repetitions": []}))


def surroundings(messages: Sequence[Mapping[str, str]]) -> str:
    """What a scripted environment and predictor of speakers says to a request.

    Asked for a speaker, it names one of those who may follow, by a hash of the request.
    """
    text = "\n".join(str(message["content"]) for message in messages)
    drawn = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    choice = re.search(r"is exactly one of: (.*)\.$", text, re.MULTILINE)
    if choice:
        names = [name for name in re.findall(r'"([^"]+)"', choice[1]) if name != "random"]
        return json.dumps({"reason": "by turns", "next_speaker": names[drawn % len(names)]})
    listed = re.findall(r"^In it are: (.*)\. \"Environment\" stands", text, re.MULTILINE)
    if listed:
        names = listed[0].split(", ")
        return f"1. By turns.\n2. Next Speaker: {names[drawn % len(names)]}"
    return HAPPENINGS[drawn % len(HAPPENINGS)]
