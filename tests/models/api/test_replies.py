"""Refusals, and what a server takes with HTTP 200 and does not follow.

Forms on the wire: asked strictly, then as JSON, then not at all, and it is on record which.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from soulkit.errors import ContextOverflow, PartnerError, ProviderError, UnreadableVerdict
from soulkit.judge.structured import VerdictShape, schema_form
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.wire import offered_room, sent_seed
from soulkit.models.base import Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.types import Call, Completion, Form, Role, Sampling, Segment
from tests.models.asking import HELLO
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
        return asyncio.run(Player(model, sampling).complete(HELLO, call))


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


class Rating(VerdictShape):
    reasoning: str
    score: int


class Label(VerdictShape):
    label: str


RATING, LABEL = Sampling(form=schema_form(Rating)), Sampling(form=schema_form(Label))
ASKED = (Segment("user", "Answer as a JSON object."),)
STRICT, LOOSE = ("form:json_schema",), ("form:json_object", "form:json_schema")
JUDGED = Call(role="judge", example_id="e")
Refusal = Fault | None


def endpoint(server: ScriptedServer, **settings: Any) -> Endpoint:
    return Endpoint(model="m", base_url=server.base_url, backoff_s=0.0, max_attempts=1, **settings)


def ask(model: Endpoint, *samplings: Sampling) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        try:
            return [await model.complete(ASKED, sampling, JUDGED) for sampling in samplings]
        finally:
            await model.close()

    return asyncio.run(all_of_them())


def kinds(server: ScriptedServer) -> list[str | None]:
    """How each request asked for its form."""
    return [body.get("response_format", {}).get("type") for body in server.requests]


def refusing(*types: str, fault: Fault) -> Any:
    """A script that refuses these kinds of response_format."""

    def script(index: int, body: dict[str, Any]) -> Refusal:
        return fault if body.get("response_format", {}).get("type") in types else None

    return script


NOT_SUPPORTED = Fault.status_error(400, "'response_format' is not supported by this model")
SCHEMA_UNKNOWN = Fault.status_error(
    400, "Invalid parameter: 'response_format' of type 'json_schema' is not supported"
)


def test_a_form_travels_as_a_strict_schema() -> None:
    with ScriptedServer() as server:
        got = ask(endpoint(server), RATING)
    assert got[0].dropped == ()
    sent = server.requests[0]["response_format"]
    assert sent["type"] == "json_schema"
    assert (sent["json_schema"]["name"], sent["json_schema"]["strict"]) == ("Rating", True)
    assert sent["json_schema"]["schema"] == Rating.model_json_schema()


def test_names_of_schemas_are_made_fit() -> None:
    with ScriptedServer() as server:
        ask(endpoint(server), Sampling(form=Form("Été [x] " + "y" * 80, "{}")))
    name = server.requests[0]["response_format"]["json_schema"]["name"]
    assert len(name) == 64 and name.isascii() and " " not in name


@pytest.mark.parametrize(
    "fault",
    [
        SCHEMA_UNKNOWN,
        Fault.status_error(400, "unknown", param="response_format.type", code="invalid_value"),
        Fault.status_error(422, "json_schema: extra inputs are not permitted"),
        Fault.status_error(404, "No endpoints found that support structured outputs"),
        Fault.status_error(500, "This backend does not support json_schema"),
        Fault.status_error(501, "guided_json is not supported"),
        Fault(status=422, raw=b'{"detail":[{"loc":["body","response_format","json_schema"]}]}'),
        Fault.reply({"error": {"message": "response_format is not supported", "code": 400}}),
        Fault.reply({"error": {"message": "response_format is not supported", "code": "bad"}}),
        Fault.reply({"error": "unsupported: json_schema"}),
    ],
    ids=lambda fault: str(fault.raw)[:60],
)
def test_a_server_that_knows_no_schemas_is_asked_for_json(fault: Fault) -> None:
    with ScriptedServer(script=refusing("json_schema", fault=fault)) as server:
        got = ask(endpoint(server), RATING, RATING)
    assert [completion.dropped for completion in got] == [STRICT, STRICT]
    assert kinds(server) == ["json_schema", "json_object", "json_object"]
    assert all(completion.text for completion in got)


def test_a_server_that_knows_no_form_is_asked_without_and_that_is_remembered() -> None:
    script = refusing("json_schema", "json_object", fault=NOT_SUPPORTED)
    with ScriptedServer(script=script) as server:
        got = ask(endpoint(server), RATING, LABEL)
    assert [completion.dropped for completion in got] == [LOOSE, LOOSE]
    assert kinds(server) == ["json_schema", "json_object", None, None]


def test_a_schema_that_cannot_be_held_is_given_up_for_itself_alone() -> None:
    fault = Fault.status_error(400, "Invalid schema for response_format 'Rating': no such keyword")

    def script(index: int, body: dict[str, Any]) -> Refusal:
        return fault if "'Rating'" in str(body.get("response_format")) else None

    with ScriptedServer(script=script) as server:
        got = ask(endpoint(server), RATING, LABEL, RATING)
    assert [completion.dropped for completion in got] == [STRICT, (), STRICT]
    assert kinds(server) == ["json_schema", "json_object", "json_schema", "json_object"]


def test_json_mode_that_misses_its_word() -> None:
    word = Fault.status_error(
        400, "'messages' must contain the word 'json' to use 'response_format' 'json_object'"
    )

    def script(index: int, body: dict[str, Any]) -> Refusal:
        kind = body.get("response_format", {}).get("type")
        return {"json_schema": SCHEMA_UNKNOWN, "json_object": word}.get(kind or "")

    with ScriptedServer(script=script) as server:
        assert ask(endpoint(server), RATING)[0].dropped == LOOSE


def test_a_form_and_other_parameters_are_dropped_each_for_itself() -> None:
    def script(index: int, body: dict[str, Any]) -> Refusal:
        if body.get("response_format", {}).get("type") == "json_schema":
            return SCHEMA_UNKNOWN
        return Fault.status_error(400, "unsupported", param="seed") if "seed" in body else None

    with ScriptedServer(script=script) as server:
        got = ask(endpoint(server), Sampling(form=RATING.form, seed=1))
    assert got[0].dropped == ("form:json_schema", "seed")
    assert kinds(server)[-1] == "json_object"


def test_other_refusals_are_not_mended_by_dropping_the_form() -> None:
    faults = {
        "seed": Fault.status_error(400, "unsupported value; response_format is fine", param="seed"),
        "final": Fault.status_error(400, "temperature must be at most 2", param="temperature"),
        "long": Fault.status_error(400, "response_format: maximum context length is 8192"),
    }
    with ScriptedServer(script={0: faults["seed"]}) as server:
        got = ask(endpoint(server), Sampling(form=RATING.form, seed=1))
    assert got[0].dropped == ("seed",)
    with ScriptedServer(script={0: faults["final"]}) as server, pytest.raises(ProviderError):
        ask(endpoint(server), RATING)
    with ScriptedServer(script={0: faults["long"]}) as server, pytest.raises(ContextOverflow):
        ask(endpoint(server), RATING)


def test_a_server_that_always_complains_of_the_format_ends() -> None:
    with (
        ScriptedServer(script=lambda index, body: NOT_SUPPORTED) as server,
        pytest.raises(ProviderError),
    ):
        ask(endpoint(server), RATING)
    assert kinds(server) == ["json_schema", "json_object", None]


def test_refusals_of_a_crowd_end_too() -> None:
    script = refusing("json_schema", "json_object", fault=NOT_SUPPORTED)

    async def crowd(model: Endpoint) -> list[Completion]:
        calls = [Call(role="judge", example_id=f"e{i}") for i in range(40)]
        try:
            return await asyncio.gather(*(model.complete(ASKED, RATING, call) for call in calls))
        finally:
            await model.close()

    with ScriptedServer(script=script) as server:
        got = asyncio.run(crowd(endpoint(server, concurrency=8)))
    assert {completion.dropped for completion in got} == {LOOSE}
    assert len(server.requests) <= 40 + 2 * 8 + 2


def test_what_was_dropped_is_known_again_from_the_ledger(tmp_path: Any) -> None:
    script = refusing("json_schema", fault=SCHEMA_UNKNOWN)
    with ScriptedServer(script=script) as server, Ledger(tmp_path / "ledger.sqlite") as ledger:
        for _ in range(2):
            got = ask(endpoint(server, ledger=ledger), RATING)
            assert got[0].dropped == STRICT
    assert len(server.requests) == 2
    assert json.loads(json.dumps(got[0].dropped)) == ["form:json_schema"]


@pytest.mark.parametrize(("prompt", "room"), [(100, 28), (127, 1), (128, 0), (200, 0), (1, 0)])
def test_a_reply_gets_the_room_that_a_prompt_leaves(prompt: int, room: int) -> None:
    message = f"The context length is 128 tokens, and there are {prompt} tokens in the prompt."
    assert offered_room(message, 100, overflow=True) == room
