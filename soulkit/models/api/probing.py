"""Checks of a server before a run: does it answer, which models has it, does it follow schemas?

Every endpoint of a run joins the `Preflight`. The first call that is not in a ledger waits until
each endpoint has been asked for one token, so that a judge's wrong key is found before the actor is
called. Only a wrong key, an unknown model, an address without its `/v1` and an account without
credit stop the run. If a call is refused later in the run, the check is repeated.

Some servers accept a schema with HTTP 200 and ignore it. The schema question detects this: the only
text its schema allows is a word that no model would produce by chance.

The checks are not recorded in the ledger; their cost counts towards the budget.
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
from soulkit.parse import json_or_none
from soulkit.reporting import SILENT, Reporter
from soulkit.types import Call, Form, Sampling, Segment

SCHEMA_WORD = "qvx7zk"
SCHEMA_FORM = Form("schema_question", json.dumps({"enum": [SCHEMA_WORD]}, separators=(",", ":")))
SCHEMA_REPLY_TOKENS = 32
ASKED_FOR_FORMS = ("judge", "auditor", "coach", "environment", "filter", "drafter")
"""Roles whose replies may need a JSON schema."""


def schema_question() -> tuple[Sequence[Segment], Sampling, Call]:
    """(context, sampling, call) of the schema question: greedy and without reasoning."""
    context = [Segment("user", "Which day comes after Monday? Reply with one word.")]
    sampling = Sampling(
        temperature=0.0, max_tokens=SCHEMA_REPLY_TOKENS, seed=0, thinking=False, form=SCHEMA_FORM
    )
    return context, sampling, Call(role="judge", example_id=SCHEMA_FORM.name)


def follows_schema(text: str) -> bool | None:
    """Whether the reply follows the schema; None if the reply is empty."""
    answer = text.rpartition("</think>")[2].strip()
    if not answer:
        return None
    return bool(json_or_none(answer) == SCHEMA_WORD)


def schema_words(holds: bool) -> str:
    """The result as half a sentence about the server."""
    if holds:
        return "it enforces JSON schemas"
    return "it does not enforce JSON schemas; soulkit checks the format of each reply"


async def ask_schema(
    access: Access, model: str, beside: Mapping[str, Any], pool: ClientPool, timeout_s: float
) -> tuple[bool | None, WireReply | None]:
    """Send the schema question to a chat server with the additional parameters `beside`. Returns
    whether the server follows schemas (None: unclear), and the reply, to count its cost."""
    context, sampling, call = schema_question()
    asked = {**parameters(sampling, call), **beside}
    body = access.protocol.body(model, to_messages(context), asked)
    received = await exchange(
        pool, access.request_url, access.headers, body, timeout_s=timeout_s, most=MAX_BYTES
    )
    if isinstance(received, Fault) or not 200 <= received.status < 300:
        return None, None  # a refusal is handled and reported when a real call meets it
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
"""Pauses before each attempt at a busy server, as multiples of the backoff."""
LONGEST_PAUSE_S = 10.0
SHOWN_MODELS = 6
USUAL_PATHS = ("/v1", "/api/v1", "/v1beta/openai")
"""Usual paths of base URLs: most servers, OpenRouter, Google."""

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
    """The server refuses every call with the current settings, so the run stops."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The server answers."""

    model: str = ""
    """The server's name for the model, if it gives one."""
    reply: WireReply | None = None
    """The reply with its token counts; None if the server only rejected the question."""
    refusal: str = ""
    """Why the server rejected the question."""
    forms: bool | None = None
    """Whether it enforces JSON schemas; None if not needed or unclear."""


@dataclass(frozen=True, slots=True)
class Undecided:
    """The server may still answer later."""

    why: str
    wait_s: float | None = None
    busy: bool = False
    """Whether the same question may work after a short wait."""
    page: bool = False
    """Whether the answer was a web page."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The server will not answer."""

    kind: Kind
    why: str
    hint: str = ""
    """What else was found out about the fix, as a sentence."""


Outcome = Answer | Undecided | Refusal


async def probe(
    access: Access, model: str, pool: ClientPool, timeout_s: float, backoff_s: float,
    beside: Mapping[str, Any] | None = None,
) -> Outcome:  # fmt: skip
    """Send the preflight question, repeat it while the server is busy, and try the usual paths.

    `beside`: parameters of the question in addition to those that every server accepts.
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
    """Check whether the same host answers at a usual path that the address lacks."""
    for base_url in () if access.api_version else _usual(access):
        there = await _ask(access, f"{base_url}{access.protocol.path}", model, pool, timeout_s)
        if isinstance(there, Answer) or (
            isinstance(there, Refusal) and there.kind in ("key", "model", "credit")
        ):
            why = outcome.why if isinstance(outcome, Refusal | Undecided) else ""
            return Refusal("path", why, f"The server answers at {base_url}: use that address.")
    return outcome


def _usual(access: Access) -> list[str]:
    """Addresses that the user may have meant."""
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
    """What a reply to the preflight question says about the server."""
    status, error = received.status, error_in(received, protocol)
    if 200 <= status < 300:
        try:
            reply = protocol.parse(received.text)
        except Unreadable as unreadable:
            # Some servers put the status of an error into a body with status 200.
            if not re.fullmatch("[45][0-9][0-9]", error.code):
                page = received.text.lstrip().startswith("<")
                why = "a web page" if page else f"an unreadable reply ({unreadable})"
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
        hint = f"It redirects to {clean_detail(where) or 'an unknown place'}, which is not followed"
        return Refusal("moved", f"HTTP {status}", f"{hint}: prompts are only sent to your address.")
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
    """Sorted names of the server's models; empty if it has no list or fails."""
    listing = await exchange(
        pool, access.url("/models"), access.headers, None, timeout_s=timeout_s, most=LISTING_BYTES
    )
    if isinstance(listing, Fault):
        return []
    return sorted({clean_detail(str(entry.get("id"))) for entry in models_listed(listing)})


def _hint(model: str, models: Sequence[str]) -> str:
    """A hint for a name that is not in the list of models; empty without a list."""
    near = did_you_mean(model, models) if models else ""
    if not models or near.startswith("Did you mean"):
        return near
    more = f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
    return f"The server has: {', '.join(models[:SHOWN_MODELS])}{more}."


# -- messages --------------------------------------------------------------------------------------


def answer_line(outcome: Answer | Undecided, model: str, base_url: str) -> str:
    """One line: the model that answered, or why there is no answer yet."""
    where = f"{model} at {urlsplit(base_url).netloc}"
    if isinstance(outcome, Undecided):
        return f"no answer yet from {where}: {outcome.why}; calls will wait for it"
    known_as = f" (as {outcome.model})" if outcome.model not in ("", model) else ""
    holds = "" if outcome.forms is None else f"; {schema_words(outcome.forms)}"
    return f"answered: {where}{known_as}{holds}"


def refused(refusal: Refusal, model: str, access: Access, *, before: bool) -> EndpointRefused:
    """The error for a refusal, either `before` the first call or in the middle of a run."""
    what, way_out = _what_and_way(refusal, model, access)
    when = (
        "This was a one-token check before the run, so nothing was played or paid for."
        if before
        else "The server answered earlier. Finished work is kept, and no further calls are made."
    )
    return EndpointRefused(what, when, f"{way_out} Then run the same command again.")


def _what_and_way(refusal: Refusal, model: str, access: Access) -> tuple[str, str]:
    url, why, hint = access.base_url, refusal.why, refusal.hint
    unset = "" if access.has_key else ", which is not set"
    ways: dict[Kind, tuple[str, str]] = {
        "key": (
            f"The server at {url} rejects the key for '{model}': {why}",
            f"The key is read from {access.key_env}{unset}: check it, or name another variable "
            "with --api-key-env, or as #NAME after the player's address.",
        ),
        "model": (
            f"The server at {url} has no model '{model}': {why}",
            f"{hint} Use a model that the server has.".lstrip(),
        ),
        "path": (
            f"There is no API at {url}{access.protocol.path}: {why}",
            hint or "Use the address without that path, and with /v1 if the server has it.",
        ),
        "credit": (
            f"The account at {url} has no credit left for '{model}': {why}",
            f"Add credit to the account of the key in {access.key_env}, or use another model.",
        ),
        "moved": (f"The server at {url} redirects to another address: {why}",
                  f"{hint} Use the new address if you trust it."),
    }  # fmt: skip
    return ways[refusal.kind]


log = logging.getLogger(__name__)
UNLIMITED = (
    "--max-cost does not cover {names}: on this machine (loopback) without a known price, calls "
    "count as free; set a price, or 0, with --price-in and --price-out for the model under test, "
    "else with price_in and price_out in --endpoints FILE, or with --prices FILE"
)
"""Printed before the first call of a run with a cost limit."""


class PreflightMember(Protocol):
    """An endpoint that can be checked."""

    name: str
    access: Access
    concurrency: int

    @property
    def unlimited(self) -> bool: ...

    async def probe(self) -> Outcome: ...

    def limit_concurrency(self, most: int) -> None: ...


def forget(facts: Mapping[str, Any]) -> None:
    """The default of `note`: do nothing."""


class Preflight:
    """Checks the endpoints of one run. `reporter` gets one line per endpoint and each warning once;
    `note` gets deviations from the settings, for the run's record."""

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
        """Print a warning about a server, once."""
        if remark not in self._remarks:
            self._remarks.add(remark)
            self.reporter.note(remark)

    def join(self, member: PreflightMember) -> None:
        """Check `member` before the next call of any endpoint."""
        self._waiting.append(member)

    async def hold(self) -> None:
        """Check all endpoints that have not been checked. Raises EndpointRefused."""
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
        """Lower the concurrency of all members if this process may not open enough files."""
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
        """Check `member` again after a refused call. Raises EndpointRefused if the refusal is
        permanent."""
        async with self._locks.get():
            self._check()
            outcome = await member.probe()
            if isinstance(outcome, Refusal):
                self._stop([refused(outcome, member.name, member.access, before=False)])

    def _check(self) -> None:
        if self._refusal is not None:
            raise EndpointRefused(*self._refusal.lines())

    def _stop(self, errors: list[EndpointRefused]) -> NoReturn:
        """Raise all refusals as one error, so that one restart fixes them all."""
        lines = [" ".join(dict.fromkeys(parts))
                 for parts in zip(*(error.lines() for error in errors), strict=True)]  # fmt: skip
        self._refusal = EndpointRefused(*lines)
        raise self._refusal
