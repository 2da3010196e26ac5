"""Sampling options: each engine is sent what was asked for, and old ledger keys stay valid.

How long a reply may be: what the context leaves, and what servers say of it over HTTP.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soulkit.errors import ContextOverflow
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.wire import RESERVED, estimated_tokens, offered_room
from soulkit.models.base import max_reply_tokens, min_reply_tokens
from soulkit.models.ledger.ledger import Ledger, request_key, request_of
from soulkit.models.players.settings import RoleSettings
from soulkit.models.vllm.client import completion_request, gives_logprobs
from soulkit.types import (
    ADDED_LATER,
    LEAST_ROOM,
    MAX_TOKENS,
    Form,
    Sampling,
)
from tests.models.asking import CALL, ask
from tests.support.evaluation import api, oracle
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

CUT = Sampling(top_k=40, min_p=0.05)


def key(sampling: Sampling) -> str:
    messages = [{"role": "user", "content": "a"}]
    return request_key(request_of("u", messages, sampling), "m", CALL)


def test_keys_that_were_recorded_before_an_option_existed_stay_valid() -> None:
    """The figures are those of the version without `top_k`, `min_p` and forms."""
    plain, many = Sampling(max_tokens=512), Sampling(temperature=0.5, seed=3, stop=("X",))
    assert key(plain) == "44676b3c0616144e14422a1ba0c5cbf3450bc3c4a9f809148ed0a255a1ce685b"
    assert key(many) == "3ec960fe937d0694f3815e2b3658ef6340dd7bdcf8e9cfb1e1a5077702a842bd"
    for option in fields(Sampling):
        assert key(replace(plain, **{option.name: getattr(plain, option.name)})) == key(plain)


CHANGED: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.5, "max_tokens": 9, "seed": 1, "stop": ("X",),
    "thinking": False, "reasoning_effort": "low", "form": Form("F", "{}"), "top_k": 4, "min_p": 0.1,
}  # fmt: skip


@pytest.mark.parametrize("name", [option.name for option in fields(Sampling)])
def test_every_option_is_in_the_key_unless_it_is_neutral(name: str) -> None:
    changed = replace(Sampling(), **{name: CHANGED[name]})
    assert key(changed) != key(Sampling())
    later = {option.name for option in fields(Sampling) if option.metadata == ADDED_LATER}
    assert (name in Sampling().identity()) == (name not in later)


def test_the_first_source_that_names_an_option_decides() -> None:
    chosen = Sampling.first_of({"top_k": 0, "seed": None}, {"top_k": 9, "seed": 3, "x": 1}, {})
    assert chosen == Sampling(top_k=0, seed=3)


def test_a_player_may_be_sampled_with_cuts() -> None:
    player = RoleSettings(model="m", top_k=40, min_p=0.05)
    assert player.sampling("partner", 1) == replace(CUT, seed=1, max_tokens=4096)
    assert {"top_k", "min_p"} <= player.model_dump().keys()
    assert not {"top_k", "min_p"} & RoleSettings(model="m").model_dump().keys()


@pytest.mark.parametrize("owner", ["", "vllm", "llamacpp"])
def test_a_server_is_sent_the_cuts(owner: str) -> None:
    with ScriptedServer(owner=owner) as server:
        reply = ask(Endpoint(model="scripted", base_url=server.base_url), CUT)
    body = server.requests[-1]
    assert (body["top_k"], body["min_p"]) == (40, 0.05)
    assert not reply.dropped


@pytest.mark.torch
def test_transformers_serve_takes_cuts_within_its_generation_config(
    tmp_path: Any,
) -> None:
    from soulkit.models.local.tiny import build_tiny
    from tests.support.servers.transformers_server import TransformersServer

    with TransformersServer(build_tiny(tmp_path / "tiny", ["yes", "no"])) as server:
        reply = ask(Endpoint(model="m", base_url=server.base_url), replace(CUT, max_tokens=2))
    sent = json.loads(server.requests[-1]["generation_config"])
    assert (sent["top_k"], sent["min_p"]) == (40, 0.05)
    assert not server.refused and not reply.dropped


def test_a_vllm_server_is_sent_the_cuts_and_gives_no_logprobs_of_them() -> None:
    body = completion_request("m", [1], CUT, CALL, room=9, end_ids=(2,), logprobs=False, form=False)
    assert (body["top_k"], body["min_p"], body["top_p"]) == (40, 0.05, 1.0)
    plain = completion_request(
        "m", [1], Sampling(), CALL, room=9, end_ids=(2,), logprobs=False, form=False
    )
    assert (plain["top_k"], plain["min_p"]) == (-1, 0.0)
    for cut in (replace(CUT, min_p=0.0), replace(CUT, top_k=0)):
        assert not gives_logprobs(cut, "processed", form=False)
        assert gives_logprobs(cut, "raw", form=False)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("sampling", "likely"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(min_p=0.5), {0, 1}),
        (Sampling(top_k=3, top_p=0.6), {0, 1}),  # of what the three have together
        (Sampling(top_k=3, min_p=0.2), {0, 1, 2}),
        (Sampling(top_p=0.45), {0, 1}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_a_local_model_draws_from_what_is_left(sampling: Sampling, likely: set[int]) -> None:
    import torch

    from soulkit.models.local.draw import Draw

    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    uniform = torch.from_numpy(np.linspace(0.0, 0.999, 400)).reshape(-1, 1)
    drawn, logprobs = Draw(uniform, sampling).pick(probs.log().expand(400, 4), uniform[:, 0])
    assert set(drawn.tolist()) == likely
    assert torch.allclose(logprobs, probs.log()[drawn]), "the log-probs are of the whole"
    counts = torch.bincount(drawn, minlength=4) / 400
    left = probs * torch.tensor([float(i in likely) for i in range(4)])
    assert torch.allclose(counts, left / left.sum(), atol=0.01)


def test_an_evaluation_sends_and_records_the_cuts(tmp_path: Path) -> None:
    with ScriptedServer(answer=oracle("tomi", 2)) as server:
        cuts = ("--top-k", 40, "--min-p", 0.05, "--limit", 2)
        assert api(server.base_url, tmp_path / "cut", *cuts) == 0
        sent = server.requests[-1]
        assert api(server.base_url, tmp_path / "plain", "--limit", 2) == 0
        assert not {"top_k", "min_p"} & server.requests[-1].keys()
    assert (sent["top_k"], sent["min_p"]) == (40, 0.05)
    recorded = {
        name: json.loads((tmp_path / name / "conditions.json").read_text())["tasks"]["tomi"]
        for name in ("cut", "plain")
    }
    assert recorded["cut"]["sampling"]["top_k"] == 40
    assert "top_k" not in recorded["plain"]["sampling"], "as in runs from before the option"


VLLM = (
    "This model's maximum context length is {context} tokens. However, you requested {total} "
    "tokens ({prompt} in the messages, {limit} in the completion). Please reduce the length."
)


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
