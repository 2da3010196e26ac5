"""Requests to one vLLM server: completions by token ids, with all sampling settings explicit.

A server returns log-probs of the distribution it samples from (*processed*) or of the plain logits
(*raw*). They are requested only if they equal log-probs of logits / temperature before `top_p`, as
in `Completion` (`gives_logprobs`).

A generation may take an hour, so requests have no timeout: `replicas.py` monitors the server and
repeats failed requests. A request must therefore be safe to repeat. Connections belong to one event
loop.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from soulkit.errors import SoulError
from soulkit.models.api.protocol import CHAT, ERROR_CHARS, Unreadable
from soulkit.models.api.replies import clean_detail, connection_fault, error_in
from soulkit.models.api.transport import (
    ClientPool,
    PerLoop,
    Received,
    TooLong,
    get,
    make_client,
    post,
)
from soulkit.models.api.wire import NEUTRAL, sent_seed
from soulkit.parse import json_or_none
from soulkit.types import Call, Sampling

COMPLETIONS_PATH = "/v1/completions"
LogprobsMode = Literal["processed", "raw", "none"]
"""The distribution of a server's log-probs; none: it returns none that can be used."""
LEAST_TEMPERATURE = 0.01
"""vLLM raises lower temperatures, except 0, to this one."""
MOST_STOPS = 4
"""Maximum stop strings per request. The codec cuts at all of them; others do not stop sampling."""
_MOST_ID = 2**31 - 1
_ROUNDING = 1e-3
"""Tolerance in nats for rounded log-probs above zero."""
_NO_SEED = -1
"""Used if no seed is set, so that such replies are reproducible as well."""
_FINISHED = ("stop", "length")
"""Finish reasons of a complete reply. With any other, the server has aborted it."""


@dataclass(frozen=True, slots=True)
class Emission:
    """A parsed reply."""

    prompt: tuple[int, ...]
    """The prompt ids that the server reports; empty if it does not."""
    ids: tuple[int, ...]
    """Sampled ids, including the one that ended the turn or completed a stop string."""
    logprobs: tuple[float, ...]
    """One per id; empty if they were not requested."""
    stopped: bool
    """Whether the reply ended by itself, not at its limit."""


def gives_logprobs(sampling: Sampling, mode: LogprobsMode, *, form: bool) -> bool:
    """Whether a server's log-probs equal those of logits / temperature; `form`: whether the server
    enforces one.

    With greedy sampling, a server uses temperature 1 and no cuts, as soulkit does.
    """
    if form or mode == "none":
        return False
    greedy = sampling.temperature == 0
    if mode == "raw":
        return greedy or sampling.temperature == 1
    return greedy or (not sampling.cuts and sampling.temperature >= LEAST_TEMPERATURE)


def sent_cuts(sampling: Sampling) -> dict[str, Any]:
    """top_p, top_k and the like by vLLM's names, including neutral values."""
    cuts = {"top_p": sampling.top_p, "min_p": sampling.min_p}
    return {**NEUTRAL, **cuts, **({"top_k": sampling.top_k} if sampling.top_k else {})}


def completion_request(
    served: str, prompt: Sequence[int], sampling: Sampling, call: Call, *, room: int,
    end_ids: Iterable[int], logprobs: bool, form: bool,
) -> dict[str, Any]:  # fmt: skip
    """The body of one request: at most `room` tokens after `prompt`, from the model `served`.

    `end_ids` end the reply; `logprobs` requests log-probs of the sampled tokens; `form` enforces
    the sampling's form. Equal seeds and calls give equal bodies.
    """
    body: dict[str, Any] = {
        "model": served,
        "prompt": list(prompt),
        "max_tokens": room,
        "temperature": sampling.temperature,
        **sent_cuts(sampling),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": sent_seed(_NO_SEED if sampling.seed is None else sampling.seed, call),
        "stop_token_ids": sorted(end_ids),
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    stops = [text for text in sampling.stop if text]
    if stops:
        body["stop"] = stops[:MOST_STOPS]
    if logprobs:
        body["logprobs"] = 0
    if form and sampling.form is not None:
        body["structured_outputs"] = {"json": json.loads(sampling.form.schema)}
    return body


def read_emission(
    body: Mapping[str, Any], prompt: Sequence[int] | None, *, logprobs: bool
) -> Emission:
    """Parse a reply to `prompt` (None: to any prompt).

    Raises Unreadable, also if the server used other prompt ids or aborted the reply.
    """
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise Unreadable("no choices")
    read = choice.get("prompt_token_ids")
    if isinstance(read, list) and prompt is not None and read != list(prompt):
        raise Unreadable("the server used another prompt than the one sent")
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or len(_ids(ids)) != len(ids):
        raise Unreadable("no token ids: this server does not return ids")
    finish = choice.get("finish_reason")
    if finish not in _FINISHED:
        raise Unreadable(f"the server aborted the reply ({finish})")
    notes = _logprobs_of(choice, len(ids)) if logprobs else ()
    return Emission(_ids(read), tuple(ids), notes, finish == "stop")


def _ids(values: object) -> tuple[int, ...]:
    ids = values if isinstance(values, list) else []
    return tuple(one for one in ids if type(one) is int and 0 <= one <= _MOST_ID)


def _logprobs_of(choice: Mapping[str, Any], count: int) -> tuple[float, ...]:
    holder = choice.get("logprobs")
    notes = holder.get("token_logprobs") if isinstance(holder, dict) else None
    if not isinstance(notes, list) or len(notes) != count:
        raise Unreadable("no log-prob for every token")
    # Compared as is: converting an integer beyond the range of floats would fail.
    if not all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in notes):
        raise Unreadable("a log-prob is not a number")
    if any(one > _ROUNDING for one in notes):
        raise Unreadable("a log-prob is above zero, which is impossible")
    return tuple(map(float, notes))


HEALTH = "/health"
MAX_BYTES = 256 * 1024 * 1024
"""Maximum size of a reply: 100,000 tokens with log-probs and texts need about 10 MB."""
CONCURRENCY = 1024
_PASSES = frozenset((408, 409, 425, 429))
"""Statuses below 500 that do not depend on the request."""
_DEAD = ("EngineCore encountered", "EngineDead", "engine is dead", "engine died")
"""Messages of a server whose engine has died; its HTTP part may live a moment longer."""


class ServerRefused(SoulError):
    """The server rejects a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status} {message}")
        self.status, self.message = status, message


class ServerBusy(ServerRefused):
    """A status that does not depend on the request, so a retry may work."""


class ServerGone(SoulError):
    """A connection broke, or the server's engine has died."""


@dataclass(frozen=True)
class Address:
    """Address and key of a server."""

    url: str
    """Without a path: http://127.0.0.1:8000."""
    key: str = field(default="", repr=False)
    """Sent as a bearer token; empty: none."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class VllmClient:
    """Sends requests to one server, without retries."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pools = PerLoop(
            lambda: ClientPool(partial(make_client, address.url, None), CONCURRENCY)
        )

    def __repr__(self) -> str:
        return f"VllmClient({self.address.url!r})"

    async def alive(self, seconds: float) -> bool:
        """Whether the server answers /health within `seconds`. Any status below 500 counts, since a
        gateway may not have that path."""
        import httpx2 as errors

        try:
            async with asyncio.timeout(seconds):
                return (await self._exchange(HEALTH, None)).status < 500
        except (TimeoutError, errors.HTTPError, TooLong):
            return False

    async def close(self) -> None:
        """Close this event loop's connections."""
        pool = self._pools.pop()
        if pool is not None:
            await pool.close()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST `body` to `path`, or GET it without one: the JSON object of the answer, or
        {"text": …} if it is not one. Raises ServerRefused, ServerBusy, ServerGone."""
        import httpx2 as errors

        try:
            received = await self._exchange(path, body)
        except TooLong:
            raise ServerRefused(200, f"the reply exceeds {MAX_BYTES >> 20} MB") from None
        except errors.HTTPError as error:
            raise self._gone(clean_detail(connection_fault(error).detail)) from None
        return self._answer(received)

    def _answer(self, received: Received) -> dict[str, Any]:
        status, body = received.status, json_or_none(received.text)
        if 200 <= status < 300:
            return body if isinstance(body, dict) else {"text": received.text}
        message = clean_detail(error_in(received, CHAT).message)
        if status < 500 and status not in _PASSES:
            raise ServerRefused(status, message)
        if any(words in received.text[:ERROR_CHARS] for words in _DEAD):
            raise self._gone(f"HTTP {status} {message}")
        raise ServerBusy(status, message)

    async def _exchange(self, path: str, body: Mapping[str, Any] | None) -> Received:
        url, headers = f"{self.address.url}{path}", self.address.headers
        async with self._pools.get().client() as client:
            if body is None:
                return await get(client, url, headers, MAX_BYTES)
            return await post(client, url, headers, body, MAX_BYTES)

    def _gone(self, why: str) -> ServerGone:
        return ServerGone(f"The vLLM server at {self.address.url} is gone: {why}.")
