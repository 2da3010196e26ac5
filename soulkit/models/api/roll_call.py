"""Who answers, asked once before a run's first call: everybody at once, each server for itself.

Every endpoint of a run joins; the first call that no ledger answers waits until all of them have
been asked (probe.py). So a judge's wrong key is known before the actor says its first word, and a
run whose replies are all in its ledger asks nobody. A refusal stops the run. In the middle of it a
call that is refused has the question put again: where that is refused as well the run stops, else
it was about that call alone.

Before the first question, the connections of all endpoints together are compared with the number of
files that this process may open (pool.py). Where they are too many, each endpoint gets fewer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

from soulkit.models.api.access import Access
from soulkit.models.api.pool import file_limits, fitted, lowered_line, open_files
from soulkit.models.api.probe import EndpointRefused, Outcome, Refusal, answer_line, refused

log = logging.getLogger(__name__)
UNLIMITED = (
    "--max-cost cannot hold for {names}: on this machine (loopback) no price is known, and what is "
    "asked there counts nothing; name its price, or 0: --price-in and --price-out for the model "
    "that is measured, else price_in and price_out in --endpoints FILE, or --prices FILE"
)
"""Said before the first call of a run with a cost limit."""


class Member(Protocol):
    """Who can be asked."""

    name: str
    access: Access
    concurrency: int

    @property
    def unlimited(self) -> bool: ...

    async def probe(self) -> Outcome: ...

    def limit_concurrency(self, most: int) -> None: ...


def forget(facts: Mapping[str, Any]) -> None:
    """The default of `note`."""


class RollCall:
    """The endpoints of one run. `say` gets a line on each of them, `remark` every warning about one
    of their servers, once; `note` gets what differs from the settings, for the run's record."""

    def __init__(
        self, say: Callable[[str], None], note: Callable[[Mapping[str, Any]], None] = forget,
        remark: Callable[[str], None] = log.info,
    ) -> None:  # fmt: skip
        self.say, self.note, self._remark = say, note, remark
        self._remarks: set[str] = set()
        self._waiting: list[Member] = []
        self._members: list[Member] = []
        self._files_before: int | None = None
        self._refusal: EndpointRefused | None = None
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None

    def warn(self, remark: str) -> None:
        """Pass on a warning about a server, unless it was passed on before."""
        if remark not in self._remarks:
            self._remarks.add(remark)
            self._remark(remark)

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
            self._members += members
            self._fit()
            outcomes = await asyncio.gather(*(member.probe() for member in members))
            self._waiting = [one for one in self._waiting if one not in members]
            errors = []
            for member, outcome in zip(members, outcomes, strict=True):
                if isinstance(outcome, Refusal):
                    errors.append(refused(outcome, member.name, member.access, before=True))
                else:
                    self.say(answer_line(outcome, member.name, member.access.base_url))
            if errors:
                self._stop(errors)
            if unlimited := [one for one in members if one.unlimited]:
                names = (
                    f"{one.name} at {urlsplit(one.access.base_url).netloc}" for one in unlimited
                )
                self.say(UNLIMITED.format(names=" and ".join(names)))

    def _fit(self) -> None:
        """Lower the concurrency of all members where this process may not open enough files."""
        if self._files_before is None:
            self._files_before = open_files()
        asked, servers = max(one.concurrency for one in self._members), len(self._members)
        used = fitted(asked, servers, self._files_before)
        if used >= asked:
            return
        for member in self._members:
            member.limit_concurrency(used)
        log.warning(lowered_line(asked, used, servers, self._files_before))
        limit = (file_limits() or (0, 0))[0]
        self.note({"concurrency": {"asked": asked, "used": used, "open_files": limit}})

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
