"""Responses of a server: a fault, or a paid reply and its completion.

A `Fault` says why an attempt failed: whether a retry may help, whether it affects every call to the
server, and whether a smaller request would work.

Completions are parsed from the ledger entry at every lookup, so a corrected parser also applies to
old entries. A server may accept a parameter with HTTP 200 and ignore it: `Completion.ignored` lists
`form` if the reply does not follow it, and `seed` if the server reports another one. A reply that
is cut before the requested length has reached a limit of the server (`overflow_words`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from soulkit.api_keys import MASK, printable
from soulkit.models.api.protocol import (
    ApiError,
    ApiProtocol,
    Unreadable,
    WireReply,
    parse_reply,
    safe_reply,
)
from soulkit.models.api.transport import (
    OUT_OF_FILES,
    ClientPool,
    Received,
    TooLong,
    get,
    post,
)
from soulkit.models.api.wire import (
    FORMAT,
    RUNGS,
    offered_room,
    rate_limit_wait,
    refused_name,
    refused_rung,
    retry_after,
    sent_seed,
    too_long,
)
from soulkit.models.ledger.ledger import LedgerEntry
from soulkit.parse import json_or_none
from soulkit.types import Call, Completion, Form, Sampling, Usage

_DETAIL_CHARS = 220
_FILES_WAIT_S = 0.25
"""Seconds until other calls have probably closed some files."""
_RETRIED = frozenset({408, 409, 429})
_REFUSING = frozenset({400, 413, 422})
"""Statuses of a request that is itself at fault."""
_FINAL = frozenset({401, 402, 403, 404, 405, 410})
_REFUSING_FORMS = frozenset({400, 404, 415, 422, 500, 501})
"""Statuses with which servers refuse a JSON schema: routers find no server that accepts it, and
some servers fail on it."""
NO_CREDIT = re.compile(
    r"insufficient[_ ](?:quota|balance|credit|funds)|billing[_ ](?:hard[_ ]limit|not[_ ]active)",
    re.IGNORECASE,
)
"""Some servers send 429 for unpaid accounts, which no pause fixes. "quota" and "billing" alone are
not in the pattern, since others use them for limits per minute."""
_KEY_LIKE = re.compile(r"\bsk-[\w*.-]{6,}|\bBearer\s+\S+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one attempt failed."""

    detail: str
    retry: bool = True
    server: Literal["up", "busy", "down", "unasked"] = "up"
    """What the fault says about the server for other calls; `unasked`: the request was never
    sent."""
    wait_s: float | None = None
    """Seconds to wait, as stated by the server or needed by this machine."""
    refused: str = ""
    """The parameter that the server refuses, as named in `wire.without`."""
    overflow: bool = False
    room: int = 0
    """Reply tokens to request instead if the requested reply is too long; 0: another fault."""
    key: bool = False
    """The server rejects the key, or needs one."""
    final: bool = False
    """Probably the same for every request: no key, no credit, no such model or path."""
    probe: bool = False
    """Found by a probe: the server's fault, not one of the call's attempts."""

    @property
    def stated_wait_s(self) -> float:
        """Seconds to wait without using up an attempt, because of a rate limit or a problem on this
        machine; else 0."""
        return (self.wait_s or 0.0) if self.server in ("busy", "unasked") else 0.0


def read_received(
    received: Received, settings: Mapping[str, Any], sent: Mapping[str, Any], protocol: ApiProtocol
) -> tuple[str, WireReply] | Fault:
    """(reply with keys masked, parsed reply), or the fault; `sent` is the part of `settings` that
    was sent."""
    if 200 <= received.status < 300:
        try:
            return safe_reply(received.text, protocol)
        except Unreadable as error:
            fault = _unreadable_fault(received, error, settings, sent, protocol)
    else:
        fault = _refusal(received, settings, sent, protocol)
    return replace(fault, detail=clean_detail(fault.detail))


def _refusal(
    received: Received, settings: Mapping[str, Any], sent: Mapping[str, Any], protocol: ApiProtocol
) -> Fault:
    if 300 <= received.status < 400:
        where = received.headers.get("location", "an unknown place")
        return Fault(
            f"HTTP {received.status} redirects to {where}, which is not followed", retry=False
        )
    error = error_in(received, protocol)
    return _status_fault(received.status, error, received.headers, settings, sent)


def error_in(received: Received, protocol: ApiProtocol) -> ApiError:
    """Parse a reply as an error, whether or not it is JSON."""
    body = json_or_none(received.text)
    return protocol.error(received.text if body is None else body)


def _status_fault(
    status: int, error: ApiError, headers: Mapping[str, str], settings: Mapping[str, Any],
    sent: Mapping[str, Any],
) -> Fault:  # fmt: skip
    code, kind, message = error.code, error.kind, error.message
    detail = f"HTTP {status} {kind}: {message}" if kind else f"HTTP {status} {message}"
    if status in _REFUSING:
        overflow = too_long(f"{code} {kind} {message}")
        limit = int(sent.get("max_tokens") or sent.get("max_completion_tokens") or 0)
        room = offered_room(message, limit, overflow=overflow)
        if overflow or room:
            return Fault(detail, retry=False, overflow=overflow, room=room)
    refused = refused_name(code, error.param, message, sent)
    if refused == FORMAT and status in _REFUSING_FORMS:
        return Fault(detail, retry=False, refused=refused_rung(code, message, settings, sent))
    if status in _REFUSING:
        return Fault(detail, retry=False, refused=refused)
    if status == 429 and NO_CREDIT.search(f"{code} {kind} {message}"):
        return Fault(detail, retry=False, final=True)
    server: Literal["up", "busy", "down"] = "busy" if status == 429 else "up"
    return Fault(
        detail,
        retry=status in _RETRIED or status >= 500,
        server="down" if status >= 500 else server,
        wait_s=rate_limit_wait(headers, message) if status == 429 else retry_after(headers),
        key=status == 401,
        final=status in _FINAL,
    )


def _unreadable_fault(
    received: Received, why: Unreadable, settings: Mapping[str, Any], sent: Mapping[str, Any],
    protocol: ApiProtocol,
) -> Fault:  # fmt: skip
    """The fault of a reply with status 200 without a completion; some servers report errors so."""
    body, headers = json_or_none(received.text), received.headers
    if not (isinstance(body, dict) and body.get("error")):
        return Fault(f"unreadable reply ({why}): {received.text}")
    error = protocol.error(body)
    if re.fullmatch("[45][0-9][0-9]", error.code):
        return _status_fault(int(error.code), error, headers, settings, sent)
    # Without a status, only the message separates a refusal from a temporary fault.
    fault = _status_fault(400, error, headers, settings, sent)
    if fault.refused or fault.overflow or fault.room:
        return fault
    return Fault(f"HTTP 200 with an error: {error.message}", server="down")


async def exchange(
    pool: ClientPool, url: str, headers: Mapping[str, str], body: Mapping[str, Any] | None, *,
    timeout_s: float, most: int,
) -> Received | Fault:  # fmt: skip
    """The response to a POST of `body`, or to a GET if it is None. A Fault if there is no response
    or it has more than `most` bytes."""
    import httpx2 as errors

    try:
        async with asyncio.timeout(timeout_s), pool.client() as client:
            if body is None:
                return await get(client, url, headers, most)
            return await post(client, url, headers, body, most)
    except (TimeoutError, errors.TimeoutException):
        return Fault(f"no answer within {timeout_s:g} s", server="down")
    except errors.HTTPError as error:
        fault = connection_fault(error)
        return replace(fault, detail=clean_detail(fault.detail))
    except TooLong:
        return Fault(f"the reply is longer than {most >> 20} MB", retry=False)


def connection_fault(error: BaseException) -> Fault:
    """The fault of a broken connection, with the HTTP package's message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return Fault("connection refused", server="down")
        if isinstance(cause, OSError) and cause.errno in OUT_OF_FILES:
            words = "this process has too many open files (raise the limit with: ulimit -n)"
            return Fault(words, server="unasked", wait_s=_FILES_WAIT_S)
        cause = cause.__cause__ or cause.__context__
    return Fault(f"the connection broke: {str(error) or type(error).__name__}", server="down")


def clean_detail(text: str) -> str:
    """One short line without keys; keys are masked before it is shortened."""
    return _KEY_LIKE.sub(MASK, printable(" ".join(text.split())))[:_DETAIL_CHARS]


Keep = Callable[[LedgerEntry, Mapping[str, Any]], LedgerEntry]
"""Stores a paid reply in the ledger, with the extra parameters that were sent."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """One request of a call."""

    messages: list[dict[str, str]]
    settings: Mapping[str, Any]
    sent: Mapping[str, Any]
    call: Call
    number: int
    """Number of the request for this call, from 1."""
    keep: Keep
    sampling: Sampling
    """The original sampling, with the longest reply the server may give."""


@dataclass(frozen=True, slots=True)
class BilledReply:
    """A readable reply and its ledger entry."""

    entry: LedgerEntry
    answer: WireReply

    @property
    def tokens(self) -> float | None:
        if self.answer.prompt_tokens is None or self.answer.completion_tokens is None:
            return None
        return float(self.answer.prompt_tokens + self.answer.completion_tokens)


NEAR_TOKENS, NEAR_SHARE = 8, 64
"""Tolerances, since servers count tokens differently: a context with at most 8 tokens left counts
as full, and a reply that lacks at most 1/64 of the requested length counts as complete."""
_UNFINISHED = ("length", "content_filter", "refusal")
"""Stop reasons of replies that show nothing about their form."""


def read_completion(entry: LedgerEntry, sampling: Sampling) -> Completion:
    """The completion in a ledger entry, requested with `sampling`. Raises `Unreadable`."""
    answer = parse_reply(entry.reply)
    # If the server gives no stop reason, a reply that used its whole limit counts as truncated.
    cut = answer.stop_reason == "unknown" and entry.completion_tokens >= sampling.max_tokens
    usage = Usage(
        calls=1,
        prompt_tokens=entry.prompt_tokens,
        completion_tokens=entry.completion_tokens,
        seconds=entry.seconds,
        cost=entry.cost,
        reasoning_tokens=min(answer.reasoning_tokens, entry.completion_tokens),
    )
    return Completion(
        text=answer.text,
        stop_reason="length" if cut else answer.stop_reason,
        reasoning=answer.reasoning,
        usage=usage,
        dropped=entry.dropped,
        ignored=ignored_fields(entry, answer, sampling),
    )


def overflow_words(
    entry: LedgerEntry, reply: Completion, sampling: Sampling, context: int | None, longest: float
) -> str:
    """The server's limit that cut a reply, in words; empty if none did or token counts are unknown.

    `context`: the server's maximum tokens of prompt and reply together; `longest`: its maximum
    reply tokens, infinite if unknown.
    """
    if reply.stop_reason != "length":
        return ""
    tokens, asked = parse_reply(entry.reply).completion_tokens, sampling.max_tokens
    if tokens is None or tokens >= asked:
        return ""
    full = context is not None and entry.prompt_tokens + tokens + NEAR_TOKENS >= context
    if not full and (not tokens or asked - tokens <= max(1, asked // NEAR_SHARE)):
        return ""
    limit, way_out = "the server does not name the limit", "Start it with more context, or ask"
    if full:
        limit = f"the server allows {context} tokens for prompt and reply together"
    elif tokens + NEAR_TOKENS >= longest:
        limit, way_out = f"the server allows at most {longest:.0f} tokens per reply", "Ask"
    return (
        f"the server cut the reply after {tokens} of {asked} requested tokens (prompt: "
        f"{entry.prompt_tokens} tokens); {limit}. {way_out} for shorter replies"
    )


def ignored_fields(entry: LedgerEntry, answer: WireReply, sampling: Sampling) -> tuple[str, ...]:
    """Sorted `Sampling` fields that were sent but that the reply does not follow."""
    form = sampling.form is not None and _lacks_form(answer, sampling.form, entry.dropped)
    seed = "seed" not in entry.dropped and _other_seed(entry, sampling)
    return (*(("form",) if form else ()), *(("seed",) if seed else ()))


def _lacks_form(answer: WireReply, form: Form, dropped: tuple[str, ...]) -> bool:
    """Whether a complete reply is not the object that the server was asked to enforce."""
    rung = next((name for name in RUNGS if f"form:{name}" not in dropped), None)
    if rung is None:
        return False
    return lacks_form(answer.text, answer.stop_reason, form, shaped=rung == RUNGS[0])


def lacks_form(text: str, stop_reason: str, form: Form, *, shaped: bool = True) -> bool:
    """Whether a complete reply is not a JSON object or (if `shaped`) lacks the form's keys."""
    text = text.rpartition("</think>")[2].strip()
    if stop_reason in _UNFINISHED or not text:
        return False
    value = json_or_none(text)
    if not isinstance(value, dict):
        return True
    return shaped and not _has_shape(value, json_or_none(form.schema))


def _has_shape(value: Mapping[str, Any], schema: Any) -> bool:
    """Whether an object has the keys its schema requires, and no others if the schema says so."""
    properties = schema.get("properties", {}) if isinstance(schema, dict) else {}
    required = schema.get("required", ()) if isinstance(schema, dict) else ()
    closed = isinstance(schema, dict) and schema.get("additionalProperties") is False
    return set(required) <= set(value) and (not closed or set(value) <= set(properties))


def _other_seed(entry: LedgerEntry, sampling: Sampling) -> bool:
    """Whether the reply reports a seed that differs from the one sent."""
    if sampling.seed is None or '"seed"' not in entry.reply:
        return False
    body = json_or_none(entry.reply)
    choices = body.get("choices") if isinstance(body, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else {}
    places = (body, first) if isinstance(first, dict) else (body,)
    seeds = [place["seed"] for place in places if isinstance(place, dict) and "seed" in place]
    numbers = [seed for seed in seeds if isinstance(seed, int) and not isinstance(seed, bool)]
    return bool(numbers) and sent_seed(sampling.seed, entry.call) not in numbers
