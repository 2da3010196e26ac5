"""The schema question: who is asked, what an answer shows, and what becomes of forms then."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.limits import Budget
from soulkit.models.api.probing import SCHEMA_WORD, Preflight, follows_schema
from soulkit.models.players.players import Players
from soulkit.models.players.settings import RoleSettings
from soulkit.types import Call, Completion, Form, Sampling, Segment
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

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
            model="m", base_url=server.base_url, backoff_s=0.0, preflight=Preflight(remarks.append),
            **more,
        )  # fmt: skip
        if forms:
            endpoint.expect_forms()
        return asyncio.run(ask(endpoint)), server.requests, remarks


def test_a_server_that_follows_it_is_sent_forms() -> None:
    reply, (question, request), (remark,) = play(json.dumps(SCHEMA_WORD))
    assert question["chat_template_kwargs"]["enable_thinking"] is False and question["top_k"] == -1
    assert request["response_format"]["json_schema"]["name"] == "verdict"
    assert remark.startswith("answered: m at ") and remark.endswith(
        "; it holds replies to a schema"
    )
    assert reply.ignored == ("form",)  # what a reply lacks is recorded all the same


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_a_server_that_ignores_it_is_asked_without(owner: str) -> None:
    reply, (_, request), (remark,) = play("Tuesday", owner=owner)
    assert "response_format" not in request
    assert "holds no reply to a schema" in remark
    assert (reply.dropped, reply.ignored) == (("form:json_object", "form:json_schema"), ())


@pytest.mark.parametrize(
    ("more", "asked"), [({"owner": "openai"}, 0), ({"forms": False}, 0), ({"status": 422}, 1)]
)
def test_nobody_else_is_asked_and_a_refusal_shows_nothing(more: dict[str, Any], asked: int) -> None:
    reply, requests, (remark,) = play("Tuesday", **more)
    assert sum(map(is_question, requests)) == asked
    assert "response_format" in requests[-1] and "schema" not in remark
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
        players = Players(say=remarks.append)
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
