"""The breaker as a state machine: no clock, no server, every path by hand.

Rates and the gate: buckets by hand, the gate in an event loop with real, short times.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.models.api.limits import (
    NEVER_ANSWERED_S,
    Breaker,
    Bucket,
    CallGate,
    Decision,
    ServerDown,
    SharedLimits,
    Ticket,
)

NOON = datetime(2026, 1, 2, 14, 2, 11, tzinfo=UTC)


def breaker(after: int = 3, down_after_s: float = 10.0) -> Breaker:
    """Pauses of exactly 1, 2, 4, 4, 4 … seconds."""
    return Breaker(
        down_after_s, after=after, pause_s=1.0, max_pause_s=4.0,
        jitter=lambda: 1.0, wall=lambda: NOON,
    )  # fmt: skip


def opened(at: float = 0.0) -> Breaker:
    circuit = breaker()
    for _ in range(3):
        circuit.failed(at, "connection refused")
    return circuit


def test_it_opens_after_failures_in_a_row_only() -> None:
    circuit = breaker()
    for _ in range(5):
        circuit.failed(0.0, "HTTP 500")
        circuit.failed(0.0, "HTTP 500")
        circuit.answered()
    assert circuit.closed and circuit.may(0.0) is Decision.GO
    for _ in range(3):
        circuit.failed(1.0, "HTTP 500")
    assert not circuit.closed and circuit.may(1.5) is Decision.WAIT


def test_one_probe_at_a_time_with_pauses_that_double() -> None:
    circuit, went = opened(), []
    for tenth in range(200):
        now = tenth / 10
        if circuit.may(now) is Decision.PROBE:
            went.append(now)
            assert circuit.may(now) is not Decision.PROBE
            circuit.failed(now, "no answer", probe=True)
    assert went == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


def test_a_probe_that_is_answered_closes_it() -> None:
    circuit = opened()
    assert circuit.may(1.0) is Decision.PROBE and circuit.may(1.0) is Decision.WAIT
    circuit.answered()
    assert circuit.may(1.0) is Decision.GO
    assert (circuit.failures, circuit.gave_up, circuit.since) == (0, 0, None)


def test_an_answer_to_a_call_from_before_closes_it_too() -> None:
    circuit = opened()
    circuit.answered()
    assert circuit.may(0.0) is Decision.GO


def test_a_failure_from_before_does_not_postpone_the_probe() -> None:
    circuit = opened()
    circuit.failed(0.9, "no answer within 5 s")
    assert circuit.may(1.0) is Decision.PROBE
    assert circuit.last == "no answer within 5 s"


def test_an_abandoned_probe_is_taken_by_the_next_call() -> None:
    circuit = opened()
    assert circuit.may(1.0) is Decision.PROBE
    circuit.abandoned()
    assert circuit.may(1.1) is Decision.PROBE


def test_down_lets_nobody_wait_but_still_probes() -> None:
    circuit = opened()
    assert circuit.may(9.0) is Decision.PROBE
    assert (circuit.may(9.9), circuit.may(10.0), circuit.may(99.0)) == (
        Decision.WAIT,
        Decision.FAIL,
        Decision.FAIL,
    )
    assert (circuit.hopeless(9.9), circuit.hopeless(10.0)) == (False, True)
    circuit.failed(99.0, "no answer", probe=True)
    assert circuit.may(99.5) is Decision.FAIL
    assert circuit.hopeless(99.5) and not circuit.hopeless(102.0), "a probe is due"
    assert circuit.may(102.0) is Decision.PROBE
    circuit.answered()
    assert circuit.may(102.0) is Decision.GO and not circuit.hopeless(102.0)


def test_waits_end_at_the_probe_or_when_calls_give_up() -> None:
    circuit = opened()
    assert circuit.wait_s(0.25) == 0.75
    assert circuit.may(1.0) is Decision.PROBE
    assert circuit.wait_s(4.0) == 6.0
    assert circuit.wait_s(99.0) == 0.0
    circuit.answered()
    assert circuit.wait_s(4.0) == 0.0


def test_everybody_in_line_tells_the_same_number() -> None:
    circuit = opened()
    counts = []
    for line in (37, 36, 35):
        circuit.gives_up(line)
        counts.append(circuit.gave_up)
    assert counts == [37, 37, 37]
    for line in range(34, 0, -1):
        circuit.gives_up(line)
    assert circuit.gave_up == 37
    circuit.gives_up(1)
    assert circuit.gave_up == 38


def test_the_story() -> None:
    circuit = opened()
    circuit.gives_up(37)
    assert circuit.story("gpt-x at http://h/v1") == (
        "gpt-x at http://h/v1 has been down since 14:02:11 UTC (connection refused); "
        "37 calls gave up"
    )
    alone = opened()
    alone.gives_up(1)
    assert alone.story("m").endswith("; 1 call gave up")


def test_busy_is_up_until_nobody_was_served_for_too_long() -> None:
    circuit = breaker()
    for second in range(10):
        circuit.busy(float(second), "HTTP 429")
        assert circuit.may(float(second)) is Decision.GO
    circuit.busy(10.0, "HTTP 429 slow down")
    assert circuit.may(10.0) is Decision.FAIL
    circuit.gives_up(1)
    assert (
        circuit.story("m")
        == "m has been down since 14:02:11 UTC (HTTP 429 slow down); 1 call gave up"
    )
    assert circuit.may(11.0) is Decision.PROBE
    circuit.busy(11.1, "HTTP 429", probe=True)
    assert (circuit.may(11.2), circuit.may(13.2)) == (Decision.FAIL, Decision.PROBE)
    circuit.answered()
    assert circuit.may(13.2) is Decision.GO


def test_one_answer_among_many_429s_keeps_it_up() -> None:
    circuit = breaker()
    for second in range(100):
        circuit.busy(float(second), "HTTP 429")
        if second % 9 == 8:
            circuit.answered()
        assert circuit.may(float(second)) is Decision.GO


def test_a_probe_that_is_turned_away_shows_that_the_server_is_up() -> None:
    circuit = opened()
    assert circuit.may(1.0) is Decision.PROBE
    circuit.busy(1.1, "HTTP 429", probe=True)
    assert circuit.may(1.1) is Decision.GO


def test_a_server_that_has_never_answered_is_given_up_sooner() -> None:
    for has_answered, limit in ((False, NEVER_ANSWERED_S), (True, 120.0)):
        breaker = Breaker(120.0, after=1, pause_s=1000.0, max_pause_s=1000.0, jitter=lambda: 1.0)
        if has_answered:
            breaker.answered()
        breaker.failed(0.0, "refused")
        assert breaker.may(limit - 1) is Decision.WAIT and not breaker.hopeless(limit - 1)
        assert breaker.may(limit) is Decision.FAIL and breaker.hopeless(limit)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def make_gate(concurrency: int = 4, **shared: Any) -> CallGate:
    breaker = Breaker(shared.pop("down_after_s", 5.0), after=3, pause_s=0.05, jitter=lambda: 0.0)
    return CallGate("m", SharedLimits(breaker, **shared), concurrency)


# -- buckets ---------------------------------------------------------------------------------------


def test_a_bucket_holds_a_second_and_at_least_one() -> None:
    assert Bucket(600).size == 10
    assert Bucket(6).size == 1


def test_a_bucket_refills_evenly() -> None:
    bucket = Bucket(60)
    assert bucket.wait_s(1, 0.0) == 0
    bucket.take(1, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 0.75) == pytest.approx(0.25)
    assert bucket.wait_s(1, 500.0) == 0
    assert bucket.level == bucket.size


def test_what_is_larger_than_the_bucket_leaves_a_debt() -> None:
    bucket = Bucket(600)  # ten a second
    assert bucket.wait_s(50, 0.0) == 0
    bucket.take(50, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(4.1)


def test_estimates_are_corrected_both_ways() -> None:
    bucket = Bucket(600)
    bucket.take(50, 0.0)
    bucket.give_back(45)
    assert bucket.wait_s(5, 0.0) == 0
    bucket.give_back(-25)
    assert bucket.wait_s(1, 0.0) == pytest.approx(2.1)
    bucket.give_back(1_000)
    assert bucket.level == bucket.size


def test_time_that_runs_backwards_adds_nothing() -> None:
    bucket = Bucket(60, now=100.0)
    bucket.take(1, 100.0)
    assert bucket.wait_s(1, 90.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 100.5) == pytest.approx(0.5)


@given(
    st.integers(1, 6000),
    st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 50)), min_size=1, max_size=60),
)
def test_no_minute_takes_more_than_the_rate_and_a_bucket(
    per_minute: int, calls: list[tuple[float, float]]
) -> None:
    bucket, now, taken = Bucket(per_minute), 0.0, []
    for gap, amount in calls:
        now += gap
        now += bucket.wait_s(amount, now) + 1e-6
        bucket.take(amount, now)
        taken.append((now, amount))
    for start, _ in taken:
        inside = [amount for at, amount in taken if start <= at < start + 60]
        assert sum(inside[:-1]) <= per_minute + bucket.size + 0.01


# -- the gate --------------------------------------------------------------------------------------


def test_calls_enter_in_order_and_no_more_than_there_is_room() -> None:
    async def scene() -> tuple[list[int], int]:
        gate, order, most = make_gate(2), [], 0

        async def call(number: int) -> None:
            nonlocal most
            ticket = await gate.enter()
            order.append(number)
            most = max(most, gate.inside)
            await asyncio.sleep(0.001)
            gate.answered(ticket, None)

        await asyncio.gather(*(call(n) for n in range(30)))
        assert (gate.inside, gate.waiting) == (0, 0)
        return order, most

    order, most = run(scene())
    assert order == list(range(30))
    assert most == 2


def test_tokens_that_were_not_used_come_back_at_once() -> None:
    async def scene() -> float:
        gate = make_gate(100, tokens=Bucket(6000, time.monotonic()))  # 100 a second
        first = await gate.enter(1000)  # ten seconds' worth
        second = asyncio.create_task(gate.enter(10))
        await asyncio.sleep(0.05)
        assert not second.done()
        started = time.perf_counter()
        gate.answered(first, 20)
        gate.answered(await second, 10)
        return time.perf_counter() - started

    assert run(scene()) < 1


def test_tokens_are_given_back_by_a_refusal_and_not_by_a_failure() -> None:
    async def scene() -> tuple[float, float]:
        gate = make_gate(tokens=Bucket(6000, time.monotonic()))
        assert gate.traffic.tokens is not None
        gate.refused(await gate.enter(1000))
        after_refusal = gate.traffic.tokens.level
        gate.failed(await gate.enter(1000), "HTTP 500")
        return after_refusal, gate.traffic.tokens.level

    refused, failed = run(scene())
    assert refused == pytest.approx(100, abs=5)
    assert failed == pytest.approx(-900, abs=90)


def test_a_busy_server_stops_everybody_and_they_come_back_one_by_one() -> None:
    async def scene() -> list[float]:
        gate = make_gate(32)
        started = time.perf_counter()
        gate.busy(await gate.enter(), 0.3)
        came = []

        async def call() -> None:
            ticket = await gate.enter()
            came.append(time.perf_counter() - started)
            gate.answered(ticket, None)

        await asyncio.gather(*(call() for _ in range(20)))
        return came

    came = run(scene())
    assert min(came) >= 0.3
    assert max(came) - min(came) > 0.05, "the crowd came back as one"
    assert max(came) < 3


def test_room_is_halved_once_a_wave_and_regained() -> None:
    async def scene() -> tuple[float, float, float]:
        gate = make_gate(16)
        wave = [await gate.enter() for _ in range(16)]
        for ticket in wave:
            gate.busy(ticket, 0.0)
        halved = gate.room
        gate.busy(await gate.enter(), 0.0)
        quarter = gate.room
        for _ in range(60):
            gate.answered(await gate.enter(), None)
        return halved, quarter, gate.room

    assert run(scene()) == (8, 4, 16)


def test_an_open_breaker_lets_calls_wait_until_a_probe_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> int:
        gate, probes = make_gate(64), 0
        for _ in range(3):
            gate.failed(await gate.enter(), "connection refused")

        async def call() -> None:
            nonlocal probes
            ticket = await gate.enter()
            if ticket.probe:
                probes += 1
                await asyncio.sleep(0.05)
                if probes < 3:
                    gate.failed(ticket, "connection refused")
                    return
            gate.answered(ticket, None)

        await asyncio.gather(*(call() for _ in range(40)))
        assert (gate.inside, gate.waiting) == (0, 0)
        return probes

    assert run(scene()) == 3
    assert [record.message for record in caplog.records] == [
        "m does not answer (connection refused): calls wait for it for up to 5 s.",
        "m answers again.",
    ]


def test_when_patience_ends_everybody_fails_at_once_with_one_story() -> None:
    async def scene() -> tuple[list[str], float]:
        gate = make_gate(64, down_after_s=0.4)
        for _ in range(3):
            gate.failed(await gate.enter(), "connection refused")
        started = time.perf_counter()

        async def call() -> str:
            try:
                ticket: Ticket = await gate.enter()
            except ServerDown as down:
                return str(down)
            await asyncio.sleep(30 if ticket.probe else 0)
            return "asked"

        calls = [asyncio.create_task(call()) for _ in range(40)]
        done, left = await asyncio.wait(calls, timeout=5, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        done, left = {c for c in calls if c.done()}, {c for c in calls if not c.done()}
        took = time.perf_counter() - started
        for one in left:
            one.cancel()
        assert len(left) == 1, "only the probe is under way"
        return [one.result() for one in done], took

    stories, took = run(scene())
    assert 0.3 < took < 3
    assert len(stories) == 39
    assert len(set(stories)) == 1
    assert stories[0].startswith("m has been down since ")
    assert stories[0].endswith("(connection refused); 39 calls gave up")


def test_nobody_sits_out_a_pause_of_a_server_that_is_given_up() -> None:
    async def scene() -> tuple[list[str], float]:
        gate = make_gate(8, down_after_s=0.2)
        first, second = await gate.enter(), await gate.enter()
        gate.busy(first, 30.0)
        started = time.perf_counter()

        async def call() -> str:
            try:
                await gate.enter()
            except ServerDown as down:
                return str(down)
            return "asked"

        calls = [asyncio.create_task(call()) for _ in range(20)]
        await asyncio.sleep(0.25)
        gate.busy(second, 30.0, "HTTP 429 slow down")
        return await asyncio.gather(*calls), time.perf_counter() - started

    stories, took = run(scene())
    assert took < 2
    assert len(set(stories)) == 1
    assert stories[0].endswith("(HTTP 429 slow down); 20 calls gave up")


def test_a_cancelled_call_leaves_no_trace() -> None:
    async def scene() -> None:
        gate = make_gate(1)
        held = await gate.enter()
        waiting = [asyncio.create_task(gate.enter()) for _ in range(5)]
        await asyncio.sleep(0.01)
        for one in waiting[:4]:
            one.cancel()
        await asyncio.sleep(0.01)
        gate.cancelled(held)
        gate.answered(await waiting[4], None)
        assert (gate.inside, gate.waiting) == (0, 0)

    run(scene())


def test_a_cancelled_probe_is_replaced() -> None:
    async def scene() -> None:
        gate = make_gate(8)
        for _ in range(3):
            gate.failed(await gate.enter(), "no answer")
        probe = await gate.enter()
        assert probe.probe
        other = asyncio.create_task(gate.enter())
        await asyncio.sleep(0.05)
        assert not other.done()
        gate.cancelled(probe)
        assert (await other).probe

    run(scene())


def test_the_warning_tells_how_long_calls_really_wait(caplog: pytest.LogCaptureFixture) -> None:
    """A server that has never answered has less time than one that has."""

    async def scene() -> None:
        gate = make_gate(8, down_after_s=120.0)
        for _ in range(3):
            gate.failed(await gate.enter(), "connection refused")

    run(scene())
    assert "up to 30 s" in caplog.text
