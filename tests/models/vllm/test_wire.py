"""Completions by ids: every setting is sent, and what cannot be read is no reply."""

from __future__ import annotations

import json
from typing import Any

import pytest

from soulkit.models.vllm.wire import (
    LogprobsMode,
    Unreadable,
    completion_request,
    gives_logprobs,
    read_emission,
)
from soulkit.types import Call, Form, Sampling

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
        (reply(finish_reason="abort"), "gave the reply up"),
        (reply(logprobs=None), "no log-prob"),
        (reply(logprobs={"token_logprobs": [-0.5]}), "no log-prob"),
        (reply(logprobs={"token_logprobs": [None, -1]}), "no number"),
        (json.loads(json.dumps(reply(logprobs={"token_logprobs": [1e999, 0]}))), "no number"),
        (reply(logprobs={"token_logprobs": [-(10**400), -1]}), "no number"),
        (reply(logprobs={"token_logprobs": [True, -1]}), "no number"),
        (reply(logprobs={"token_logprobs": [-0.5, 3.25]}), "above zero"),
    ],
)
def test_what_cannot_be_read_is_no_reply(body: dict[str, Any], why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_emission(body, [4, 5], logprobs=True)
