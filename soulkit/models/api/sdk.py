"""The openai package, for what is not the hot path: lists of models and the batch service.

It runs on the HTTP client of `http.py`: no redirects, this machine's proxies and certificates.
Calls themselves do without it, see there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from soulkit.models.api import http

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CONNECTIONS = 4


def make_sdk(base_url: str, headers: Mapping[str, str], timeout_s: float) -> AsyncOpenAI:
    """A client for `base_url` that sends `headers`, the key among them, and retries nothing: a
    request that was sent twice might be paid for twice.

    ModelLoadError when no connection can be prepared.
    """
    from openai import AsyncOpenAI, Omit

    # By itself the package would tell every host the organisation and project of the environment.
    silent: dict[str, Any] = {"OpenAI-Organization": Omit(), "OpenAI-Project": Omit()}
    return AsyncOpenAI(
        api_key="unused",  # `headers` hold the real one, in whatever form the server wants it
        base_url=base_url,
        default_headers={**silent, **headers},
        timeout=timeout_s,
        max_retries=0,
        http_client=http.make_client(base_url, timeout_s, CONNECTIONS),
    )
