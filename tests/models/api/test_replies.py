"""Refusals, and what a server takes with HTTP 200 and does not follow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from soulkit.errors import PartnerError, UnreadableVerdict
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.wire import sent_seed
from soulkit.models.base import Player
from soulkit.types import Call, Completion, Form, Role, Sampling, Segment
from tests.support.servers.openai_server import Fault, ScriptedServer

CALL = Call(role="actor", example_id="e1")
FORM = Form(
    "Rating",
    '{"type":"object","properties":{"score":{"type":"integer"}},"required":["score"],'
    '"additionalProperties":false}',
)


def reply_to(
    sampling: Sampling, reply: Fault, call: Call = CALL, before: dict[int, Fault] | None = None
) -> Completion:
    script = {**(before or {}), len(before or {}): reply}
    with ScriptedServer(script=script) as server:
        model = Endpoint(model="m", base_url=server.base_url, backoff_s=0.0, max_attempts=1)
        return asyncio.run(_closing(Player(model, sampling), call))


async def _closing(player: Player, call: Call) -> Completion:
    try:
        return await player.complete((Segment("user", "hello"),), call)
    finally:
        await player.model.close()


def body(content: Any, stop: str = "stop", **more: Any) -> Fault:
    message = {"role": "assistant", "content": content, **more.pop("message", {})}
    choice = {"index": 0, "message": message, "finish_reason": stop, **more.pop("choice", {})}
    return Fault.reply({"choices": [choice], **more})


@pytest.mark.parametrize(
    ("text", "ignored"),
    [
        ('{"score": 3}', ()),
        (' <think>so {</think> {"score": 3}\n', ()),
        ('{"score": "three"}', ()),  # values are the reader's business
        ("I would say 3.", ("form",)),
        ('The answer: {"score": 3}', ("form",)),
        ('{"grade": 3}', ("form",)),
        ('{"score": 3, "why": ""}', ("form",)),
        ("[3]", ("form",)),
        ("", ()),  # an empty reply says nothing about its form
    ],
)
def test_a_schema_that_was_taken_and_not_followed(text: str, ignored: tuple[str, ...]) -> None:
    assert reply_to(Sampling(form=FORM), body(text)).ignored == ignored


def test_a_reply_that_was_cut_or_refused_shows_nothing_of_its_form() -> None:
    for reply in (body('{"sco', "length"), body(None, message={"refusal": "No."})):
        assert reply_to(Sampling(form=FORM), reply).ignored == ()


def test_json_mode_asks_for_any_object() -> None:
    refused = {0: Fault.status_error(400, "response_format json_schema is not supported")}
    form = Sampling(form=FORM)
    other = reply_to(form, body('{"grade": 3}'), before=refused)
    assert (other.dropped, other.ignored) == (("form:json_schema",), ())
    assert reply_to(form, body("grade 3"), before=refused).ignored == ("form",)


def test_a_seed_that_the_reply_says_was_another() -> None:
    sampling, sent = Sampling(seed=7), sent_seed(7, CALL)
    assert reply_to(sampling, body("hi")).ignored == ()
    assert reply_to(sampling, body("hi", seed=sent)).ignored == ()
    assert reply_to(sampling, body("hi", seed=sent + 1)).ignored == ("seed",)
    assert reply_to(sampling, body("hi", choice={"seed": sent + 1})).ignored == ("seed",)
    assert reply_to(Sampling(), body("hi", seed=3)).ignored == ()


def test_a_refusal_is_known_by_its_field() -> None:
    reply = reply_to(Sampling(), body(None, message={"refusal": "I will not."}))
    assert (reply.text, reply.stop_reason) == ("I will not.", "refusal")
    both = reply_to(Sampling(), body("Well, fine.", message={"refusal": "I will not."}))
    assert (both.text, both.stop_reason) == ("Well, fine.", "stop")


def test_a_refusal_may_be_a_part_of_the_content() -> None:
    parts = [{"type": "refusal", "refusal": "I will not."}]
    reply = reply_to(Sampling(), body(parts))
    assert (reply.text, reply.stop_reason) == ("I will not.", "refusal")
    mixed = reply_to(Sampling(), body([{"type": "text", "text": "Well, fine."}, *parts]))
    assert (mixed.text, mixed.stop_reason) == ("Well, fine.", "stop")


@pytest.mark.parametrize("stop", ["length", "max_tokens", "MAX_TOKENS", "model_length"])
def test_servers_have_several_names_for_the_limit(stop: str) -> None:
    assert reply_to(Sampling(), body("Well, I", stop)).stop_reason == "length"


@pytest.mark.parametrize(("tokens", "stop"), [(12, "length"), (11, "unknown")])
def test_who_says_nothing_of_the_end_and_used_up_the_limit_was_cut(tokens: int, stop: str) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    choice = {"finish_reason": None}
    reply = reply_to(Sampling(max_tokens=12), body("Well, I", choice=choice, usage=usage))
    assert reply.stop_reason == stop


@pytest.mark.parametrize(
    ("role", "error"),
    [("partner", PartnerError), ("environment", PartnerError), ("coach", UnreadableVerdict)],
)
def test_a_refusal_is_nobodys_words_but_the_actors(role: Role, error: type[Exception]) -> None:
    refusal = body(None, message={"refusal": "I will not."})
    with pytest.raises(error, match="m refused: I will not"):
        reply_to(Sampling(), refusal, Call(role=role, example_id="e1"))
