"""Scripted MirrorBench: a user who gives themselves away, and verdicts, for self-checks."""

from __future__ import annotations

import json

HELPFUL = (
    "Certainly! I would be delighted to provide a comprehensive overview of my request:\n\n"
    "1. **Context**: my goal as a user.\n2. **Details**: all relevant aspects.\n\n"
    "Please let me know if you need any further clarification!"
)


def user_verdict(form: str, perfect: bool) -> str | None:
    """The reply of a judge that is asked for `form`: the simulated user is a person, or is none."""
    why, yes = "as scripted", "YES" if perfect else "NO"
    wins = {"Preference1": "A", "Preference2": "B"}
    loses = {"Preference1": "B", "Preference2": "A"}
    if form == "":
        return "- as scripted"
    if form in ("Similarity", "LooseSimilarity"):
        return json.dumps({"reasoning": why, "score": 1.0 if perfect else 0.0})
    if form in wins:
        return json.dumps({"reasoning": why, "verdict": (wins if perfect else loses)[form]})
    if form == "Rubric":
        return json.dumps({"reasoning": why, "verdict": yes})
    if form == "Revision":
        return json.dumps({"critique": why, "explanation": why, "verdict": yes})
    return None
