"""Which models a server offers: for whoever misspelt one. No answer decides nothing."""

from __future__ import annotations

import asyncio

from soulkit.errors import ModelLoadError
from soulkit.models.api.access import Access
from soulkit.models.api.faults import clean_detail
from soulkit.models.api.sdk import make_sdk

TIMEOUT_S = 10.0
MOST = 10_000
"""Names that are read; routers list a few thousand."""


async def list_models(access: Access, timeout_s: float = TIMEOUT_S) -> list[str]:
    """The names of the models of a server, sorted.

    Raises ModelLoadError where there is no list: many servers have none, or one that fails, and
    answer calls all the same.
    """
    import httpx2
    from openai import OpenAIError

    names: set[str] = set()
    try:
        # The package's own limit is one of each read: a server that drips would never end.
        async with asyncio.timeout(timeout_s), make_sdk(access, timeout_s) as sdk:
            async for model in sdk.models.list():
                names.add(clean_detail(str(model.id)))
                if len(names) >= MOST:
                    break
    except (
        OpenAIError, httpx2.HTTPError, TimeoutError, ValueError, TypeError, AttributeError
    ) as error:  # fmt: skip
        raise ModelLoadError(
            f"The server at {access.base_url} gives no list of its models: "
            f"{clean_detail(str(error) or type(error).__name__)}.",
            "Some servers have none; that says nothing about whether they answer calls.",
            "Look up the model's name at the provider, or check the address and the key in "
            f"{access.key_env}.",
        ) from error
    return sorted(names)
