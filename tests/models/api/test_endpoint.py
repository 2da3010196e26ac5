"""Endpoints against a scripted server over real HTTP: every fault ends, none becomes an answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, ContextOverflow, ModelLoadError, ProviderError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.players.config import CallSettings
from soulkit.types import Call, Sampling, Segment
from tests.models.asking import CALL, HELLO, ask
from tests.support.servers.openai_server import Fault, ScriptedServer

KEY = "sk-test-0123456789abcdef"
EMPTY_SYSTEM = (Segment("system", ""), Segment("user", "hello"))


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def endpoint(server: ScriptedServer, **settings: Any) -> Endpoint:
    base: dict[str, Any] = {
        "model": "m", "base_url": server.base_url, "backoff_s": 0.0, "max_attempts": 3
    }  # fmt: skip
    return Endpoint(**(base | settings))


def test_plain_reply_and_what_was_sent() -> None:
    with ScriptedServer() as server:
        got = ask(endpoint(server, price_in=1.0, price_out=10.0), context=EMPTY_SYSTEM)
    assert (got.text, got.stop_reason, got.dropped) == ("You said: hello", "stop", ())
    assert (got.usage.calls, got.usage.prompt_tokens, got.usage.completion_tokens) == (1, 1, 3)
    assert got.usage.cost == pytest.approx(31e-6)
    assert got.usage.seconds > 0
    messages = [{"role": "user", "content": "hello"}]
    settings = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 8192}
    assert server.requests == [{"model": "m", "messages": messages, **settings}]


def test_all_parameters_travel() -> None:
    sampling = Sampling(
        temperature=0.5, top_p=0.9, seed=3, stop=("X",), thinking=False, reasoning_effort="low"
    )
    with ScriptedServer() as server:
        model = endpoint(server)
        assert ask(model, sampling).usage.cost is None
        ask(model, sampling, call=Call(role="judge", example_id="e1", rollout=1))
        ask(model, sampling)
        ask(model, Sampling(thinking=True))
    first, other, again, thinking = server.requests
    assert first["chat_template_kwargs"] == {"enable_thinking": False, "thinking_budget": 0}
    assert thinking["chat_template_kwargs"] == {"enable_thinking": True}
    sent = [first[name] for name in ("temperature", "top_p", "stop", "reasoning_effort")]
    assert sent == [0.5, 0.9, ["X"], "low"]
    assert first["seed"] == again["seed"] != other["seed"]


def test_strict_server_refusals_are_paid_once_and_recorded() -> None:
    with ScriptedServer(profile="strict-reasoning") as server:
        model = endpoint(server, max_attempts=1)
        first, second = ask(model), ask(model)
    assert first.dropped == second.dropped == ("temperature",)
    assert len(server.requests) == 4
    assert server.requests[-1]["max_completion_tokens"] == 8192
    assert not {"temperature", "max_tokens"} & set(server.requests[-1])


def refused(message: str, status: int = 400, **more: Any) -> Fault:
    return Fault.status_error(status, message, **more)


CUTS, WARM = Sampling(top_k=40, min_p=0.05), Sampling(temperature=0.3)
EVERY = Sampling(seed=1, stop=("X",), top_p=0.5, thinking=True)
FORBIDDEN = b'{"detail":[{"type":"extra_forbidden","loc":["body","seed"]}]}'
DROPPED: dict[str, tuple[Fault, str, Sampling, str]] = {
    "by its field": (refused("x", param="seed", code="unsupported_parameter"), "seed", EVERY, ""),
    "by its name": (refused("`stop` is not supported by this model"), "stop", EVERY, ""),
    "as an argument": (refused("Unrecognized request argument: top_p"), "top_p", EVERY, ""),
    "inside a field": (
        refused("unknown", param="chat_template_kwargs.enable_thinking"), "chat_template_kwargs",
        EVERY, "",
    ),
    "as a place in the body": (Fault(status=422, raw=FORBIDDEN), "seed", EVERY, ""),
    "beside known ones": (
        refused("unsupported: seed (there are temperature, top_p)"), "seed", EVERY, "",
    ),
    "a cut": (refused("Unrecognized request argument: min_p"), "min_p", CUTS, ""),
    "neutral, of vLLM": (
        refused("The min_p sampling parameter is not yet supported"), "min_p", WARM, "vllm",
    ),
    "neutral, of llama.cpp": (refused("bad repeat_penalty"), "repeat_penalty", WARM, "llamacpp"),
    **{f"neutral top_p, {name}": (refused(message, param=param), "top_p", WARM, "")
       for name, message, param in (
        ("unsupported", "Unsupported parameter: 'top_p' is not supported here.", "top_p"),
        ("by name", "x", "top_p"),
        ("open interval", "Range of top_p should be (0.0, 1.0)", None),
        ("out of range", "top_p: Input should be less than 1", "top_p"),
        ("not both", "`temperature` and `top_p` cannot both be specified for this model.", None),
        ("not both, by name", "temperature and top_p cannot be used together", "temperature"),
        ("not both, unsupported", "Setting both temperature and top_p is not supported", None),
    )},
}  # fmt: skip
"""Name → refusal, what it refuses, what is asked for, the server."""


@pytest.mark.parametrize("name", DROPPED)
def test_a_setting_that_is_refused_is_left_out_from_then_on_and_the_reply_says_so(
    name: str,
) -> None:
    fault, field, sampling, owner = DROPPED[name]
    with ScriptedServer(
        owner=owner, script=lambda index, body: fault if field in body else None
    ) as server:
        model = endpoint(server, model="scripted", max_attempts=1)
        replies = [ask(model, sampling), ask(model, sampling)]
    dropped = "thinking" if field == "chat_template_kwargs" else field
    assert [reply.dropped for reply in replies] == [(dropped,)] * 2
    assert [field in body for body in server.requests] == [True, False, False]
    assert server.requests[-1]["temperature"] == sampling.temperature
    assert sampling is not CUTS or server.requests[-1]["top_k"] == CUTS.top_k


SOMETHING_ELSE = {
    "a value of the user's": (Sampling(top_p=0.5), "Range of top_p should be (0.0, 1.0)", None),
    "a value out of range": (
        Sampling(temperature=9.0), "temperature must be at most 2", "temperature",
    ),
    "a request that is quoted": (
        Sampling(), "invalid messages in {'temperature': 1.0, 'top_p': 1.0, 'max_tokens': 9}", None,
    ),
    "a request quoted as JSON": (Sampling(), 'bad: {"top_p": 1.0, "top_k": -1}', None),
}  # fmt: skip


@pytest.mark.parametrize("name", SOMETHING_ELSE)
def test_other_refusals_are_not_mended_by_dropping_a_setting(name: str) -> None:
    sampling, message, param = SOMETHING_ELSE[name]
    fault = refused(message, param=param)
    with (
        ScriptedServer(script=lambda index, body: fault) as server,
        pytest.raises(ProviderError, match=re.escape(message[:20])),
    ):
        ask(endpoint(server), sampling)
    assert len(server.requests) == 1


def test_refusing_everything_ends() -> None:
    def refuse(index: int, body: dict[str, Any]) -> Fault:
        left = set(body) - {"model", "messages"}
        return Fault.status_error(400, "unsupported", param=min(left, default="model"))

    with ScriptedServer(script=refuse) as server, pytest.raises(ProviderError):
        ask(endpoint(server), Sampling(seed=1, top_p=0.5, thinking=True, reasoning_effort="low"))
    assert len(server.requests) == 8


@pytest.mark.parametrize(
    "fault",
    [
        Fault.status_error(408), Fault.status_error(409), Fault.status_error(500),
        Fault(status=502, raw=b"<html>bad gateway</html>"), Fault(status=503, raw=b""),
        Fault.rate_limited("0"), Fault.truncated_json(), Fault.cut_midway(), Fault.cut_midway(0),
        Fault.closed(), Fault.slow(0.5), Fault(raw=b""), Fault.reply([]),
        Fault.reply({"choices": []}), Fault.reply({"choices": [{"index": 0}]}),
        Fault.reply({"error": {"message": "upstream", "code": 502}}),
    ],
    ids=lambda fault: repr(fault)[:70],
)  # fmt: skip
def test_passing_faults_are_retried(fault: Fault) -> None:
    with ScriptedServer(script={0: fault, 1: fault}) as server:
        model = endpoint(server, timeout_s=0.2 if fault.delay_s else 10.0)
        assert ask(model).text == "You said: hello"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "fault", [Fault.status_error(500), Fault.truncated_json(), Fault.closed(), Fault.reply({})]
)
def test_retries_end(fault: Fault) -> None:
    with (
        ScriptedServer(script=lambda index, body: fault) as server,
        pytest.raises(ProviderError, match="after 3 attempts"),
    ):
        ask(endpoint(server))
    assert len(server.requests) == 3


FINAL: dict[str, tuple[Fault, type[Exception], str]] = {
    **{f"HTTP {status}": (Fault.status_error(status, "no " * 500, kind="some_type"), ProviderError,
                          f"HTTP {status} some_type: no no")
       for status in (400, 401, 403, 404, 422)},
    "within a 200": (
        Fault.reply({"error": {"message": "no credit", "code": 403}}), ProviderError, "no credit",
    ),
    "too long, by code": (
        refused("too long", code="context_length_exceeded"), ContextOverflow, "too long",
    ),
    "too long, in words": (
        refused("prompt is too long: 9 tokens > 8 maximum", 413), ContextOverflow, "9 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FINAL)
def test_final_errors_are_raised_at_once(name: str) -> None:
    fault, kind, words = FINAL[name]
    with ScriptedServer(script={0: fault}) as server, pytest.raises(kind) as caught:
        ask(endpoint(server))
    assert len(server.requests) == 1 and type(caught.value) is kind
    assert words in str(caught.value) and len(str(caught.value)) < 400


def test_retry_after_is_honoured_and_capped() -> None:
    with ScriptedServer(script={0: Fault.rate_limited("0.2")}) as server:
        started = time.perf_counter()
        ask(endpoint(server))
        assert time.perf_counter() - started >= 0.2
    busy = Fault.status_error(503, headers={"Retry-After": "3600"})
    with ScriptedServer(script={0: busy}) as server:
        started = time.perf_counter()
        ask(endpoint(server, max_wait_s=0.1))
        assert 0.1 <= time.perf_counter() - started < 10


def test_thinking_replies() -> None:
    with ScriptedServer(profile="thinking", answer="yes") as server:
        model = endpoint(server)
        short, full = ask(model, Sampling(max_tokens=5)), ask(model)
        silent = ask(model, Sampling(thinking=False))
    assert (short.text, short.stop_reason) == ("", "length")
    assert short.reasoning == "first I weigh what was"
    assert (full.text, full.stop_reason) == ("yes", "stop")
    assert full.reasoning.endswith("what to answer")
    assert (silent.text, silent.reasoning) == ("yes", "")


def _reply(message: dict[str, Any], stop: str | None = "stop") -> Fault:
    return Fault.reply({"choices": [{"message": message, "finish_reason": stop}]})


@pytest.mark.parametrize(
    ("fault", "text", "stop", "reasoning"),
    [
        (_reply({"content": None}), "", "stop", ""),
        (_reply({"content": ""}, "content_filter"), "", "content_filter", ""),
        (_reply({"content": "a", "reasoning": "b"}), "a", "stop", "b"),
        (_reply({"content": None, "refusal": "I will not."}), "I will not.", "refusal", ""),
        (_reply({"content": [{"type": "text", "text": "part"}]}), "part", "stop", ""),
        (_reply({"content": "half \ud83d"}, "length"), "half \ufffd", "length", ""),
        (_reply({"content": "a"}, None), "a", "unknown", ""),
    ],
)
def test_odd_replies(fault: Fault, text: str, stop: str, reasoning: str) -> None:
    with ScriptedServer(script={0: fault}) as server:
        got = ask(endpoint(server, price_in=1.0, price_out=1.0))
    assert (got.text, got.stop_reason, got.reasoning) == (text, stop, reasoning)
    assert got.usage.cost is None, "without token counts no cost is known"


def test_concurrency_is_bounded() -> None:
    async def many(model: Endpoint) -> None:
        calls = [Call(role="judge", example_id=f"e{i}") for i in range(20)]
        await asyncio.gather(*(model.complete(HELLO, Sampling(), call) for call in calls))
        await model.close()

    with ScriptedServer(delay_s=0.02) as server:
        asyncio.run(many(endpoint(server, concurrency=4)))
    assert len(server.requests) == 20
    assert server.max_in_flight == 4


def test_several_event_loops_in_turn() -> None:
    with ScriptedServer() as server:
        model = endpoint(server)
        for _ in range(3):
            got = asyncio.run(model.complete(HELLO, Sampling(), CALL))
            assert got.text == "You said: hello"
        assert len(model._sessions.values()) == 1


def test_no_key_is_told_in_three_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(ModelLoadError) as caught:
        Endpoint(model="m", base_url="https://api.example.org/v1", api_key_env="SOME_KEY")
    assert "'SOME_KEY' is not set" in caught.value.what
    assert "export SOME_KEY=" in caught.value.way_out


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}\n")
    yield KEY


def test_the_key_is_sent_and_never_shown(key: str, tmp_path: Path) -> None:
    def leak(body: dict[str, Any]) -> str:
        return f"your key is {key}"

    path = tmp_path / "ledger.sqlite"
    with ScriptedServer(answer=leak, require_key=key) as server, Ledger(path) as ledger:
        model = endpoint(server, ledger=ledger)
        assert ask(model).text == "your key is [key]"
        assert server.authorizations == [f"Bearer {key}"]
        assert key not in repr(model) + repr(ledger)
        assert key.encode() not in b"".join(p.read_bytes() for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x/v1", "http://", "http://[x", "http://h:99999/v1"]
)
def test_unusable_urls(url: str) -> None:
    with pytest.raises(ModelLoadError, match="not an http or https"):
        Endpoint(model="m", base_url=url)


def test_urls_and_keys_with_secrets_or_dirt(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError) as caught:
        Endpoint(model="m", base_url="http://me:hunter2@localhost/v1")
    assert "hunter2" not in " ".join(caught.value.lines())
    monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
    with pytest.raises(ModelLoadError, match="characters that cannot be sent"):
        Endpoint(model="m")


@pytest.mark.parametrize(
    "settings",
    [{"timeout_s": 0.0}, {"max_attempts": 0}, {"concurrency": 0}, {"backoff_s": -1.0},
     {"rate_limit_wait_s": -1.0}, {"requests_per_minute": 0.0}, {"tokens_per_minute": float("nan")},
     {"down_after_s": float("nan")}, {"max_cost": 0.0}],
)  # fmt: skip
def test_numbers_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CallSettings.load(env={}, flags=settings)


@pytest.mark.parametrize("settings", [{"price_in": 1.0}, {"price_in": 1.0, "price_out": -1.0}])
def test_prices_that_are_none(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Endpoint(model="m", base_url="http://localhost:1/v1", **settings)
