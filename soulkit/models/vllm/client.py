"""Requests to one vLLM server: completions by ids, each with all settings of its sampling.

A server gives log-probs of the distribution that it drew from (*processed*) or of the plain logits
(*raw*). They are asked for where those are log-probs of logits / temperature before `top_p` cuts
anything, as `Completion` has them (`gives_logprobs`).

A generation may take an hour, so no request has a time limit of its own: `replicas.py` watches over
the server meanwhile, and puts again what brought nothing. What is asked must therefore be such that
asking twice does no harm. Connections belong to one event loop.
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
from soulkit.models.api.protocol import CHAT, ERROR_CHARS, Unreadable, json_or_none
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
from soulkit.types import Call, Sampling

COMPLETIONS_PATH = "/v1/completions"
LogprobsMode = Literal["processed", "raw", "none"]
"""Of which distribution a server's log-probs are; none: it gives none that could be used."""
LEAST_TEMPERATURE = 0.01
"""A server takes any lower one, but for 0, for this one."""
MOST_STOPS = 4
"""Stop strings that a server takes. The codec cuts at all of them; the others end no sampling."""
_MOST_ID = 2**31 - 1
_ROUNDING = 1e-3
"""Nats by which a rounded log-prob may be above zero."""
_NO_SEED = -1
"""Stands for a seed that nobody chose: such replies are repeatable as well."""
_FINISHED = ("stop", "length")
"""How a whole reply ends. Any other way the server gave the work up."""


@dataclass(frozen=True, slots=True)
class Emission:
    """What one reply holds."""

    prompt: tuple[int, ...]
    """What the server says that it was prompted with; empty where it does not."""
    ids: tuple[int, ...]
    """Emitted ids, with the one that ended the turn or completed a stop string."""
    logprobs: tuple[float, ...]
    """One per id; empty where none were asked for."""
    stopped: bool
    """Whether the reply ended by itself, and not at its limit."""


def gives_logprobs(sampling: Sampling, mode: LogprobsMode, *, form: bool) -> bool:
    """Whether a server's log-probs are those of logits / temperature; `form`: it is held to one.

    Greedily a server counts with temperature 1 and cuts nothing, as everybody here does.
    """
    if form or mode == "none":
        return False
    greedy = sampling.temperature == 0
    if mode == "raw":
        return greedy or sampling.temperature == 1
    return greedy or (not sampling.cuts and sampling.temperature >= LEAST_TEMPERATURE)


def sent_cuts(sampling: Sampling) -> dict[str, Any]:
    """Which tokens may be drawn, in the words of a vLLM server; neutral values are named, too."""
    cuts = {"top_p": sampling.top_p, "min_p": sampling.min_p}
    return {**NEUTRAL, **cuts, **({"top_k": sampling.top_k} if sampling.top_k else {})}


def completion_request(
    served: str, prompt: Sequence[int], sampling: Sampling, call: Call, *, room: int,
    end_ids: Iterable[int], logprobs: bool, form: bool,
) -> dict[str, Any]:  # fmt: skip
    """The body of one request: at most `room` tokens after `prompt`, by the model that is called
    `served` there.

    `end_ids` end the reply, `logprobs` asks for those of the emitted tokens, and `form` holds it to
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
    """What a reply to `prompt` (None: to whatever it says) emitted.

    Raises Unreadable, also where a server read other ids than those that it was sent, or gave the
    work up.
    """
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise Unreadable("no choices")
    read = choice.get("prompt_token_ids")
    if isinstance(read, list) and prompt is not None and read != list(prompt):
        raise Unreadable("the server read another prompt than it was sent")
    ids = choice.get("token_ids")
    if not isinstance(ids, list) or len(_ids(ids)) != len(ids):
        raise Unreadable("no token ids: the server is none that answers with ids")
    finish = choice.get("finish_reason")
    if finish not in _FINISHED:
        raise Unreadable(f"the server gave the reply up ({finish})")
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
    # An integer beyond every float is compared here, and converted nowhere.
    if not all(type(one) in (int, float) and abs(one) <= sys.float_info.max for one in notes):
        raise Unreadable("a log-prob that is no number")
    if any(one > _ROUNDING for one in notes):
        raise Unreadable("a log-prob above zero: the server gives something else under that name")
    return tuple(map(float, notes))


HEALTH = "/health"
HEALTH_S = 5.0
"""How long a server may take to say that it is well."""
MAX_BYTES = 256 * 1024 * 1024
"""Of a reply: a hundred thousand tokens with their log-probs and texts need some ten of them."""
CONCURRENCY = 1024
_PASSES = frozenset((408, 409, 425, 429))
"""Statuses below 500 that say nothing about the request."""
_DEAD = ("EngineCore encountered", "EngineDead", "engine is dead", "engine died")
"""Words of a server whose engine has ended; its HTTP part may outlive that by a moment."""


class ServerRefused(SoulError):
    """A server's answer to a request that it will not do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status} {message}")
        self.status, self.message = status, message


class ServerBusy(ServerRefused):
    """A status that says nothing about the request: another try may be answered."""


class ServerGone(SoulError):
    """A connection that broke, or a server whose engine has ended."""


@dataclass(frozen=True)
class Address:
    """Where a server is asked."""

    url: str
    """Without a path: http://127.0.0.1:8000."""
    key: str = field(default="", repr=False)
    """Sent as the bearer token; empty: none."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


class VllmClient:
    """Asks one server, once for each request."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._pools = PerLoop(
            lambda: ClientPool(partial(make_client, address.url, None), CONCURRENCY)
        )

    def __repr__(self) -> str:
        return f"VllmClient({self.address.url!r})"

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`; {"text": …} where the server answers with something else.

        Raises ServerRefused, ServerBusy, ServerGone.
        """
        return await self._ask(path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the server answers to `body`, as `get` has it; raises as `get` does."""
        return await self._ask(path, body)

    async def alive(self) -> bool:
        """Whether the server says within HEALTH_S that it is well. Whatever else it answers, it
        answers: a gateway may know no such path."""
        import httpx2 as errors

        try:
            async with asyncio.timeout(HEALTH_S):
                return (await self._exchange(HEALTH, None)).status < 500
        except (TimeoutError, errors.HTTPError, TooLong):
            return False

    async def close(self) -> None:
        """Close this event loop's connections."""
        pool = self._pools.pop()
        if pool is not None:
            await pool.close()

    async def _ask(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        import httpx2 as errors

        try:
            received = await self._exchange(path, body)
        except TooLong:
            raise ServerRefused(200, f"a reply of more than {MAX_BYTES >> 20} MB") from None
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
