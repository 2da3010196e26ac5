"""Which models a server offers: for whoever misspelt one. No answer decides nothing."""

from __future__ import annotations

import asyncio

from soulkit.errors import ModelLoadError
from soulkit.models.api.address import checked_url, is_loopback, read_key
from soulkit.models.api.faults import clean_detail
from soulkit.models.api.sdk import make_sdk
from soulkit.models.roles.settings import RoleSettings

TIMEOUT_S = 10.0
MOST = 10_000
"""Names that are read; routers list a few thousand."""


def list_models(settings: RoleSettings) -> list[str]:
    """The names of the models at the address of `settings`, sorted.

    Raises:
        ModelLoadError: the address or the key cannot be used, or there is no list: many servers
            have none, or one that fails, and answer calls all the same.
    """
    return asyncio.run(models_at(settings))


async def models_at(settings: RoleSettings) -> list[str]:
    """`list_models` for whoever is in an event loop already."""
    url = checked_url(settings.base_url)
    key = read_key(settings.api_key_env, optional=is_loopback(url))
    headers = {"Authorization": f"Bearer {key or 'unused'}"}
    from openai import OpenAIError

    names: set[str] = set()
    try:
        async with make_sdk(url, headers, TIMEOUT_S) as sdk:
            async for model in sdk.models.list():
                names.add(str(model.id))
                if len(names) >= MOST:
                    break
    except (OpenAIError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"The server at {url} gives no list of its models: {clean_detail(str(error))}.",
            "Some servers have none; that says nothing about whether they answer calls.",
            "Look up the model's name at the provider, or check the address and the key in "
            f"{settings.api_key_env}.",
        ) from error
    return sorted(names)
