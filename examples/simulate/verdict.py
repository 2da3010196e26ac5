"""The verdict on one conversation: did the agent return the right order?"""

from __future__ import annotations

import re
from typing import Any


def returned(messages: list[dict[str, str]], row: dict[str, Any]) -> dict[str, Any]:
    """1 if the agent confirms the return of the order in the scenario."""
    order = re.search(r"[A-Z]-\d{4}", row["scenario"])
    replies = [one["content"] for one in messages if one["role"] == "assistant"]
    done = order is not None and f"return of {order[0]}" in " ".join(replies)
    return {"score": done, "reason": "returned" if done else f"last reply: {replies[-1]}"}
