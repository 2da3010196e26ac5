"""A further question to each judge about its own answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from soulkit.errors import UnreadableVerdict
from soulkit.judge.follow import follow_up
from soulkit.judge.panel import Opinion, opinions
from soulkit.judge.structured import JudgeQuestion, label_question
from soulkit.models.base import Cast, Panel
from soulkit.types import Episode
from tests.support.road import NO_ONE, player
from tests.support.servers.openai_server import ScriptedServer

EPISODE = Episode(example_id="e", task="t")
Body = dict[str, Any]


def thought(text: str) -> str:
    if not text.strip():
        raise UnreadableVerdict("nothing")
    return text


FIRST: JudgeQuestion[str] = JudgeQuestion(
    "first", "Think.", thought, lambda t: {"text": t}, None, 1
)


def then(critique: str) -> JudgeQuestion[str]:
    return label_question("then", f"You thought: {critique}", ("YES", "NO"))


async def asked(cast: Cast) -> list[Opinion[str]]:
    try:
        return await follow_up(cast, await opinions(cast, FIRST, EPISODE), then, EPISODE)
    finally:
        for judge in cast.judges:
            await judge.model.close()


def table(base_url: str, samples: int = 2) -> Cast:
    judges = tuple(player(base_url, name) for name in ("a", "b"))
    return Cast(actor=NO_ONE.actor, judges=judges, panel=Panel(samples=samples))


def test_each_judge_is_asked_about_what_it_said_itself_under_the_same_sample() -> None:
    def answer(body: Body) -> str:
        prompt = body["messages"][0]["content"]
        if prompt == "Think.":
            return f"{body['model']} sees it"
        return "YES" if f"{body['model']} sees it" in prompt else "NO"

    with ScriptedServer(answer=answer) as server:
        later = asyncio.run(asked(table(server.base_url)))
    assert [(o.judge, o.sample, o.answer) for o in later] == [
        ("a", 0, "YES"), ("a", 1, "YES"), ("b", 0, "YES"), ("b", 1, "YES"),
    ]  # fmt: skip


def test_what_could_not_be_read_has_nothing_to_follow() -> None:
    replies = iter(["", "so"])

    def answer(body: Body) -> str:
        if body["messages"][0]["content"] == "Think.":
            return next(replies) if body["model"] == "a" else "b"
        return "YES"

    with ScriptedServer(answer=answer) as server:
        later = asyncio.run(asked(table(server.base_url)))
    assert [o.judge for o in later] == ["a", "b", "b"]


def test_a_judge_without_any_readable_decision_is_missing() -> None:
    def answer(body: Body) -> str:
        first = body["messages"][0]["content"] == "Think."
        return "so" if first else "YES" if body["model"] == "b" else "perhaps"

    with ScriptedServer(answer=answer) as server, pytest.raises(UnreadableVerdict, match="a: "):
        asyncio.run(asked(table(server.base_url)))
