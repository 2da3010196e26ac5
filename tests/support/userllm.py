"""What the tests of UserLLM share: a row of each kind, and its score by rule or by a judge."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from soulkit.models.base import Cast, Panel
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.tasks.userllm.fields import CSQA, NQ, PRISM
from soulkit.types import Example, Record, Score
from tests.support.letters import released
from tests.support.road import NO_ONE, episode_of, played_by, player, task_of
from tests.support.servers.openai_server import Body, ScriptedServer

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


Judge = str | Callable[[Body], str]


def scored(row: dict[str, Any], text: str, judge: Judge = "", **panel: Any) -> Score:
    """The score of a reply, judged over HTTP by `judge`."""
    with played_by(judge) as player:
        cast = Cast(actor=NO_ONE.actor, judges=(player,), panel=Panel(**panel))
        return asyncio.run(scored_by(task_of("userllm"), example(row), text, cast))


async def scored_by(task: Any, one: Example, text: str, cast: Cast) -> Score:
    try:
        score: Score = await task.score(one, episode_of(task, one, text), cast)
        return score
    finally:
        for judge in cast.judges:
            await judge.model.close()


def by_rule(row: dict[str, Any], text: str) -> Score:
    task = task_of("userllm")
    score: Score = asyncio.run(
        task.score(example(row), episode_of(task, example(row), text), NO_ONE)
    )
    return score


def walked(
    row: dict[str, Any], actor: Judge, judge: Judge | None, policy: FeedbackPolicy | None = None,
    script: Any = None,
) -> tuple[list[Record], list[Body]]:  # fmt: skip
    """The records of one rollout over HTTP, and what the judge was asked."""
    task = task_of("userllm")
    with (
        ScriptedServer(answer=actor) as actors,
        ScriptedServer(answer=judge or "", script=script) as judges,
    ):
        seats = [player(actors.base_url, "actor"), player(judges.base_url, "judge")]

        async def run() -> list[Record]:
            cast = Cast(actor=seats[0], judges=(seats[1],) if judge is not None else ())
            try:
                return await Engine(cast, feedback=policy).walk(
                    Job(task, example(row)), lambda record: None
                )
            finally:
                for seat in seats:
                    await seat.model.close()

        return asyncio.run(run()), judges.requests
