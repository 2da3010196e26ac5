"""The breaker as a state machine: no clock, no server, every path by hand."""

from __future__ import annotations

from datetime import UTC, datetime

from soulkit.models.api.breaker import NEVER_ANSWERED_S, Breaker, May

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
    assert circuit.closed and circuit.may(0.0) is May.GO
    for _ in range(3):
        circuit.failed(1.0, "HTTP 500")
    assert not circuit.closed and circuit.may(1.5) is May.WAIT


def test_one_probe_at_a_time_with_pauses_that_double() -> None:
    circuit, went = opened(), []
    for tenth in range(200):
        now = tenth / 10
        if circuit.may(now) is May.PROBE:
            went.append(now)
            assert circuit.may(now) is not May.PROBE
            circuit.failed(now, "no answer", probe=True)
    assert went == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


def test_a_probe_that_is_answered_closes_it() -> None:
    circuit = opened()
    assert circuit.may(1.0) is May.PROBE and circuit.may(1.0) is May.WAIT
    circuit.answered()
    assert circuit.may(1.0) is May.GO
    assert (circuit.failures, circuit.gave_up, circuit.since) == (0, 0, None)


def test_an_answer_to_a_call_from_before_closes_it_too() -> None:
    circuit = opened()
    circuit.answered()
    assert circuit.may(0.0) is May.GO


def test_a_failure_from_before_does_not_postpone_the_probe() -> None:
    circuit = opened()
    circuit.failed(0.9, "no answer within 5 s")
    assert circuit.may(1.0) is May.PROBE
    assert circuit.last == "no answer within 5 s"


def test_an_abandoned_probe_is_taken_by_the_next_call() -> None:
    circuit = opened()
    assert circuit.may(1.0) is May.PROBE
    circuit.abandoned()
    assert circuit.may(1.1) is May.PROBE


def test_down_lets_nobody_wait_but_still_probes() -> None:
    circuit = opened()
    assert circuit.may(9.0) is May.PROBE
    assert (circuit.may(9.9), circuit.may(10.0), circuit.may(99.0)) == (
        May.WAIT,
        May.FAIL,
        May.FAIL,
    )
    assert (circuit.hopeless(9.9), circuit.hopeless(10.0)) == (False, True)
    circuit.failed(99.0, "no answer", probe=True)
    assert circuit.may(99.5) is May.FAIL
    assert circuit.hopeless(99.5) and not circuit.hopeless(102.0), "a probe is due"
    assert circuit.may(102.0) is May.PROBE
    circuit.answered()
    assert circuit.may(102.0) is May.GO and not circuit.hopeless(102.0)


def test_waits_end_at_the_probe_or_when_calls_give_up() -> None:
    circuit = opened()
    assert circuit.wait_s(0.25) == 0.75
    assert circuit.may(1.0) is May.PROBE
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
        "gpt-x at http://h/v1 is down since 14:02:11 UTC (connection refused); 37 calls gave up"
    )
    alone = opened()
    alone.gives_up(1)
    assert alone.story("m").endswith("; 1 call gave up")


def test_busy_is_up_until_nobody_was_served_for_too_long() -> None:
    circuit = breaker()
    for second in range(10):
        circuit.busy(float(second), "HTTP 429")
        assert circuit.may(float(second)) is May.GO
    circuit.busy(10.0, "HTTP 429 slow down")
    assert circuit.may(10.0) is May.FAIL
    circuit.gives_up(1)
    assert circuit.story("m") == "m is down since 14:02:11 UTC (HTTP 429 slow down); 1 call gave up"
    assert circuit.may(11.0) is May.PROBE
    circuit.busy(11.1, "HTTP 429", probe=True)
    assert (circuit.may(11.2), circuit.may(13.2)) == (May.FAIL, May.PROBE)
    circuit.answered()
    assert circuit.may(13.2) is May.GO


def test_one_answer_among_many_429s_keeps_it_up() -> None:
    circuit = breaker()
    for second in range(100):
        circuit.busy(float(second), "HTTP 429")
        if second % 9 == 8:
            circuit.answered()
        assert circuit.may(float(second)) is May.GO


def test_a_probe_that_is_turned_away_shows_that_the_server_is_up() -> None:
    circuit = opened()
    assert circuit.may(1.0) is May.PROBE
    circuit.busy(1.1, "HTTP 429", probe=True)
    assert circuit.may(1.1) is May.GO


def test_a_server_that_has_never_answered_is_given_up_sooner() -> None:
    for has_answered, limit in ((False, NEVER_ANSWERED_S), (True, 120.0)):
        breaker = Breaker(120.0, after=1, pause_s=1000.0, max_pause_s=1000.0, jitter=lambda: 1.0)
        if has_answered:
            breaker.answered()
        breaker.failed(0.0, "refused")
        assert breaker.may(limit - 1) is May.WAIT and not breaker.hopeless(limit - 1)
        assert breaker.may(limit) is May.FAIL and breaker.hopeless(limit)
