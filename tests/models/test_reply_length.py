"""How long a reply may be: what the context leaves, and what servers say of it over HTTP."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ContextOverflow
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.wire import RESERVED, estimated_tokens, offered_room
from soulkit.models.base import max_reply_tokens, min_reply_tokens
from soulkit.models.ledger.ledger import Ledger
from soulkit.types import LEAST_ROOM, MAX_TOKENS, Call, Completion, Sampling, Segment
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

HELLO = (Segment("user", "hello there"),)
CALL = Call(role="actor", example_id="e1")
VLLM = (
    "This model's maximum context length is {context} tokens. However, you requested {total} "
    "tokens ({prompt} in the messages, {limit} in the completion). Please reduce the length."
)


def ask(model: Endpoint, sampling: Sampling, call: Call = CALL) -> Completion:
    async def once() -> Completion:
        try:
            return await model.complete(HELLO, sampling, call)
        finally:
            await model.close()

    return asyncio.run(once())


def endpoint(server: ScriptedServer, **more: Any) -> Endpoint:
    return Endpoint(model="m", base_url=server.base_url, backoff_s=0.0, max_attempts=2, **more)


def small_server(context: int, prompt: int, words: str = VLLM) -> ScriptedServer:
    """A server with so much context, to which every prompt has `prompt` tokens."""

    def fault(index: int, body: Body) -> Fault | None:
        limit = body["max_tokens"]
        if prompt + limit <= context:
            return None
        total = prompt + limit
        text = words.format(context=context, prompt=prompt, limit=limit, total=total)
        return Fault.status_error(400, text)

    return ScriptedServer(answer="hi", script=fault)


@pytest.mark.parametrize(
    ("prompt", "limit", "context", "room"),
    [
        (100, 8192, None, 8192),
        (100, 8192, 32_768, 8192),
        (100, 8192, 4096, 3996),
        (3584, 8192, 4096, LEAST_ROOM),
        (3585, 8192, 4096, 0),
        (3585, 256, 4096, 256),
        (4000, 96, 4096, 96),
        (4001, 96, 4096, 0),
        (5000, 8192, 4096, 0),
    ],
)
def test_a_reply_has_what_the_context_leaves(
    prompt: int, limit: int, context: int | None, room: int
) -> None:
    assert max_reply_tokens(prompt, limit, context) == room


def test_the_limits_of_the_paper() -> None:
    assert (MAX_TOKENS, LEAST_ROOM) == (8192, 512)
    assert (min_reply_tokens(8192), min_reply_tokens(128)) == (512, 128)
    assert Sampling().max_tokens == MAX_TOKENS


def test_a_served_reply_has_what_the_server_has_room_for(tmp_path: Path) -> None:
    with small_server(2000, 700) as server:
        model = endpoint(server, ledger=Ledger(tmp_path / "ledger.sqlite", "record"))
        assert ask(model, Sampling()).text == "hi"
        assert [body["max_tokens"] for body in server.requests] == [8192, 1300]
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT body FROM settings")
    (settings,) = [json.loads(body) for (body,) in rows]
    assert settings["sampling"]["max_tokens"] == 8192, "the key is what was wanted of the model"
    assert settings["beside"]["max_tokens"] == 1300


def test_a_prompt_that_leaves_too_little_room_is_an_overflow() -> None:
    with small_server(2000, 1489) as server, pytest.raises(ContextOverflow, match="1489 in the"):
        ask(endpoint(server), Sampling())
    assert len(server.requests) == 1
    with small_server(2000, 1489) as server:
        assert ask(endpoint(server), Sampling(max_tokens=511)).text == "hi"


def test_a_server_that_does_not_count_is_asked_for_half() -> None:
    with small_server(2000, 100, "max_tokens exceeds the context length") as server:
        assert ask(endpoint(server), Sampling()).text == "hi"
        assert [body["max_tokens"] for body in server.requests] == [8192, 4096, 2048, 1024]
    with (
        small_server(500, 400, "max_tokens exceeds the context length") as server,
        pytest.raises(ContextOverflow),
    ):
        ask(endpoint(server), Sampling())
    assert [body["max_tokens"] for body in server.requests] == [8192, 4096, 2048, 1024, 512]


def test_a_model_that_gives_no_reply_so_long() -> None:
    words = (
        "max_tokens is too large: {limit}. This model supports at most 4096 completion tokens, "
        "whereas you provided {limit}."
    )
    with small_server(4096, 0, words) as server:
        model = endpoint(server)
        for index in range(2):
            assert ask(model, Sampling(), replace(CALL, rollout=index)).text == "hi"
        assert ask(model, Sampling(max_tokens=300)).text == "hi"
        assert [body["max_tokens"] for body in server.requests] == [8192, 4096, 4096, 300]


@pytest.mark.parametrize(
    ("message", "room"),
    [
        (VLLM.format(context=4096, prompt=108, limit=8192, total=8300), 3988),
        ("'max_tokens' is too large: 8192. This model's maximum context length is 4096 tokens and "
         "your request has 108 input tokens (8192 > 4096 - 108).", 3988),
        ("Requested token count exceeds the model's maximum context length of 4096 tokens. You "
         "requested a total of 8300 tokens: 108 tokens from the input messages and 8192 tokens for "
         "the completion.", 3988),
        ("the context length is 4096, and max_tokens 8192 is more", 4096),
        ("This model's maximum context length is 4096 tokens. However, your messages resulted in "
         "5000 tokens.", 0),
        ("prompt is too long: 9000 tokens > 8000 maximum", 0),
        (VLLM.format(context=4096, prompt=5000, limit=8192, total=13192), 0),
    ],
)  # fmt: skip
def test_what_is_said_of_the_context(message: str, room: int) -> None:
    assert offered_room(message, 8192, overflow=True) == room


@pytest.mark.parametrize(
    ("message", "room"),
    [
        ("This model supports at most 4096 completion tokens, whereas you provided 8192.", 4096),
        ("Invalid max_tokens value, the valid range of max_tokens is [1, 4096]", 4096),
        ("`max_tokens` must be less than or equal to `2048`", 2048),
        ("max_tokens: 8192 > 4096, which is the maximum allowed number of output tokens", 4096),
        ("max_tokens is too big", 4096),
        ("Unsupported parameter: 'max_tokens'; this model reads 'max_completion_tokens'.", 0),
        ("temperature must be less than or equal to 1", 0),
    ],
)
def test_what_is_said_of_the_limit_alone(message: str, room: int) -> None:
    assert offered_room(message, 8192, overflow=False) == room


def test_rates_reserve_no_more_than_a_usual_reply() -> None:
    messages = [{"role": "user", "content": "x" * 400}]
    assert estimated_tokens(messages, 8192) == 100 + 4 + RESERVED
    assert estimated_tokens(messages, 64) == 100 + 4 + 64
