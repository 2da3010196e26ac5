"""Servers in kinds of their own: what each is sent so that it fills in nothing, and its context."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ContextOverflow
from soulkit.models.api.addresses import open_access
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.probing import Preflight
from soulkit.models.api.server_defaults import ServerDefaults, ServerKind
from soulkit.models.api.transport import ClientPool, make_client
from soulkit.models.ledger.ledger import Ledger
from soulkit.types import Call, Completion, Sampling, Segment
from tests.support.servers.openai_server import Body, Fault, ScriptedServer
from tests.support.servers.transformers_server import TransformersServer

HELLO = (Segment("user", "bab hello"),)
WORDS = [a + b for a in "bcdfgklm" for b in ("ab", "ed", "im", "om", "un")]
NEUTRAL = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def ask(
    model: Endpoint, count: int = 1, sampling: Sampling | None = None
) -> list[Completion | BaseException]:
    async def crowd() -> list[Completion | BaseException]:
        calls = (Call(role="actor", example_id="e", rollout=i) for i in range(count))
        sampled = sampling or Sampling()
        asked = [model.complete(HELLO, sampled, call) for call in calls]
        try:
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await model.close()

    return asyncio.run(crowd())


def texts(model: Endpoint, count: int, temperature: float) -> set[str]:
    replies = ask(model, count, Sampling(temperature=temperature, max_tokens=6, seed=1))
    assert all(isinstance(reply, Completion) and not reply.dropped for reply in replies), replies
    return {reply.text for reply in replies if isinstance(reply, Completion)}


# -- transformers serve ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model whose generation config has no `do_sample`."""
    from soulkit.models.local.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("tiny"), WORDS)


def with_config(folder: Path, copy: Path, **settings: Any) -> Path:
    """The model of `folder` with other settings in its generation config."""
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    file = copy / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return copy


def test_transformers_serve_samples_where_the_model_does_not_say_so(tiny: Path) -> None:
    with TransformersServer(tiny) as server:
        model = Endpoint(model="m", base_url=server.base_url)
        assert len(texts(model, 12, 1.0)) > 8
        assert len(texts(model, 3, 0.0)) == 1
    sent = [json.loads(body["generation_config"]) for body in server.requests]
    assert sent == [{"do_sample": True, **NEUTRAL}] * 12 + [{"do_sample": False, **NEUTRAL}] * 3
    assert not server.refused


def test_transformers_serve_takes_nothing_from_the_models_own_config(
    tiny: Path, tmp_path: Path
) -> None:
    """With a top_k of 1 every reply would be the same one."""
    filling = with_config(tiny, tmp_path / "m", do_sample=True, top_k=1, repetition_penalty=5.0)
    with TransformersServer(filling) as server:
        assert len(texts(Endpoint(model="m", base_url=server.base_url), 12, 1.0)) > 8


def test_transformers_serve_is_known_behind_a_proxy_that_shows_nothing_else(tiny: Path) -> None:
    said: list[str] = []
    roll = Preflight(lambda line: None, remark=said.append)
    with TransformersServer(tiny, hidden=True) as server:
        model = Endpoint(model="m", base_url=server.base_url, preflight=roll)
        assert len(texts(model, 12, 1.0)) > 8
    assert model.server == ServerKind("transformers") and not said
    assert ["top_k" in body for body in server.refused] == [True]


@pytest.mark.parametrize("status", [400, 422])
def test_another_server_that_refuses_the_test_field_is_asked_again_without_it(status: int) -> None:
    def refuses(body: Body) -> Fault | None:
        return Fault.status_error(status, "top_k is not allowed") if "top_k" in body else None

    said: list[str] = []
    roll = Preflight(lambda line: None, remark=said.append)
    with ScriptedServer(on_probe=refuses) as server:
        model = Endpoint(model="m", base_url=server.base_url, preflight=roll)
        (reply,) = ask(model)
    assert isinstance(reply, Completion) and reply.dropped == ()
    assert ["top_k" in body for body in (*server.probes, *server.requests)] == [True, False, False]
    assert model.server == ServerKind() and len(said) == 1


def test_transformers_serve_is_known_by_its_refusal_where_nothing_else_shows_it() -> None:
    """The field that is refused here is one that older versions do not know."""

    def script(index: int, body: Body) -> Fault | None:
        unexpected = set(body) & {"chat_template_kwargs"}
        text = f"Unexpected fields in the request: {unexpected}"
        return Fault(status=422, raw=json.dumps({"detail": text}).encode()) if unexpected else None

    with ScriptedServer(script=script) as server:
        model = Endpoint(model="m", base_url=server.base_url)
        (reply,) = ask(model, sampling=Sampling(thinking=False))
        (other,) = ask(model)
    assert isinstance(reply, Completion) and reply.dropped == ("thinking",)
    assert isinstance(other, Completion) and other.dropped == ()
    assert ["generation_config" in body for body in server.requests] == [False, True, True]
    assert model.server == ServerKind("transformers")


# -- llama.cpp -------------------------------------------------------------------------------------


class LlamaServer(ScriptedServer):
    """llama.cpp's server: it names itself as the owner, and `/props` tells of its slots."""

    def __init__(self, props: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init__(owner="llamacpp", extra={"/props": props} if props else {}, **more)


def slots(n_ctx: int) -> dict[str, Any]:
    return {"default_generation_settings": {"n_ctx": n_ctx, "params": {"top_k": 40}},
            "total_slots": 4}  # fmt: skip


def test_llama_cpp_is_sent_neutral_values_in_its_own_words() -> None:
    with LlamaServer() as server:
        ask(Endpoint(model="scripted", base_url=server.base_url), 3)
    sent = [{n: v for n, v in body.items() if n in ("top_k", "min_p", "repeat_penalty",
                                                    "repetition_penalty")}
            for body in server.requests]  # fmt: skip
    assert sent == [{"top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0}] * 3


def test_a_neutral_value_that_llama_cpp_refuses_is_given_up() -> None:
    def script(index: int, body: Body) -> Fault | None:
        return Fault.status_error(400, "bad repeat_penalty") if "repeat_penalty" in body else None

    with LlamaServer(script=script) as server:
        (reply,) = ask(Endpoint(model="scripted", base_url=server.base_url))
    assert isinstance(reply, Completion) and reply.dropped == ("repeat_penalty",)


@pytest.mark.parametrize(
    ("pages", "context"),
    [
        ({"/props": slots(2048)}, 2048),
        ({"/props": slots(0), "/props?model=scripted": slots(512)}, 512),
        ({"/props": {"default_generation_settings": None}}, None),
        ({"/props": {"n_ctx": 9}}, None),
        ({}, None),
    ],
)
def test_the_context_of_a_slot_is_read(pages: dict[str, Any], context: int | None) -> None:
    """Not the one that the model was trained with, which its list of models tells."""
    meta = {"n_ctx_train": 131_072}
    listed = {"data": [{"id": "scripted", "owned_by": "llamacpp", "meta": meta}]}
    with ScriptedServer(models=Fault.reply(listed), extra=pages) as server:
        model = Endpoint(model="scripted", base_url=server.base_url)
        ask(model)
    assert model.server == ServerKind("llamacpp", context=context)


# -- replies that a server cuts --------------------------------------------------------------------


def cut(tokens: int, prompt: int = 728, **usage: Any) -> Fault:
    """A reply of so many tokens that ended for its length."""
    choice = {"message": {"content": "I was about to say"}, "finish_reason": "length"}
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens, **usage}
    return Fault.reply({"choices": [choice], "usage": counts})


def reply_to(fault: Fault, sampling: Sampling | None = None, **server: Any) -> Any:
    with ScriptedServer(script=lambda i, body: fault, **server) as one:
        return ask(Endpoint(model="scripted", base_url=one.base_url), 1, sampling)[0]


VLLM = {"data": [{"id": "scripted", "owned_by": "vllm", "max_model_len": 2048}]}


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({"owner": "llamacpp", "extra": {"/props": slots(2048)}}, "holds 2048 tokens"),
        ({"models": Fault.reply(VLLM)}, "holds 2048 tokens"),
        ({"owner": "llamacpp", "extra": {"/props": slots(9000)}}, "does not say"),
        ({}, "does not say"),
    ],
    ids=["llama.cpp", "vllm", "for another reason", "unknown"],
)
def test_a_reply_that_the_server_cut_is_an_overflow(server: dict[str, Any], words: str) -> None:
    error = reply_to(cut(1320), **server)
    assert isinstance(error, ContextOverflow)
    assert "cut the reply after 1320 of the 8192 tokens" in error.detail
    assert words in error.detail and "prompt: 728 tokens" in error.detail
    assert "max-tokens" not in error.detail


def test_a_prompt_that_fills_the_context_leaves_no_reply_to_score() -> None:
    error = reply_to(cut(0, 2048), owner="llamacpp", extra={"/props": slots(2048)})
    assert isinstance(error, ContextOverflow) and "prompt: 2048 tokens" in error.detail


def test_a_context_that_is_full_counts_even_near_the_limit_asked_for() -> None:
    server = {"owner": "llamacpp", "extra": {"/props": slots(8900)}}
    assert isinstance(reply_to(cut(8170, 728), **server), ContextOverflow)
    assert isinstance(reply_to(cut(8170, 728)), Completion)


@pytest.mark.parametrize(
    ("fault", "limit"),
    [
        (cut(64), 64),
        (cut(63), 64),
        (cut(20, total_tokens=728 + 64), 64),
        (cut(20, completion_tokens_details={"reasoning_tokens": 64}), 64),
        (cut(0), 64),
        (Fault.reply({"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}), 64),
        (Fault.reply({"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
                      "usage": {"prompt_tokens": 1, "completion_tokens": 5}}), 64),
    ],
    ids=["limit", "one less", "total", "thinking", "zero", "uncounted", "whole"],
)  # fmt: skip
def test_a_reply_at_the_limit_asked_for_is_the_models_own(fault: Fault, limit: int) -> None:
    assert isinstance(reply_to(fault, Sampling(max_tokens=limit)), Completion)


def test_a_cut_reply_is_asked_for_again_when_the_run_is_resumed(tmp_path: Path) -> None:
    """The server may have more context then; a replay shows the same overflow."""
    path = tmp_path / "ledger.sqlite"
    with ScriptedServer(script={0: cut(1320)}) as server:
        with Ledger(path, mends=True) as ledger:
            model = Endpoint(model="m", base_url=server.base_url, ledger=ledger)
            assert isinstance(ask(model)[0], ContextOverflow)
        with Ledger(path, "replay") as ledger:
            model = Endpoint(model="m", base_url=server.base_url, ledger=ledger)
            assert isinstance(ask(model)[0], ContextOverflow)
        with Ledger(path, mends=True) as ledger:
            model = Endpoint(model="m", base_url=server.base_url, ledger=ledger)
            assert isinstance(ask(model)[0], Completion)
        assert len(server.requests) == 2


# -- servers that are not known --------------------------------------------------------------------


def test_of_an_unknown_server_one_line_is_said() -> None:
    said: list[str] = []
    with ScriptedServer() as one, LlamaServer() as other:
        roll = Preflight(lambda line: None, remark=said.append)
        for server in (one, other):
            ask(Endpoint(model="m", base_url=server.base_url, preflight=roll), 4)
    (line,) = said
    assert line.startswith("unknown server: m at 127.0.0.1:") and "defaults" in line


@pytest.mark.parametrize(
    ("url", "unknown"),
    [("https://api.openai.com/v1", False), ("https://x.openai.azure.com/openai/v1", False),
     ("https://api.anthropic.com/v1", False), ("http://127.0.0.1:9/v1", True)],
)  # fmt: skip
def test_services_with_documented_defaults_are_known_without_a_question(
    url: str, unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")

    async def kind() -> ServerKind:
        pool = ClientPool(lambda n: make_client("http://127.0.0.1:9/v1", 1.0, n), 1)
        try:
            defaults = ServerDefaults("m", open_access(url, "OPENAI_API_KEY"), 1.0)
            return await defaults.server(pool, asyncio.Lock())
        finally:
            await pool.close()

    server = asyncio.run(kind())
    assert server.unknown is unknown and server.beside(Sampling()) == {}
