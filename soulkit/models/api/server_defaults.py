"""Detects the kind of server, its context, and the parameters that neutralise its defaults.

A server fills in parameters that a request leaves out. Each kind is sent neutral values under its
own names:

    vLLM, SGLang, soulkit top_k -1, min_p 0, repetition_penalty 1
    llama.cpp             top_k 0, min_p 0, repeat_penalty 1
    transformers serve    generation_config: a JSON text that replaces the model's own

The first three are named in `/v1/models`; `transformers serve` is recognised by `/load_model` in
its `/openapi.json` or by its error for an unsupported field. For other servers the defaults are
unknown, and the run says so. A server is asked before its first request, and again until it
answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlsplit

from soulkit.models.api import transport
from soulkit.models.api.addresses import AZURE, Access
from soulkit.models.api.transport import ClientPool
from soulkit.models.api.wire import NEUTRAL
from soulkit.parse import json_or_none
from soulkit.types import Sampling

LLAMA_CPP, TRANSFORMERS = "llamacpp", "transformers"
OWNERS = frozenset(("vllm", "sglang", "soulkit", LLAMA_CPP))
"""Values of `owned_by` in these servers' lists of models."""
FILLED = ("top_k", "min_p", "repetition_penalty", "repeat_penalty", "generation_config")
"""All parameters that may be sent in addition to those of every request."""
NEUTRAL_HOSTS = ("api.openai.com", "api.anthropic.com", "api.deepseek.com", *AZURE)
"""Host suffixes of services that document neutral defaults for all parameters."""
HOSTED = (*NEUTRAL_HOSTS, "generativelanguage.googleapis.com", "openrouter.ai")
"""Host suffixes of known services, which need no check for a local server."""
_REFUSAL = re.compile(r"HTTP 422\b.*Unexpected fields in the request", re.DOTALL)
_CONTEXT_NAMES = ("max_model_len", "context_length", "context_window")
"""Fields in lists of models with the maximum tokens of prompt and reply."""
TIMEOUT_S = 5.0
PAUSES_S = (0.0, 0.2, 0.5)
"""Seconds before each request for the list of models."""
MAX_BYTES = 8 * 1024 * 1024

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What is known about a server. The default is an unknown server."""

    engine: str = ""
    """`vllm`, `sglang`, `llamacpp`, `transformers`; empty: unknown."""
    neutral: bool = False
    """Whether it documents neutral defaults."""
    context: int | None = None
    """Maximum tokens of prompt and reply together; None: unknown."""

    @property
    def unknown(self) -> bool:
        """Whether its defaults are unknown."""
        return not (self.engine or self.neutral)

    @property
    def holds_cuts(self) -> tuple[str, ...]:
        """Settings that this server accepts only inside `generation_config`."""
        return ("top_k", "min_p") if self.engine == TRANSFORMERS else ()

    def beside(self, sampling: Sampling) -> dict[str, Any]:
        """Extra parameters for this server, so that it fills in no defaults.

        `transformers serve` samples only with `do_sample`; without it, every reply is greedy at any
        temperature.
        """
        top_k, min_p = sampling.top_k, sampling.min_p
        if self.engine == TRANSFORMERS:
            values = {"do_sample": sampling.temperature > 0, "top_k": top_k, "min_p": min_p,
                      "repetition_penalty": 1.0}  # fmt: skip
            return {"generation_config": json.dumps(values)}
        if self.engine == LLAMA_CPP:
            return {"top_k": top_k, "min_p": min_p, "repeat_penalty": 1.0}
        if self.engine in OWNERS:
            return {"top_k": top_k or NEUTRAL["top_k"], "min_p": min_p, "repetition_penalty": 1.0}
        return {}

    def as_dict(self) -> dict[str, Any]:
        """The fields for the run's record of conditions."""
        defaults = "not used" if self.engine else "documented as neutral"
        return {
            **({"engine": self.engine} if self.engine else {}),
            "defaults": "unknown" if self.unknown else defaults,
            **({"context": self.context} if self.context else {}),
        }


class ServerDefaults:
    """The server of one endpoint; its kind is determined on first use."""

    def __init__(self, model: str, access: Access, timeout_s: float) -> None:
        self.model, self.access = model, access
        self.timeout_s = min(TIMEOUT_S, timeout_s)
        self.found: ServerKind | None = None
        """The detected server; None: not asked yet."""
        self._certain = False
        """Whether `found` is final."""

    async def server(self, pool: ClientPool, turn: asyncio.Lock) -> ServerKind:
        """The server's kind; `turn` lets one caller at a time ask."""
        async with turn:
            if self.found is None:
                self.found = await self._ask(pool)
                sent = ", ".join(self.found.beside(Sampling()))
                if sent:
                    log.info("%s: neutral values are also sent for %s.", self.access.base_url, sent)
            return self.found

    def field_to_refuse(self) -> dict[str, Any]:
        """A field for the first request to an unknown server. `transformers serve` refuses it, and
        elsewhere its value has no effect."""
        doubtful = self.found is not None and self.found.unknown and not self._is_at(HOSTED)
        return {"top_k": 0} if doubtful else {}

    def recognise(self, refusal: str) -> None:
        """Identify `transformers serve` by the way it refuses a field."""
        known = self.found is not None and not self.found.unknown
        if not known and _REFUSAL.search(refusal):
            self.found = replace(self.found or ServerKind(), engine=TRANSFORMERS)
            self._certain = True

    def answered(self) -> None:
        """A request was answered, so all later requests are sent the same way."""
        self._certain = True

    def silent(self) -> None:
        """Record that a request got no answer. The server's kind is determined again before the
        next request, unless it is certain."""
        if not self._certain:
            self.found = None

    async def _ask(self, pool: ClientPool) -> ServerKind:
        if self._is_at(NEUTRAL_HOSTS):
            self._certain = True
            return ServerKind(neutral=True)
        reply = None
        for pause in PAUSES_S:
            await asyncio.sleep(pause)
            reply = await self._get(pool, self.access.url("/models"))
            if reply is None or (reply.status not in (408, 429) and reply.status < 500):
                break  # otherwise the same request may work in a moment
        self._certain = reply is not None and reply.status < 500
        listed = models_listed(reply, self.model)
        engine = listed_engine(listed)
        if not engine and not self._is_at(HOSTED):
            paths = _object(await self._page(pool, "/openapi.json")).get("paths")
            if isinstance(paths, dict) and "/load_model" in paths:
                engine, self._certain = TRANSFORMERS, True
        context = await self._slot(pool) if engine == LLAMA_CPP else listed_context(listed)
        return ServerKind(engine, context=context)

    def _is_at(self, hosts: tuple[str, ...]) -> bool:
        """Whether the server's host is one of these or a subdomain."""
        return (urlsplit(self.access.base_url).hostname or "").lower().endswith(hosts)

    async def _slot(self, pool: ClientPool) -> int | None:
        """The context of one slot of llama.cpp's server, which is less than the model's."""
        for query in ("", f"?model={quote(self.model, safe='')}"):
            body = _object(await self._page(pool, f"/props{query}"))
            settings = body.get("default_generation_settings")
            context = _positive(settings.get("n_ctx")) if isinstance(settings, dict) else None
            if context:
                return context
        return None

    async def _page(self, pool: ClientPool, path: str) -> transport.Received | None:
        """A page outside the API. Retried once if the connection breaks: `transformers serve`
        closes it after a failed list of models."""
        return await self._get(pool, self.access.root_url(path), attempts=2)

    async def _get(
        self, pool: ClientPool, url: str, *, attempts: int = 1
    ) -> transport.Received | None:
        import httpx2 as errors

        try:
            async with asyncio.timeout(self.timeout_s), pool.client() as client:
                return await transport.get(client, url, self.access.headers, MAX_BYTES)
        except (TimeoutError, errors.HTTPError, transport.TooLong) as error:
            if attempts > 1 and isinstance(error, errors.NetworkError | errors.ProtocolError):
                return await self._get(pool, url, attempts=attempts - 1)
            log.info("%s does not identify itself: %s", url, type(error).__name__)
            return None


def defaults_line(model: str, base_url: str) -> str:
    """The warning for a server whose defaults are unknown."""
    where = urlsplit(base_url).netloc
    return (
        f"unknown server: {model} at {where} does not say which software it runs; its defaults "
        "for top_k, min_p and penalties apply and are unknown"
    )


def models_listed(listing: transport.Received | None, model: str = "") -> list[Mapping[str, Any]]:
    """The entries for `model` in a server's list of models; all entries if there are none."""
    listed = _object(listing).get("data")
    models: list[Mapping[str, Any]] = []
    if isinstance(listed, list):
        models = [entry for entry in listed if isinstance(entry, dict)]
    return [m for m in models if m.get("id") == model] or models


def listed_engine(listed: list[Mapping[str, Any]]) -> str:
    """The server software that all entries name as owner; empty if they name none or several."""
    owners = {str(entry.get("owned_by")).lower() for entry in listed}
    return next(iter(owners)) if len(owners) == 1 and owners <= OWNERS else ""


def listed_context(listed: list[Mapping[str, Any]]) -> int | None:
    """The context in tokens that all entries agree on; None if there is none."""
    named = {_positive(entry.get(name)) for entry in listed for name in _CONTEXT_NAMES}
    contexts = named - {None}
    return next(iter(contexts)) if len(contexts) == 1 else None


def _object(received: transport.Received | None) -> Mapping[str, Any]:
    body = json_or_none(received.text) if received and received.status == 200 else None
    return body if isinstance(body, dict) else {}


def _positive(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if value > 0 else None
