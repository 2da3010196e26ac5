"""Who answers, asked once before a run's first call: everybody at once, each server for itself.

Every endpoint of a run joins; the first call that no ledger answers waits until all of them have
been asked (probe.py). So a judge's wrong key is known before the actor says its first word, and a
run whose replies are all in its ledger asks nobody. A refusal stops the run. In the middle of it a
call that is refused has the question put again: where that is refused as well the run stops, else
it was about that call alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol

from soulkit.models.api.access import Access
from soulkit.models.api.probe import EndpointRefused, Outcome, Refusal, refused, words


class Member(Protocol):
    """Who can be asked."""

    name: str
    access: Access

    async def probe(self) -> Outcome: ...


class RollCall:
    """The endpoints of one run. `say` gets a line on each of them."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._waiting: list[Member] = []
        self._refusal: EndpointRefused | None = None
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def join(self, member: Member) -> None:
        """`member` is asked before the next call of anybody."""
        self._waiting.append(member)

    async def hold(self) -> None:
        """Ask everybody who was not asked yet. Raises EndpointRefused."""
        if self._refusal is None and not self._waiting:
            return
        async with self._lock():
            self._check()
            if not self._waiting:
                return
            members = list(self._waiting)
            outcomes = await asyncio.gather(*(member.probe() for member in members))
            self._waiting = [one for one in self._waiting if one not in members]
            errors = []
            for member, outcome in zip(members, outcomes, strict=True):
                if isinstance(outcome, Refusal):
                    errors.append(refused(outcome, member.name, member.access, before=True))
                else:
                    self.say(words(outcome, member.name, member.access.base_url))
            if errors:
                self._stop(errors)

    async def confirm(self, member: Member) -> None:
        """A call to `member` was refused. Raises EndpointRefused where that is for good."""
        async with self._lock():
            self._check()
            outcome = await member.probe()
            if isinstance(outcome, Refusal):
                self._stop([refused(outcome, member.name, member.access, before=False)])

    def _check(self) -> None:
        if self._refusal is not None:
            raise EndpointRefused(*self._refusal.lines())

    def _stop(self, errors: list[EndpointRefused]) -> NoReturn:
        """Several refusals are one error: each would have been the next start's."""
        lines = [" ".join(dict.fromkeys(parts))
                 for parts in zip(*(error.lines() for error in errors), strict=True)]  # fmt: skip
        self._refusal = EndpointRefused(*lines)
        raise self._refusal

    def _lock(self) -> asyncio.Lock:
        """Of this event loop: runs may have several in turn."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = (loop, asyncio.Lock())
        return self._turn[1]
