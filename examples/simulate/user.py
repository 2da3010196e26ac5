"""A customer who follows rules, in place of a model: to try the command without one.

soul simulate --user function:user.py:customer ...
soul serve --script user.py:customer              # the same customer as a server
"""

from __future__ import annotations

import re

QUESTIONS = (
    "does it cost anything?", "which box should i take?", "do i need a label?",
    "when do i get my money?", "can i exchange it instead?", "and if it was a gift?",
    "could you pick it up?", "what if i am late?",
)  # fmt: skip
STOP = "###STOP###"


def customer(messages: list[dict[str, str]]) -> str:
    """The next message. The system prompt has the persona and the scenario."""
    brief, turn = messages[0]["content"], sum(one["role"] == "assistant" for one in messages)
    order = re.search(r"[A-Z]-\d{4}", brief)
    questions = int((re.search(r"(\d+) questions", brief) or [0, 0])[1])
    polite = "polite" in brief
    if turn == 0:
        number = order[0] if order else "unknown"
        return f"Hello, I want to return order {number}." if polite else f"return {number} pls"
    if turn <= questions:
        return QUESTIONS[(turn - 1) % len(QUESTIONS)]
    if turn == questions + 1:
        return "Thank you, please go ahead." if polite else "ok go ahead"
    if "hurry" in brief:
        return STOP  # leaves without a word: the simulator's fault, not the agent's
    done = "started the return" in messages[-1]["content"]
    return f"{'Great, thanks!' if done else 'I told you already. Forget it.'} {STOP}"
