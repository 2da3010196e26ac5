"""Questions to a server before a run: does it answer, which models has it, does it follow schemas?

Every endpoint of a run joins the `Preflight`. The first call that no ledger answers waits until all
of them have been asked for one token: a judge's wrong key is then known before the actor speaks.
Only a wrong key, an unknown model, an address without its `/v1` and an account without credit stop
the run. In the middle of a run a call that is refused has the question put again.

Some servers take a schema with HTTP 200 and do nothing about it. The schema question shows it: the
only text that its schema allows is a word that no model would say by chance.

The questions are no part of the run's ledger; what they cost counts against the budget.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, Protocol
from urllib.parse import urlsplit

from soulkit.errors import UserError, did_you_mean
from soulkit.models.api.addresses import Access
from soulkit.models.api.protocol import (
    CHAT,
    ApiError,
    ApiProtocol,
    Unreadable,
    WireReply,
    json_or_none,
)
from soulkit.models.api.replies import NO_CREDIT, Fault, clean_detail, error_in, exchange
from soulkit.models.api.server_defaults import models_listed
from soulkit.models.api.transport import (
    ClientPool,
    PerLoop,
    Received,
    file_limits,
    fitted,
    lowered_line,
    open_files,
)
from soulkit.models.api.wire import parameters, rate_limit_wait, retry_after, to_messages
from soulkit.reporting import SILENT, Reporter
from soulkit.types import Call, Form, Sampling, Segment

SCHEMA_WORD = "qvx7zk"
SCHEMA_FORM = Form("schema_question", json.dumps({"enum": [SCHEMA_WORD]}, separators=(",", ":")))
SCHEMA_REPLY_TOKENS = 32
ASKED_FOR_FORMS = ("judge", "auditor", "coach", "environment", "filter", "drafter")
"""Roles whose replies may be asked for in a form."""


def schema_question() -> tuple[Sequence[Segment], Sampling, Call]:
    """What is asked, how, and as which call: greedily, and without thinking before it."""
    context = [Segment("user", "Which day comes after Monday? Reply with one word.")]
    sampling = Sampling(
        temperature=0.0, max_tokens=SCHEMA_REPLY_TOKENS, seed=0, thinking=False, form=SCHEMA_FORM
    )
    return context, sampling, Call(role="judge", example_id=SCHEMA_FORM.name)


def follows_schema(text: str) -> bool | None:
    """Whether a reply's text shows that the schema was followed; None where it says nothing."""
    answer = text.rpartition("</think>")[2].strip()
    if not answer:
        return None
    return bool(json_or_none(answer) == SCHEMA_WORD)


def schema_words(holds: bool) -> str:
    """The outcome, as half a sentence about the server."""
    if holds:
        return "it holds replies to a schema"
    return "it holds no reply to a schema: whoever reads them checks their form"


async def ask_schema(
    access: Access, model: str, beside: Mapping[str, Any], pool: ClientPool, timeout_s: float
) -> tuple[bool | None, WireReply | None]:
    """The question, put to a chat server with `beside` among its parameters: whether it follows a
    schema (None: it did not show), and the reply for whoever counts the money."""
    context, sampling, call = schema_question()
    asked = {**parameters(sampling, call), **beside}
    body = access.protocol.body(model, to_messages(context), asked)
    received = await exchange(
        pool, access.request_url, access.headers, body, timeout_s=timeout_s, most=MAX_BYTES
    )
    if isinstance(received, Fault) or not 200 <= received.status < 300:
        return None, None  # what it refuses of a form is found out, and said, as for any other
    try:
        reply = access.protocol.parse(received.text)
    except Unreadable:
        return None, None
    return follows_schema(reply.text), reply


QUESTION = "Reply with one word: yes."
TIMEOUT_S = 20.0
MAX_BYTES = 1024 * 1024
LISTING_BYTES = 8 * MAX_BYTES
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
        outcome = await _ask(access, access.request_url, model, pool, timeout_s, beside)
        if not (isinstance(outcome, Undecided) and outcome.busy):
            break
    if isinstance(outcome, Refusal) and outcome.kind == "model":
        models = await offered_models(access, pool, min(TIMEOUT_S, timeout_s))
        return Refusal("model", outcome.why, _hint(model, models))
    if isinstance(outcome, Undecided) and not outcome.page:
        return outcome
    if isinstance(outcome, Answer) or (isinstance(outcome, Refusal) and outcome.kind != "path"):
        return outcome
    return await _elsewhere(access, model, pool, timeout_s, outcome)


async def _elsewhere(
    access: Access, model: str, pool: ClientPool, timeout_s: float, outcome: Outcome
) -> Outcome:
    """Whether the same host answers under one of the usual paths, which the address then lacks."""
    for base_url in () if access.api_version else _usual(access):
        there = await _ask(access, f"{base_url}{access.protocol.path}", model, pool, timeout_s)
        if isinstance(there, Answer) or (
            isinstance(there, Refusal) and there.kind in ("key", "model", "credit")
        ):
            why = outcome.why if isinstance(outcome, Refusal | Undecided) else ""
            return Refusal("path", why, f"It answers at {base_url}: give that address.")
    return outcome


def _usual(access: Access) -> list[str]:
    """Addresses that may have been meant by one that answers nothing."""
    base_url, path = access.base_url, access.protocol.path
    if base_url.endswith(path):
        return [base_url.removesuffix(path)]
    return [f"{base_url}{usual}" for usual in USUAL_PATHS if not base_url.endswith("/v1")]


async def _ask(
    access: Access, url: str, model: str, pool: ClientPool, timeout_s: float,
    beside: Mapping[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    messages = [{"role": "user", "content": QUESTION}]
    body = access.protocol.body(model, messages, {"max_tokens": 1, **(beside or {})})
    limit = min(TIMEOUT_S, timeout_s)
    received = await exchange(pool, url, access.headers, body, timeout_s=limit, most=MAX_BYTES)
    if isinstance(received, Fault):
        return Undecided(received.detail)
    return outcome_of(received, model, access.protocol)


def outcome_of(received: Received, model: str, protocol: ApiProtocol = CHAT) -> Outcome:
    """What a reply to the question says of the server."""
    status, error = received.status, error_in(received, protocol)
    if 200 <= status < 300:
        try:
            reply = protocol.parse(received.text)
        except Unreadable as unreadable:
            # Some report the status of an error in a body of status 200.
            if not re.fullmatch("[45][0-9][0-9]", error.code):
                page = received.text.lstrip().startswith("<")
                why = "a page for people" if page else f"an unreadable reply ({unreadable})"
                return Undecided(f"HTTP {received.status} with {why}", page=page)
            status = int(error.code)
        else:
            body = json_or_none(received.text)
            name = body.get("model") if isinstance(body, dict) else ""
            return Answer(clean_detail(name) if isinstance(name, str) else "", reply)
    return _outcome_of_error(status, error, received, model)


def _outcome_of_error(status: int, error: ApiError, received: Received, model: str) -> Outcome:
    message = error.message
    text = f"{error.code} {error.kind} {message}"
    why = clean_detail(f"HTTP {status} {message}".strip())
    if 300 <= status < 400:
        where = received.headers.get("location", "").partition("?")[0].removesuffix(CHAT.path)
        hint = f"It sends on to {clean_detail(where) or 'an unknown place'}, which is not followed"
        return Refusal("moved", f"HTTP {status}", f"{hint}: prompts go where you say alone.")
    if status == 402 or (status == 429 and NO_CREDIT.search(text)):
        return Refusal("credit", why)
    if status in (401, 403) or (status == 400 and _NO_KEY.search(text)):
        return Refusal("key", why)
    if status in (400, 422) and _NO_MODEL.search(text) and "max_tokens" not in text:
        return Refusal("model", why)
    if status in (404, 405, 410):
        in_json = json_or_none(received.text) is not None
        by_itself = rf"(?<![\w/]){re.escape(model)}(?![\w/])"  # not a part of a word or path
        names = len(model) > 1 and re.search(by_itself, message)
        named = in_json and (_ABOUT_MODEL.search(text) or names)
        is_model = status != 405 and (named or _NO_MODEL.search(text))
        return Refusal("model" if is_model else "path", why)
    if status == 429:
        return Undecided(why, rate_limit_wait(received.headers, message), busy=True)
    if status in (408, 409) or status >= 500:
        return Undecided(why, retry_after(received.headers), busy=True)
    return Answer(refusal=why)


async def offered_models(access: Access, pool: ClientPool, timeout_s: float) -> list[str]:
    """The names of the models of a server, sorted; none where it has no list or fails over it."""
    listing = await exchange(
        pool, access.url("/models"), access.headers, None, timeout_s=timeout_s, most=LISTING_BYTES
    )
    if isinstance(listing, Fault):
        return []
    return sorted({clean_detail(str(entry.get("id"))) for entry in models_listed(listing)})


def _hint(model: str, models: Sequence[str]) -> str:
    """What a list of models says of a name that is not in it; empty without one."""
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
            f"Nothing answers at {url}{access.protocol.path}: {why}",
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


log = logging.getLogger(__name__)
UNLIMITED = (
    "--max-cost cannot hold for {names}: on this machine (loopback) no price is known, and what is "
    "asked there counts nothing; name its price, or 0: --price-in and --price-out for the model "
    "that is measured, else price_in and price_out in --endpoints FILE, or --prices FILE"
)
"""Said before the first call of a run with a cost limit."""


class PreflightMember(Protocol):
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


class Preflight:
    """The endpoints of one run. `reporter` gets a line on each of them and every warning about one
    of their servers, once; `note` gets what differs from the settings, for the run's record."""

    def __init__(
        self, reporter: Reporter = SILENT, note: Callable[[Mapping[str, Any]], None] = forget
    ) -> None:
        self.reporter, self.note = reporter, note
        self._remarks: set[str] = set()
        self._waiting: list[PreflightMember] = []
        self._members: list[PreflightMember] = []
        self._files_before: int | None = None
        self._refusal: EndpointRefused | None = None
        self._locks = PerLoop(asyncio.Lock)

    def warn(self, remark: str) -> None:
        """Pass on a warning about a server, unless it was passed on before."""
        if remark not in self._remarks:
            self._remarks.add(remark)
            self.reporter.note(remark)

    def join(self, member: PreflightMember) -> None:
        """`member` is asked before the next call of anybody."""
        self._waiting.append(member)

    async def hold(self) -> None:
        """Ask everybody who was not asked yet. Raises EndpointRefused."""
        if self._refusal is None and not self._waiting:
            return
        async with self._locks.get():
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
                    self.reporter.note(answer_line(outcome, member.name, member.access.base_url))
            if errors:
                self._stop(errors)
            if unlimited := [one for one in members if one.unlimited]:
                names = (
                    f"{one.name} at {urlsplit(one.access.base_url).netloc}" for one in unlimited
                )
                self.reporter.note(UNLIMITED.format(names=" and ".join(names)))

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

    async def confirm(self, member: PreflightMember) -> None:
        """A call to `member` was refused. Raises EndpointRefused where that is for good."""
        async with self._locks.get():
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
