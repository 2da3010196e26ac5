"""The gate of an endpoint: how many calls go at once, how fast, and what happens when it is busy.

Calls pass one after the other, in the order in which they came; only the first of them waits for a
condition, the others wait for their turn, so a crowd costs no more than a queue. To pass, a call
needs all of

* **the server** (breaker.py): up, or the call is the probe;
* **no pause**: a 429 stops all calls for as long as the server asks. After it the calls leave with
  random gaps, spread over about as long again, so that the crowd does not come back as one. One
  call waits for rate limits only so long in all (`Patience`);
* **room**: at most `concurrency` calls are inside. Each wave of 429s and each outage halves the
  room, each answer gives a quarter of a place back: a server that takes less than it is asked for
  finds its measure before the attempts of a call are used up;
* **the rates**: requests and tokens per minute. A call takes its estimate of tokens beforehand and
  is corrected by the real usage afterwards.

The rates have buckets of their own: aiolimiter (MIT, kept up) cannot give capacity back, allows a
whole minute's worth in one burst, refuses an amount above it and belongs to one event loop, whereas
an endpoint serves several in turn.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from soulkit.errors import ConfigError
from soulkit.models.api.breaker import Breaker, May

log = logging.getLogger(__name__)

_REGAINED = 0.25
"""Places that an answer gives back after the room was halved: a quarter more with every wave."""
_SHORTEST_PAUSE_S = 0.05
"""Times the number of rate limits that a call met: the least pause after one that states less."""


class Bucket:
    """An allowance that refills evenly; it holds a second's worth, and at least one.

    Whatever is larger than the bucket waits until it is full and leaves a debt, so the mean rate
    holds for calls of any size: in any minute at most `per_minute` and one bucket pass (and one
    call more where a single call exceeds the bucket).
    """

    def __init__(self, per_minute: float, now: float = 0.0) -> None:
        self.rate = per_minute / 60.0
        self.size = max(1.0, self.rate)
        self.level = self.size
        self._seen = now

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken."""
        self._refill(now)
        return max(0.0, (min(amount, self.size) - self.level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        self._refill(now)
        self.level -= amount

    def give_back(self, amount: float) -> None:
        """Correct an estimate; a negative amount takes what the estimate left out."""
        self.level = min(self.size, self.level + amount)

    def _refill(self, now: float) -> None:
        self.level = min(self.size, self.level + self.rate * max(0.0, now - self._seen))
        self._seen = max(self._seen, now)


@dataclass
class Traffic:
    """What the calls of an endpoint share, whichever event loop they run in."""

    breaker: Breaker
    requests: Bucket | None = None
    tokens: Bucket | None = None
    pause_until: float = 0.0
    spread_s: float = 0.0
    """Length of the last pause: the calls after it are spread over as long again."""

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
    """One call inside the gate."""

    entered: float
    tokens: float
    probe: bool = False


@dataclass
class Patience:
    """How long one call waits for rate limits that state their wait.

    Time in the queue does not count: other calls may be answered meanwhile.
    """

    limit_s: float
    waited_s: float = 0.0
    """The sum of the pauses."""
    times: int = 0

    def pause_s(self, stated_s: float) -> float:
        """Seconds to pause after the next 429. A call that is told again and again to wait for
        a moment waits a little longer each time."""
        return max(stated_s, _SHORTEST_PAUSE_S * (self.times + 1))

    def lasts(self, stated_s: float) -> bool:
        return self.waited_s + self.pause_s(stated_s) <= self.limit_s

    def spend(self, stated_s: float) -> None:
        self.waited_s += self.pause_s(stated_s)
        self.times += 1

    def words(self, asks: str, stated_s: float) -> str:
        """Why the call gives up: `asks` to wait for longer."""
        before = f" after {round(self.waited_s, 2):g} s of waiting" if self.times else ""
        return (
            f"{asks} to wait {round(stated_s, 2):g} s{before}, and a call waits {self.limit_s:g} s "
            "in all (--rate-limit-wait)"
        )


class Down(Exception):
    """The server is down and the call gave up; the text says since when and why."""


class CallGate:
    """The calls of one event loop to one endpoint: `enter`, ask the server, `leave`.

    Args:
        name: what the server is called in messages.
        traffic: shared with the gates of other event loops.
        concurrency: calls inside at most.
        clock: seconds; monotonic.
    """

    def __init__(
        self,
        name: str,
        traffic: Traffic,
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
        """Let at most so many calls inside from now on."""
        self.concurrency, self.room = concurrency, min(self.room, float(concurrency))

    async def enter(self, tokens: float = 0.0) -> Ticket:
        """Wait until a call with this estimate of tokens may go. Raises Down."""
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
        while (may := breaker.may(self.clock())) is May.WAIT:
            await self._sleep(breaker.wait_s(self.clock()))
        if may is May.FAIL:
            raise self._gives_up()
        now = self.clock()
        self.traffic.take(tokens, now)
        self.inside += 1
        return Ticket(now, tokens, may is May.PROBE)

    async def _room(self, tokens: float) -> None:
        while (wait := self._room_wait_s(tokens)) != 0.0:
            await self._pause(wait)

    def _room_wait_s(self, tokens: float) -> float | None:
        """Seconds to wait for room, a pause and the rates; None: until somebody leaves."""
        if self.inside >= max(1, int(self.room)):
            return None
        now = self.clock()
        pause = self.traffic.pause_until - now
        return max(0.0, pause, self.traffic.rates_wait_s(tokens, now))

    async def _gap(self) -> None:
        """After a pause, a random while before the next one goes."""
        spread, now = self.traffic.spread_s, self.clock()
        if now - self.traffic.pause_until >= spread:
            return
        end = now + self._jitter.uniform(0.0, min(spread, 2 * spread / max(1.0, self.room)))
        while (left := end - self.clock()) > 0:
            await self._pause(left)

    async def _pause(self, seconds: float | None) -> None:
        """Sleep until something happens; nobody waits for room at a server that is given up."""
        if self.traffic.breaker.hopeless(self.clock()):
            raise self._gives_up()
        await self._sleep(seconds)

    def _gives_up(self) -> Down:
        self.traffic.breaker.gives_up(self.waiting)
        return Down(self.traffic.breaker.story(self.name))

    async def _sleep(self, seconds: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    # -- leaving -----------------------------------------------------------------------------------

    def answered(self, ticket: Ticket, used: float | None) -> None:
        """The server gave an answer; `used` are its tokens, None when it did not say."""
        self._is_up()
        self.room = min(float(self.concurrency), self.room + _REGAINED)
        if used is not None:
            self._correct(ticket.tokens - used)
        self._left()

    def refused(self, ticket: Ticket) -> None:
        """The server is up and did no work for this call."""
        self._is_up()
        self._correct(ticket.tokens)
        self._left()

    def busy(
        self, ticket: Ticket, pause_s: float, why: str = "HTTP 429", patience_s: float = 0.0
    ) -> None:
        """The server asks everybody to wait; `patience_s` as in `Breaker.busy`."""
        now = self.clock()
        self.traffic.breaker.busy(now, why, probe=ticket.probe, patience_s=patience_s)
        self._hold_back(ticket, now, pause_s)

    def unasked(self, ticket: Ticket, pause_s: float) -> None:
        """This machine could not send the request; nothing is known about the server."""
        if ticket.probe:
            self.traffic.breaker.abandoned()
        self._hold_back(ticket, self.clock(), pause_s)

    def _hold_back(self, ticket: Ticket, now: float, pause_s: float) -> None:
        """Everybody pauses, and fewer go at once after it."""
        self._correct(ticket.tokens)
        if now + pause_s > self.traffic.pause_until:
            self.traffic.pause_until, self.traffic.spread_s = now + pause_s, pause_s
        if ticket.entered >= self._halved:  # calls that went before it do not count again
            self._halve(now)
        self._left()

    def failed(self, ticket: Ticket, why: str) -> None:
        """The connection broke, nothing came in time, or the server failed. Its tokens may be
        spent, so they are not given back."""
        now, breaker = self.clock(), self.traffic.breaker
        was_closed = breaker.closed
        breaker.failed(now, why, probe=ticket.probe)
        if was_closed and not breaker.closed:
            log.warning(
                "%s does not answer (%s): calls wait for it, at most %g s.",
                self.name, why, breaker.give_up_after_s,
            )  # fmt: skip
            self._halve(now)  # it may be the crowd that it cannot bear
        self._left()

    def cancelled(self, ticket: Ticket) -> None:
        """The caller went away; nothing is known about the server."""
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
    """A bucket of so many a minute, None without a limit."""
    return None if per_minute is None else Bucket(per_minute, time.monotonic())


def check_numbers(
    positive: Mapping[str, float | None],
    at_least_1: Mapping[str, int],
    not_negative: Mapping[str, float],
) -> None:
    """ConfigError for a setting of an endpoint that is out of range."""
    # Written so that NaN breaks every rule.
    wrong = [f"{n} must be above 0" for n, v in positive.items() if v is not None and not v > 0]
    wrong += [f"{n} must be at least 1" for n, v in at_least_1.items() if not v >= 1]
    wrong += [f"{n} must not be negative" for n, v in not_negative.items() if not v >= 0]
    if wrong:
        raise ConfigError(
            f"An endpoint setting is out of range: {wrong[0]}.",
            "With such a value no request could be sent, or retries would never end.",
            "Set it to a value in range, or leave it out to use the default.",
        )
