"""A verdict that was cut is named as cut, with whose limit it was, and not asked for again."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import Field

from soulkit.errors import UnreadableVerdict
from soulkit.judge.panel import opinions
from soulkit.judge.structured import VerdictShape, ask, question
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.types import Call, Episode, Sampling
from tests.support.road import NO_ONE
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

CALL = Call(role="judge", example_id="e")


class Mark(VerdictShape):
    score: int = Field(ge=0, le=10)


ASKED = question("score", "How was it? Reply with a JSON object.", Mark)


def player(server: ScriptedServer, limit: int) -> Player:
    model = Endpoint(model="judge", base_url=server.base_url, backoff_s=0, max_attempts=1)
    return Player(model, Sampling(temperature=0.0, max_tokens=limit))


def asked_of(limit: int, **server: Any) -> tuple[Any, list[Body]]:
    with ScriptedServer(**server) as running:
        try:
            return asyncio.run(ask(player(running, limit), ASKED, CALL)), running.requests
        except UnreadableVerdict as error:
            return error, running.requests


def cut(text: str, tokens: int | None) -> Fault:
    choice = {"message": {"content": text}, "finish_reason": "length"}
    usage = {} if tokens is None else {"prompt_tokens": 9, "completion_tokens": tokens}
    return Fault.reply({"choices": [choice], "usage": usage})


def test_a_verdict_that_is_cut_at_its_limit_is_asked_for_once() -> None:
    error, requests = asked_of(5, answer="I think that all in all it was a fair try")
    assert isinstance(error, UnreadableVerdict) and len(requests) == 1
    assert "cut at its limit of 5 tokens" in error.detail and "asked once" in error.detail
    assert "max_tokens" in error.detail


def test_a_limit_of_the_server_is_named_as_its_own() -> None:
    error, requests = asked_of(4096, script={0: cut('{"sco', 128)})
    assert isinstance(error, UnreadableVerdict) and len(requests) == 1
    assert "cut at 128 tokens, a limit of the server" in error.detail
    assert "4096 were allowed" in error.detail


def test_thinking_that_fills_the_limit_is_cut_and_not_empty() -> None:
    error, requests = asked_of(4096, script={0: cut("", None)})
    assert "cut at its limit of 4096 tokens" in error.detail and len(requests) == 1


def test_a_verdict_that_was_complete_before_the_cut_is_one() -> None:
    verdict, _ = asked_of(4096, script={0: cut('{"score": 4} and so', 128)})
    assert verdict == Mark(score=4)


def test_a_judge_that_refuses_is_asked_once_more() -> None:
    message = {"content": None, "refusal": "I rate nobody."}
    refusal = Fault.reply({"choices": [{"message": message, "finish_reason": "stop"}]})
    verdict, requests = asked_of(4096, script={0: refusal}, answer='{"score": 4}')
    assert verdict == Mark(score=4) and len(requests) == 2
    error, requests = asked_of(4096, script={0: refusal, 1: refusal})
    assert "the judge refused: I rate nobody." in error.detail and "asked 2 times" in error.detail


def test_a_form_that_the_server_ignored_stands_in_the_verdict() -> None:
    replies = iter(['Here it is: {"score": 4}', '{"score": 4}'])
    with ScriptedServer(answer=lambda body: next(replies)) as server:
        cast = Cast(actor=NO_ONE.actor, judges=(player(server, 512),))
        for ignored in (("form",), ()):
            episode = Episode(example_id=f"e{ignored}", task="t")
            (opinion,) = asyncio.run(opinions(cast, ASKED, episode))
            assert opinion.verdict().ignored == ignored
