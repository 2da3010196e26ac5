"""Whether a server is up, and who may find out: a circuit breaker without a clock of its own.

    closed ── `after` failures in a row, over all calls ──▶ open ── `down_after_s` ──▶ down
       ▲                                                     │                          │
       └────────────── any answer of the server ─────────────┴──────────────────────────┘

* **closed**: everybody may ask.
* **open**: everybody waits, but for one probe at a time, with pauses that double up to
  `max_pause_s`. Whoever waits spends no attempt, so a short outage costs no episode.
* **down**: nobody waits any longer; a call fails at once and says so. A probe may still go when it
  is due, so a server that comes back is found.

A failure is a broken connection, a time-out or a 5xx. Whatever else a server says shows that it is
up. A 429 does too, and has limits of its own (limits.py). But a server that answers every call with
a 429 for `down_after_s` counts as down. Where the 429 states a wait, that takes as long as the
calls wait for rate limits, if that is longer. Callers tell the time and sleep; nothing here does
either.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime
from enum import Enum

AFTER = 8
"""Failures in a row that open it: more than one call has attempts, so that a single call that
cannot be answered does not stop the others."""

NEVER_ANSWERED_S = 30.0
"""Seconds to wait for a server that has never answered anything: more likely a wrong address."""


class May(Enum):
    """What a call may do now."""

    GO = "go"
    PROBE = "probe"
    WAIT = "wait"
    FAIL = "fail"


def _now() -> datetime:
    return datetime.now(UTC)


class Breaker:
    """The state of one server, shared by all calls to it. Times are seconds of one clock.

    Args:
        down_after_s: seconds from opening after which waiting calls give up; NEVER_ANSWERED_S at
            most while the server has not answered anything yet.
        after: failures in a row that open it.
        pause_s: seconds before the first probe.
        max_pause_s: no pause is longer.
        jitter: draws of [0, 1).
        wall: tells the date and time, for messages.
    """

    def __init__(
        self,
        down_after_s: float,
        *,
        after: int = AFTER,
        pause_s: float = 1.0,
        max_pause_s: float = 30.0,
        jitter: Callable[[], float] = random.random,
        wall: Callable[[], datetime] = _now,
    ) -> None:
        self.down_after_s, self.after = down_after_s, after
        self.pause_s, self.max_pause_s = pause_s, max_pause_s
        self._jitter, self._wall = jitter, wall
        self.failures = 0
        """In a row."""
        self.since: datetime | None = None
        """When the first failure of the row was seen."""
        self.last = ""
        """The last failure in words."""
        self.gave_up = 0
        """Calls that failed because the server is down, in this outage."""
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
        """Seconds from opening after which waiting calls give up."""
        return self.down_after_s if self._has_answered else min(self.down_after_s, NEVER_ANSWERED_S)

    @property
    def closed(self) -> bool:
        return self._opened is None

    def may(self, now: float) -> May:
        """What a call that comes at `now` may do; a PROBE is given to one call until it reports."""
        if self._opened is None:
            return May.GO
        if not self.probing and now >= self._probe_at:
            self.probing = True
            return May.PROBE
        return May.FAIL if now >= self._opened + self.give_up_after_s else May.WAIT

    def hopeless(self, now: float) -> bool:
        """Whether a call that comes at `now` would fail."""
        if self._opened is None or now < self._opened + self.give_up_after_s:
            return False
        return self.probing or now < self._probe_at

    def wait_s(self, now: float) -> float:
        """Seconds until a call that has to wait should ask again, unless something happens."""
        if self._opened is None:
            return 0.0
        end = self._opened + self.give_up_after_s
        return max(0.0, (end if self.probing else min(end, self._probe_at)) - now)

    def answered(self) -> None:
        """The server said something: it is up."""
        self.failures, self.since, self.last = 0, None, ""
        self._opened, self._pause, self.probing, self.gave_up = None, self.pause_s, False, 0
        self._busy_since, self._has_answered, self._patience_s = None, True, 0.0

    def failed(self, now: float, why: str, *, probe: bool = False) -> None:
        """A call failed; `probe` when it was the probe."""
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
        """The server turned a call away for the time being; `probe` when it was the probe.
        `patience_s` is how long calls wait for rate limits, where the server states a wait."""
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
        """The probe was cancelled without an answer: another call may probe at once."""
        self.probing = False

    def gives_up(self, line: int) -> None:
        """A call gives up, one of `line` that wait: the first one counts the whole line, so that
        all who waited together tell the same number."""
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
        """What happened to the server called `name`, for the error of whoever gives up."""
        since = f"{self.since:%H:%M:%S} UTC" if self.since else "an unknown time"
        calls = "1 call" if self.gave_up == 1 else f"{self.gave_up} calls"
        patience = (
            f"; calls wait {self._patience_s:g} s for rate limits (--rate-limit-wait)"
            if self._patience_s
            else ""
        )
        return f"{name} is down since {since} ({self.last}{patience}); {calls} gave up"
