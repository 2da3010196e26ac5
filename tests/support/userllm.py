"""Helpers for tests of UserLLM: a row of each kind, and its score by rule or by a judge."""

from __future__ import annotations

import asyncio
from typing import Any

from soulkit.models.base import Cast, Panel
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.userllm.fields import CSQA, NQ, PRISM
from soulkit.types import Example, Record, Score
from tests.support import table as tables
from tests.support.letters import released
from tests.support.road import NO_ONE, episode_of, run, task_of
from tests.support.servers.openai_server import Body
from tests.support.table import Says, asked_of, recorded

QUIZ: dict[str, Any] = {
    "source": CSQA, "intent": "where do people keep money",
    "choices": ["bank", "department store", "store", "river"],
}  # fmt: skip
SEARCH: dict[str, Any] = {
    "source": NQ, "intent": "who painted the ceiling", "question": "who painted the ceiling",
    "assistant_suggestion_turn": "How about its acoustics instead?",
}  # fmt: skip
FIRST: dict[str, Any] = {
    "source": PRISM, "intent": "get advice about moving to another city for a new job",
    "conversation_history": "", "is_last_turn": False, "opening_prompt": "shd i move 4 a job",
}  # fmt: skip
LATER = {
    **FIRST,
    "conversation_history": "<user>: hi\n<assistant>: go for it",
    "is_last_turn": True,
}
OPEN = {**LATER, "is_last_turn": False}


def example(row: dict[str, Any], protocol: str = "paper") -> Example:
    row_example: Example = task_of("userllm", protocol).example(released(row))
    return row_example


def scored(row: dict[str, Any], text: str, judge: Says = "", **panel: Any) -> Score:
    """The score of a reply, judged over HTTP by `judge`."""
    task, one = task_of("userllm"), example(row)
    episode = episode_of(task, one, text)
    return tables.scored(task, one, episode, judge=judge, panel=Panel(**panel))


def scored_by(task: Any, one: Example, text: str, cast: Cast) -> Score:
    score: Score = run(cast, task.score(one, episode_of(task, one, text), cast))
    return score


def by_rule(row: dict[str, Any], text: str) -> Score:
    task = task_of("userllm")
    score: Score = asyncio.run(
        task.score(example(row), episode_of(task, example(row), text), NO_ONE)
    )
    return score


def walked(
    row: dict[str, Any], actor: Says, judge: Says | None, policy: FeedbackPolicy | None = None,
    **server: Any,
) -> tuple[list[Record], list[Body]]:  # fmt: skip
    """The records of one rollout over HTTP, and the judge's requests."""
    played, requests = recorded(
        task_of("userllm"), example(row), policy, actor=actor, judge=judge, **server
    )
    return played, asked_of(requests, "judge")
