"""The conversation that a quiz question of UserLLM comes after.

The user has asked, with the choices listed, and the assistant was unsure: what comes next must not
be the user's own answer. The assistant's words are one of a few sentences, by a hash of the
question, so that a row is the same wherever it is made.

    <user>: where do people keep money? A) bank B) river
    <assistant>: I am not certain about this one. Which of them seems right to you?
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

UNSURE = (
    "I am not certain about this one. Which of them seems right to you?",
    "Hmm, several of these could be meant, and I would not like to guess. What would you say?",
    "That is a tricky one, and I do not know. Do you have an idea yourself?",
    "I cannot tell for sure which one fits. Which way are you leaning?",
    "Honestly, I am undecided between some of them. What do you think?",
)


def quiz_history(question: str, choices: Sequence[str]) -> str:
    """Two tagged lines: the question with its choices, and an assistant that is unsure."""
    listed = " ".join(f"{chr(ord('A') + i)}) {_line(text)}" for i, text in enumerate(choices))
    draw = int(hashlib.sha256(_line(question).casefold().encode()).hexdigest(), 16)
    return f"<user>: {_line(question)} {listed}\n<assistant>: {UNSURE[draw % len(UNSURE)]}"


def _line(text: str) -> str:
    """On one line: a line that began with a mark would be another speaker's."""
    return " ".join(text.split())
