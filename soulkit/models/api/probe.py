"""A question of one token, put to every server before anything is played.

What a run would learn from its first hundred failures is said at once: a wrong key, a model that
the server does not have, an address that lacks its `/v1`, an account without credit. Only such a
refusal decides. A server that is busy or not there yet, and one that does not like the question
(models that think want more than one token), may be asked all the same. A list of models decides
nothing: some servers have none, and some break on it.

    what came back ──▶ Answer       who answered
                   ──▶ Undecided    why nobody can tell yet
                   ──▶ Refusal      why no request will ever be answered

The question is no part of the run's ledger; what it costs counts against the budget.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from soulkit.errors import ModelLoadError, UserError, did_you_mean
from soulkit.models.api import http
from soulkit.models.api.access import Access
from soulkit.models.api.address import PATH
from soulkit.models.api.faults import NO_CREDIT, clean_detail, connection_fault, error_of
from soulkit.models.api.listing import list_models
from soulkit.models.api.pool import ClientPool
from soulkit.models.api.schema_question import schema_words
from soulkit.models.api.wire import (
    Unreadable,
    WireReply,
    error_message,
    json_or_none,
    parse_reply,
    rate_limit_wait,
    retry_after,
)

QUESTION = "Reply with one word: yes."
TIMEOUT_S = 20.0
MAX_BYTES = 1024 * 1024
PAUSES_S = (0.0, 1.0, 3.0)
"""Before each time that a busy server is asked; multiples of the back-off."""
LONGEST_PAUSE_S = 10.0
SHOWN_MODELS = 6
USUAL_PATHS = ("/v1", "/api/v1", "/v1beta/openai")
"""Of base URLs, on most servers, on OpenRouter's and on Google's."""

Kind = Literal["key", "model", "path", "credit", "moved"]

_NO_MODEL = re.compile(
    r"(?:model|deployment)\W.{0,80}(?:does ?n[o']t exist|not (?:be )?(?:found|exist|available))"
    r"|(?:model|deployment)[ _]?not[ _]?(?:found|exist)|no such (?:model|deployment)"
    r"|(?:invalid|unknown|not a valid) model|no endpoints found",
    re.IGNORECASE,
)
_NO_KEY = re.compile(r"(?:invalid|incorrect|wrong) api.?key|api.?key (?:is )?(?:not valid|invalid)",
                     re.IGNORECASE)  # fmt: skip
_ABOUT_MODEL = re.compile(r"\b(?:models?|deployment)\b|deploymentnotfound", re.IGNORECASE)


class EndpointRefused(UserError):
    """A server that will answer nothing that it is asked as things are: nothing goes on."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The server answers."""

    model: str = ""
    """What it calls the model, where it says so."""
    reply: WireReply | None = None
    """What it counted; None where it liked everything but the question."""
    refusal: str = ""
    """What it did not like about the question."""
    forms: bool | None = None
    """Whether it holds replies to a form; None where nobody needs to know, or it did not show."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The server may yet answer."""

    why: str
    wait_s: float | None = None
    busy: bool = False
    """Whether the same question may have another answer in a moment."""
    page: bool = False
    """Whether it answered with a page for people."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server will not answer."""

    kind: Kind
    why: str
    hint: str = ""
    """What else was learnt about the way out, as a sentence."""


Outcome = Answer | Undecided | Refusal


async def probe(
    access: Access, model: str, pool: ClientPool, timeout_s: float, backoff_s: float,
    beside: Mapping[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    """Put the question, again while the server is busy, and look where else it may answer.

    `beside` are parameters of the question beyond those that every server takes.
    """
    outcome: Outcome = Undecided("it was not asked")
    for pause in PAUSES_S:
        asked_for = outcome.wait_s if isinstance(outcome, Undecided) else None
        await asyncio.sleep(min(LONGEST_PAUSE_S, max(asked_for or 0.0, pause * backoff_s)))
        outcome = await _ask(access, access.url(PATH), model, pool, timeout_s, beside)
        if not (isinstance(outcome, Undecided) and outcome.busy):
            break
    if isinstance(outcome, Refusal) and outcome.kind == "model":
        return Refusal("model", outcome.why, await _offered(access, model, timeout_s))
    if isinstance(outcome, Undecided) and not outcome.page:
        return outcome
    if isinstance(outcome, Answer) or (isinstance(outcome, Refusal) and outcome.kind != "path"):
        return outcome
    return await _elsewhere(access, model, pool, timeout_s, outcome)


async def _elsewhere(
    access: Access, model: str, pool: ClientPool, timeout_s: float, outcome: Outcome
) -> Outcome:
    """Whether the same host answers under one of the usual paths, which the address then lacks."""
    for base_url in () if access.api_version else _usual(access.base_url):
        there = await _ask(access, f"{base_url}{PATH}", model, pool, timeout_s)
        if isinstance(there, Answer) or (
            isinstance(there, Refusal) and there.kind in ("key", "model", "credit")
        ):
            why = outcome.why if isinstance(outcome, Refusal | Undecided) else ""
            return Refusal("path", why, f"It answers at {base_url}: give that address.")
    return outcome


def _usual(base_url: str) -> list[str]:
    """Addresses that may have been meant by one that answers nothing."""
    if base_url.endswith(PATH):
        return [base_url.removesuffix(PATH)]
    return [f"{base_url}{path}" for path in USUAL_PATHS if not base_url.endswith("/v1")]


async def _ask(
    access: Access, url: str, model: str, pool: ClientPool, timeout_s: float,
    beside: Mapping[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    import httpx2 as errors

    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": model, "messages": messages, "max_tokens": 1, **(beside or {})}
    limit = min(TIMEOUT_S, timeout_s)
    try:
        async with asyncio.timeout(limit), pool.client() as client:
            received = await http.post(client, url, access.headers, body, MAX_BYTES)
    except (TimeoutError, errors.TimeoutException):
        return Undecided(f"no answer within {limit:g} s")
    except errors.HTTPError as error:
        return Undecided(clean_detail(connection_fault(error).detail))
    except http.TooLong:
        return Undecided("its answer is too long to be one")
    return outcome_of(received, model)


def outcome_of(received: http.Received, model: str) -> Outcome:
    """What a reply to the question says of the server."""
    status, body = received.status, json_or_none(received.text)
    error = error_of(body)
    if 200 <= status < 300:
        try:
            reply = parse_reply(received.text)
        except Unreadable as unreadable:
            status = _status_within(error)
            if not status:
                page = received.text.lstrip().startswith("<")
                why = "a page for people" if page else f"an unreadable reply ({unreadable})"
                return Undecided(f"HTTP {received.status} with {why}", page=page)
        else:
            name = body.get("model") if isinstance(body, dict) else ""
            return Answer(clean_detail(name) if isinstance(name, str) else "", reply)
    return _outcome_of_error(status, error, received, model)


def _outcome_of_error(status: int, error: object, received: http.Received, model: str) -> Outcome:
    fields: Mapping[str, Any] = error if isinstance(error, dict) else {}
    message = error_message(received.text if error is None else error)
    text = " ".join([*(str(fields.get(name) or "")[:200] for name in ("code", "type")), message])
    why = clean_detail(f"HTTP {status} {message}".strip())
    if 300 <= status < 400:
        return Refusal("moved", f"HTTP {status}", _moved(received.headers.get("location", "")))
    if status == 402 or (status == 429 and NO_CREDIT.search(text)):
        return Refusal("credit", why)
    if status in (401, 403) or (status == 400 and _NO_KEY.search(text)):
        return Refusal("key", why)
    if status in (400, 422) and _NO_MODEL.search(text) and "max_tokens" not in text:
        return Refusal("model", why)
    if status in (404, 405, 410):
        named = error is not None and (_ABOUT_MODEL.search(text) or _names(message, model))
        is_model = status != 405 and (named or _NO_MODEL.search(text))
        return Refusal("model" if is_model else "path", why)
    if status == 429:
        return Undecided(why, rate_limit_wait(received.headers, message), busy=True)
    if status in (408, 409) or status >= 500:
        return Undecided(why, retry_after(received.headers), busy=True)
    return Answer(refusal=why)


def _names(message: str, model: str) -> bool:
    """Whether a message names a model, by itself and not as a part of a word or path."""
    return len(model) > 1 and bool(re.search(rf"(?<![\w/]){re.escape(model)}(?![\w/])", message))


def _status_within(error: object) -> int:
    """The status that some servers report in a body of status 200; 0 for none."""
    code = str(error.get("code")) if isinstance(error, dict) else ""
    return int(code) if re.fullmatch("[45][0-9][0-9]", code) else 0


def _moved(where: str) -> str:
    place = clean_detail(where.partition("?")[0].removesuffix(PATH)) or "an unknown place"
    return f"It sends on to {place}, which is not followed: prompts go where you say alone."


async def _offered(access: Access, model: str, timeout_s: float) -> str:
    """What the server's list of models says of a name that it does not have; empty without one."""
    try:
        return _hint(model, await list_models(access, min(TIMEOUT_S, timeout_s)))
    except ModelLoadError:
        return ""


def _hint(model: str, names: Iterable[str]) -> str:
    models = list(names)
    near = did_you_mean(model, models) if models else ""
    if not models or near.startswith("Did you mean"):
        return near
    more = f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
    return f"It has: {', '.join(models[:SHOWN_MODELS])}{more}."


# -- in words --------------------------------------------------------------------------------------


def answer_line(outcome: Answer | Undecided, model: str, base_url: str) -> str:
    """A line on who answered, or why that is not known yet."""
    where = f"{model} at {urlsplit(base_url).netloc}"
    if isinstance(outcome, Undecided):
        return f"no answer yet from {where}: {outcome.why}; calls wait for it"
    known_as = f" (as {outcome.model})" if outcome.model not in ("", model) else ""
    holds = "" if outcome.forms is None else f"; {schema_words(outcome.forms)}"
    return f"answered: {where}{known_as}{holds}"


def refused(refusal: Refusal, model: str, access: Access, *, before: bool) -> EndpointRefused:
    """The error of a refusal; `before` anything was played, or in the middle of a run."""
    what, way_out = _what_and_way(refusal, model, access)
    when = (
        "It was asked a question of one token first, so nothing was played or paid for."
        if before
        else "It had answered before. What is played is kept, and no further call is made."
    )
    return EndpointRefused(what, when, f"{way_out} Then give the same command again.")


def _what_and_way(refusal: Refusal, model: str, access: Access) -> tuple[str, str]:
    url, why, hint = access.base_url, refusal.why, refusal.hint
    unset = "" if access.has_key else ", which is not set"
    ways: dict[Kind, tuple[str, str]] = {
        "key": (
            f"The server at {url} refuses the key for '{model}': {why}",
            f"The key is read from {access.key_env}{unset}: check it, or name another variable "
            "with --api-key-env or behind the player's address as #NAME.",
        ),
        "model": (
            f"The server at {url} has no model '{model}': {why}",
            f"{hint} Name one that it has.".lstrip(),
        ),
        "path": (
            f"Nothing answers at {url}{PATH}: {why}",
            hint or "Give the address up to the part before that, with /v1 where there is one.",
        ),
        "credit": (
            f"The account at {url} has no credit left for '{model}': {why}",
            f"Add credit to the account of the key in {access.key_env}, or name another player.",
        ),
        "moved": (f"The server at {url} is not where it is asked: {why}",
                  f"{hint} Give the address that it names, if you trust it."),
    }  # fmt: skip
    return ways[refusal.kind]
