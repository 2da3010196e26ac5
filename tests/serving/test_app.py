"""The HTTP application of `soul serve`, asked by the real `openai` client and by raw requests."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx2
import openai
import pytest

from soulkit.api_keys import remember
from soulkit.serving import app
from soulkit.serving.app import Limits
from soulkit.serving.backend import Body, Chunk, RequestError, ScriptBackend, assembled, chunk_head
from tests.support.servers.serving import served

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = "/chat/completions"
BODY: dict[str, Any] = {"model": "counting", "messages": HELLO}
HTTP = httpx2.Client()


class Counting:
    """Counts up to `max_tokens`, one chunk every `pause_s`, and notes what was closed."""

    name, context_limit = "counting", 100

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.running = self.most = self.closed = 0
        self.conversations: list[str] = []

    async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
        self.conversations.append(conversation)
        if (count := body.get("max_tokens", 3)) > self.context_limit:
            raise RequestError(f"at most {self.context_limit} tokens", code="too_long")
        self.running += 1
        self.most, done = max(self.most, self.running), False
        head = chunk_head(self.name, 7)
        try:
            for number in range(count):
                await asyncio.sleep(self.pause_s)
                last = number == count - 1
                choice = {"index": 0, "delta": {"role": "assistant", "content": f"{number} "},
                          "finish_reason": "stop" if last else None}  # fmt: skip
                if body.get("user") == f"breaks at {number}":
                    raise RuntimeError("secret words of the server")
                yield {**head, "choices": [choice]}
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            done = True
            yield {**head, "choices": [], "usage": usage}
        finally:
            self.running -= 1
            self.closed += not done

    async def close(self) -> None:
        """Nothing is held."""


@pytest.fixture(scope="module")
def backend() -> Counting:
    return Counting()


@pytest.fixture(scope="module")
def url(backend: Counting) -> Iterator[str]:
    with served(backend, limits=Limits(running=2, waiting=1, body_bytes=2000)) as address:
        yield address


def client(url: str, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30)


def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.005)


def test_the_openai_client_gets_whole_and_streamed_replies(url: str) -> None:
    ask = client(url).chat.completions.create
    whole = ask(model="counting", messages=HELLO, max_tokens=4)
    assert whole.choices[0].message.content == "0 1 2 3 "
    assert whole.choices[0].message.role == "assistant" and whole.object == "chat.completion"
    assert whole.usage and (whole.usage.total_tokens, whole.created) == (5, 7)
    chunks = list(ask(model="counting", messages=HELLO, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["0 ", "1 ", "2 "]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
    *_, last = ask(
        model="counting", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    assert not last.choices and last.usage and last.usage.completion_tokens == 3
    raw = HTTP.post(f"{url}{CHAT}", json={"messages": HELLO, "stream": True}).text
    assert raw.endswith("\n\ndata: [DONE]\n\n")


def test_models(url: str) -> None:
    (listed,) = client(url).models.list().data
    assert listed.id == "counting" and listed == client(url).models.retrieve("counting")
    assert listed.model_dump()["max_model_len"] == 100
    assert listed.model_dump()["soulkit"] == {"certificate": None}


def test_metrics() -> None:
    with served(Counting()) as url:
        for raw in (json.dumps(BODY).encode(), b"{"):
            HTTP.post(f"{url}{CHAT}", content=raw)
        expected = {'soulkit_requests_total{status="200"} 1',
                    'soulkit_requests_total{status="400"} 1', "soulkit_requests_running 0",
                    'soulkit_tokens_total{kind="completion"} 3',
                    "# TYPE soulkit_requests_total counter"}  # fmt: skip
        address = url.removesuffix("/v1") + "/metrics"
        until(lambda: expected <= set(HTTP.get(address).text.splitlines()))


def test_a_client_that_cancels_in_mid_stream_frees_its_place_at_once() -> None:
    backend = Counting(pause_s=0.02)
    with served(backend, limits=Limits(running=1)) as url:
        ask = client(url).chat.completions.create
        stream = ask(model="counting", messages=HELLO, max_tokens=100, stream=True)
        assert next(stream).choices[0].delta.content == "0 "
        stream.close()
        until(lambda: backend.closed == 1)
        assert ask(model="counting", messages=HELLO, max_tokens=1).usage


def test_a_client_that_gives_up_frees_its_place_at_once() -> None:
    backend = Counting(pause_s=0.02)
    with served(backend, limits=Limits(running=1)) as url:
        with pytest.raises(httpx2.TimeoutException):
            HTTP.post(f"{url}{CHAT}", json={**BODY, "max_tokens": 100}, timeout=0.1)
        until(lambda: backend.closed == 1)
        until(lambda: 'status="499"} 1' in HTTP.get(url.replace("/v1", "/metrics")).text)


def test_64_at_once_run_in_their_places() -> None:
    backend = Counting(pause_s=0.01)

    async def ask_all(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as many:
            return await asyncio.gather(*(
                many.chat.completions.create(model="counting", messages=HELLO, max_tokens=1 + n % 5)
                for n in range(64)
            ))  # fmt: skip

    with served(backend, limits=Limits(running=16)) as url:
        replies = asyncio.run(ask_all(url))
    lengths = [len(reply.choices[0].message.content.split()) for reply in replies]
    assert lengths == [1 + n % 5 for n in range(64)] and backend.most == 16


def test_more_than_may_wait_are_told_to_come_back(
    url: str, backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask_all() -> list[Any]:
        async with httpx2.AsyncClient() as many:
            asked = (many.post(f"{url}{CHAT}", json={"messages": HELLO}) for _ in range(8))
            return await asyncio.gather(*asked)

    monkeypatch.setattr(backend, "pause_s", 0.05)
    replies = asyncio.run(ask_all())
    busy = [reply for reply in replies if reply.status_code == 429]
    assert len(busy) == 5 and [r.status_code for r in replies].count(200) == 3
    assert busy[0].headers["retry-after"] == "1"
    assert busy[0].json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize(
    ("path", "content", "status", "words"),
    [
        (CHAT, b"{", 400, "not valid JSON"),
        (CHAT, b"\xff", 400, "not valid JSON"),
        (CHAT, b"[" * 1500, 400, "not valid JSON"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "not valid JSON"),
        (CHAT, b'{"temperature": NaN}', 400, "NaN is not a valid number"),
        (CHAT, b'{"temperature": 1e999}', 400, "the number 1e999 is too large"),
        (CHAT, [], 400, "a JSON object"),
        (CHAT, {"model": "counting"}, 400, "'messages' is missing"),
        (CHAT, {**BODY, "messages": {}}, 400, "'messages' must be a list"),
        (CHAT, {**BODY, "messages": ["hi"]}, 400, "'messages[0]'"),
        (CHAT, {**BODY, "messages": [{"role": ["user"]}]}, 400, "messages[0]"),
        (CHAT, {**BODY, "stream": "yes"}, 400, "'stream' must be true or false"),
        (CHAT, {**BODY, "tools": ["x"]}, 400, "'tools'"),
        (CHAT, {**BODY, "max_tokens": 101}, 400, "100 tokens"),
        (CHAT, {**BODY, "max_tokens": 101, "stream": True}, 400, "100 tokens"),
        (CHAT, {**BODY, "model": "gpt-5"}, 404, "'gpt-5'"),
        (CHAT, {**BODY, "user": "x" * 2000}, 413, "2,000 bytes"),
        (CHAT, None, 405, "method"),
        ("/models/other", None, 404, "'other'"),
        ("/embeddings", BODY, 404, "path"),
    ],
)
def test_wrong_requests_get_error_objects(
    url: str, path: str, content: Any, status: int, words: str
) -> None:
    if content is None:
        reply = HTTP.get(f"{url}{path}")
    else:
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        reply = HTTP.post(f"{url}{path}", content=raw)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (status, "invalid_request_error")
    assert words in error["message"] and error.keys() == {"message", "type", "param", "code"}


def test_null_means_not_set(url: str) -> None:
    body = {**BODY, "stream": None, "tools": None, "metadata": None, "max_tokens": None}
    assert HTTP.post(f"{url}{CHAT}", json=body).status_code == 200


def test_a_conversation_is_named_by_header_or_metadata(url: str, backend: Counting) -> None:
    for headers, metadata in (({}, {}), ({"X-Conversation-Id": "a"}, {}),
                              ({}, {"conversation_id": "b"})):  # fmt: skip
        HTTP.post(f"{url}{CHAT}", json={**BODY, "metadata": metadata}, headers=headers)
    assert backend.conversations[-3:] == ["", "a", "b"]


def test_its_own_failures_tell_the_client_nothing(url: str, caplog: Any) -> None:
    reply = HTTP.post(f"{url}{CHAT}", json={**BODY, "user": "breaks at 0"})
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
    with pytest.raises(openai.APIError) as caught:
        list(client(url).chat.completions.create(
            model="counting", messages=HELLO, stream=True, user="breaks at 1"
        ))  # fmt: skip
    assert "secret" not in reply.text + str(caught.value)
    assert "secret words" in caplog.text
    assert HTTP.post(f"{url}{CHAT}", json=BODY).status_code == 200


def test_a_key_is_needed_for_everything_but_health(backend: Counting) -> None:
    with served(backend, key="right-key") as url:
        with pytest.raises(openai.AuthenticationError):
            client(url, "wrong-key").chat.completions.create(model="counting", messages=HELLO)
        assert client(url, "right-key").models.list().data
        root = url.removesuffix("/v1")
        codes = [HTTP.get(root + path).status_code for path in ("/metrics", "/health", "/nope")]
        assert codes == [401, 200, 401]
        assert (
            HTTP.get(f"{url}/models", headers={b"Authorization": b"Bearer \xfc"}).status_code == 401
        )
        names = {"Authorization": "Bearer right-key", "Host": "simulator.example"}
        assert HTTP.get(f"{url}/models", headers=names).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:1"}, 200), ({"Host": "[::1]:9"}, 200),
        ({"Origin": "http://localhost:3000"}, 200), ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403), ({"Host": "[bad"}, 403),
        ({"Host": "evil.example@127.0.0.1"}, 403),
        ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403),
    ],
)  # fmt: skip
def test_without_a_key_no_web_page_can_use_it(
    url: str, headers: dict[str, str], status: int
) -> None:
    assert HTTP.post(f"{url}{CHAT}", json=BODY, headers=headers).status_code == status


def ends(messages: Any) -> str:
    raise SystemExit(3)


@pytest.mark.parametrize(
    "speak",
    [lambda messages: 3, lambda messages: messages[5]["content"], lambda m: m.no,
     lambda messages: "a\ud800b", lambda messages: b"bytes", lambda messages: messages.clear()],
)  # fmt: skip
def test_a_script_that_cannot_answer_refuses(speak: Any) -> None:
    with served(ScriptBackend("script", speak)) as url:
        reply = HTTP.post(f"{url}{CHAT}", json={"messages": HELLO})
    assert reply.status_code == 400 and "script cannot answer" in reply.json()["error"]["message"]


@pytest.mark.parametrize("speak", [ends, lambda messages: next(iter(())), lambda messages: 1 / 0])
def test_a_script_that_fails_is_an_error_of_the_server(speak: Any, caplog: Any) -> None:
    with served(ScriptBackend("script", speak)) as url:
        assert HTTP.post(f"{url}{CHAT}", json={"messages": HELLO}).status_code == 500
    assert "the script ended with" in caplog.text


def test_choices_tool_calls_and_logprobs_are_assembled() -> None:
    def choice(index: int, delta: dict[str, Any], end: str | None = None, **more: Any) -> Chunk:
        return {"index": index, "delta": delta, "finish_reason": end, **more}

    def call(index: int, name: str) -> dict[str, Any]:
        return {"index": index, "id": f"call-{index}", "type": "function",
                "function": {"arguments": "{}", "name": name}}  # fmt: skip

    pieces = [
        [choice(1, {"role": "assistant", "content": None}), choice(0, {"content": "user"})],
        [choice(0, {"content": "user"}, logprobs={"content": [{"token": "a"}]})],
        [choice(0, {"content": ""}, "stop", logprobs={"content": [{"token": "b"}]})],
        [choice(1, {"tool_calls": [call(0, "end")]})],
        [choice(1, {"tool_calls": [call(1, "f")]}, "tool_calls", stop_reason=None)],
    ]

    async def chunks() -> AsyncIterator[Chunk]:
        for choices in pieces:
            yield {"id": "x", "object": "chat.completion.chunk", "choices": choices}

    first, second = asyncio.run(assembled(chunks()))["choices"]
    assert first["message"] == {"role": "assistant", "content": "useruser"}
    assert first["logprobs"] == {"content": [{"token": "a"}, {"token": "b"}]}
    calls = second["message"]["tool_calls"]
    assert [one["function"] for one in calls] == [
        {"arguments": "{}", "name": "end"}, {"arguments": "{}", "name": "f"},
    ]  # fmt: skip
    assert (second["finish_reason"], first["finish_reason"]) == ("tool_calls", "stop")


def test_a_script_that_hangs_does_not_keep_the_server_from_ending() -> None:
    never, begun = threading.Event(), time.monotonic()
    backend = ScriptBackend("script", lambda messages: str(never.wait(600)))
    with served(backend) as url:
        for _ in range(30):  # more than the threads of the default executor
            with pytest.raises(httpx2.TimeoutException):
                HTTP.post(f"{url}{CHAT}", json={"messages": HELLO}, timeout=0.05)
        assert HTTP.get(url.replace("/v1", "/health")).status_code == 200
    assert time.monotonic() - begun < 60
    never.set()


def test_connections_without_a_request_and_clients_that_do_not_read_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "HEADERS_S", 0.3)
    monkeypatch.setattr(app, "BODY_S", 0.3)
    with served(ScriptBackend("s", lambda m: "x" * 40_000_000), limits=Limits(running=1)) as url:
        host = httpx2.URL(url)
        ends = [socket.create_connection((host.host, host.port), timeout=30) for _ in range(3)]
        ends[1].sendall(b"GET /hea")
        body = json.dumps({"messages": HELLO}).encode()
        ends[2].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                        b"Content-Length: %d\r\n\r\n%s" % (len(body), body))  # fmt: skip
        for end in ends[:2]:
            with suppress(ConnectionError):
                assert end.recv(100) == b""
        until(lambda: 'status="499"} 1' in HTTP.get(url.replace("/v1", "/metrics")).text, 60)
        for end in ends:
            end.close()


def test_an_error_of_a_stream_writes_no_escape_and_no_key(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    from soulkit.cli.app import _log_to_stderr

    class Strange(BaseException):
        pass

    class Broken(Counting):
        async def chunks(self, body: Body, conversation: str) -> AsyncIterator[Chunk]:
            raise Strange("\x1b[2J sk-hostile-0123456789")
            yield {}

    remember("sk-hostile-0123456789")
    with _log_to_stderr(debug=False), served(Broken()) as url:
        reply = HTTP.post(f"{url}{CHAT}", json={"messages": HELLO})
    shown = capfd.readouterr().err
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
    assert "Strange" in shown and "\x1b" not in shown and "sk-hostile" not in shown


def test_headers_without_end_are_not_kept(url: str) -> None:
    host = httpx2.URL(url)
    with socket.create_connection((host.host, host.port), timeout=30) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        with pytest.raises(OSError):
            for _ in range(100):
                client.sendall(b"A: b\r\n" * 20_000)
