"""The openai package, for what is not the hot path: lists of models and the batch service.

It runs on the HTTP client of `http.py`: no redirects, this machine's proxies and certificates.
Calls themselves do without it, see there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from soulkit.models.api import http
from soulkit.models.api.access import ACCOUNT, Access

if TYPE_CHECKING:
    from httpx2 import Request
    from openai import AsyncOpenAI

CONNECTIONS = 4
CUSTOM = "OPENAI_CUSTOM_HEADERS"
"""Headers for every request of the package, whatever the host. Here they are named with
--headers."""


def make_sdk(access: Access, timeout_s: float) -> AsyncOpenAI:
    """A client for the server of `access` that retries nothing: a request that was sent twice might
    be paid for twice.

    ModelLoadError when no connection can be prepared.
    """
    from openai import AsyncOpenAI, Omit

    # By itself the package would tell every host what the environment says of OpenAI's account.
    named = {name.lower() for name in access.headers}
    silent: dict[str, Any] = {name: Omit() for name in ACCOUNT if name.lower() not in named}
    silent |= {name: Omit() for name in _headers_of_environment()}
    client = http.make_client(access.base_url, timeout_s, CONNECTIONS)
    if "authorization" not in named:
        client.event_hooks = {"request": [_unsigned]}
    return AsyncOpenAI(
        api_key="unused",  # the headers hold the real one, in whatever form the server wants it
        base_url=access.base_url,
        default_headers={**silent, **access.headers},
        default_query={"api-version": access.api_version} if access.api_version else None,
        timeout=timeout_s,
        max_retries=0,
        http_client=client,
    )


def _headers_of_environment() -> list[str]:
    """Names of the headers that the package would add from its variable, as it spells them."""
    lines = os.environ.get(CUSTOM, "").split("\n")
    return [line.partition(":")[0].strip() for line in lines if ":" in line]


async def _unsigned(request: Request) -> None:
    """The package insists on an Authorization; Azure wants its key elsewhere, and only there."""
    request.headers.pop("Authorization", None)
