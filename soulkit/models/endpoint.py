"""A model behind any OpenAI-compatible server: OpenAI itself, vLLM, a router, a test server.

One call goes through three steps, each a function of its own:

    ledger lookup ── hit ──▶ completion
          └─ miss ──▶ ask, with retries that end ──▶ ledger ──▶ completion

* **Retries** are ours alone (the SDK's are off): 408, 409, 429, 5xx, time-outs, broken connections,
  and replies that cannot be read are asked again with exponential back-off and jitter; a
  `Retry-After` is honoured up to `max_wait_s`. Anything else is final at once. What is final is a
  `CallError`; an error text never becomes a completion.
* **Refused parameters.** A server that names a sampling parameter as unsupported is asked again
  without it, and this endpoint never sends it again. `max_tokens` is first tried under its other
  name, `max_completion_tokens`; only when both are refused is it dropped. What was asked for and
  not sent stands in `Completion.dropped`.
* **Seeds.** A server that honours seeds would answer all rollouts of one example alike, so the
  seed that is sent is derived from `Sampling.seed` and the `Call`.
* **Keys.** The configuration knows the *name* of an environment variable. The key is masked in
  every error text and stored reply, and no `repr` shows it.

Clients and semaphores belong to one event loop; an endpoint may be used from several in turn.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

from soulkit.errors import ConfigError, ContextOverflow, ModelLoadError, ProviderError
from soulkit.models.ledger import Entry, Ledger, call_key
from soulkit.models.wire import (
    Answer,
    Unreadable,
    dropped_fields,
    error_message,
    parameters,
    parse_json,
    read_reply,
    refused_name,
    retry_after,
    to_messages,
    too_long,
    without,
)
from soulkit.types import Call, Completion, Sampling, Segment, Usage

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

OPENAI_URL = "https://api.openai.com/v1"
_DETAIL_CHARS = 200
_RETRIED = frozenset({408, 409, 429})
_KEY_LIKE = re.compile(r"\bsk-[\w*.-]{6,}|\bBearer\s+\S+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Reply:
    raw: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why one attempt brought no answer."""

    detail: str
    retry: bool = True
    wait_s: float | None = None
    """What the server asked us to wait, in seconds."""
    refused: str = ""
    """The wire name of the parameter that the server does not take."""
    overflow: bool = False


@dataclass(frozen=True, slots=True)
class _Session:
    client: AsyncOpenAI
    slots: asyncio.Semaphore


class Endpoint:
    """A `ChatModel` that asks an OpenAI-compatible server.

    Args:
        model: the model's name as the server knows it.
        base_url: up to and including `/v1`; None is OpenAI's own service.
        api_key_env: NAME of the environment variable that holds the key. It may be unset for a
            server on this machine, and for a ledger in mode `replay`.
        timeout_s: seconds that one attempt may take as a whole.
        max_attempts: requests per call at most (a request without a refused parameter is free).
        concurrency: requests in flight at most.
        backoff_s: seconds before the second attempt, doubled for each one after it; 0 in tests.
        max_wait_s: no wait is longer than this, whatever the server asks for.
        price_in, price_out: US dollars per million prompt and completion tokens, both or neither.
        ledger: where replies are kept and looked up.

    Raises:
        ConfigError: a number is out of range, or one price is given without the other.
        ModelLoadError: the base URL cannot be used, or the key is missing.
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
        price_in: float | None = None,
        price_out: float | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        _check_numbers(timeout_s, max_attempts, concurrency, backoff_s, max_wait_s)
        self.name = model
        self.base_url = _checked_url(base_url)
        self.api_key_env = api_key_env
        self.timeout_s, self.max_attempts, self.concurrency = timeout_s, max_attempts, concurrency
        self.backoff_s, self.max_wait_s = backoff_s, max_wait_s
        self._prices = _checked_prices(price_in, price_out)
        self._ledger = ledger
        optional = _is_loopback(self.base_url) or (ledger is not None and ledger.mode == "replay")
        self._key = _read_key(api_key_env, optional=optional)
        self._refused: set[str] = set()
        # The jitter must not touch the global stream that seeds depend on.
        self._jitter = random.Random()
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        """Answer `context`, from the ledger when it holds the call.

        Raises:
            ProviderError: the server refused, or failed until the attempts ended.
            ContextOverflow: the server says that the prompt is too long.
            ReplayMiss: the ledger is a replay and does not hold the call.
        """
        messages = to_messages(context)
        key = call_key(
            base_url=self.base_url, model=self.name, messages=messages, sampling=sampling, call=call
        )
        found = self._ledger.lookup(key, model=self.name, call=call) if self._ledger else None
        if found is None:
            found = await self._ask(messages, sampling, call)
            if self._ledger:
                found = self._ledger.store(key, found)
        return _completion(found)

    async def close(self) -> None:
        """Close this event loop's connections."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.client.close()

    def __repr__(self) -> str:
        return (
            f"Endpoint(model={self.name!r}, base_url={self.base_url!r}, "
            f"api_key_env={self.api_key_env!r})"
        )

    async def _ask(self, messages: list[dict[str, str]], sampling: Sampling, call: Call) -> Entry:
        wanted = parameters(sampling, call)
        attempts = requests = 0
        while True:
            sent = without(wanted, self._refused)
            got = await self._attempt(messages, sent)
            requests += 1
            if isinstance(got, _Reply):
                return self._entry(got, call, dropped_fields(wanted, sent), requests)
            if got.refused:
                # This ends: every round sends one parameter less, or the same under another name.
                self._remember(got.refused)
                continue
            attempts += 1
            if not got.retry or attempts >= self.max_attempts:
                self._give_up(got, attempts)
            await asyncio.sleep(self._wait(got, attempts))

    async def _attempt(
        self, messages: list[dict[str, str]], sent: Mapping[str, Any]
    ) -> _Reply | _Fault:
        import openai

        session = self._session()
        async with session.slots:
            started = time.perf_counter()
            try:
                async with asyncio.timeout(self.timeout_s):
                    raw = await self._post(session.client, messages, sent)
            except openai.APIStatusError as error:
                return self._status_fault(
                    error.status_code, error.body, dict(error.response.headers), sent
                )
            except (TimeoutError, openai.APITimeoutError):
                return _Fault(f"no answer within {self.timeout_s:g} s")
            except (openai.APIConnectionError, openai.APIResponseValidationError) as error:
                return _Fault(self._clean(f"the connection broke: {error.__cause__ or error}"))
            seconds = time.perf_counter() - started
        return self._checked(raw, seconds, sent)

    async def _post(
        self, client: AsyncOpenAI, messages: list[dict[str, str]], sent: Mapping[str, Any]
    ) -> str:
        # All parameters travel as extra_body: the SDK types know neither all servers nor all names.
        response = await client.chat.completions.with_raw_response.create(
            model=self.name,
            messages=messages,  # type: ignore[arg-type]
            extra_body=dict(sent),
        )
        return response.text

    def _checked(self, raw: str, seconds: float, sent: Mapping[str, Any]) -> _Reply | _Fault:
        """The reply when it can be read; some routers report errors with status 200."""
        try:
            read_reply(raw)
        except Unreadable as error:
            body = parse_json(raw)
            inner = body.get("error") if isinstance(body, dict) else None
            if isinstance(inner, dict):
                code = inner.get("code")
                return self._status_fault(code if isinstance(code, int) else 500, inner, {}, sent)
            return _Fault(self._clean(f"unreadable reply ({error}): {raw}"))
        return _Reply(self._masked(raw), seconds)

    def _status_fault(
        self, status: int, body: object, headers: Mapping[str, str], sent: Mapping[str, Any]
    ) -> _Fault:
        fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
        code, kind = str(fields.get("code") or ""), str(fields.get("type") or "")
        message = error_message(body)
        detail = self._clean(f"{kind}: {message}" if kind else message, f"HTTP {status} ")
        if status in (400, 413, 422):
            if too_long(f"{code} {kind} {message}"):
                return _Fault(detail, retry=False, overflow=True)
            refused = refused_name(code, str(fields.get("param") or ""), message, sent)
            return _Fault(detail, retry=False, refused=refused)
        retry = status in _RETRIED or status >= 500
        return _Fault(detail, retry=retry, wait_s=retry_after(headers))

    def _remember(self, refused: str) -> None:
        if refused not in self._refused:
            log.info("%s refuses the parameter '%s'; it is not sent again.", self.name, refused)
            self._refused.add(refused)

    def _give_up(self, fault: _Fault, attempts: int) -> NoReturn:
        if fault.overflow:
            raise ContextOverflow(f"{self.name}: {fault.detail}")
        tries = f" (after {attempts} attempts)" if attempts > 1 else ""
        raise ProviderError(f"{self.name}: {fault.detail}{tries}")

    def _wait(self, fault: _Fault, attempts: int) -> float:
        grown = self.backoff_s * 2.0 ** min(attempts - 1, 30)
        own = min(self.max_wait_s, grown) * self._jitter.uniform(0.5, 1.0)
        return max(own, min(self.max_wait_s, fault.wait_s or 0.0))

    def _entry(self, reply: _Reply, call: Call, dropped: tuple[str, ...], requests: int) -> Entry:
        answer = read_reply(reply.raw)
        return Entry(
            model=self.name,
            call=call,
            reply=reply.raw,
            dropped=dropped,
            prompt_tokens=answer.prompt_tokens or 0,
            completion_tokens=answer.completion_tokens or 0,
            cost=_cost(self._prices, answer),
            seconds=reply.seconds,
            attempts=requests,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )

    def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            # A session refers to its loop, so a dead loop's entry would never go by itself.
            for dead in [known for known in self._sessions if known.is_closed()]:
                del self._sessions[dead]
            session = _Session(self._client(), asyncio.Semaphore(self.concurrency))
            self._sessions[loop] = session
        return session

    def _client(self) -> AsyncOpenAI:
        import openai

        # A proxy of the environment cannot reach a server on this machine's loopback.
        http = openai.DefaultAsyncHttpxClient(trust_env=not _is_loopback(self.base_url))
        return openai.AsyncOpenAI(
            api_key=self._key or "unused",
            base_url=self.base_url,
            timeout=self.timeout_s,
            max_retries=0,
            http_client=http,
        )

    def _masked(self, text: str) -> str:
        # Short values are placeholders such as "x", and masking them would garble the text.
        return text.replace(self._key, "[key]") if len(self._key) >= 8 else text

    def _clean(self, text: str, prefix: str = "") -> str:
        """One line without keys; masked before it is cut, so that no half key is left over."""
        line = _KEY_LIKE.sub("[key]", self._masked(" ".join(text.split())))
        return prefix + line[:_DETAIL_CHARS]


def _completion(entry: Entry) -> Completion:
    answer = read_reply(entry.reply)
    usage = Usage(
        calls=1,
        prompt_tokens=entry.prompt_tokens,
        completion_tokens=entry.completion_tokens,
        seconds=entry.seconds,
        cost=entry.cost,
    )
    return Completion(
        text=answer.text,
        stop_reason=answer.stop_reason,
        reasoning=answer.reasoning,
        usage=usage,
        dropped=entry.dropped,
    )


def _cost(prices: tuple[float, float] | None, answer: Answer) -> float | None:
    if prices is None or answer.prompt_tokens is None or answer.completion_tokens is None:
        return None
    return (prices[0] * answer.prompt_tokens + prices[1] * answer.completion_tokens) / 1e6


def _check_numbers(
    timeout_s: float, max_attempts: int, concurrency: int, backoff_s: float, max_wait_s: float
) -> None:
    wrong = {
        "timeout_s must be above 0": not timeout_s > 0,
        "max_attempts must be at least 1": max_attempts < 1,
        "concurrency must be at least 1": concurrency < 1,
        "backoff_s must not be negative": not backoff_s >= 0,
        "max_wait_s must not be negative": not max_wait_s >= 0,
    }
    for rule, broken in wrong.items():
        if broken:
            raise ConfigError(
                f"An endpoint setting is out of range: {rule}.",
                "With such a value no request could be sent, or retries would never end.",
                "Set it to a value in range, or leave it out to use the default.",
            )


def _checked_prices(price_in: float | None, price_out: float | None) -> tuple[float, float] | None:
    if price_in is None and price_out is None:
        return None
    if price_in is None or price_out is None or price_in < 0 or price_out < 0:
        raise ConfigError(
            f"The prices of an endpoint are incomplete or negative: {price_in} and {price_out}.",
            "A cost needs the price of prompt tokens and the price of completion tokens.",
            "Give both in US dollars per million tokens, or neither.",
        )
    return price_in, price_out


def _checked_url(base_url: str | None) -> str:
    """The base URL without a trailing slash, fit to stand in run folders and ledger keys."""
    url = (base_url or OPENAI_URL).rstrip("/")
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ModelLoadError(
            f"The base URL '{url.rpartition('@')[2]}' is no http or https address.",
            "Requests go to its path /chat/completions.",
            "Give an address such as http://localhost:8000/v1.",
        )
    if parts.username or parts.password:
        raise ModelLoadError(
            f"The base URL of '{parts.hostname}' holds a user name or password.",
            "Base URLs are written into run folders, where no secret may stand.",
            "Put the secret into an environment variable and give its name as the key variable.",
        )
    return url


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _read_key(name: str, *, optional: bool) -> str:
    """The key in the environment variable `name`, empty when it is unset and `optional`."""
    key = os.environ.get(name, "").strip()
    if not key and not optional:
        raise ModelLoadError(
            f"The environment variable '{name}' is not set.",
            "The server's key is read from there; keys are never written into configurations.",
            f"Run: export {name}=...  (any value will do for a server that asks for no key).",
        )
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ModelLoadError(
            f"The environment variable '{name}' holds characters that no key can have.",
            "A key travels in an HTTP header, which allows printable ASCII without spaces only.",
            f"Copy the key again and run: export {name}=...",
        )
    return key
