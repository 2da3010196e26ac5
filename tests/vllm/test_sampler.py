"""What a model behind a server gives is what one in this process gives, word for word."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from soulkit.models.codec import Codec
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.model import VllmModel
from soulkit.models.vllm.replicas import Replicas
from soulkit.types import Call, Completion, Form, Sampling, Segment, Usage
from tests.models.vllm.test_model import Truths

if TYPE_CHECKING:
    from soulkit.models.base import Sampler
    from soulkit.models.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.torch]

GREEDY = Sampling(temperature=0.0, max_tokens=24, seed=1)
EXACT = 1e-4


def behind(server: VllmServer, model: Path, **more: Any) -> VllmModel:
    fleet = Replicas([VllmClient(Address(server.url, server.key))], in_flight=64)
    settings = {"abilities": Truths(), **more}
    return VllmModel(fleet, Codec.load(model), name="tiny", served=server.served, **settings)


def contexts(number: int = 30) -> list[list[Segment]]:
    """Conversations of several lengths, some with a reply of the model's own in them."""
    talks = [[Segment("user", "Where is the ball? " * (1 + n % 9) + str(n))] for n in range(number)]
    for n, talk in enumerate(talks[::4]):
        talk += [Segment("assistant", "", token_ids=(40 + n, 50, 60)), Segment("user", "Why?")]
    return talks


def ask(model: Sampler, sampling: Sampling, talks: Sequence[Sequence[Segment]]) -> list[Completion]:
    async def wave() -> list[Completion]:
        calls = [Call(role="actor", example_id=str(n)) for n in range(len(talks))]
        asked = zip(talks, calls, strict=True)
        try:
            return await asyncio.gather(*(model.complete(t, sampling, c) for t, c in asked))
        finally:
            await model.close()

    return asyncio.run(wave())


def test_greedy_replies_are_equal_with_stops_and_all(
    vllm_server: VllmServer, tiny_model: Path
) -> None:
    from soulkit.models.local.sampler import LocalModel

    here = LocalModel.load(tiny_model, dtype="float32")
    first = ask(here.anew(), GREEDY, contexts())
    words = [one.text.split() for one in first]
    stops = tuple(f" {said[3]}" for said in words[:3] if len(said) > 3)
    sampling = replace(GREEDY, stop=stops)
    local = ask(here.anew(), sampling, contexts())
    there = ask(behind(vllm_server, tiny_model), sampling, contexts())
    assert sum(one.stop_reason == "stop" for one in local) >= len(stops) > 0
    for one, other in zip(local, there, strict=True):
        assert replace(one, logprobs=(), usage=Usage(), server=vllm_server.url) == replace(
            other, logprobs=(), usage=Usage()
        )
        assert one.logprobs == pytest.approx(other.logprobs, abs=EXACT)
        assert one.usage.completion_tokens == other.usage.completion_tokens


def test_replies_do_not_depend_on_who_else_is_asked(
    vllm_server: VllmServer, tiny_model: Path
) -> None:
    sampling = replace(GREEDY, temperature=1.0)
    together = ask(behind(vllm_server, tiny_model), sampling, contexts())
    alone = [ask(behind(vllm_server, tiny_model), sampling, contexts()[:n])[-1] for n in (1, 2, 3)]
    assert [one.token_ids for one in alone] == [one.token_ids for one in together[:3]]


def test_prompts_that_do_not_fit_one_step_leave_the_server_alive(
    vllm_server: VllmServer, tiny_model: Path
) -> None:
    model = behind(vllm_server, tiny_model)
    few, more = (model.prompt_length([Segment("user", "ball " * n)]) for n in (1, 41))
    words = "ball " * (900 * 40 // (more - few))
    long = [[Segment("user", f"{n} {words}")] for n in range(16)]
    replies = ask(model, Sampling(temperature=1.0, max_tokens=8, seed=1), long)
    assert all(one.token_ids for one in replies)


def test_a_verdict_is_held_to_its_form(
    vllm_server: VllmServer, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    schema = {"type": "object", "properties": {"score": {"enum": [1, 2, 3]}},
              "required": ["score"], "additionalProperties": False}  # fmt: skip
    model = behind(vllm_server, tiny_model)
    sampling = replace(GREEDY, temperature=1.0, max_tokens=64, form=Form("v", json.dumps(schema)))
    replies = ask(model, sampling, contexts(6))
    assert "tiny: it enforces JSON schemas" in caplog.messages
    assert all(json.loads(one.text)["score"] in (1, 2, 3) for one in replies)
    assert {one.dropped for one in replies} == {("logprobs",)}
    assert {one.ignored for one in replies} == {()}
