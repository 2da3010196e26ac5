"""A model on vLLM servers, with the same replies as a model in this process.

    context ──codec──▶ prompt ids ──fleet──▶ emitted ids ──codec──▶ Completion

Log-probs are left out (`dropped`) if the server computes them for another distribution. The
server's grammar enforces a form from the first token on, so a reply with reasoning is requested
without one. Seeds are derived from `Sampling.seed` and the `Call`. A player's replies are stored in
the ledger under `vllm:MODEL` instead of an address, so that a resumed run finds them on any port;
an actor has no ledger. A refusal is a ProviderError; a prompt that leaves no room for a reply is a
ContextOverflow and is not sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from soulkit.api_keys import masked_json
from soulkit.errors import ContextOverflow, ProviderError
from soulkit.models.api.probing import follows_schema, schema_question, schema_words
from soulkit.models.api.protocol import Unreadable
from soulkit.models.api.replies import lacks_form
from soulkit.models.api.transport import PerLoop
from soulkit.models.api.wire import to_messages, too_long
from soulkit.models.codec import Codec, CodecModel
from soulkit.models.ledger.ledger import LedgerEntry, request_key, request_of
from soulkit.models.ledger.storage import Request
from soulkit.models.vllm.client import (
    COMPLETIONS_PATH,
    LEAST_TEMPERATURE,
    Emission,
    ServerRefused,
    completion_request,
    gives_logprobs,
    read_emission,
)
from soulkit.models.vllm.replicas import Replicas, ServerReply
from soulkit.parse import json_or_none
from soulkit.types import Call, Completion, Sampling, Segment

if TYPE_CHECKING:
    from soulkit.models.ledger.ledger import Ledger
    from soulkit.models.vllm.capabilities import Basis, ServerCapabilities

TRIES = 2
"""Attempts for a reply that cannot be read: a server that shuts down aborts its requests."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Question:
    """One request, and what is needed to read its reply."""

    body: Mapping[str, Any]
    prompt: tuple[int, ...]
    sampling: Sampling
    room: int
    logprobs: bool
    form: bool
    """Whether the server should enforce the form."""
    policy: str


class VllmModel(CodecModel):
    """A `Sampler` whose replies come from vLLM servers.

    `fleet` is None if the ledger has all remaining replies. `served` is the servers' name for the
    model or its adapter; `policy_version` is the hash of that adapter, recorded in completions. A
    player's replies are stored in `ledger` under `vllm:LEDGER_NAME` (default: `name`); an actor has
    no ledger. `weights_basis`: how the weights of attached servers were verified.
    """

    def __init__(
        self, fleet: Replicas | None, codec: Codec, *, name: str, served: str,
        abilities: ServerCapabilities, policy_version: str = "", ledger: Ledger | None = None,
        ledger_name: str = "", weights_basis: Basis = "",
    ) -> None:  # fmt: skip
        self.name, self.served, self.policy_version = name, served, policy_version
        self.weights_basis = weights_basis
        self.codec = codec.limited(
            abilities.max_context, "start the servers with a larger --max-model-len"
        )
        self._fleet, self._ledger = fleet, ledger
        self._ledger_name = ledger_name or name
        self._abilities, self._forms = abilities, abilities.forms
        self._expects_forms = False
        self._refused_forms: set[str] = set()
        self._locks = PerLoop(asyncio.Lock)
        self._closed = False

    def use(self, served: str, policy_version: str) -> None:
        """Use the model `served` from the next call on; pending replies keep their version."""
        self.served, self.policy_version = served, policy_version

    def anew(self) -> VllmModel:
        """A new VllmModel with the same weights and servers, for use after this one is closed."""
        return VllmModel(
            self._fleet, self.codec, name=self.name, served=self.served,
            abilities=self._abilities, policy_version=self.policy_version,
            ledger=self._ledger, ledger_name=self._ledger_name,
            weights_basis=self.weights_basis,
        )  # fmt: skip

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """Generate one reply, or return it from the ledger.

        ContextOverflow if the prompt leaves too little room; ProviderError if the server refuses or
        the model is closed; ReplayMiss in a replay without the call; and the fleet's errors if no
        server is left.
        """
        if self._closed:
            raise ProviderError(f"The model '{self.name}' has been closed.")
        if self._ledger is not None:
            return await self._kept(self._ledger, context, sampling, call)
        question = await self._question(context, sampling, call)
        start = time.perf_counter()
        question, body = await self._ask(question, call)
        emission = _read(body, question)
        reply = self.codec.completion(
            question.prompt, emission.ids, emission.logprobs, stop=sampling.stop,
            room=question.room, seconds=time.perf_counter() - start, policy=question.policy,
            dropped=self._dropped(question),
        )  # fmt: skip
        return replace(_finished(reply, emission, sampling), server=body.server)

    def set_aside(self, context: Sequence[Segment], sampling: Sampling, call: Call) -> None:
        """Mark the reply to this call as unusable; see `Ledger.set_aside`."""
        if self._ledger is not None:
            request = self._request(context, sampling)
            self._ledger.set_aside(request_key(request, self.name, call))

    def expect_forms(self) -> None:
        """Find out whether the servers enforce forms, since the run will request them."""
        self._expects_forms = True

    async def holds_forms(self) -> bool:
        """Whether the servers enforce forms; checked once, with a separate request."""
        if self._forms is None:
            async with self._locks.get():
                if self._forms is None:
                    self._forms = await self._ask_for_forms()
                    level = logging.INFO if self._forms else logging.WARNING
                    log.log(level, "%s: %s", self.name, schema_words(self._forms))
        return self._forms

    async def close(self) -> None:
        """Reject further calls, and close this event loop's connections."""
        self._closed = True
        if self._fleet is not None:
            await self._fleet.close()

    # -- asking ------------------------------------------------------------------------------------

    async def _question(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> _Question:
        if self._expects_forms:
            await self.holds_forms()
        prompt = self.codec.prompt_ids(context, sampling.thinking)
        room = self.codec.room(len(prompt), sampling.max_tokens)
        form = self._may_hold(sampling, prompt) and await self.holds_forms()
        return self._put(tuple(prompt), sampling, call, room, form)

    def _put(
        self, prompt: tuple[int, ...], sampling: Sampling, call: Call, room: int, form: bool
    ) -> _Question:
        mode = self._abilities.logprobs
        logprobs = self._ledger is None and gives_logprobs(sampling, mode, form=form)
        body = completion_request(
            self.served, prompt, sampling, call, room=room, end_ids=self.codec.end_ids,
            logprobs=logprobs, form=form,
        )  # fmt: skip
        return _Question(body, prompt, sampling, room, logprobs, form, self.policy_version)

    def _may_hold(self, sampling: Sampling, prompt: Sequence[int]) -> bool:
        """Whether the server could enforce the form: a grammar leaves no room for reasoning."""
        if sampling.form is None or sampling.form.schema in self._refused_forms:
            return False
        thinks = sampling.thinking is True and self.codec.renderer().reads_thinking
        return not thinks and not self.codec.opens_thinking(prompt)

    async def _ask(self, question: _Question, call: Call) -> tuple[_Question, ServerReply]:
        """The reply and the question it answers. A form that the server refuses is left out."""
        try:
            return question, await self._reply(question)
        except ServerRefused as refusal:
            if refusal.status == 400 and too_long(refusal.message):
                raise ContextOverflow(f"{self.name}: {refusal}") from None
            if not (question.form and refusal.status in (400, 422)):
                raise ProviderError(f"{self.name}: {refusal}") from None
            without = self._put(question.prompt, question.sampling, call, question.room, False)
            answer = await self._ask(without, call)
            self._turned_down(question.sampling, refusal)
            return answer

    async def _reply(self, question: _Question) -> ServerReply:
        """A readable reply. Raises ServerRefused, ProviderError."""
        if self._fleet is None:
            raise RuntimeError(f"'{self.name}' was called, but it was created without servers")
        problem: Exception | None = None
        for _ in range(TRIES):
            body = await self._fleet.ask(COMPLETIONS_PATH, dict(question.body))
            try:
                emission = _read(body, question)
            except Unreadable as error:
                problem = error
                continue
            if not emission.stopped and len(emission.ids) < question.room:
                raise ProviderError(
                    f"{self.name}: the server cut the reply after {len(emission.ids)} of "
                    f"{question.room} tokens, at a limit of its own. Start it with "
                    "--generation-config vllm, and with the context of the model (--max-model-len)."
                )
            return body
        raise ProviderError(f"{self.name}: {problem}") from problem

    def _turned_down(self, sampling: Sampling, refusal: ServerRefused) -> None:
        form = sampling.form
        if form is not None and form.schema not in self._refused_forms:
            self._refused_forms.add(form.schema)
            log.warning(
                "%s: the server does not enforce the form '%s' (%s); soulkit checks each reply "
                "instead.", self.name, form.name, refusal,
            )  # fmt: skip

    async def _ask_for_forms(self) -> bool:
        """Ask the schema question. A server that cannot answer it does not enforce forms."""
        context, sampling, call = schema_question()
        prompt = tuple(self.codec.prompt_ids(context, sampling.thinking))
        try:
            question = self._put(prompt, sampling, call, sampling.max_tokens, True)
            body = await self._reply(question)
            emitted = _read(body, question).ids
        except (ServerRefused, ProviderError) as error:
            log.warning("%s: the server fails on a request with a form: %s", self.name, error)
            return False
        return follows_schema(self.codec.text(emitted)) is True

    def _dropped(self, question: _Question) -> tuple[str, ...]:
        sampling = question.sampling
        unasked = self._ledger is None and not question.logprobs
        lower = 0 < sampling.temperature < LEAST_TEMPERATURE
        return (
            *self.codec.dropped(sampling, forms=question.form),
            *(("logprobs",) if unasked else ()),
            *(("temperature",) if lower else ()),
        )

    # -- the ledger --------------------------------------------------------------------------------

    async def _kept(
        self, ledger: Ledger, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        request = self._request(context, sampling)
        key = request_key(request, self.name, call)
        entry = ledger.lookup(key, model=self.name, call=call)
        if entry is None:
            question = await self._question(context, sampling, call)
            start = time.perf_counter()
            question, body = await self._ask(question, call)
            seconds = time.perf_counter() - start
            entry = ledger.store(key, self._entry(question, body, call, seconds), request)
        try:
            return self._recorded(entry, sampling)
        except Unreadable as error:  # it was readable when it was stored
            raise ledger.damaged(entry, str(error)) from error

    def _request(self, context: Sequence[Segment], sampling: Sampling) -> Request:
        weights = f"+{self.policy_version}" if self.policy_version else ""
        return request_of(f"vllm:{self._ledger_name}{weights}", to_messages(context), sampling)

    def _entry(
        self, question: _Question, body: Mapping[str, Any], call: Call, seconds: float
    ) -> LedgerEntry:
        return LedgerEntry(
            model=self.name, call=call, reply=masked_json(json.dumps(body)),
            dropped=self._dropped(question), prompt_tokens=len(question.prompt),
            completion_tokens=len(_read(body, question).ids), cost=0.0, seconds=seconds,
            attempts=1,
        )  # fmt: skip

    def _recorded(self, entry: LedgerEntry, sampling: Sampling) -> Completion:
        body = json_or_none(entry.reply)
        if not isinstance(body, dict):
            raise Unreadable("no JSON object")
        emission = read_emission(body, None, logprobs=False)
        reply = self.codec.completion(
            emission.prompt, emission.ids, (), stop=sampling.stop, room=sampling.max_tokens,
            seconds=entry.seconds, dropped=entry.dropped, policy=self.policy_version,
        )  # fmt: skip
        reply = replace(reply, usage=replace(reply.usage, cost=entry.cost))
        return _finished(reply, emission, sampling)


def _read(body: Mapping[str, Any], question: _Question) -> Emission:
    return read_emission(body, question.prompt, logprobs=question.logprobs)


def _finished(reply: Completion, emission: Emission, sampling: Sampling) -> Completion:
    whole = len(reply.token_ids) == len(emission.ids)
    if whole and emission.stopped and reply.stop_reason == "length":
        reply = replace(reply, stop_reason="stop")  # ended by a token only the server knows
    form = sampling.form
    if form is None or "form" in reply.dropped:
        return reply
    lacks = lacks_form(reply.text, reply.stop_reason, form)
    return replace(reply, ignored=("form",)) if lacks else reply
