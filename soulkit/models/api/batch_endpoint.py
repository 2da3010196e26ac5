"""Calls through a provider's batch API: half the price, replies within a day.

Works like endpoint.py, except that calls are collected until no new ones arrive, sent as one file,
and continue with its replies. An interrupted run loses nothing; see batches.py.

* **Live first.** The first call with each set of parameters is sent live at full price, so that
  refused parameters are found within seconds, not after a day.
* **Retries.** Lines of an expired or failed batch are sent again in the next batch, at most ROUNDS
  times. A cancelled batch is not sent again.
* **Cost.** With a cost limit, the maximum cost of a batch is reserved before it is sent. Calls that
  do not fit wait until the real cost of the others is known.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soulkit.errors import ProviderError
from soulkit.models.api.batch_service import BatchService
from soulkit.models.api.batches import Batches, BatchQueue, BatchReply
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.api.limits import Patience
from soulkit.models.api.replies import BilledReply, CallRequest, Fault, Keep, read_received
from soulkit.models.api.wire import FORMAT, RUNGS, parameters
from soulkit.models.ledger.ledger import LedgerEntry, request_key, request_of
from soulkit.types import Call, Sampling

ROUNDS = 3
"""Maximum number of batches in which one call is sent."""
LIVE_FAILURES = 3
"""Live calls that may fail in a row before no more are sent."""


class BatchEndpoint(Endpoint):
    """An `Endpoint` that sends calls in batches. Takes the same arguments as `Endpoint`."""

    def __init__(self, *, batches: Batches, **arguments: Any) -> None:
        # Only live calls need the preflight check.
        super().__init__(**{**arguments, "preflight": None})
        self._scout = Endpoint(**arguments)
        batches.watch(self._scout.gates)
        self._defaults = self._scout._defaults
        self.price = self.price.by_batch if self.price else None
        self.max_attempts = min(self.max_attempts, ROUNDS)
        self._batches = batches
        self._lore = batches.book.lore_of(self.base_url, self.name)
        self._learn()
        self._queue = BatchQueue(self.name, batches, BatchService(self.access), self._budget)
        self._scouting = asyncio.Lock()
        self._lost: list[str] = []
        """Errors of live calls that failed in a row."""

    async def close(self) -> None:
        """Close the connections. Batches continue at the provider."""
        await self._queue.close()
        await self._scout.close()
        await super().close()

    async def _ask(
        self, messages: list[dict[str, str]], sampling: Sampling, call: Call, keep: Keep
    ) -> LedgerEntry:
        self._queue.begin()
        if not self._queue.holds(self._line_key(messages, sampling, call)):
            entry = await self._ask_live(messages, sampling, call, keep)
            if entry is not None:
                return entry
        return await super()._ask(messages, sampling, call, keep)

    async def _ask_live(
        self, messages: list[dict[str, str]], sampling: Sampling, call: Call, keep: Keep
    ) -> LedgerEntry | None:
        shape = _shape(parameters(sampling, call))
        if shape in self._lore.taken:
            return None
        async with self._scouting:
            if shape in self._lore.taken:
                return None
            if len(self._lost) >= LIVE_FAILURES:
                raise ProviderError(f"no batch was sent: {self._lost[-1]}")
            try:
                entry = await self._scout._ask(messages, sampling, call, keep)
            except ProviderError as error:
                self._lost.append(error.detail)
                raise
            self._lost.clear()
            self._lore.taken.append(shape)
            self._note()
        return entry

    def _note(self) -> None:
        self._lore.refused = sorted(self._scout._refused)
        longest = self._scout._longest
        self._lore.longest = int(longest) if longest < math.inf else None
        self._batches.book.save()
        self._learn()

    def _learn(self) -> None:
        for one in (self, self._scout):
            one._refused |= set(self._lore.refused)
            one._longest = min(one._longest, self._lore.longest or math.inf)

    def _line_key(
        self, messages: list[dict[str, str]], sampling: Sampling, call: Call
    ) -> str:  # fmt: skip
        return request_key(request_of(self.base_url, messages, sampling), self.name, call)

    async def _attempt(
        self, request: CallRequest, tokens: float, attempts: int, patience: Patience
    ) -> BilledReply | Fault:
        request = await self._prepare(self._sessions.get(), request)
        key = self._line_key(request.messages, request.sampling, request.call)
        body = self.access.protocol.body(self.name, request.messages, request.sent)
        started = time.perf_counter()
        reply = await self._queue.ask(key, body, self._cost_limit(request))
        outcome = self._read(request, reply, time.perf_counter() - started)
        self._queue.used(reply)
        return outcome

    def _read(self, request: CallRequest, reply: BatchReply, seconds: float) -> BilledReply | Fault:
        if isinstance(reply.outcome, Fault):
            return reply.outcome
        sent = reply.sent
        limit = sent.get("max_tokens") or sent.get("max_completion_tokens")
        settings = {**request.settings, "max_tokens": limit or request.settings["max_tokens"]}
        outcome = read_received(reply.outcome, settings, sent, self.access.protocol)
        if isinstance(outcome, Fault):
            return replace(outcome, wait_s=None)  # the wait for the next batch is long enough
        as_sent = replace(request, settings=settings, sent=sent)
        return self._reply(*outcome, as_sent, seconds, {"batch": reply.state.batch_id})

    async def _confirm(self) -> None:
        await self._scout._confirm()

    def _wait(self, fault: Fault, attempts: int) -> float:
        return 0.0  # the wait for the next batch is long enough


def _shape(settings: Mapping[str, Any]) -> str:
    """The parameters that decide whether a server accepts a request, apart from its content."""
    form = settings[FORMAT][RUNGS[0]]["name"] if FORMAT in settings else ""
    return "+".join([*sorted(settings), *([form] if form else [])])
