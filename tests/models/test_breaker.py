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
    found = breaker()
    for _ in range(3):
        found.failed(at, "connection refused")
    return found


def test_it_opens_after_failures_in_a_row_only() -> None:
    found = breaker()
    for _ in range(5):
        found.failed(0.0, "HTTP 500")
        found.failed(0.0, "HTTP 500")
        found.answered()
    assert found.closed and found.may(0.0) is May.GO
    for _ in range(3):
        found.failed(1.0, "HTTP 500")
    assert not found.closed and found.may(1.5) is May.WAIT


def test_one_probe_at_a_time_with_pauses_that_double() -> None:
    found, went = opened(), []
    for tenth in range(200):
        now = tenth / 10
        if found.may(now) is May.PROBE:
            went.append(now)
            assert found.may(now) is not May.PROBE
            found.failed(now, "no answer", probe=True)
    assert went == [1.0, 3.0, 7.0, 11.0, 15.0, 19.0]


def test_a_probe_that_is_answered_closes_it() -> None:
    found = opened()
    assert found.may(1.0) is May.PROBE and found.may(1.0) is May.WAIT
    found.answered()
    assert found.may(1.0) is May.GO
    assert (found.failures, found.gave_up, found.since) == (0, 0, None)


def test_an_answer_to_a_call_from_before_closes_it_too() -> None:
    found = opened()
    found.answered()
    assert found.may(0.0) is May.GO


def test_a_failure_from_before_does_not_postpone_the_probe() -> None:
    found = opened()
    found.failed(0.9, "no answer within 5 s")
    assert found.may(1.0) is May.PROBE
    assert found.last == "no answer within 5 s"


def test_an_abandoned_probe_is_taken_by_the_next_call() -> None:
    found = opened()
    assert found.may(1.0) is May.PROBE
    found.abandoned()
    assert found.may(1.1) is May.PROBE


def test_down_lets_nobody_wait_but_still_probes() -> None:
    found = opened()
    assert found.may(9.0) is May.PROBE
    assert (found.may(9.9), found.may(10.0), found.may(99.0)) == (May.WAIT, May.FAIL, May.FAIL)
    assert (found.hopeless(9.9), found.hopeless(10.0)) == (False, True)
    found.failed(99.0, "no answer", probe=True)
    assert found.may(99.5) is May.FAIL
    assert found.hopeless(99.5) and not found.hopeless(102.0), "a probe is due"
    assert found.may(102.0) is May.PROBE
    found.answered()
    assert found.may(102.0) is May.GO and not found.hopeless(102.0)


def test_waits_end_at_the_probe_or_at_the_end_of_patience() -> None:
    found = opened()
    assert found.wait_s(0.25) == 0.75
    assert found.may(1.0) is May.PROBE
    assert found.wait_s(4.0) == 6.0
    assert found.wait_s(99.0) == 0.0
    found.answered()
    assert found.wait_s(4.0) == 0.0


def test_everybody_in_line_tells_the_same_number() -> None:
    found = opened()
    counts = []
    for line in (37, 36, 35):
        found.gives_up(line)
        counts.append(found.gave_up)
    assert counts == [37, 37, 37]
    for line in range(34, 0, -1):
        found.gives_up(line)
    assert found.gave_up == 37
    found.gives_up(1)
    assert found.gave_up == 38


def test_the_story() -> None:
    found = opened()
    found.gives_up(37)
    assert found.story("gpt-x at http://h/v1") == (
        "gpt-x at http://h/v1 is down since 14:02:11 UTC (connection refused); 37 calls gave up"
    )
    alone = opened()
    alone.gives_up(1)
    assert alone.story("m").endswith("; 1 call gave up")


def test_busy_is_up_until_nobody_was_served_for_too_long() -> None:
    found = breaker()
    for second in range(10):
        found.busy(float(second), "HTTP 429")
        assert found.may(float(second)) is May.GO
    found.busy(10.0, "HTTP 429 slow down")
    assert found.may(10.0) is May.FAIL
    found.gives_up(1)
    assert found.story("m") == "m is down since 14:02:11 UTC (HTTP 429 slow down); 1 call gave up"
    assert found.may(11.0) is May.PROBE
    found.busy(11.1, "HTTP 429", probe=True)
    assert (found.may(11.2), found.may(13.2)) == (May.FAIL, May.PROBE)
    found.answered()
    assert found.may(13.2) is May.GO


def test_one_answer_among_many_429s_keeps_it_up() -> None:
    found = breaker()
    for second in range(100):
        found.busy(float(second), "HTTP 429")
        if second % 9 == 8:
            found.answered()
        assert found.may(float(second)) is May.GO


def test_a_probe_that_is_turned_away_shows_that_the_server_is_up() -> None:
    found = opened()
    assert found.may(1.0) is May.PROBE
    found.busy(1.1, "HTTP 429", probe=True)
    assert found.may(1.1) is May.GO


def test_a_server_that_has_never_answered_gets_less_patience() -> None:
    for heard, wanted in ((False, NEVER_ANSWERED_S), (True, 120.0)):
        breaker = Breaker(120.0, after=1, pause_s=1000.0, max_pause_s=1000.0, jitter=lambda: 1.0)
        if heard:
            breaker.answered()
        breaker.failed(0.0, "refused")
        assert breaker.may(wanted - 1) is May.WAIT and not breaker.hopeless(wanted - 1)
        assert breaker.may(wanted) is May.FAIL and breaker.hopeless(wanted)
