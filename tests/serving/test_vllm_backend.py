"""vLLM behind `soul serve`: replies pass through, sampling settings become neutral."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from soulkit.errors import ConfigError
from soulkit.models.vllm.client import Address
from soulkit.serving.backend import RequestError, assembled
from soulkit.serving.engines import opened_model
from soulkit.serving.vllm_backend import VllmBackend
from tests.support.servers.serving import served
from tests.support.servers.vllm_chat import ERROR, VllmChat

HTTP = httpx2.Client()


@pytest.fixture(scope="module")
def vllm() -> Iterator[VllmChat]:
    with VllmChat(key="secret-of-vllm") as server:
        yield server


@pytest.fixture(scope="module")
def url(vllm: VllmChat) -> Iterator[str]:
    with served(VllmBackend(Address(vllm.url, vllm.key), "base", name="me")) as address:
        yield address


def ask(url: str, words: str, **settings: Any) -> Any:
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    messages = [{"role": "user", "content": words}]
    return client.chat.completions.create(model="me", messages=messages, **settings)


def post(url: str, words: str, **settings: Any) -> httpx2.Response:
    body = {"messages": [{"role": "user", "content": words}], **settings}
    return HTTP.post(f"{url}/chat/completions", json=body)


def test_replies_pass_through_under_our_name(url: str) -> None:
    whole = post(url, 'say "model":"base" twice').json()
    assert whole["model"] == "me" and whole["kv_transfer_params"] is None
    assert whole["choices"][0]["message"]["content"] == 'say "model":"base" twice'
    chunks = list(ask(url, "one two", stream=True, stream_options={"include_usage": True}))
    assert [c.model for c in chunks] == ["me"] * 4 and chunks[-1].usage.completion_tokens == 2
    assert "".join(c.choices[0].delta.content for c in chunks[:-1]) == "one two "
    raw = post(url, "one two", stream=True)
    assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert raw.text.count("data: {") == 3 and raw.text.endswith("data: [DONE]\n\n")
    metrics = HTTP.get(url.removesuffix("/v1") + "/metrics").text
    assert 'soulkit_tokens_total{kind="completion"} 5' in metrics


def test_what_the_client_leaves_out_is_neutral(url: str, vllm: VllmChat) -> None:
    settings = {"temperature": 0.3, "top_p": 0.5, "seed": 4, "logit_bias": {"5": 1}}
    for more in ({}, {}, settings):
        post(url, "hello", **more)
    post(url, "other words")
    plain, again, chosen, other = vllm.bodies[-4:]
    assert (plain["model"], plain["temperature"], plain["top_p"], plain["min_p"]) == (
        "base", 1.0, 1.0, 0.0,
    )  # fmt: skip
    assert plain["top_k"] == -1 and plain["repetition_penalty"] == 1.0
    assert plain == again and plain["seed"] != other["seed"]
    assert settings.items() <= chosen.items() and "stream" not in chosen


def test_errors_of_the_server_reach_the_client(url: str) -> None:
    assert post(url, "too long " * 40).json() == {"error": ERROR}
    assert post(url, "too long " * 40, stream=True).status_code == 400
    with pytest.raises(openai.APIError, match="EngineCore died"):
        list(ask(url, "one fail", stream=True))
    with pytest.raises(openai.APIError, match="does not answer"):
        list(ask(url, "one break", stream=True))
    assert ask(url, "one").choices[0].message.content == "one"


def test_the_server_of_a_client_that_left_is_told() -> None:
    with VllmChat(pause_s=0.02) as slow, served(VllmBackend(Address(slow.url), "base")) as url:
        stream = ask_as(url, "base", "w " * 60)
        next(stream)
        stream.close()
        end = time.monotonic() + 1.0
        while not slow.left:
            assert time.monotonic() < end, "it goes on"
            time.sleep(0.01)


def ask_as(url: str, model: str, words: str) -> Any:
    client = openai.OpenAI(base_url=url, api_key="any", max_retries=0)
    messages = [{"role": "user", "content": words}]
    return client.chat.completions.create(model=model, messages=messages, stream=True)


async def chunks_of(address: Address, words: str) -> dict[str, Any]:
    backend = VllmBackend(address, "base", name="me")
    try:
        return await assembled(
            backend.chunks({"messages": [{"role": "user", "content": words}]}, "")
        )
    finally:
        await backend.close()


@pytest.mark.parametrize(
    ("words", "key", "status", "message"),
    [
        ("too long " * 40, "k", 400, "64 tokens"), ("one fail", "k", 500, "EngineCore died"),
        ("one", "", 401, "failed to answer"), ("one break", "k", 503, "does not answer"),
    ],
)  # fmt: skip
def test_chunks_for_a_person_fail_by_name(words: str, key: str, status: int, message: str) -> None:
    with VllmChat(key="k") as vllm:
        whole = asyncio.run(chunks_of(Address(vllm.url, "k"), "one two"))
        assert whole["choices"][0]["message"]["content"] == "one two "
        assert (whole["model"], whole["usage"]["completion_tokens"]) == ("me", 2)
        with pytest.raises(RequestError, match=message) as caught:
            asyncio.run(chunks_of(Address(vllm.url, key), words))
    assert caught.value.status == status


def test_a_server_that_is_gone_makes_503() -> None:
    with VllmChat() as vllm:
        address = Address(vllm.url)
    with served(VllmBackend(address, "base")) as url:
        for stream in (True, False):
            reply = post(url, "one", stream=stream)
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")


def test_a_running_server_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    with VllmChat() as vllm:
        with opened_model("base", engine=f"vllm@{vllm.url}") as backend:
            assert (backend.name, backend.context_limit) == ("base", 64)
        with pytest.raises(ConfigError, match="no model 'bass'") as caught:
            opened_model("bass", engine=f"vllm@{vllm.url}").__enter__()
        assert "base" in caught.value.lines()[2]
    with pytest.raises(ConfigError, match="does not list"):
        opened_model("base", engine=f"vllm@{vllm.url}").__enter__()


CHOICE = '{"choices":[%s]}'


@pytest.mark.parametrize("line", [
    "xx", "5", "[]", "null", "[" * 5000, '{"id":"x"}', '{"choices":null}', '{"choices":"ab"}',
    CHOICE % "null", CHOICE % "{}", CHOICE % '{"delta":null}', CHOICE % '{"delta":{"content":5}}',
    CHOICE % '{"delta":{"content":"\\ud83d"}}', CHOICE % '{"delta":{},"finish_reason":[]}',
    CHOICE % '{"delta":{}}', CHOICE % '{"delta":{},"index":{}}',
    CHOICE % '{"delta":{"tool_calls":5},"index":0}', CHOICE % '{"delta":{"refusal":1},"index":0}',
    '{"choices":[],"usage":[1]}', '{"choices":[],"usage":{"prompt_tokens":"x"}}',
    '{"choices":[],"usage":{"completion_tokens":-1}}', "9" * 5000,
])  # fmt: skip
def test_an_odd_line_of_a_stream_is_an_error(vllm: VllmChat, line: str) -> None:
    async def read() -> Any:
        backend = VllmBackend(Address(vllm.url, vllm.key), "base")
        body = {"messages": [{"role": "user", "content": f"one odd:{line}"}]}
        try:
            return await assembled(backend.chunks(body, ""))
        finally:
            await backend.close()

    with pytest.raises(RequestError, match="stream cannot be read"):
        asyncio.run(read())
