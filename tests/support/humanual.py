"""Helpers for tests of Humanual: a row, verdicts, rule-based judges, a rollout over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

from soulkit.models.base import Panel
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.humanual.judging import AXES, lexical_f1
from soulkit.types import Example, Record, Score
from tests.support.letters import released
from tests.support.road import episode_of, run, task_of
from tests.support.servers.openai_server import Body
from tests.support.table import Says, recorded, table

DOMAINS = ("book", "chat", "email", "news", "opinion", "politics")
ORIGINAL = (
    "Honestly the new bus lanes are great for my commute, even if parking near the bakery got "
    "worse; I would still vote for them again next year."
)
ROW: dict[str, Any] = {
    "persona": "A nurse who commutes by bus. Writes one careful sentence.",
    "prompt": [{"role": "editor", "content": "The city adds bus lanes downtown."},
               {"role": "mara", "content": "Nobody asked for these."}],
    "completion": ORIGINAL, "dataset": "news", "category": "city", "id": "h1",
}  # fmt: skip
REPLY = "I like the lanes, they get me to my shift on time and I would vote for them."


def tagged(text: str) -> str:
    return f"<response>{text}</response>"


def example(protocol: str = "paper", **changes: Any) -> Example:
    task = task_of("humanual_news", protocol)
    row_example: Example = task.example(released({**ROW, **changes}))
    return row_example


def sides(score: float = 0.5, why: str = "so it seems", **scores: Any) -> str:
    """A verdict with `score` on every side that is not in `scores`."""
    return json.dumps({axis: {"thought": why, "score": scores.get(axis, score)} for axis in AXES})


def fenced(body: Body, label: str) -> str:
    """The fenced text with this label in a judge's prompt."""
    prompt = body["messages"][0]["content"]
    match = re.search(rf"<{label} (\w+)>\n(.*?)\n</{label} \1>", prompt, re.DOTALL)
    assert match, prompt
    return match[2]


def by_shared_words(body: Body) -> str:
    """A rule-based judge: word overlap of reply and original, the same on every side."""
    score = lexical_f1(fenced(body, "reply"), fenced(body, "original"))
    if "key_points" in body["messages"][0]["content"]:
        return json.dumps({"key_points": "words", "thought": "counted", "score": score})
    return sides(score, "words were counted")


def scored(
    text: str, judge: Says, one: Example | None = None, protocol: str = "paper", *,
    stop: str = "stop", samples: int | None = None,
) -> tuple[Score, list[Body]]:  # fmt: skip
    """The score of a reply by a judge over HTTP, and the judge's requests."""
    replies = [(one or example(protocol), text)]
    scores, requests = all_scored("humanual_news", replies, judge, protocol, stop, samples)
    return scores[0], requests


def all_scored(
    name: str, replies: Sequence[tuple[Example, str]], judge: Says, protocol: str = "paper",
    stop: str = "stop", samples: int | None = None,
) -> tuple[list[Score], list[Body]]:  # fmt: skip
    """The scores of (row, reply) pairs by one judge over HTTP, and the judge's requests."""
    task = task_of(name, protocol)
    played = [(one, episode_of(task, one, text, stop)) for one, text in replies]
    with table(judge=judge, panel=Panel(samples=samples)) as (cast, requests):

        async def all_judged() -> list[Score]:
            return list(await asyncio.gather(*(task.judged(one, e, cast) for one, e in played)))

        return run(cast, all_judged()), requests


def walked(protocol: str = "paper", **says: Any) -> tuple[list[Record], list[Body]]:
    """Draft, feedback and refined reply over HTTP, and all requests."""
    task = task_of("humanual_news", protocol)
    return recorded(task, example(protocol), FeedbackPolicy(), **says)
