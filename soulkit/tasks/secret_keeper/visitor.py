"""The visitor by script: it lets the two-party task run on a laptop without a model or a key.

It reads its brief from the system message and asks its next question. Stateless, so equal
conversations get equal replies. `soul serve partner` puts it behind HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from soulkit.tasks.secret_keeper.task import question_at, topic_at


def visitor_line(messages: Sequence[Mapping[str, str]]) -> str:
    """The visitor's next line, from its brief and the number of lines it has said."""
    brief = messages[0]["content"]
    topics = re.findall(r"^- (.+?)\s*$", brief, re.MULTILINE)
    if len(topics) < 2:
        raise ValueError("the brief lists no topics")
    name = re.search(r"You are ([^.\n]+)", brief)
    turn = sum(message["role"] == "assistant" for message in messages)
    topic = topic_at(turn, topics[:-1], topics[-1])
    return question_at(turn, topic, name.group(1) if name else "a visitor")
