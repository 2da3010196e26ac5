"""Completions by ids: every setting is sent, and what cannot be read is no reply.

One server: what a refusal is, what passes, and what is gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from soulkit.models.vllm.client import (
    Address,
    LogprobsMode,
    ServerBusy,
    ServerGone,
    ServerRefused,
    Unreadable,
    VllmClient,
    completion_request,
    gives_logprobs,
    read_emission,
)
from soulkit.types import Call, Form, Sampling
from tests.support.servers.ids_server import DEAD, Fault, IdsServer

CALL = Call(role="actor", example_id="x")
FORM = Form("f", '{"enum":["a"]}')


def request(sampling: Sampling, call: Call = CALL, *, form: bool = False) -> dict[str, Any]:
    return completion_request(
        "base", [4, 5], sampling, call, room=9, end_ids={7, 2}, logprobs=True, form=form
    )


def test_nothing_is_left_to_the_servers_own_configuration() -> None:
    body = request(Sampling(temperature=0.7, top_p=0.9, seed=1, stop=("\n", "", "END")))
    seed = body.pop("seed")
    assert body == {
        "model": "base", "prompt": [4, 5], "max_tokens": 9, "temperature": 0.7, "top_p": 0.9,
        "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "stop": ["\n", "END"], "stop_token_ids": [2, 7],
        "skip_special_tokens": False, "return_token_ids": True, "logprobs": 0,
    }  # fmt: skip
    assert 0 <= seed < 2**31


def test_seeds_belong_to_the_call() -> None:
    one, other = Sampling(seed=1), Call(role="actor", example_id="x", rollout=1)
    assert request(one) == request(one)
    seeds = [request(one)["seed"], request(one, other)["seed"], request(Sampling(seed=2))["seed"],
             request(Sampling())["seed"]]  # fmt: skip
    assert len(set(seeds)) == 4
    assert request(Sampling())["seed"] == seeds[-1]


def test_a_server_is_sent_no_more_stop_strings_than_it_takes() -> None:
    assert request(Sampling(stop=("a", "", "b", "c", "d", "e")))["stop"] == ["a", "b", "c", "d"]


def test_a_form_goes_where_the_server_reads_it() -> None:
    held = request(Sampling(form=FORM), form=True)
    assert held["structured_outputs"] == {"json": {"enum": ["a"]}}
    assert "structured_outputs" not in request(Sampling(form=FORM))


@pytest.mark.parametrize(
    ("temperature", "top_p", "mode", "gives"),
    [
        (0.0, 0.9, "processed", True), (0.7, 1.0, "processed", True),
        (0.7, 0.9, "processed", False), (0.005, 1.0, "processed", False),
        (0.0, 0.9, "raw", True), (1.0, 0.9, "raw", True), (0.7, 1.0, "raw", False),
        (1.0, 1.0, "none", False),
    ],
)  # fmt: skip
def test_logprobs_are_asked_for_where_they_are_those_of_the_logits(
    temperature: float, top_p: float, mode: LogprobsMode, gives: bool
) -> None:
    sampling = Sampling(temperature=temperature, top_p=top_p)
    assert gives_logprobs(sampling, mode, form=False) is gives
    assert not gives_logprobs(sampling, mode, form=True)


def reply(**more: Any) -> dict[str, Any]:
    choice = {"token_ids": [8, 2], "finish_reason": "stop", "prompt_token_ids": [4, 5],
              "logprobs": {"token_logprobs": [-0.5, -1]}}  # fmt: skip
    return {"choices": [{**choice, **more}]}


def test_a_reply_is_ids_and_logprobs() -> None:
    read = read_emission(reply(), [4, 5], logprobs=True)
    assert (read.prompt, read.ids, read.logprobs, read.stopped) == ((4, 5), (8, 2), (-0.5, -1.0),
                                                                   True)  # fmt: skip
    without = read_emission(reply(finish_reason="length", logprobs=None), None, logprobs=False)
    assert without.logprobs == () and not without.stopped


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({}, "no choices"),
        ({"choices": ["x"]}, "no choices"),
        (reply(prompt_token_ids=[1, 4, 5]), "another prompt"),
        (reply(token_ids=None), "no token ids"),
        (reply(token_ids=[8, "2"]), "no token ids"),
        (reply(token_ids=[8, True]), "no token ids"),
        (reply(token_ids=[8, -1]), "no token ids"),  # no tokenizer decodes these two
        (reply(token_ids=[8, 10**30]), "no token ids"),
        (reply(finish_reason="abort"), "aborted the reply"),
        (reply(logprobs=None), "no log-prob"),
        (reply(logprobs={"token_logprobs": [-0.5]}), "no log-prob"),
        (reply(logprobs={"token_logprobs": [None, -1]}), "not a number"),
        (json.loads(json.dumps(reply(logprobs={"token_logprobs": [1e999, 0]}))), "not a number"),
        (reply(logprobs={"token_logprobs": [-(10**400), -1]}), "not a number"),
        (reply(logprobs={"token_logprobs": [True, -1]}), "not a number"),
        (reply(logprobs={"token_logprobs": [-0.5, 3.25]}), "above zero"),
    ],
)
def test_what_cannot_be_read_is_no_reply(body: dict[str, Any], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_emission(body, [4, 5], logprobs=True)


BODY: dict[str, Any] = {
    "model": "base", "prompt": [1], "max_tokens": 3, "stop_token_ids": [], "temperature": 0.0,
}  # fmt: skip


def server(script: Mapping[int, Fault] | None = None, **more: Any) -> IdsServer:
    return IdsServer(lambda body: [5, 6, 7], script=script, **more)


def client_of(one: IdsServer, key: str = "") -> VllmClient:
    return VllmClient(Address(one.url, key))


async def ask(client: VllmClient) -> dict[str, Any]:
    try:
        return await client.ask("/v1/completions", BODY)
    finally:
        await client.close()


def test_a_key_is_sent_and_not_shown() -> None:
    with server(key="sesame-1234") as one:
        client = client_of(one, "sesame-1234")
        assert asyncio.run(ask(client))["choices"][0]["token_ids"] == [5, 6, 7]
        assert "sesame" not in repr(client) + repr(client.address)
        with pytest.raises(ServerRefused) as refusal:
            asyncio.run(ask(client_of(one)))
    assert refusal.value.status == 401


def test_a_reply_that_is_no_object_is_text() -> None:
    async def text() -> dict[str, Any]:
        client = client_of(one)
        got = await client.ask("/text")
        await client.close()
        return got

    with server() as one:
        assert asyncio.run(text()) == {"text": "Success: done."}


@pytest.mark.parametrize(
    ("fault", "error", "why"),
    [
        (Fault(status=400, message="no such thing"), ServerRefused, "no such thing"),
        (Fault(status=500, message="kv cache"), ServerBusy, "HTTP 500 kv cache"),
        (Fault(status=429), ServerBusy, "HTTP 429"),
        (Fault(status=500, message=DEAD), ServerGone, "is gone: HTTP 500"),
        (Fault(hang_up=True), ServerGone, "is gone"),
    ],
)
def test_one_exchange_says_what_became_of_it(
    fault: Fault, error: type[Exception], why: str
) -> None:
    with server({0: fault}) as one:
        with pytest.raises(error, match=why) as caught:
            asyncio.run(ask(client_of(one)))
        assert type(caught.value) is error and len(one.requests) == 1


@pytest.mark.parametrize(("health", "alive"), [(200, True), (404, True), (503, False)])
def test_what_a_server_says_of_its_health(health: int, alive: bool) -> None:
    with server() as one:
        one.health = health
        assert asyncio.run(client_of(one).alive(5.0)) is alive


def test_a_server_that_is_silent_is_not_well() -> None:
    with server() as one:
        one.health = 0
        assert not asyncio.run(client_of(one).alive(0.02))


def test_nobody_there_is_gone() -> None:
    with server() as one:
        address = Address(one.url)
    client = VllmClient(address)
    assert not asyncio.run(client.alive(5.0))
    with pytest.raises(ServerGone, match="connection refused"):
        asyncio.run(ask(client))


def test_a_client_serves_several_event_loops_in_turn() -> None:
    with server() as one:
        client = client_of(one)
        assert [asyncio.run(ask(client))["model"] for _ in range(2)] == ["base", "base"]
