"""A small shop agent, twice: one that forgets the order number, and one that does not.

soul simulate --agent agent.py:forgetful ...
"""

from __future__ import annotations

import re

Messages = list[dict[str, str]]

ORDER = re.compile(r"\b[A-Z]-\d{4}\b")
ANSWERS = {
    "cost": "Returns are free within 30 days.",
    "box": "Any sturdy box will do.",
    "label": "You get a label by e-mail.",
    "money": "The money is back on your card after five days.",
    "exchange": "You can exchange it in any of our shops.",
    "gift": "Gifts can be returned, too.",
    "pick": "A courier can pick it up for 4 euros.",
    "late": "After 30 days we give you a voucher.",
}


def forgetful(messages: Messages) -> str:
    """The bug: it only reads what the customer wrote in the last six turns."""
    return reply(messages, [one for one in messages if one["role"] == "user"][-6:])


def fixed(messages: Messages) -> str:
    """The same agent, which reads the whole conversation."""
    return reply(messages, messages)


def reply(messages: Messages, remembered: Messages) -> str:
    question = messages[-1]["content"].lower()
    if "go ahead" in question:
        orders = ORDER.findall(" ".join(one["content"] for one in remembered))
        if not orders:
            return "Sure! Which order is it? Please tell me the number."
        return f"Done: I have started the return of {orders[0]}."
    answer = next((text for word, text in ANSWERS.items() if word in question), "")
    return answer or "Of course. What would you like to know before we start the return?"
