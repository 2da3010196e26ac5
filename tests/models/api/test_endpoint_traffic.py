"""Many calls to one server that is slow, busy or away: they wait together, and all of them end.

What endpoints charge, and how a run with a limit stops and goes on.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from soulkit.errors import ConfigError, ProviderError, SoulError
from soulkit.models.api import transport
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.limits import Budget, BudgetSpent
from soulkit.models.api.prices import load_prices
from soulkit.models.api.wire import rate_limit_wait
from soulkit.models.ledger.ledger import Ledger
from soulkit.play.engine import gather
from soulkit.types import MAX_TOKENS, Call, Completion, Sampling, Segment
from tests.support.servers.faulty import FaultPlan, FaultyServer
from tests.support.servers.openai_server import Fault, ScriptedServer

HELLO = (Segment("user", "hello there"),)
Outcome = Completion | SoulError


def endpoint(url: str, **settings: Any) -> Endpoint:
    base: dict[str, Any] = {"model": "gpt-x", "base_url": url, "backoff_s": 0.01}
    return Endpoint(**(base | settings))


def crowd(model: Endpoint, count: int, tokens: int = 16) -> tuple[list[Outcome], float]:
    """The outcome of every call, and the seconds that all of them took."""

    async def one(index: int) -> Outcome:
        call = Call(role="judge", example_id=f"e{index}")
        try:
            return await model.complete(HELLO, Sampling(max_tokens=tokens), call)
        except SoulError as error:
            return error

    async def everybody() -> list[Outcome]:
        try:
            return await asyncio.gather(*(one(i) for i in range(count)))
        finally:
            await model.close()

    started = time.perf_counter()
    return asyncio.run(everybody()), time.perf_counter() - started


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def texts(outcomes: list[Outcome]) -> list[str]:
    return [outcome.text for outcome in outcomes if isinstance(outcome, Completion)]


# -- connections -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_hundreds_of_calls_at_once_keep_their_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    # Beside other work a wave takes longer than an idle connection is kept.
    monkeypatch.setattr(transport, "IDLE_S", 600.0)

    async def waves(model: Endpoint) -> int:
        for wave in range(3):
            calls = [Call(role="judge", example_id=f"{wave}/{i}") for i in range(200)]
            await asyncio.gather(*(model.complete(HELLO, Sampling(), call) for call in calls))
        pools = len(next(iter(model._sessions.values())).pool._members)
        await model.close()
        return pools

    with FaultyServer(FaultPlan(latency_s=(0.3, 0.5))) as server:
        assert asyncio.run(waves(endpoint(server.base_url, concurrency=200))) == 25
    assert server.most_in_flight > 100
    assert server.connections <= 200
    assert server.outcomes == {"fine": 600}


def test_a_small_run_opens_few_connections() -> None:
    with FaultyServer(FaultPlan()) as server:
        model = endpoint(server.base_url, concurrency=200)
        assert len(texts(crowd(model, 10)[0])) == 10
    assert server.connections <= 10


# -- rates -----------------------------------------------------------------------------------------


def test_tokens_per_minute_are_counted_as_the_server_counts_them() -> None:
    """A reply may have 2,000 tokens and has four: by estimates alone this would take minutes."""
    with ScriptedServer() as server:
        model = endpoint(server.base_url, tokens_per_minute=60_000, concurrency=2)
        outcomes, took = crowd(model, 30, tokens=2000)
    assert len(texts(outcomes)) == 30
    assert took < 20


def test_retries_count_against_the_rate() -> None:
    faults = {i: Fault.status_error(500) for i in range(11)}
    with ScriptedServer(script=faults) as server:
        model = endpoint(server.base_url, requests_per_minute=600, max_attempts=12, backoff_s=0.0)
        _, took = crowd(model, 1)
        assert took >= 0.15
    assert len(server.requests) == 12


# -- 429 -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_storm_of_429s_costs_no_episode() -> None:
    """The server takes eight requests in any 0.2 s and is asked by 64 at once."""
    taken: list[float] = []

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        now = time.perf_counter()
        if sum(1 for at in taken if now - at < 0.2) >= 8:
            return Fault.rate_limited("0.1")
        taken.append(now)
        return None

    with ScriptedServer(script=script) as server:
        outcomes, took = crowd(endpoint(server.base_url, concurrency=64), 64)
    assert len(texts(outcomes)) == 64
    assert took < 30
    assert len(server.requests) < 64 * 6


STATED = {
    "milliseconds": ({"retry-after-ms": "20", "retry-after": "3600"}, "slow down"),
    "seconds": ({"Retry-After": "0.02"}, "slow down"),
    "the limit that is used up": (
        {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "20ms",
         "x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "6m0s"}, "slow down",
    ),
    "the message": ({}, "Limit 3 per minute. Please try again in 20ms."),
}  # fmt: skip


@pytest.mark.parametrize("inside", [False, True], ids=["429", "within a 200"])
@pytest.mark.parametrize("how", STATED)
def test_a_429_that_states_a_wait_is_no_attempt(how: str, inside: bool) -> None:
    headers, message = STATED[how]
    error = {"error": {"message": message, "code": 429}}
    fault = Fault(status=200 if inside else 429, raw=json.dumps(error).encode(), headers=headers)
    with ScriptedServer(script=lambda index, body: fault if index < 2 else None) as server:
        outcomes, _ = crowd(endpoint(server.base_url, max_attempts=1), 1)
    assert texts(outcomes) == ["You said: hello there"]
    assert len(server.requests) == 3


def test_a_429_without_a_wait_is_an_attempt() -> None:
    fault = Fault.status_error(429, "slow down", headers={"x-ratelimit-reset-tokens": "0s"})
    with ScriptedServer(script=lambda index, body: fault) as server:
        outcomes, _ = crowd(endpoint(server.base_url, max_attempts=3), 4)
    assert all("after 3 attempts" in str(outcome) for outcome in outcomes)
    assert len(server.requests) == 12


@pytest.mark.parametrize(
    ("header", "value", "seconds"),
    [("Retry-After", "3600", 3600), ("x-ratelimit-reset-requests", "8h0m0s", 28800)],
)
def test_a_wait_beyond_the_patience_is_not_begun(header: str, value: str, seconds: int) -> None:
    fault = Fault.status_error(429, "daily limit", headers={header: value})
    with ScriptedServer(script=lambda index, body: fault) as server:
        outcomes, _ = crowd(endpoint(server.base_url), 1)
    words = f"the server asks to wait {seconds} s, but a call waits at most 600 s in total"
    assert words in str(outcomes[0]) and "daily limit" in str(outcomes[0])
    assert len(server.requests) == 1


def test_waits_add_up_to_the_patience_of_a_call() -> None:
    with ScriptedServer(script=lambda index, body: Fault.rate_limited("0.1")) as server:
        outcomes, _ = crowd(endpoint(server.base_url, max_attempts=1, rate_limit_wait_s=0.25), 1)
    assert "asks to wait 0.1 s after 0.2 s of waiting" in str(outcomes[0])
    assert "a call waits at most 0.25 s in total (--rate-limit-wait)" in str(outcomes[0])
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "word", ["insufficient_quota", "Insufficient balance", "billing_hard_limit_reached"]
)
def test_no_credit_is_no_storm(word: str) -> None:
    fault = Fault.status_error(429, word, kind="t", headers={"Retry-After": "30"})
    with ScriptedServer(script=lambda index, body: fault) as server:
        outcomes, took = crowd(endpoint(server.base_url), 10)
    assert len(server.requests) == 10
    assert took < 5
    assert all(word in str(outcome) for outcome in outcomes)


# -- down ------------------------------------------------------------------------------------------


def test_a_server_that_is_away_fails_everybody_at_once() -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    outcomes, took = crowd(endpoint(url, down_after_s=0.2, concurrency=64), 40)
    stories = {str(outcome) for outcome in outcomes}
    assert not texts(outcomes)
    assert all(isinstance(outcome, ProviderError) for outcome in outcomes)
    assert took < 8
    pattern = rf"gpt-x at {re.escape(url)} has been down since \d\d:\d\d:\d\d UTC "
    assert any(re.match(pattern + r"\(connection refused\); \d+ calls gave up", s) for s in stories)


def test_a_server_that_answers_between_failures_is_up(caplog: pytest.LogCaptureFixture) -> None:
    def script(index: int, body: dict[str, Any]) -> Fault | None:
        return None if index % 3 == 2 else Fault.status_error(500)

    with ScriptedServer(script=script) as server:
        model = endpoint(server.base_url, max_attempts=60, backoff_s=0.0, concurrency=1)
        assert len(texts(crowd(model, 20)[0])) == 20
    assert "does not answer" not in caplog.text


def test_full_jitter_grows_and_is_bounded() -> None:
    model = endpoint("http://localhost:1/v1", backoff_s=1.0, max_wait_s=8.0)
    from soulkit.models.api.replies import Fault as Found

    for attempts, most in ((1, 1.0), (2, 2.0), (4, 8.0), (20, 8.0)):
        drawn = [model._wait(Found("x"), attempts) for _ in range(400)]
        assert 0 <= min(drawn) < 0.1 * most and 0.9 * most < max(drawn) <= most
    waits = [model._wait(Found("x", wait_s=5.0), 1) for _ in range(100)]
    assert min(waits) >= 5.0 and max(waits) <= 6.0


def in_five_seconds(form: str) -> str:
    when = datetime.now(UTC) + timedelta(seconds=5)
    return {
        "HTTP": format_datetime(when, usegmt=True), "RFC 3339": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "Unix": f"{when.timestamp():.3f}", "Unix ms": f"{when.timestamp() * 1000:.0f}",
    }[form]  # fmt: skip


WAITS: dict[str, tuple[dict[str, str], str, float | None]] = {
    "milliseconds go before seconds": ({"retry-after-ms": "300", "retry-after": "7"}, "", 0.3),
    "unreadable milliseconds": ({"retry-after-ms": "soon", "retry-after": "7"}, "", 7.0),
    "a header goes before the message": ({"retry-after": "7"}, "try again in 9s", 7.0),
    "a date of HTTP": ({"retry-after": "HTTP"}, "", 5.0),
    "a date in the past": ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, "", None),
    "no wait": ({"retry-after": "0", "retry-after-ms": "0"}, "", None),
    "a negative wait": ({"retry-after": "-1"}, "", None),
    "OpenAI: the limit that is used up": (
        {"x-ratelimit-remaining-requests": "12", "x-ratelimit-reset-requests": "20ms",
         "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"}, "", 360.0,
    ),
    "two limits that are used up": (
        {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1s",
         "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1m1.5s"}, "", 61.5,
    ),
    "a limit that is used up and more": (
        {"x-ratelimit-remaining-requests": "-2", "x-ratelimit-reset-requests": "1m2.5s",
         "x-ratelimit-remaining-tokens": "9", "x-ratelimit-reset-tokens": "6ms"}, "", 62.5,
    ),
    "no limit is marked as used up": (
        {"x-ratelimit-reset-requests": "8h0m0s", "x-ratelimit-reset-tokens": "250ms"}, "", 0.25,
    ),
    "Anthropic": (
        {"anthropic-ratelimit-requests-remaining": "0",
         "anthropic-ratelimit-requests-reset": "RFC 3339",
         "anthropic-ratelimit-input-tokens-remaining": "900",
         "anthropic-ratelimit-input-tokens-reset": "2015-10-21T07:28:00Z"}, "", 5.0,
    ),
    "OpenRouter": ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "Unix ms"}, "", 5.0),
    "GitHub": ({"x-ratelimit-remaining": "0", "x-ratelimit-reset": "Unix"}, "", 5.0),
    "the draft of the IETF": ({"ratelimit-remaining": "0", "ratelimit-reset": "5"}, "", 5.0),
    "Azure in words": ({}, "Please retry after 6 seconds.", 6.0),
    "milliseconds in words": ({}, "Please try again in 90 milliseconds.", 0.09),
    "an hour in words": ({}, "Limit reached, retry after 1 hour", 3600.0),
    "hours and minutes in words": ({}, "Try again in 2 hours 3 min.", 7380.0),
    "no unit of time": ({}, "try again in 3 models", None),
    "Google in words": ({}, "You exceeded your quota. Please retry in 34.5s.", 34.5),
    "nothing": ({"x-ratelimit-limit-requests": "60"}, "Too many requests", None),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_waits_that_a_429_states(name: str) -> None:
    given, message, seconds = WAITS[name]
    forms = ("HTTP", "RFC 3339", "Unix", "Unix ms")
    headers = {k: in_five_seconds(v) if v in forms else v for k, v in given.items()}
    wait = rate_limit_wait(headers, message)
    # A date has whole seconds, and time passes between writing and reading it.
    dated = headers != given
    assert wait is None if seconds is None else wait == pytest.approx(seconds, abs=2.0 * dated)


# -- open files ------------------------------------------------------------------------------------

FEW_FILES = """
import asyncio, resource, sys
from soulkit.models.api.endpoint import Endpoint
from soulkit.types import Call, Sampling, Segment

resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
model = Endpoint(model="m", base_url=sys.argv[1], concurrency=256, max_attempts=1, backoff_s=0.01)
calls = [Call(role="judge", example_id=f"e{i}") for i in range(200)]

async def scene():
    return await asyncio.gather(
        *(model.complete((Segment("user", "hello"),), Sampling(), call) for call in calls),
        return_exceptions=True,
    )

print({getattr(reply, "text", None) or repr(reply) for reply in asyncio.run(scene())})
"""

FITTED = """
import resource
from soulkit.models.api.transport import BESIDE, fitted

resource.setrlimit(resource.RLIMIT_NOFILE, (BESIDE + 40, BESIDE + 240))
soft = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0] - BESIDE
print(fitted(10, 2, 20), soft(), fitted(50, 2, 20), soft())
print(fitted(512, 2, 20), soft(), fitted(512, 999, 20))
"""


def python(script: str, *arguments: str) -> str:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_calls_that_find_no_file_to_open_wait_and_spend_no_attempt() -> None:
    """No roll call has compared the connections with the limit: each call learns it by itself."""
    with FaultyServer(FaultPlan(latency_s=(0.05, 0.1))) as server:
        assert python(FEW_FILES, server.base_url) == "{'You said: hello'}"
    assert server.outcomes == {"fine": 200}


def test_connections_are_fitted_into_the_limit_which_is_raised_first() -> None:
    assert python(FITTED).split() == ["10", "40", "50", "120", "110", "240", "1"]


COST = (2 * 1.0 + 4 * 10.0) / 1e6
"""Of one call: two words, answered by four."""


def priced_endpoint(server: ScriptedServer, **settings: Any) -> Endpoint:
    base: dict[str, Any] = {
        "model": "m", "base_url": server.base_url, "backoff_s": 0.0, "max_attempts": 2,
        "price_in": 1.0, "price_out": 10.0,
    }  # fmt: skip
    return Endpoint(**(base | settings))


def call(index: int) -> Call:
    return Call(role="judge", example_id=f"e{index}")


def one_after_the_other(model: Endpoint, count: int) -> list[Completion]:
    async def scene() -> list[Completion]:
        try:
            return [await model.complete(HELLO, Sampling(), call(i)) for i in range(count)]
        finally:
            await model.close()

    return asyncio.run(scene())


def test_prices_are_looked_up_when_none_is_given(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("prices: [{model: m, in: 2, out: 20}]")
    with ScriptedServer() as server:
        table = load_prices(path)
        looked_up = one_after_the_other(
            priced_endpoint(server, price_in=None, price_out=None, prices=table), 1
        )
        by_setting = one_after_the_other(priced_endpoint(server, prices=table), 1)
        unknown = priced_endpoint(
            server, model="other", price_in=None, price_out=None, prices=load_prices()
        )
        assert one_after_the_other(unknown, 1)[0].usage.cost is None
    assert looked_up[0].usage.cost == pytest.approx(2 * COST)
    assert by_setting[0].usage.cost == pytest.approx(COST)


def test_cached_tokens_cost_what_the_table_says(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("prices: [{model: m, in: 2, out: 20, cached: 1}]")
    usage = {
        "prompt_tokens": 1000, "completion_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 600},
    }  # fmt: skip
    reply = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "usage": usage}
    with ScriptedServer(script={0: Fault.reply(reply)}) as server:
        model = priced_endpoint(server, price_in=None, price_out=None, prices=load_prices(path))
        got = one_after_the_other(model, 1)
    assert got[0].usage.cost == pytest.approx((400 * 2 + 600 * 1 + 10 * 20) / 1e6)


def counted(reply: int, total: int | None = None, reasoning: int | None = None) -> dict[str, Any]:
    """The usage of a prompt of 10 tokens under the names of OpenAI."""
    usage: dict[str, Any] = {"prompt_tokens": 10, "completion_tokens": reply}
    usage |= {} if total is None else {"total_tokens": total}
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}}
    return usage | ({} if reasoning is None else details)


NATIVE = {"promptTokenCount": 10, "candidatesTokenCount": 20, "thoughtsTokenCount": 80}
USAGES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "OpenAI": ({"usage": counted(100, 110, 80)}, (10, 100, 80)),
    "OpenAI, all of it reasoning": ({"usage": counted(80, 90, 80)}, (10, 80, 80)),
    "OpenAI's newer names": (
        {"usage": {"input_tokens": 10, "output_tokens": 100, "total_tokens": 110,
                   "output_tokens_details": {"reasoning_tokens": 80}}}, (10, 100, 80),
    ),
    "OpenRouter": ({"usage": counted(100, 110, 80) | {"cost": 0.1}}, (10, 100, 80)),
    "DeepSeek": (
        {"usage": counted(100, 110, 80) | {"prompt_cache_miss_tokens": 10}}, (10, 100, 80),
    ),
    "Gemini": ({"usage": counted(20, 110)}, (10, 100, 80)),
    "Gemini, reasoning told": ({"usage": counted(20, 110, 80)}, (10, 100, 80)),
    "Gemini, nothing but thoughts": (
        {"usage": {"prompt_tokens": 10, "total_tokens": 90}}, (10, 80, 0),
    ),
    "Gemini's own names": ({"usageMetadata": NATIVE | {"totalTokenCount": 110}}, (10, 100, 80)),
    "Gemini's own names, no total": ({"usageMetadata": NATIVE}, (10, 100, 80)),
    "thoughts beside OpenAI's names": (
        {"usage": counted(20) | {"thoughts_token_count": 80}}, (10, 100, 80),
    ),
    "thoughts that the gateway added": (
        {"usage": counted(100, 110) | {"thoughts_token_count": 80}}, (10, 100, 80),
    ),
    "xAI": ({"usage": counted(20, 110, 80)}, (10, 100, 80)),
    "xAI, total of a gateway": ({"usage": counted(20, 30, 80)}, (10, 100, 80)),
    "xAI, no total": ({"usage": counted(20, None, 80)}, (10, 100, 80)),
    "vLLM": ({"usage": counted(100, 110) | {"prompt_tokens_details": None}}, (10, 100, 0)),
    "SGLang": ({"usage": counted(100, 110) | {"reasoning_tokens": 80}}, (10, 100, 80)),
    "Anthropic": ({"usage": counted(100, 110)}, (10, 100, 0)),
    "Anthropic's own names": (
        {"usage": {"input_tokens": 4, "output_tokens": 100, "cache_read_input_tokens": 5,
                   "cache_creation_input_tokens": 1}}, (10, 100, 0),
    ),
    "a total that says less": ({"usage": counted(100, 0)}, (10, 100, 0)),
}  # fmt: skip


@pytest.mark.parametrize("provider", USAGES)
def test_reasoning_costs_what_each_provider_bills(provider: str, tmp_path: Path) -> None:
    body, (prompt, billed, reasoning) = USAGES[provider]
    reply = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], **body}
    budget, cost = Budget(1.0), (prompt * 1.0 + billed * 10.0) / 1e6
    with (
        ScriptedServer(script=lambda index, body: Fault.reply(reply)) as server,
        Ledger(tmp_path / "ledger.sqlite") as ledger,
    ):
        model = priced_endpoint(server, budget=budget, ledger=ledger)
        usage = one_after_the_other(model, 1)[0].usage
        kept = ledger.totals()
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, billed)
    assert usage.reasoning_tokens == reasoning
    assert usage.cost == pytest.approx(cost) == budget.spent == kept["cost"]
    assert kept["completion_tokens"] == billed


def test_a_budget_needs_prices_of_servers_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedServer(host="0.0.0.0") as server:  # no address of this machine
        monkeypatch.setenv("OPENAI_API_KEY", "sk-of-nobody")
        with pytest.raises(ConfigError) as caught:
            priced_endpoint(server, price_in=None, price_out=None, budget=Budget(1.0))
        priced_endpoint(server, price_in=0.0, price_out=0.0, budget=Budget(1.0))
    assert "price of 'm'" in caught.value.what


def test_a_server_on_this_machine_without_a_price_spends_nothing() -> None:
    budget = Budget(0.5 * COST)
    with ScriptedServer() as server:
        model = priced_endpoint(server, price_in=None, price_out=None, budget=budget)
        one_after_the_other(model, 3)
    assert len(server.requests) == 3 and budget.spent == 0.0


def test_one_budget_for_all_endpoints() -> None:
    budget = Budget(3.5 * COST)
    with ScriptedServer() as server:
        first, second = (priced_endpoint(server, budget=budget) for _ in range(2))
        one_after_the_other(first, 3)
        with pytest.raises(BudgetSpent):
            one_after_the_other(second, 3)
    assert len(server.requests) == 4
    assert budget.spent == pytest.approx(4 * COST)


def test_replies_without_counts_are_taken_at_their_most() -> None:
    reply = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
    budget = Budget(1.0)
    with ScriptedServer(script={0: Fault.reply(reply)}) as server:
        got = one_after_the_other(priced_endpoint(server, budget=budget), 1)
    assert got[0].usage.cost is None
    assert MAX_TOKENS * 10e-6 <= budget.spent < MAX_TOKENS * 11e-6


def test_what_is_under_way_is_waited_for_and_kept_and_not_paid_again(tmp_path: Path) -> None:
    """Eight at once, enough for one: the others are cancelled, and their replies are kept."""
    path, budget = tmp_path / "ledger.sqlite", Budget(0.5 * COST)

    def slower(index: int, body: dict[str, Any]) -> Fault:
        return Fault.slow(0.05 if index == 0 else 0.4)

    async def run(model: Endpoint, count: int) -> list[Completion]:
        try:
            return await gather(model.complete(HELLO, Sampling(), call(i)) for i in range(count))
        finally:
            await model.close()

    with ScriptedServer(script=slower) as server, Ledger(path) as ledger:
        model = priced_endpoint(server, concurrency=8, ledger=ledger, budget=budget)
        with pytest.raises(BudgetSpent):
            asyncio.run(run(model, 20))
        assert len(server.requests) == 8
        assert ledger.totals()["calls"] == 8
        assert budget.spent == pytest.approx(8 * COST)

    port = int(server.base_url.split(":")[2].split("/")[0])
    with ScriptedServer(port=port) as server, Ledger(path) as ledger:
        spent = ledger.totals()["cost"]
        assert spent == pytest.approx(8 * COST)
        budget = Budget(1.0, spent=spent or 0.0)
        assert (
            len(asyncio.run(run(priced_endpoint(server, ledger=ledger, budget=budget), 20))) == 20
        )
        assert len(server.requests) == 12
        assert budget.spent == pytest.approx(20 * COST)


def test_cancelled_for_another_reason_nothing_is_waited_for() -> None:
    async def scene(model: Endpoint) -> None:
        task = asyncio.create_task(model.complete(HELLO, Sampling(), call(0)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(model.close(), 2)

    with ScriptedServer(delay_s=5.0) as server:
        asyncio.run(scene(priced_endpoint(server, budget=Budget(1.0))))
