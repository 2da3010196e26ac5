"""The questions that a customer answers after the conversation, and how answers are read.

An answer counts where it is one of the options, letter by letter; each option has a place on the
scale of its question, from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soulkit.judge.objects import LENIENT, scan
from soulkit.judge.verdict import spoken

SURVEY: Mapping[str, Mapping[str, int]] = {
    "task_success": {
        "No - Task failed": 1,
        "No - Due to a policy issue, which the agent clearly explained": 2,
        "Partially - Some progress": 3,
        "Yes - Task completed": 4,
        "Fully - Exceeded expectations": 5,
    },
    "efficiency": {
        "Very inefficient - Too many steps": 1,
        "Somewhat inefficient": 2,
        "About right": 3,
        "Very efficient": 4,
    },
    "question_amount_preference": {"Too many": 1, "About right": 2, "Too few": 1},
    "answer_effort_time": {"High": 1, "Medium": 2, "Low": 3},
    "human_like": {"No": 1, "Partially": 2, "Yes": 3},
    "interaction_flow": {"Not smooth": 1, "OK": 2, "Smooth": 3, "Excellent": 4},
    "overall_score": {
        "1 (Very poor)": 1, "2 (Poor)": 2, "3 (Acceptable)": 3, "4 (Good)": 4, "5 (Excellent)": 5,
    },
    "reuse": {"Absolutely no": 1, "No": 2, "Maybe": 3, "Yes": 4, "Absolutely yes": 5},
}  # fmt: skip
"""Question → option → its place, in the order of the form."""
ASKED: Mapping[str, str] = {
    "task_success": "Did you get what you came for?",
    "efficiency": "How efficient was the agent?",
    "question_amount_preference": "How many questions did the agent ask you?",
    "answer_effort_time": "How much effort and time did your answers take?",
    "human_like": "Did the agent come across as a person?",
    "interaction_flow": "How smoothly did the conversation go?",
    "overall_score": "How do you rate the agent all in all?",
    "reuse": "Would you use this service again?",
}


def ordinal(question: str, answer: Any) -> float | None:
    """The place of an answer on the scale of its question, in [0, 1]; None for no option of it."""
    places = SURVEY[question]
    if not isinstance(answer, str) or answer not in places:
        return None
    low, high = min(places.values()), max(places.values())
    return (places[answer] - low) / (high - low)


def read_answers(text: str) -> dict[str, str]:
    """Question → the option that was chosen; the last object that answers anything decides, empty
    where none does."""
    for span in reversed(scan(spoken(text, "paper"), LENIENT).spans):
        answers = {q: span.value[q] for q in SURVEY if ordinal(q, span.value.get(q)) is not None}
        if answers:
            return answers
    return {}
