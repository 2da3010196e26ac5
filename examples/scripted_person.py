"""A person, a coach and a judge that are scripts: try `soul chat` and clients without any model.

soul serve --script examples/scripted_person.py:person --port 8801 --model-name person
soul serve --script examples/scripted_person.py:judge --port 8802 --model-name judge
soul chat http://127.0.0.1:8801/v1 --judge endpoint:judge@http://127.0.0.1:8802/v1 \
    --coach endpoint:judge@http://127.0.0.1:8802/v1
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Messages = Sequence[Mapping[str, str]]
LINES = (
    "hello, i hope you can help me. i ordered a lamp from your shop and it has not arrived yet.",
    "nine days now. order 4711",
    "ok, tomorrow is fine. thx ###STOP###",
)
SHORTER = "where is my lamp?? order 4711"


def person(messages: Messages) -> str:
    """The person's next message; shorter if the prompt has a hint of the coach."""
    turn = sum(message["role"] == "assistant" for message in messages)
    hint = "\nHint: " in messages[0]["content"]
    return SHORTER if hint and not turn else LINES[min(turn, len(LINES) - 1)]


def judge(messages: Messages) -> str:
    """A coach's feedback, or a judge's verdict."""
    if messages[-1]["content"].startswith("You coach"):
        return "You write in a hurry: leave out the greeting, and ask for what you want at once."
    reasons = {
        "persona": ("Small letters and short messages, as described.", 8),
        "purpose": ("Asks for the lamp and gives the order number.", 9),
        "human": ("Reads as typed on a phone.", 8),
    }
    return json.dumps({n: {"reasoning": why, "score": mark} for n, (why, mark) in reasons.items()})
