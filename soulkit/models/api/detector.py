"""A service that detects machine-written text: POST a text, receive a number.

    POST {url}   header {header}: KEY   body {"text": "..."}      →      {"{field}": 0.83, ...}

The number in [0, 1] is the human share of the text, or with `machine` the machine share. Anything
else (another status, a missing field, 1.2, "0.8", NaN) is no score: the request is retried if that
may help, and then raises UnreadableVerdict, which leaves the episode unscored. The key comes from
an environment variable and never appears in errors or in the ledger.

Replies are stored in the ledger as chat completions that contain the raw reply, so that all ledger
tools can read them and no reply is paid for twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass

from soulkit.api_keys import masked_json
from soulkit.errors import UnreadableVerdict
from soulkit.models.api import transport
from soulkit.models.api.addresses import checked_url, is_loopback, read_key
from soulkit.models.api.protocol import Unreadable, parse_reply
from soulkit.models.api.replies import clean_detail, connection_fault
from soulkit.models.ledger.ledger import Ledger, LedgerEntry, request_key, request_of
from soulkit.parse import json_or_none
from soulkit.types import Call, Sampling

ATTEMPTS = 4
MAX_BYTES = 100_000
"""Maximum size of a reply."""
_JITTER = random.Random()
"""A separate generator, so that seeds are not affected."""
_RETRIED = frozenset((408, 409, 425, 429, 500, 502, 503, 504))
_SAMPLING = Sampling(temperature=0.0)
"""Nothing is sampled, but the ledger key needs sampling settings."""
DETECTOR = "detector "
"""Prefix of a service's model name in the ledger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Detector:
    """Address and reply format of the service.

    Args:
        url: full URL of the service.
        key_env: NAME of the environment variable with the key; empty if the service needs none.
            Optional for a service on this machine and for a ledger in mode `replay`.
        header: name of the header with the key.
        field: name of the field with the number in the reply's JSON object.
        machine: whether a high number means machine-written text.
        timeout_s: seconds per attempt.
        backoff_s: maximum seconds before the second attempt, doubled for each further one.
    """

    url: str
    key_env: str = ""
    header: str = "x-api-key"
    field: str = "fraction_human"
    machine: bool = False
    timeout_s: float = 30.0
    attempts: int = ATTEMPTS
    backoff_s: float = 1.0

    @property
    def name(self) -> str:
        return f"{DETECTOR}{checked_url(self.url)}"

    async def human(self, text: str, call: Call, ledger: Ledger | None = None) -> float:
        """The human share of `text` in [0, 1], from the ledger if it has the call.

        Raises:
            UnreadableVerdict: no attempt returned a number.
            ModelLoadError: the address is unusable, or the key is missing.
            ReplayMiss: the ledger is a replay and does not have the call.
        """
        messages = [{"role": "user", "content": text}]
        request = request_of(checked_url(self.url), messages, _SAMPLING)
        key = request_key(request, self.name, call)
        entry = ledger.lookup(key, model=self.name, call=call) if ledger else None
        if entry is None:
            replay = ledger is not None and ledger.mode == "replay"
            optional = replay or is_loopback(checked_url(self.url))
            secret = read_key(self.key_env, optional=optional) if self.key_env else ""
            entry = await self._ask(text, call, secret)
            if ledger is not None:
                entry = ledger.store(key, entry, request)
        return self._share(_reply_text(entry))

    async def _ask(self, text: str, call: Call, secret: str) -> LedgerEntry:
        problem = ""
        for attempt in range(1, self.attempts + 1):
            started = time.perf_counter()
            raw, problem, again = await self._post(text, secret)
            if not problem:
                return self._entry(raw, call, time.perf_counter() - started, attempt)
            if not again:
                break
            if attempt < self.attempts:
                await asyncio.sleep(_JITTER.uniform(0.5, 1.0) * self.backoff_s * 2 ** (attempt - 1))
        raise UnreadableVerdict(f"{self.name}: {problem}")

    async def _post(self, text: str, secret: str) -> tuple[str, str, bool]:
        """(reply, problem, whether a retry may help)."""
        import httpx2 as errors

        try:
            async with asyncio.timeout(self.timeout_s):
                received = await self._receive(text, secret)
        except (TimeoutError, errors.TimeoutException):
            return "", f"no answer within {self.timeout_s:g} s", True
        except errors.HTTPError as error:
            return "", clean_detail(connection_fault(error).detail), True
        except transport.TooLong:
            return "", f"the reply is longer than {MAX_BYTES} bytes", False
        raw = masked_json(received.text)
        if received.status != 200:
            problem = f"HTTP {received.status} {clean_detail(raw)}".strip()
            return raw, problem, received.status in _RETRIED
        try:
            self._share(raw)
        except UnreadableVerdict as error:
            return raw, error.detail, True
        return raw, "", False

    async def _receive(self, text: str, secret: str) -> transport.Received:
        headers = {self.header: secret} if secret else {}
        url = checked_url(self.url)
        async with transport.make_client(url, self.timeout_s, 1) as client:
            return await transport.post(client, url, headers, {"text": text}, MAX_BYTES)

    def _share(self, raw: str) -> float:
        """The human share in a reply. UnreadableVerdict if it has no number in [0, 1]."""
        body = json_or_none(raw)
        number = body.get(self.field) if isinstance(body, dict) else None
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1:
            raise UnreadableVerdict(
                f"the field '{self.field}' of the reply is not a number in [0, 1]"
            )
        return 1 - number if self.machine else float(number)

    def _entry(self, raw: str, call: Call, seconds: float, attempts: int) -> LedgerEntry:
        message = {"role": "assistant", "content": raw}
        return LedgerEntry(
            model=self.name,
            call=call,
            reply=json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}),
            prompt_tokens=0,
            completion_tokens=0,
            cost=None,
            seconds=seconds,
            attempts=attempts,
        )


def _reply_text(entry: LedgerEntry) -> str:
    try:
        return parse_reply(entry.reply).text
    except Unreadable as error:
        raise UnreadableVerdict(f"a ledger entry for {entry.model} cannot be read") from error
