"""The question before a run: what each kind of answer decides, who is asked, and how often.

The schema question: who is asked, what an answer shows, and what becomes of forms then.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from soulkit.errors import ProviderError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.limits import Budget, BudgetSpent
from soulkit.models.api.probing import (
    SCHEMA_WORD,
    Answer,
    EndpointRefused,
    Preflight,
    Refusal,
    Undecided,
    follows_schema,
    outcome_of,
)
from soulkit.models.api.protocol import error_message
from soulkit.models.api.transport import Received
from soulkit.models.players.players import Players
from soulkit.models.players.settings import RoleSettings
from soulkit.types import Call, Completion, Form, Sampling, Segment
from tests.models import asking
from tests.support.reporting import Heard
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

KEY = "qk0123456789abcdef0123"


def error(message: str, **more: Any) -> str:
    return json.dumps({"error": {"message": message, **more}})


ANSWERED = json.dumps({"model": "m-2025", "choices": [{"message": {"content": ""}}]})
DECIDED = {
    "a wrong key": (401, error("no"), "key"),
    "a key without a permission": (403, error("no access"), "key"),
    "Google's wrong key": (400, f"[{error('API key not valid. Please pass one.')}]", "key"),
    "OpenAI's model": (404, error("The model `x` does not exist", code="model_not_found"), "model"),
    "vLLM's model": (404, error("The model `x` does not exist.", type="NotFoundError"), "model"),
    "Ollama's model": (404, error("model 'x' not found, try pulling it first"), "model"),
    "Azure's deployment": (404, error("no", code="DeploymentNotFound"), "model"),
    "DeepSeek's model": (400, error("Model Not Exist"), "model"),
    "OpenRouter's model": (400, error("x is not a valid model ID"), "model"),
    "no such path": (404, '{"detail": "Not Found"}', "path"),
    "OpenAI's path": (404, error("Invalid URL (POST /chat/completions)"), "path"),
    "a page": (404, "<html>the model page is not here</html>", "path"),
    "another method": (405, "", "path"),
    "credit": (402, error("Insufficient Balance"), "credit"),
    "OpenAI's credit": (429, error("You exceeded it", code="insufficient_quota"), "credit"),
    "a status within": (200, error("Insufficient credits", code=402), "credit"),
    "elsewhere": (308, "", "moved"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_refusals_that_no_request_gets_around(name: str) -> None:
    status, text, kind = DECIDED[name]
    outcome = outcome_of(Received(status, {"location": "http://h/v1/chat/completions"}, text), "x")
    assert isinstance(outcome, Refusal) and outcome.kind == kind


@pytest.mark.parametrize(
    ("status", "text"),
    [(429, error("slow down")), (429, error("quota per minute exceeded")), (500, "x"), (503, ""),
     (408, ""), (529, error("overloaded")), (200, error("Provider returned error", code=502))],
)  # fmt: skip
def test_a_busy_server_decides_nothing(status: int, text: str) -> None:
    outcome = outcome_of(Received(status, {"retry-after": "2"}, text), "m")
    assert isinstance(outcome, Undecided) and outcome.busy and outcome.wait_s == 2.0


@pytest.mark.parametrize("words", ["model does ", "Bearer ", "invalid api key "])
def test_an_endless_error_is_read_from_its_ends(words: str) -> None:
    """What is looked at has a bound, whatever a server sends."""
    text = f"no {words * 100_000} at the very end"
    message = error_message({"message": text})
    assert len(message) < 10_000
    assert message.startswith(f"no {words}") and message.endswith("at the very end")
    assert isinstance(outcome_of(Received(400, {}, error(text)), "m"), Answer | Refusal)


@pytest.mark.parametrize("text", ["<html>", "", "{}", '{"choices": []}'])
def test_neither_does_a_reply_that_is_none(text: str) -> None:
    outcome = outcome_of(Received(200, {}, text), "m")
    assert isinstance(outcome, Undecided) and outcome.page == (text == "<html>")


@pytest.mark.parametrize(
    ("status", "text"),
    [(400, error("Unsupported parameter: 'max_tokens'", param="max_tokens")),
     (400, error("With this model the parameter 'max_tokens' is not available")),
     (400, error("Invalid 'max_tokens': integer below minimum value. Expected >= 16.")),
     (422, error("temperature is required")), (200, ANSWERED)],
)  # fmt: skip
def test_who_dislikes_the_question_alone_is_there(status: int, text: str) -> None:
    assert isinstance(outcome_of(Received(status, {}, text), "m"), Answer)


# -- everybody of a run ----------------------------------------------------------------------------


def member(roll: Preflight, server: ScriptedServer, model: str = "m", **settings: Any) -> Endpoint:
    base: dict[str, Any] = {"base_url": server.base_url, "backoff_s": 0.0, "max_attempts": 2}
    return Endpoint(model=model, preflight=roll, **{**base, **settings})


def crowd(*models: Endpoint, times: int = 4) -> list[Completion | BaseException]:
    return asking.crowd(*models, count=times)


def test_everybody_is_asked_once_before_the_first_call() -> None:
    lines: list[str] = []
    with ScriptedServer() as server:
        roll = Preflight(Heard(lines))
        actor, judge = member(roll, server), member(roll, server, "j")
        assert all(isinstance(reply, Completion) for reply in crowd(actor))
        assert sorted(body["model"] for body in server.probes) == ["j", "m"]
        crowd(actor, judge)
        assert len(server.probes) == 2 and len(server.requests) == 12
        assert {tuple(body) for body in server.probes} == {
            ("model", "messages", "max_tokens", "top_k")
        }
    where = server.base_url.removeprefix("http://").removesuffix("/v1")
    assert sorted(lines)[:2] == [f"answered: j at {where}", f"answered: m at {where}"]
    assert [line.partition(":")[0] for line in sorted(lines)[2:]] == ["unknown server"] * 2


def test_one_wrong_key_stops_everybody_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with ScriptedServer() as fine, ScriptedServer(require_key="another") as strict:
        roll = Preflight()
        actor, judge = member(roll, fine), member(roll, strict, "j")
        errors = crowd(actor, judge)
        assert fine.requests == strict.requests == [] and len(strict.probes) == 1
    assert all(isinstance(one, EndpointRefused) for one in errors)
    what, why, way_out = errors[0].lines()  # type: ignore[union-attr]
    assert "rejects the key for 'j': HTTP 401" in what and KEY not in what
    assert "nothing was played" in why and "OPENAI_API_KEY" in way_out


def test_several_refusals_are_one_error() -> None:
    with ScriptedServer(require_key="a") as one, ScriptedServer(require_key="b") as other:
        roll = Preflight()
        first = crowd(member(roll, one, "first"), member(roll, other, "second"), times=1)[0]
    assert isinstance(first, EndpointRefused)
    assert "'first'" in first.what and "'second'" in first.what
    assert first.why.count("nothing was played") == 1


def test_a_key_that_is_revoked_stops_the_run_and_one_odd_refusal_does_not() -> None:
    odd = {2: Fault.status_error(401, "odd"), 5: Fault.status_error(404, "odd")}
    with ScriptedServer(script=odd) as server:
        roll = Preflight()
        model = member(roll, server, concurrency=1)
        outcomes = [crowd(model, times=1)[0] for _ in range(8)]
        refused = [one for one in outcomes if not isinstance(one, Completion)]
        assert [type(one) for one in refused] == [ProviderError, ProviderError]
        assert len(server.probes) == 3
        server._require_key = "revoked"
        errors = crowd(model)
        assert all(isinstance(one, EndpointRefused) for one in errors)
        assert len(server.probes) == 4, "the others are told what the first one learnt"
    assert "Finished work is kept" in errors[0].why  # type: ignore[union-attr]


def test_servers_that_are_busy_or_away_are_waited_for() -> None:
    lines: list[str] = []
    with ScriptedServer() as server:
        roll = Preflight(Heard(lines))
        model = member(roll, server, base_url="http://127.0.0.1:9/v1", down_after_s=0.2)
        first = crowd(model, times=1)[0]
        assert isinstance(first, ProviderError) and "connection refused" in str(first)
    assert lines == [
        "no answer yet from m at 127.0.0.1:9: connection refused; calls will wait for it"
    ]


def test_the_question_counts_against_the_budget() -> None:
    with ScriptedServer() as server:
        budget = Budget(1e-6)
        roll = Preflight()
        model = member(roll, server, price_in=1.0, price_out=1.0, budget=budget)
        assert isinstance(crowd(model, times=1)[0], BudgetSpent)
        assert len(server.probes) == 1 and server.requests == []
        assert budget.spent == pytest.approx(6e-6), "five words and one"


def test_a_list_of_models_decides_nothing_and_helps_with_names() -> None:
    def wrong(body: Body) -> Fault | None:
        return Fault.status_error(404, f"The model `{body['model']}` does not exist")

    for models, hint in (
        (None, "Did you mean 'scripted'?"),
        (Fault.status_error(500), "Use a model that the server has"),
    ):
        with ScriptedServer(models=models, on_probe=wrong) as server:
            first = crowd(member(Preflight(), server, "scriptet"), times=1)[0]
        assert isinstance(first, EndpointRefused) and hint in first.way_out
    with ScriptedServer(models=Fault.status_error(500)) as server:
        assert isinstance(crowd(member(Preflight(), server), times=1)[0], Completion)


def test_a_busy_server_is_asked_again() -> None:
    busy = iter([Fault.status_error(503), Fault.rate_limited("0"), None])
    with ScriptedServer(on_probe=lambda body: next(busy)) as server:
        assert isinstance(crowd(member(Preflight(), server), times=1)[0], Completion)
        assert len(server.probes) == 3


@pytest.mark.parametrize("cut", ["/v1", ""])
def test_a_missing_path_is_looked_for(cut: str) -> None:
    with ScriptedServer() as server:
        base_url = (
            server.base_url.removesuffix(cut) if cut else f"{server.base_url}/chat/completions"
        )
        server.paths = ("/v1/chat/completions",)
        roll = Preflight()
        first = crowd(member(roll, server, base_url=base_url), times=1)[0]
        assert isinstance(first, EndpointRefused)
        assert f"The server answers at {server.base_url}: use that address." in first.way_out
        assert server.requests == []


FORM = Form("verdict", '{"properties":{"yes":{}},"required":["yes"],"type":"object"}')
JUDGE = Call(role="judge", example_id="x")


@pytest.mark.parametrize(
    ("text", "shows"),
    [(json.dumps(SCHEMA_WORD), True), (f"<think>\n</think>\n {json.dumps(SCHEMA_WORD)}", True),
     (SCHEMA_WORD, False),
     ("Tuesday", False), ("", None), ("<think>hm</think>", None)],
)  # fmt: skip
def test_what_an_answer_shows(text: str, shows: bool | None) -> None:
    assert follows_schema(text) is shows


def is_question(body: Body) -> bool:
    return SCHEMA_WORD in json.dumps(body.get("response_format"))


def play(
    answer: str, *, owner: str = "vllm", forms: bool = True, status: int = 200, **more: Any
) -> tuple[Completion, list[Body], list[str]]:
    """A judge's reply, what its server was sent, and what was said of it."""
    remarks: list[str] = []

    def script(index: int, body: Body) -> Fault | None:
        return Fault.status_error(status) if status != 200 and is_question(body) else None

    def said(body: Body) -> str:
        return answer if is_question(body) else "yes"

    async def ask(endpoint: Endpoint) -> Completion:
        try:
            return await endpoint.complete([Segment("user", "?")], Sampling(form=FORM), JUDGE)
        finally:
            await endpoint.close()

    with ScriptedServer(answer=said, owner=owner, script=script) as server:
        endpoint = Endpoint(
            model="m", base_url=server.base_url, backoff_s=0.0, preflight=Preflight(Heard(remarks)),
            **more,
        )  # fmt: skip
        if forms:
            endpoint.expect_forms()
        return asyncio.run(ask(endpoint)), server.requests, remarks


def test_a_server_that_follows_it_is_sent_forms() -> None:
    reply, (question, request), (remark,) = play(json.dumps(SCHEMA_WORD))
    assert question["chat_template_kwargs"]["enable_thinking"] is False and question["top_k"] == -1
    assert request["response_format"]["json_schema"]["name"] == "verdict"
    assert remark.startswith("answered: m at ") and remark.endswith("; it enforces JSON schemas")
    assert reply.ignored == ("form",)  # what a reply lacks is recorded all the same


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_a_server_that_ignores_it_is_asked_without(owner: str) -> None:
    reply, (_, request), (remark,) = play("Tuesday", owner=owner)
    assert "response_format" not in request
    assert "does not enforce JSON schemas" in remark
    assert (reply.dropped, reply.ignored) == (("form:json_object", "form:json_schema"), ())


@pytest.mark.parametrize(
    ("more", "asked"), [({"owner": "openai"}, 0), ({"forms": False}, 0), ({"status": 422}, 1)]
)
def test_nobody_else_is_asked_and_a_refusal_shows_nothing(more: dict[str, Any], asked: int) -> None:
    reply, requests, remarks = play("Tuesday", **more)
    assert sum(map(is_question, requests)) == asked
    assert "response_format" in requests[-1] and not any("schema" in line for line in remarks)
    assert reply.dropped == ()


def test_it_counts_against_the_budget() -> None:
    budget = Budget(1.0, 0.0)
    play("Tuesday", price_in=10.0, price_out=10.0, budget=budget)
    after = budget.spent
    plain = Budget(1.0, 0.0)
    play("Tuesday", price_in=10.0, price_out=10.0, budget=plain, forms=False)
    assert after > plain.spent > 0


def test_players_whose_replies_may_have_forms_are_asked() -> None:
    with ScriptedServer(answer="Tuesday", owner="vllm") as server:
        remarks: list[str] = []
        players = Players(reporter=Heard(remarks))
        who = {
            role: players.model(role, RoleSettings(kind="endpoint", model=role,
                                                   base_url=server.base_url))
            for role in ("partner", "judge")
        }  # fmt: skip

        async def ask() -> None:
            await who["partner"].complete([Segment("user", "?")], Sampling(), JUDGE)
            await players.close()

        asyncio.run(ask())
    assert [("schema" in one, one.split()[1]) for one in sorted(remarks)] == [
        (True, "judge"), (False, "partner"),
    ]  # fmt: skip
