"""What a server says it is, and what it would fill into a request that leaves it out.

vLLM and SGLang take sampling settings that a request does not name from the model's own
`generation_config.json`: a `top_k` of 20, say, of which no record of the run would tell. Both say
who they are in their list of models, so the list is asked for once, before the first request, and
requests to them name the neutral values as well. No answer, or another one, decides nothing: then
nothing is added. What such a server refuses of them is dropped and recorded as usual.

A server that is too busy to say (408, 429, an error of its own) is asked a few times before the
first request. After that the question is put again only while the server has answered nothing at
all: one that is still starting is not taken for another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from soulkit.models.api import http
from soulkit.models.api.access import Access
from soulkit.models.api.pool import ClientPool
from soulkit.models.api.wire import NEUTRAL, json_or_none

FILLING = frozenset(("vllm", "sglang"))
"""What these say as the owner of their models."""
FILLED = ("top_k", "min_p", "repetition_penalty")
"""What they fill in beside the parameters that every request names."""
TIMEOUT_S = 5.0
PAUSES_S = (0.0, 0.2, 0.5)
"""Before each time that the question is put."""
MAX_BYTES = 8 * 1024 * 1024
_NOTHING: Mapping[str, Any] = {}

log = logging.getLogger(__name__)


class ServerDefaults:
    """The server of one endpoint; `beside` is what belongs beside the sampling settings."""

    def __init__(self, model: str, access: Access, timeout_s: float) -> None:
        self.model, self.url, self._headers = model, access.url("/models"), access.headers
        self.timeout_s = min(TIMEOUT_S, timeout_s)
        self._beside: Mapping[str, Any] | None = None
        self._certain = False

    async def beside(self, pool: ClientPool, turn: asyncio.Lock) -> Mapping[str, Any]:
        """Neutral values for a server that would fill in others; `turn` lets one caller ask."""
        async with turn:
            if self._beside is None:
                self._beside = await self._ask(pool)
        return self._beside

    def answered(self) -> None:
        """A request was answered: from now on all are sent like it."""
        self._certain = True

    def silent(self) -> None:
        """A request found nobody: while that is all there is, the next one asks again."""
        if not self._certain:
            self._beside = None

    async def _ask(self, pool: ClientPool) -> Mapping[str, Any]:
        reply = None
        for pause in PAUSES_S:
            await asyncio.sleep(pause)
            reply = await self._list_models(pool)
            if reply is None or not _busy(reply.status):
                break
        if reply is None:
            return _NOTHING
        self._certain = reply.status < 500
        if not fills_in(reply, self.model):
            return _NOTHING
        log.info("%s: neutral %s are sent as well.", self.url, ", ".join(FILLED))
        return {name: NEUTRAL[name] for name in FILLED}

    async def _list_models(self, pool: ClientPool) -> http.Received | None:
        """The list of models, None where no answer came."""
        import httpx2 as errors

        try:
            async with asyncio.timeout(self.timeout_s), pool.client() as client:
                return await http.get(client, self.url, self._headers, MAX_BYTES)
        except (TimeoutError, errors.HTTPError, http.TooLong) as error:
            log.info("%s does not say what it is: %s", self.url, type(error).__name__)
            return None


def _busy(status: int) -> bool:
    """Whether the same question may have another answer in a moment."""
    return status in (408, 429) or status >= 500


def fills_in(listing: http.Received, model: str) -> bool:
    """Whether the list of models says that the server of `model` fills in what is left out."""
    body = json_or_none(listing.text) if listing.status == 200 else None
    listed = body.get("data") if isinstance(body, dict) else None
    models = [m for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
    same = [m for m in models if m.get("id") == model] or models
    return bool(same) and all(str(m.get("owned_by")).lower() in FILLING for m in same)
