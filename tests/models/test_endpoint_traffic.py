"""Many calls to one server that is slow, busy or away: they wait together, and all of them end."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from typing import Any

import pytest

from soulkit.errors import ConfigError, ProviderError, SoulError
from soulkit.models.api import http
from soulkit.models.api.endpoint import Endpoint
from soulkit.types import Call, Completion, Sampling, Segment
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
    monkeypatch.setattr(http, "IDLE_S", 600.0)

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


def test_requests_per_minute() -> None:
    with ScriptedServer() as server:
        outcomes, took = crowd(endpoint(server.base_url, requests_per_minute=1200), 40)
    assert len(texts(outcomes)) == 40
    assert 0.9 <= took < 10  # 20 a second after the first 20


def test_tokens_per_minute_are_counted_as_the_server_counts_them() -> None:
    """A reply may have 2,000 tokens and has four: by estimates alone this would take minutes."""
    with ScriptedServer() as server:
        model = endpoint(server.base_url, tokens_per_minute=60_000, concurrency=2)
        outcomes, took = crowd(model, 30, tokens=2000)
    assert len(texts(outcomes)) == 30
    assert took < 20


def test_retries_count_against_the_rate() -> None:
    faults = {i: Fault.status_error(500) for i in range(4)}
    with ScriptedServer(script=faults) as server:
        model = endpoint(server.base_url, requests_per_minute=120, max_attempts=3, concurrency=1)
        started = time.perf_counter()
        crowd(model, 1)
        assert time.perf_counter() - started >= 0.45
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"requests_per_minute": 0.0},
        {"tokens_per_minute": -1.0},
        {"down_after_s": -1.0},
        {"down_after_s": float("nan")},
        {"requests_per_minute": float("nan")},
    ],
)
def test_limits_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        endpoint("http://localhost:1/v1", **settings)


# -- 429 -------------------------------------------------------------------------------------------


def test_one_429_stops_everybody_and_not_as_a_herd() -> None:
    arrived: list[float] = []

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        arrived.append(time.perf_counter())
        return Fault.rate_limited("0.2") if index == 0 else None

    with ScriptedServer(script=script) as server:
        outcomes, _ = crowd(endpoint(server.base_url, concurrency=1), 10)
    assert len(texts(outcomes)) == 10
    assert arrived[1] - arrived[0] >= 0.2, "another call went during the pause"


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


def test_429s_without_end_end() -> None:
    with ScriptedServer(script=lambda index, body: Fault.rate_limited("0.01")) as server:
        outcomes, _ = crowd(endpoint(server.base_url, max_attempts=3), 4)
    assert all("after 3 attempts" in str(outcome) for outcome in outcomes)
    assert len(server.requests) == 12


@pytest.mark.slow
def test_a_storm_that_serves_nobody_is_given_up() -> None:
    """One call at a time with growing pauses would go on for hours."""
    with ScriptedServer(script=lambda index, body: Fault.rate_limited("0.1")) as server:
        model = endpoint(server.base_url, max_attempts=50, down_after_s=1.0, concurrency=64)
        outcomes, took = crowd(model, 200)
    assert took < 10
    assert all(
        "is down since" in str(outcome) and "HTTP 429" in str(outcome) for outcome in outcomes
    )


@pytest.mark.parametrize("word", ["insufficient_quota", "Insufficient balance"])
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
    outcomes, took = crowd(endpoint(url, down_after_s=1.0, concurrency=64), 40)
    stories = {str(outcome) for outcome in outcomes}
    assert not texts(outcomes)
    assert all(isinstance(outcome, ProviderError) for outcome in outcomes)
    assert took < 8
    pattern = rf"gpt-x at {re.escape(url)} is down since \d\d:\d\d:\d\d UTC "
    assert any(re.match(pattern + r"\(connection refused\); \d+ calls gave up", s) for s in stories)


@pytest.mark.slow
def test_waiting_spends_no_attempts() -> None:
    """Forty calls of two attempts each, and a server that comes after a while."""
    port = free_port()
    model = endpoint(
        f"http://127.0.0.1:{port}/v1", max_attempts=6, down_after_s=20.0, concurrency=8
    )

    async def one(index: int) -> str:
        call = Call(role="judge", example_id=f"e{index}")
        return (await model.complete(HELLO, Sampling(), call)).text

    async def scene() -> list[str]:
        calls = [asyncio.create_task(one(i)) for i in range(40)]
        await asyncio.sleep(1.0)
        assert not any(call.done() for call in calls)
        with ScriptedServer(port=port) as server:
            replies = await asyncio.gather(*calls)
            assert len(server.requests) == 40
        await model.close()
        return replies

    assert asyncio.run(scene()) == ["You said: hello there"] * 40


def test_after_giving_up_calls_fail_at_once_until_the_server_is_back() -> None:
    port = free_port()
    model = endpoint(f"http://127.0.0.1:{port}/v1", down_after_s=0.3, max_wait_s=0.2)

    async def one(index: int) -> Outcome:
        try:
            return await model.complete(
                HELLO, Sampling(), Call(role="judge", example_id=f"e{index}")
            )
        except SoulError as error:
            return error

    async def scene() -> tuple[list[Outcome], float, Outcome]:
        await asyncio.gather(*(one(i) for i in range(16)))
        started = time.perf_counter()
        gone = [await one(i) for i in range(50)]
        took = time.perf_counter() - started
        with ScriptedServer(port=port):
            back: Outcome = ProviderError("never")
            for attempt in range(100):
                back = await one(attempt)
                if isinstance(back, Completion):
                    break
                await asyncio.sleep(0.05)
            await model.close()
        return gone, took, back

    gone, took, back = asyncio.run(scene())
    assert all("is down since" in str(outcome) for outcome in gone)
    assert took < 2
    assert isinstance(back, Completion)


def test_silence_opens_the_breaker_too() -> None:
    with ScriptedServer(delay_s=1.0) as server:
        model = endpoint(server.base_url, timeout_s=0.1, down_after_s=0.5, concurrency=16)
        outcomes, took = crowd(model, 24)
    assert any("is down since" in str(outcome) for outcome in outcomes)
    assert any("no answer within 0.1 s" in str(outcome) for outcome in outcomes)
    assert took < 10


def test_a_call_that_cannot_be_answered_does_not_stop_the_others() -> None:
    """One prompt breaks the server every time; everybody else's answers show that it is up."""

    def script(index: int, body: dict[str, Any]) -> Fault | None:
        return Fault.status_error(500) if body["seed"] == poison else None

    poison = -1
    with ScriptedServer(script=script) as server:
        model = endpoint(server.base_url, max_attempts=4)

        async def scene() -> tuple[Outcome, list[str]]:
            async def good(index: int) -> str:
                call = Call(role="judge", example_id=f"e{index}")
                return (await model.complete(HELLO, Sampling(seed=1), call)).text

            nonlocal poison
            await good(0)
            poison = server.requests[0]["seed"]
            bad = model.complete(HELLO, Sampling(seed=1), Call(role="judge", example_id="e0"))
            both = await asyncio.gather(
                bad, *(good(i) for i in range(1, 30)), return_exceptions=True
            )
            await model.close()
            return both[0], both[1:]  # type: ignore[return-value]

        bad, rest = asyncio.run(scene())
    assert "HTTP 500" in str(bad) and "after 4 attempts" in str(bad)
    assert rest == ["You said: hello there"] * 29


def test_full_jitter_grows_and_is_bounded() -> None:
    model = endpoint("http://localhost:1/v1", backoff_s=1.0, max_wait_s=8.0)
    from soulkit.models.api.faults import Fault as Found

    for attempts, most in ((1, 1.0), (2, 2.0), (4, 8.0), (20, 8.0)):
        drawn = [model._wait(Found("x"), attempts) for _ in range(400)]
        assert 0 <= min(drawn) < 0.1 * most and 0.9 * most < max(drawn) <= most
    waits = [model._wait(Found("x", wait_s=5.0), 1) for _ in range(100)]
    assert min(waits) >= 5.0 and max(waits) <= 6.0
