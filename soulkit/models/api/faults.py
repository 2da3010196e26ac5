"""Why an attempt brought no answer, and what that says about the call and about the server.

Pure functions: from a status and a body, from a reply that is none, or from a broken connection, to
a `Fault`. What may be tried again, what is the server's trouble and concerns every call, and what
is mended by asking for less, is decided here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from soulkit.keys import MASK, printable
from soulkit.models.api.http import Received
from soulkit.models.api.pool import OUT_OF_FILES
from soulkit.models.api.wire import (
    FORMAT,
    Unreadable,
    WireReply,
    error_message,
    json_or_none,
    offered_room,
    rate_limit_wait,
    refused_name,
    refused_rung,
    retry_after,
    safe_reply,
    too_long,
)

_DETAIL_CHARS = 220
_FILES_WAIT_S = 0.25
"""Until other calls have closed some of the files that are open."""
_RETRIED = frozenset({408, 409, 429})
_REFUSING = frozenset({400, 413, 422})
"""Statuses of a request that is at fault itself."""
_FINAL = frozenset({401, 402, 403, 404, 405, 410})
_REFUSING_FORMS = frozenset({400, 404, 415, 422, 500, 501})
"""Statuses with which servers turn a form down: routers do not find one that takes it, others
break on it."""
NO_CREDIT = re.compile(
    r"insufficient[_ ](?:quota|balance|credit|funds)|billing[_ ](?:hard[_ ]limit|not[_ ]active)",
    re.IGNORECASE,
)
"""Some say 429 to whoever has not paid: no pause mends that. Words such as "quota" and "billing"
alone say nothing, since others use them of their limits per minute."""
_KEY_LIKE = re.compile(r"\bsk-[\w*.-]{6,}|\bBearer\s+\S+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why one attempt brought no answer."""

    detail: str
    retry: bool = True
    server: Literal["up", "busy", "down", "unasked"] = "up"
    """What the fault says about the server, for the other calls; `unasked`: the request never left
    this machine."""
    wait_s: float | None = None
    """Seconds that the server asks to wait, or that this machine needs."""
    refused: str = ""
    """What the server does not take, in the words of `wire.without`."""
    overflow: bool = False
    room: int = 0
    """Tokens to ask for instead, where the server has no room for so long a reply; 0: it is about
    something else."""
    key: bool = False
    """The server does not take the key, or wants one."""
    final: bool = False
    """It may be the answer to whatever is asked: no key, no credit, no such model or path."""
    probe: bool = False
    """It was found by a probe: the server's fault, not one of the call's attempts."""

    @property
    def stated_wait_s(self) -> float:
        """Seconds to wait without spending an attempt: what a rate limit states, or what this
        machine needs; else 0."""
        return (self.wait_s or 0.0) if self.server in ("busy", "unasked") else 0.0


def read_received(
    received: Received, settings: Mapping[str, Any], sent: Mapping[str, Any]
) -> tuple[str, WireReply] | Fault:
    """A reply as it may be kept and what it says, or why it is none; `sent` is what is left of
    the `settings`."""
    if 200 <= received.status < 300:
        try:
            return safe_reply(received.text)
        except Unreadable as error:
            fault = unreadable_fault(received, error, settings, sent)
    else:
        fault = refusal(received, settings, sent)
    return replace(fault, detail=clean_detail(fault.detail))


def refusal(received: Received, settings: Mapping[str, Any], sent: Mapping[str, Any]) -> Fault:
    """The fault of a reply whose status is none of success."""
    if 300 <= received.status < 400:
        where = received.headers.get("location", "an unknown place")
        return Fault(
            f"HTTP {received.status} sends on to {where}, which is not followed", retry=False
        )
    body = json_or_none(received.text)
    error = received.text if body is None else error_of(body)
    return status_fault(received.status, error, received.headers, settings, sent)


def error_of(body: object) -> object:
    """What an error body says of the error; Google's interface puts it into a list."""
    if isinstance(body, list) and len(body) == 1:
        body = body[0]
    return body.get("error", body) if isinstance(body, dict) else body


def status_fault(
    status: int,
    body: object,
    headers: Mapping[str, str],
    settings: Mapping[str, Any],
    sent: Mapping[str, Any],
) -> Fault:
    """The fault of an error status; `sent` is what is left of the `wanted` parameters."""
    fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
    code, kind = (str(fields.get(name) or "")[:_DETAIL_CHARS] for name in ("code", "type"))
    message, param = error_message(body), str(fields.get("param") or "")
    detail = f"HTTP {status} {kind}: {message}" if kind else f"HTTP {status} {message}"
    if status in _REFUSING:
        overflow = too_long(f"{code} {kind} {message}")
        room = offered_room(message, _limit(sent), overflow=overflow)
        if overflow or room:
            return Fault(detail, retry=False, overflow=overflow, room=room)
    refused = refused_name(code, param, message, sent)
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


def _limit(sent: Mapping[str, Any]) -> int:
    """The reply's limit as it was sent, under whichever name; 0 without one."""
    return int(sent.get("max_tokens") or sent.get("max_completion_tokens") or 0)


def unreadable_fault(
    received: Received, error: Unreadable, settings: Mapping[str, Any], sent: Mapping[str, Any]
) -> Fault:
    """The fault of a reply with status 200 that holds no completion; some report errors so."""
    body, headers = json_or_none(received.text), received.headers
    inner = body.get("error") if isinstance(body, dict) else None
    if not inner:
        return Fault(f"unreadable reply ({error}): {received.text}")
    code = str(inner.get("code") if isinstance(inner, dict) else "")
    if re.fullmatch("[45][0-9][0-9]", code):
        return status_fault(int(code), inner, headers, settings, sent)
    # Without a status only its words tell a refusal from a fault that passes.
    fault = status_fault(400, inner, headers, settings, sent)
    if fault.refused or fault.overflow or fault.room:
        return fault
    return Fault(f"HTTP 200 with an error: {error_message(inner)}", server="down")


def timeout_fault(seconds: float) -> Fault:
    """The fault of an attempt that took too long."""
    return Fault(f"no answer within {seconds:g} s", server="down")


def oversize_fault(most: int) -> Fault:
    """The fault of a reply of more than `most` bytes."""
    return Fault(f"the reply is longer than {most >> 20} MB", retry=False)


def connection_fault(error: BaseException) -> Fault:
    """The fault of a connection, in the words of the HTTP package."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return Fault("connection refused", server="down")
        if isinstance(cause, OSError) and cause.errno in OUT_OF_FILES:
            words = "this process has too many files open (raise it with: ulimit -n)"
            return Fault(words, server="unasked", wait_s=_FILES_WAIT_S)
        cause = cause.__cause__ or cause.__context__
    return Fault(f"the connection broke: {str(error) or type(error).__name__}", server="down")


def clean_detail(text: str) -> str:
    """One short line without keys; masked before it is cut, so that no half key is left over."""
    return _KEY_LIKE.sub(MASK, printable(" ".join(text.split())))[:_DETAIL_CHARS]
