"""A scripted friend, to play the call without a partner model: `soul serve --script`.

It reads its free days from its brief and replies to the last day that the caller named. It is
stateless: equal requests get equal replies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_DAY = re.compile(r"\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b")


def friend_line(messages: Sequence[Mapping[str, str]]) -> str:
    """The friend's next line, given its brief and the conversation so far."""
    listed = re.search(r"You are free on: ([^.]+)\.", messages[0]["content"])
    if listed is None:
        raise ValueError("the brief does not say when the friend is free")
    free = _DAY.findall(listed.group(1))
    offers = _DAY.findall(messages[-1]["content"]) if len(messages) > 1 else []
    if not offers:
        return "Which day do you have in mind?"
    day = offers[-1]
    return f"Yes, {day} suits me." if day in free else f"Sorry, I cannot on {day}."
