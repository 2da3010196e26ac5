"""A model on any OpenAI-compatible server: OpenAI, vLLM, a router, a test server.

    ledger lookup ── hit ──▶ completion
          └─ miss ──▶ gate (limits.py) ──▶ request, with retries ──▶ ledger ──▶ completion

A refused sampling parameter is no longer sent and is listed in `Completion.dropped`. If the
requested reply is too long for the server, a shorter one is requested. The seed sent is derived
from `Sampling.seed` and the `Call`, so that rollouts of one example differ. An error text never
becomes a completion. Paid replies are awaited and kept even if the calls are cancelled. Clients
belong to one event loop; an endpoint may be used from several.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from soulkit.errors import ContextOverflow, ProviderError
from soulkit.models.api.addresses import is_loopback, open_access
from soulkit.models.api.limits import (
    Breaker,
    Budget,
    CallGate,
    Patience,
    ServerDown,
    SharedLimits,
    Ticket,
    bucket,
)
from soulkit.models.api.prices import PriceTable, cost_of, own_price, unpriced_model
from soulkit.models.api.probing import TIMEOUT_S, Answer, Outcome, Undecided, ask_schema, probe
from soulkit.models.api.protocol import CHAT, ApiProtocol, Unreadable, WireReply
from soulkit.models.api.replies import (
    BilledReply,
    CallRequest,
    Fault,
    Keep,
    exchange,
    overflow_words,
    read_completion,
    read_received,
)
from soulkit.models.api.server_defaults import FILLED, ServerDefaults, ServerKind, defaults_line
from soulkit.models.api.transport import ClientPool, PerLoop, make_client
from soulkit.models.api.wire import (
    RUNGS,
    dropped_fields,
    estimated_tokens,
    parameters,
    to_messages,
    without,
)
from soulkit.models.base import min_reply_tokens
from soulkit.models.ledger.ledger import Ledger, LedgerEntry, request_key, request_of
from soulkit.types import Call, Completion, Sampling, Segment

if TYPE_CHECKING:
    from soulkit.models.api.probing import Preflight

log = logging.getLogger(__name__)

MAX_BYTES = 32 * 1024 * 1024
"""Maximum size of a reply: a million tokens need a few MB, and hundreds may arrive at once."""


@dataclass(frozen=True, slots=True)
class _Session:
    """State of one event loop."""

    pool: ClientPool
    gate: CallGate
    under_way: set[asyncio.Task[BilledReply | Fault]] = field(default_factory=set)
    """Requests that will be billed whether or not their callers still wait."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lets one caller at a time ask the server what it is."""


class Endpoint:
    """A `ChatModel` that calls an OpenAI-compatible server.

    `base_url` ends in `/v1`; None means OpenAI. `api_key_env` and the values of `headers` are NAMES
    of environment variables (addresses.py); the key is optional for a server on this machine and in
    a replay. `max_attempts` does not count retries without a refused parameter or after a 429 that
    states a wait. `rate_limit_wait_s` limits a call's total wait after such 429s, `max_wait_s` the
    pause between two attempts, `down_after_s` the wait for a server that does not answer. For
    tokens per minute, prompts are estimated and each reply counts as its maximum length, at most
    RESERVED. Set both prices, in US dollars per million tokens, or neither: then `prices` is used.
    `preflight` checks the server before the first call.

    ConfigError for one price without the other and for a budget without a price; ModelLoadError
    for an unusable address or a missing key.
    """

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        timeout_s: float = 120.0,
        max_attempts: int = 6,
        concurrency: int = 16,
        backoff_s: float = 1.0,
        max_wait_s: float = 60.0,
        rate_limit_wait_s: float = 600.0,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        down_after_s: float = 120.0,
        price_in: float | None = None,
        price_out: float | None = None,
        prices: PriceTable | None = None,
        budget: Budget | None = None,
        ledger: Ledger | None = None,
        headers: Mapping[str, str] | None = None,
        api_version: str | None = None,
        preflight: Preflight | None = None,
        protocol: ApiProtocol = CHAT,
    ) -> None:
        self.name = model
        replays = ledger is not None and ledger.mode == "replay"
        self.access = open_access(
            base_url, api_key_env, headers, api_version, keyless=replays, protocol=protocol
        )
        self.base_url, self.api_key_env = self.access.base_url, api_key_env
        self.timeout_s, self.max_attempts, self.concurrency = timeout_s, max_attempts, concurrency
        self.backoff_s, self.max_wait_s = backoff_s, max_wait_s
        self.rate_limit_wait_s = rate_limit_wait_s
        self.price = own_price(price_in, price_out) or (
            prices.of(model, self.base_url) if prices is not None else None
        )
        self._budget, self._ledger = budget, ledger
        if budget is not None and self.price is None and not is_loopback(self.base_url):
            raise unpriced_model(model, self.base_url)
        self._refused: set[str] = set()
        self._expects_forms = False
        self._longest = math.inf  # maximum reply tokens of the server
        self._defaults = ServerDefaults(model, self.access, timeout_s)
        # A separate generator: jitter must not affect seeded random numbers.
        self._jitter = random.Random()
        first = min(1.0, max(backoff_s, 0.05))
        longest = max(first, min(30.0, max_wait_s))
        self._traffic = SharedLimits(
            Breaker(down_after_s, pause_s=first, max_pause_s=longest, jitter=self._jitter.random),
            bucket(requests_per_minute), bucket(tokens_per_minute),
        )  # fmt: skip
        self._sessions = PerLoop(self._new_session)
        self._preflight = preflight
        if preflight is not None and not replays:
            preflight.join(self)

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """Reply to `context`, from the ledger if it has the call.

        Raises:
            ProviderError: the server refused, is down, or all attempts failed.
            BudgetSpent: the budget is used up.
            ContextOverflow: the prompt is too long for the server, or the server cut the reply at
                its own limit.
            ReplayMiss: the ledger is a replay and does not have the call.
        """
        messages = to_messages(context)
        if self._ledger is None:
            fresh = await self._ask(messages, sampling, call, lambda entry, beside: entry)
            return self._whole(read_completion(fresh, sampling), fresh, sampling)
        ledger, request = self._ledger, request_of(self.base_url, messages, sampling)
        key = request_key(request, self.name, call)
        entry = ledger.lookup(key, model=self.name, call=call)
        if entry is None:

            def keep(fresh: LedgerEntry, beside: Mapping[str, Any]) -> LedgerEntry:
                return ledger.store(key, fresh, replace(request, beside=beside))

            entry = await self._ask(messages, sampling, call, keep)
        try:
            return self._whole(read_completion(entry, sampling), entry, sampling)
        except Unreadable as error:  # it was readable when it was stored
            raise ledger.damaged(entry, str(error)) from error
        except ContextOverflow:  # a resumed run may use a server with a longer context
            ledger.set_aside(key)
            raise

    def _whole(self, reply: Completion, entry: LedgerEntry, sampling: Sampling) -> Completion:
        """`reply`; ContextOverflow if the server cut it. A judge's reply is left to its parser."""
        if entry.call.role in ("judge", "auditor"):
            return reply
        context = self._defaults.found.context if self._defaults.found else None
        words = overflow_words(entry, reply, sampling, context, self._longest)
        if words:
            raise ContextOverflow(f"{self.name} at {self.base_url}: {words}")
        return reply

    def set_aside(self, context: Sequence[Segment], sampling: Sampling, call: Call) -> None:
        """Mark the reply to this call as unusable; see `Ledger.set_aside`."""
        if self._ledger is not None:
            request = request_of(self.base_url, to_messages(context), sampling)
            self._ledger.set_aside(request_key(request, self.name, call))

    @property
    def unlimited(self) -> bool:
        """Whether a cost limit is set but does not cover these calls, since their price is
        unknown."""
        return self._budget is not None and self.price is None

    async def probe(self) -> Outcome:
        """Ask the server for one token and return the outcome. Raises BudgetSpent."""
        if self._budget is not None:
            self._budget.check()
        outcome = await self._put_question()
        if isinstance(outcome, Undecided):
            self._defaults.silent()
        if isinstance(outcome, Answer):
            self._charge(outcome.reply)
            outcome = replace(outcome, forms=await self._ask_for_forms())
        return outcome

    async def _put_question(self) -> Outcome:
        """Send the preflight question, without extra fields if the server refuses them."""
        session = self._sessions.get()
        await self._defaults.server(session.pool, session.turn)
        for beside in (self._defaults.field_to_refuse(), {}):
            self._traffic.take(estimated_tokens([], 1), time.monotonic())
            outcome = await probe(
                self.access, self.name, session.pool, self.timeout_s, self.backoff_s, beside
            )
            if not (beside and isinstance(outcome, Answer) and outcome.refusal):
                break
            self._defaults.recognise(outcome.refusal)
        return outcome

    @property
    def server(self) -> ServerKind | None:
        """What is known about the server; None if this process has not asked it."""
        return self._defaults.found

    def gates(self) -> list[CallGate]:
        """The gates of its calls, one per event loop."""
        return [session.gate for session in self._sessions.values()]

    def limit_concurrency(self, most: int) -> None:
        """Lower the concurrency to at most `most` requests."""
        self.concurrency = min(self.concurrency, most)
        for gate in self.gates():
            gate.limit(self.concurrency)

    def expect_forms(self) -> None:
        """Check whether the server enforces JSON schemas, since the run will request them."""
        self._expects_forms = True

    async def _ask_for_forms(self) -> bool | None:
        """Whether the server enforces JSON schemas; checked once and only if needed."""
        session = self._sessions.get()
        server = await self._defaults.server(session.pool, session.turn)
        if not (self._expects_forms and server.engine):
            return None
        self._expects_forms = False
        limit, beside = min(TIMEOUT_S, self.timeout_s), server.beside(Sampling(temperature=0.0))
        holds, reply = await ask_schema(self.access, self.name, beside, session.pool, limit)
        self._charge(reply)
        if holds is False:
            self._refused |= {f"form:{rung}" for rung in RUNGS}
        return holds

    def _charge(self, reply: WireReply | None) -> None:
        if self._budget is not None and reply is not None:
            self._budget.add(cost_of(self.price, reply) or 0.0)

    async def close(self) -> None:
        """Close this event loop's connections once all billed replies have arrived."""
        session = self._sessions.pop()
        if session is None:
            return
        for left in await asyncio.gather(*session.under_way, return_exceptions=True):
            if isinstance(left, Exception):
                log.warning("%s: a pending reply was lost: %s", self.name, left)
        await session.pool.close()

    def __repr__(self) -> str:
        return (
            f"Endpoint(model={self.name!r}, base_url={self.base_url!r}, "
            f"api_key_env={self.api_key_env!r})"
        )

    async def _ask(
        self, messages: list[dict[str, str]], sampling: Sampling, call: Call, keep: Keep
    ) -> LedgerEntry:
        settings, least = parameters(sampling, call), min_reply_tokens(sampling.max_tokens)
        if least <= self._longest < sampling.max_tokens:
            settings["max_tokens"] = int(self._longest)
        tokens = estimated_tokens(messages, sampling.max_tokens)
        if self._preflight is not None:
            await self._preflight.hold()
        attempts, requests, patience = 0, 0, Patience(self.rate_limit_wait_s)
        while True:
            requests += 1
            request = CallRequest(messages, settings, settings, call, requests, keep, sampling)
            outcome = await self._attempt(request, tokens, attempts, patience)
            if isinstance(outcome, BilledReply):
                return outcome.entry
            if outcome.refused:
                # This ends: every round drops one parameter or sends it in another form.
                self._defaults.recognise(outcome.detail)
                if outcome.refused not in self._refused:
                    log.info(
                        "%s refuses '%s'; it will not be sent again.", self.name, outcome.refused
                    )
                    self._refused.add(outcome.refused)
                continue
            if outcome.room >= least:
                settings = {**settings, "max_tokens": outcome.room}  # ends too: the limit shrinks
                if not outcome.overflow:
                    self._longest = min(self._longest, outcome.room)
                continue
            if outcome.probe:
                continue  # ends too: after `down_after_s` the gate rejects all calls
            if stated_s := outcome.stated_wait_s:
                if not patience.lasts(stated_s):
                    here = outcome.server == "unasked"
                    asks = "this machine needs" if here else "rate limit: the server asks"
                    words = patience.words(asks, stated_s)
                    raise ProviderError(f"{self.name}: {words}: {outcome.detail}")
                patience.spend(stated_s)
                continue  # the gate holds back all calls; ends when the patience is used up
            attempts += 1
            if not outcome.retry or attempts >= self.max_attempts:
                if outcome.final:
                    await self._confirm()
                self._give_up(outcome, attempts)
            if outcome.server != "busy":  # if busy, the gate holds back all calls
                await asyncio.sleep(self._wait(outcome, attempts))

    async def _confirm(self) -> None:
        if self._preflight is not None:
            await self._preflight.confirm(self)

    async def _attempt(
        self, request: CallRequest, tokens: float, attempts: int, patience: Patience
    ) -> BilledReply | Fault:
        session = self._sessions.get()
        try:
            ticket = await session.gate.enter(tokens)
        except ServerDown as down:
            raise ProviderError(str(down)) from None
        try:
            outcome = await self._request(session, request)
        except BaseException:
            session.gate.cancelled(ticket)
            raise
        return self._report(session.gate, ticket, outcome, attempts, patience)

    def _report(
        self, gate: CallGate, ticket: Ticket, outcome: BilledReply | Fault, attempts: int,
        patience: Patience,
    ) -> BilledReply | Fault:  # fmt: skip
        """Report the outcome of a request to the gate and mark a failed probe."""
        if isinstance(outcome, BilledReply):
            self._defaults.answered()
            server = self._defaults.found
            if self._preflight is not None and server is not None and server.unknown:
                self._preflight.warn(defaults_line(self.name, self.base_url))
            gate.answered(ticket, outcome.tokens)
        elif outcome.server == "busy":
            stated_s = outcome.stated_wait_s
            if stated_s and patience.lasts(stated_s):
                pause_s = patience.pause_s(stated_s)
                gate.busy(ticket, pause_s, outcome.detail, self.rate_limit_wait_s)
            else:  # a wait beyond its patience fails this call but does not hold back others
                gate.busy(ticket, self._backoff(attempts + 1), outcome.detail)
        elif outcome.server == "unasked":
            gate.unasked(ticket, patience.pause_s(outcome.stated_wait_s))
        elif outcome.server == "down":
            self._defaults.silent()
            gate.failed(ticket, outcome.detail)
            return replace(outcome, probe=ticket.probe)
        else:
            gate.refused(ticket)
        return outcome

    async def _request(self, session: _Session, request: CallRequest) -> BilledReply | Fault:
        """Send a request and keep its reply. With a budget, it outlives a cancelled caller."""
        if self._budget is None:
            return await self._pay(session, request)
        self._budget.check()
        task = asyncio.create_task(self._pay(session, request))
        session.under_way.add(task)
        task.add_done_callback(session.under_way.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not self._budget.exhausted:
                task.cancel()
            raise

    async def _prepare(self, session: _Session, request: CallRequest) -> CallRequest:
        server = await self._defaults.server(session.pool, session.turn)
        asked = {k: v for k, v in request.settings.items() if k not in server.holds_cuts}
        settings = {**asked, **server.beside(request.sampling)}
        # Computed last: other calls may have learned meanwhile what the server refuses.
        return replace(request, settings=settings, sent=without(settings, self._refused))

    async def _pay(self, session: _Session, request: CallRequest) -> BilledReply | Fault:
        request = await self._prepare(session, request)
        started = time.perf_counter()
        outcome = await self._receive(session.pool, request)
        if isinstance(outcome, Fault):
            return outcome
        return self._reply(*outcome, request, time.perf_counter() - started)

    def _reply(
        self, raw: str, answer: WireReply, request: CallRequest, seconds: float,
        way: Mapping[str, Any] | None = None,
    ) -> BilledReply:  # fmt: skip
        """Count and keep a paid reply; `way` says how it was obtained."""
        entry = self._entry(raw, answer, request, seconds)
        if self._budget is not None:
            self._budget.add(entry.cost if entry.cost is not None else self._cost_limit(request))
        beside = {name: request.sent[name] for name in FILLED if name in request.sent}
        if request.settings["max_tokens"] != request.sampling.max_tokens:
            beside["max_tokens"] = request.settings["max_tokens"]
        return BilledReply(request.keep(entry, {**beside, **(way or {})}), answer)

    def _cost_limit(self, request: CallRequest) -> float:
        """Maximum cost of a reply without token counts. Only used for the budget."""
        if self.price is None:
            return 0.0
        prompt = int(estimated_tokens(request.messages, 0))
        return self.price.cost(prompt, int(request.settings["max_tokens"]))

    async def _receive(
        self, pool: ClientPool, request: CallRequest
    ) -> tuple[str, WireReply] | Fault:
        protocol, sent = self.access.protocol, request.sent
        received = await exchange(
            pool, self.access.request_url, self.access.headers,
            protocol.body(self.name, request.messages, sent), timeout_s=self.timeout_s,
            most=MAX_BYTES,
        )  # fmt: skip
        if isinstance(received, Fault):
            return received
        return read_received(received, request.settings, sent, protocol)

    def _give_up(self, fault: Fault, attempts: int) -> NoReturn:
        if fault.overflow or fault.room:
            raise ContextOverflow(f"{self.name}: {fault.detail}")
        more = f" (after {attempts} attempts)" if attempts > 1 else ""
        if fault.key:
            more += f" (the key is read from {self.access.key_env})"
        raise ProviderError(f"{self.name}: {fault.detail}{more}")

    def _backoff(self, attempts: int) -> float:
        return float(min(self.max_wait_s, self.backoff_s * 2.0 ** min(attempts - 1, 30)))

    def _wait(self, fault: Fault, attempts: int) -> float:
        """Seconds before the next attempt: the server's Retry-After plus full jitter."""
        retry_after = min(self.max_wait_s, fault.wait_s or 0.0)
        return retry_after + self._jitter.uniform(0.0, self._backoff(attempts))

    def _entry(
        self, raw: str, answer: WireReply, request: CallRequest, seconds: float
    ) -> LedgerEntry:
        return LedgerEntry(
            model=self.name,
            call=request.call,
            reply=raw,
            dropped=dropped_fields(request.settings, request.sent),
            prompt_tokens=answer.prompt_tokens or 0,
            completion_tokens=answer.completion_tokens or 0,
            cost=cost_of(self.price, answer),
            seconds=seconds,
            attempts=request.number,
        )

    def _new_session(self) -> _Session:
        gate = CallGate(f"{self.name} at {self.base_url}", self._traffic, self.concurrency)
        make = partial(make_client, self.base_url, self.timeout_s)
        return _Session(ClientPool(make, self.concurrency), gate)
