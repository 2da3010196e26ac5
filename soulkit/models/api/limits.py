"""Limits on calls to one server: concurrency, rates, a circuit breaker, and the run's budget.

Calls pass a `CallGate` in order of arrival. A call passes if the server is up (or the call is its
probe), no 429 pause is active, fewer than `concurrency` calls are inside, and the rates per minute
allow it. Each wave of 429s and each outage halves the allowed concurrency; each reply restores a
quarter of a place. The circuit breaker:

    closed ── `after` failures in a row, over all calls ──▶ open ── `down_after_s` ──▶ down
    open: calls wait, with one probe at a time; down: calls fail at once; any reply closes it

Failures are broken connections, timeouts and 5xx; 429s for `down_after_s` also count as down.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from soulkit.errors import ConfigError, UserError

AFTER = 8
"""Failures in a row that open the breaker: more than one call's attempts, so that one call that
always fails does not stop the others."""

NEVER_ANSWERED_S = 30.0
"""Seconds to wait for a server that has never answered; its address is probably wrong."""


class Decision(Enum):
    """What a call may do now."""

    GO = "go"
    PROBE = "probe"
    WAIT = "wait"
    FAIL = "fail"


class Breaker:
    """The state of one server, shared by all its calls. Times are seconds of one clock.

    It opens after `after` failures in a row. Waiting calls give up after `down_after_s` (at most
    NEVER_ANSWERED_S if the server has never answered). Probes start after `pause_s`, and the pause
    doubles up to `max_pause_s`. `jitter` returns values in [0, 1); `wall` returns the date.
    """

    def __init__(
        self,
        down_after_s: float,
        *,
        after: int = AFTER,
        pause_s: float = 1.0,
        max_pause_s: float = 30.0,
        jitter: Callable[[], float] = random.random,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.down_after_s, self.after = down_after_s, after
        self.pause_s, self.max_pause_s = pause_s, max_pause_s
        self._jitter, self._wall = jitter, wall
        self.failures = 0
        """Consecutive failures."""
        self.since: datetime | None = None
        """Time of the first of these failures."""
        self.last = ""
        """Description of the last failure."""
        self.gave_up = 0
        """Calls that gave up in this outage."""
        self._opened: float | None = None
        self._probe_at = 0.0
        self._pause = pause_s
        self._in_line = 0
        self._busy_since: float | None = None
        self._patience_s = 0.0
        self._has_answered = False
        self.probing = False

    @property
    def give_up_after_s(self) -> float:
        """Seconds after opening at which waiting calls give up."""
        return self.down_after_s if self._has_answered else min(self.down_after_s, NEVER_ANSWERED_S)

    @property
    def closed(self) -> bool:
        return self._opened is None

    def may(self, now: float) -> Decision:
        """What a call at time `now` may do; only one call at a time gets PROBE."""
        if self._opened is None:
            return Decision.GO
        if not self.probing and now >= self._probe_at:
            self.probing = True
            return Decision.PROBE
        return Decision.FAIL if now >= self._opened + self.give_up_after_s else Decision.WAIT

    def hopeless(self, now: float) -> bool:
        """Whether a call at time `now` would fail."""
        if self._opened is None or now < self._opened + self.give_up_after_s:
            return False
        return self.probing or now < self._probe_at

    def wait_s(self, now: float) -> float:
        """Seconds until a waiting call should check again, unless the state changes."""
        if self._opened is None:
            return 0.0
        end = self._opened + self.give_up_after_s
        return max(0.0, (end if self.probing else min(end, self._probe_at)) - now)

    def answered(self) -> None:
        """Record a reply: the server is up."""
        self.failures, self.since, self.last = 0, None, ""
        self._opened, self._pause, self.probing, self.gave_up = None, self.pause_s, False, 0
        self._busy_since, self._has_answered, self._patience_s = None, True, 0.0

    def failed(self, now: float, why: str, *, probe: bool = False) -> None:
        """Record a failed call; `probe`: whether it was the probe."""
        self.failures += 1
        self.last, self._patience_s = why, 0.0
        if self.since is None:
            self.since = self._wall()
        if self._opened is None:
            if self.failures >= self.after:
                self._opened = now
                self._probe_at = now + self._next_pause()
        elif probe:
            self.probing = False
            self._probe_at = now + self._next_pause()

    def busy(self, now: float, why: str, *, probe: bool = False, patience_s: float = 0.0) -> None:
        """Record a 429: the server rejected a call for now; `probe`: whether it was the probe.
        `patience_s`: how long calls wait if the server states a wait."""
        first = now if self._busy_since is None else self._busy_since
        since = self.since if self._busy_since is not None else None
        self._patience_s = patience_s
        if now - first < max(self.down_after_s, patience_s):
            self.answered()
            self._busy_since, self.since, self.last = first, since or self._wall(), why
            return
        self._busy_since, self.last = first, why
        self.since = self.since or self._wall()
        if self._opened is None:
            self._opened = now - self.down_after_s
            self._probe_at = now + self._next_pause()
        elif probe:
            self.probing = False
            self._probe_at = now + self._next_pause()

    def abandoned(self) -> None:
        """Record that the probe was cancelled without a reply. Another call may probe at once."""
        self.probing = False

    def gives_up(self, line: int) -> None:
        """Count a call that gives up while `line` calls wait. The first one counts all of them, so
        that they all report the same number."""
        if self.gave_up == 0:
            self.gave_up, self._in_line = line, line - 1
        elif self._in_line > 0:
            self._in_line -= 1
        else:
            self.gave_up += 1

    def _next_pause(self) -> float:
        pause, self._pause = self._pause, min(self.max_pause_s, 2 * self._pause)
        return pause * (0.5 + 0.5 * self._jitter())

    def story(self, name: str) -> str:
        """What happened to the server `name`, for the error message of calls that give up."""
        since = f"{self.since:%H:%M:%S} UTC" if self.since else "an unknown time"
        calls = "1 call" if self.gave_up == 1 else f"{self.gave_up} calls"
        patience = (
            f"; calls wait {self._patience_s:g} s for rate limits (--rate-limit-wait)"
            if self._patience_s
            else ""
        )
        return f"{name} has been down since {since} ({self.last}{patience}); {calls} gave up"


log = logging.getLogger(__name__)

_REGAINED = 0.25
"""Part of a place that each reply restores after the concurrency was halved."""
_SHORTEST_PAUSE_S = 0.05
"""Minimum pause after a rate limit, multiplied by the number of limits that the call has met."""


class Bucket:
    """A token bucket with room for one second's amount, at least 1.

    An amount larger than the bucket waits until it is full and then leaves a debt, so the mean rate
    holds for calls of any size: per minute at most `per_minute` plus one bucket pass (plus one call
    if a single call exceeds the bucket).
    """

    def __init__(self, per_minute: float, now: float = 0.0) -> None:
        self.rate = per_minute / 60.0
        self.size = max(1.0, self.rate)
        self.level = self.size
        self._seen = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` is available."""
        self._refill(now)
        return max(0.0, (min(amount, self.size) - self.level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self.level -= amount

    def give_back(self, amount: float) -> None:
        """Correct an estimate that was too high; a negative amount corrects one that was too
        low."""
        self.level = min(self.size, self.level + amount)

    def _refill(self, now: float) -> None:
        self.level = min(self.size, self.level + self.rate * max(0.0, now - self._seen))
        self._seen = max(self._seen, now)


@dataclass
class SharedLimits:
    """State shared by all calls of an endpoint, across event loops."""

    breaker: Breaker
    requests: Bucket | None = None
    tokens: Bucket | None = None
    pause_until: float = 0.0
    spread_s: float = 0.0
    """Length of the last pause; calls after it are spread over the same length."""

    def rates_wait_s(self, tokens: float, now: float) -> float:
        requests = self.requests.wait_s(1.0, now) if self.requests else 0.0
        return max(requests, self.tokens.wait_s(tokens, now) if self.tokens else 0.0)

    def take(self, tokens: float, now: float) -> None:
        if self.requests:
            self.requests.take(1.0, now)
        if self.tokens:
            self.tokens.take(tokens, now)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A call inside the gate."""

    entered: float
    tokens: float
    probe: bool = False


@dataclass
class Patience:
    """How long one call waits for rate limits that state a wait.

    Time in the queue does not count, since other calls may get replies meanwhile.
    """

    limit_s: float
    waited_s: float = 0.0
    """Sum of all pauses."""
    times: int = 0

    def pause_s(self, stated_s: float) -> float:
        """Seconds to pause after the next 429. Repeated short waits get longer each time."""
        return max(stated_s, _SHORTEST_PAUSE_S * (self.times + 1))

    def lasts(self, stated_s: float) -> bool:
        return self.waited_s + self.pause_s(stated_s) <= self.limit_s

    def spend(self, stated_s: float) -> None:
        self.waited_s += self.pause_s(stated_s)
        self.times += 1

    def words(self, asks: str, stated_s: float) -> str:
        """Why the call gives up; `asks` begins the sentence, as in "rate limit: the server
        asks"."""
        before = f" after {round(self.waited_s, 2):g} s of waiting" if self.times else ""
        return (
            f"{asks} to wait {round(stated_s, 2):g} s{before}, but a call waits at most "
            f"{self.limit_s:g} s in total (--rate-limit-wait)"
        )


class ServerDown(Exception):
    """The server is down and the call gave up; the text says since when and why."""


class CallGate:
    """Admits the calls of one event loop to one endpoint, at most `concurrency` at a time.
    `traffic` is shared with the gates of other event loops."""

    def __init__(
        self,
        name: str,
        traffic: SharedLimits,
        concurrency: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.traffic = name, traffic
        self.concurrency, self.clock = concurrency, clock
        self.room = float(concurrency)
        self.inside = 0
        self.waiting = 0
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        self._jitter = random.Random()
        self._halved = float("-inf")

    def limit(self, concurrency: int) -> None:
        """Change the maximum number of calls inside."""
        self.concurrency, self.room = concurrency, min(self.room, float(concurrency))

    async def enter(self, tokens: float = 0.0) -> Ticket:
        """Wait until a call with this token estimate may start. Raises ServerDown."""
        self.waiting += 1
        try:
            async with self._turn:
                return await self._first_in_line(tokens)
        finally:
            self.waiting -= 1

    async def _first_in_line(self, tokens: float) -> Ticket:
        breaker = self.traffic.breaker
        await self._room(tokens)
        await self._gap()
        await self._room(tokens)
        while (may := breaker.may(self.clock())) is Decision.WAIT:
            await self._sleep(breaker.wait_s(self.clock()))
        if may is Decision.FAIL:
            raise self._gives_up()
        now = self.clock()
        self.traffic.take(tokens, now)
        self.inside += 1
        return Ticket(now, tokens, may is Decision.PROBE)

    async def _room(self, tokens: float) -> None:
        while (wait := self._room_wait_s(tokens)) != 0.0:
            await self._pause(wait)

    def _room_wait_s(self, tokens: float) -> float | None:
        """Seconds to wait for a place, a pause and the rates; None: until a call leaves."""
        if self.inside >= max(1, int(self.room)):
            return None
        now = self.clock()
        pause = self.traffic.pause_until - now
        return max(0.0, pause, self.traffic.rates_wait_s(tokens, now))

    async def _gap(self) -> None:
        spread, now = self.traffic.spread_s, self.clock()
        if now - self.traffic.pause_until >= spread:
            return
        end = now + self._jitter.uniform(0.0, min(spread, 2 * spread / max(1.0, self.room)))
        while (left := end - self.clock()) > 0:
            await self._pause(left)

    async def _pause(self, seconds: float | None) -> None:
        """Sleep until something changes. Raises ServerDown if the server is given up."""
        if self.traffic.breaker.hopeless(self.clock()):
            raise self._gives_up()
        await self._sleep(seconds)

    def _gives_up(self) -> ServerDown:
        self.traffic.breaker.gives_up(self.waiting)
        return ServerDown(self.traffic.breaker.story(self.name))

    async def _sleep(self, seconds: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    # -- leaving -----------------------------------------------------------------------------------

    def answered(self, ticket: Ticket, used: float | None) -> None:
        """Record a reply; `used` is its token count, None if unknown."""
        self._is_up()
        self.room = min(float(self.concurrency), self.room + _REGAINED)
        if used is not None:
            self._correct(ticket.tokens - used)
        self._left()

    def refused(self, ticket: Ticket) -> None:
        """Record that the server is up but rejected this call, which used no tokens."""
        self._is_up()
        self._correct(ticket.tokens)
        self._left()

    def busy(
        self, ticket: Ticket, pause_s: float, why: str = "HTTP 429", patience_s: float = 0.0
    ) -> None:
        """Record that the server asks all calls to wait; `patience_s` as in `Breaker.busy`."""
        now = self.clock()
        self.traffic.breaker.busy(now, why, probe=ticket.probe, patience_s=patience_s)
        self._hold_back(ticket, now, pause_s)

    def unasked(self, ticket: Ticket, pause_s: float) -> None:
        """Record that this machine could not send the request; the server's state is unchanged."""
        if ticket.probe:
            self.traffic.breaker.abandoned()
        self._hold_back(ticket, self.clock(), pause_s)

    def _hold_back(self, ticket: Ticket, now: float, pause_s: float) -> None:
        self._correct(ticket.tokens)
        if now + pause_s > self.traffic.pause_until:
            self.traffic.pause_until, self.traffic.spread_s = now + pause_s, pause_s
        if ticket.entered >= self._halved:  # calls that started earlier are the same wave
            self._halve(now)
        self._left()

    def failed(self, ticket: Ticket, why: str) -> None:
        """Record a broken connection, a timeout or a failure of the server. The call's tokens may
        have been used, so they are not given back."""
        now, breaker = self.clock(), self.traffic.breaker
        was_closed = breaker.closed
        breaker.failed(now, why, probe=ticket.probe)
        if was_closed and not breaker.closed:
            log.warning(
                "%s does not answer (%s): calls wait for it for up to %g s.",
                self.name, why, breaker.give_up_after_s,
            )  # fmt: skip
            self._halve(now)  # too many calls may be the cause
        self._left()

    def cancelled(self, ticket: Ticket) -> None:
        """Record that the caller was cancelled; the server's state is unchanged."""
        if ticket.probe:
            self.traffic.breaker.abandoned()
        self._left()

    def _is_up(self) -> None:
        if not self.traffic.breaker.closed:
            log.warning("%s answers again.", self.name)
        self.traffic.breaker.answered()

    def _halve(self, now: float) -> None:
        self.room, self._halved = max(1.0, self.room / 2), now

    def _correct(self, tokens: float) -> None:
        if self.traffic.tokens:
            self.traffic.tokens.give_back(tokens)

    def _left(self) -> None:
        self.inside -= 1
        self._changed.set()


def bucket(per_minute: float | None) -> Bucket | None:
    """A bucket of `per_minute`; None without a limit."""
    return None if per_minute is None else Bucket(per_minute, time.monotonic())


class BudgetSpent(UserError):
    """The cost limit is reached: no further requests are sent."""


class Budget:
    """The cost limit in US dollars and the amount spent. `spent` starts at the total of the run's
    ledger. ConfigError unless `max_cost` is above 0."""

    def __init__(self, max_cost: float, spent: float = 0.0) -> None:
        if not max_cost > 0:
            raise ConfigError(
                f"The cost limit is {max_cost} US dollars, which allows no request.",
                "The run compares its cost with this limit before each request.",
                "Set --max-cost to an amount above 0, or remove it.",
            )
        self.max_cost = max_cost
        self._spent, self._reserved, self._reservations = spent, 0.0, 0
        self._lock = threading.Lock()

    @property
    def spent(self) -> float:
        return self._spent

    @property
    def reserved(self) -> float:
        """Maximum cost of the batches under way."""
        return self._reserved

    def reserve(self, cost: float, *, sent: bool = False) -> bool:
        """Reserve `cost` until `release` if it fits into the remaining budget, and return whether
        it did. The cost of a request that was already `sent` is always reserved."""
        with self._lock:
            fits = sent or self._spent + self._reserved + cost <= self.max_cost
            if fits:
                self._reserved, self._reservations = self._reserved + cost, self._reservations + 1
        return fits

    def release(self, cost: float) -> None:
        """End a reservation. The amount spent is reported with `add`."""
        with self._lock:
            self._reservations = max(0, self._reservations - 1)
            # With none left, set 0 exactly: rounding errors would remain.
            self._reserved = max(0.0, self._reserved - cost) if self._reservations else 0.0

    @property
    def exhausted(self) -> bool:
        return self._spent >= self.max_cost

    def check(self) -> None:
        """Raise BudgetSpent if the budget is used up."""
        if self.exhausted:
            raise BudgetSpent(
                f"The run has spent {self._spent:.4f} of at most {self.max_cost:g} US dollars.",
                "No further requests are sent; replies received so far are in the ledger.",
                "Run the same command with a larger --max-cost: finished work is not repeated.",
            )

    def add(self, cost: float) -> None:
        """Add the cost of a reply."""
        with self._lock:
            self._spent += cost

    def __repr__(self) -> str:
        return f"Budget(max_cost={self.max_cost}, spent={self._spent:.6f})"
