"""Where a server is and the key to it, both checked before anything is asked.

A player that names no address is asked where OPENAI_BASE_URL says, else at OpenAI's own service.
Settings put that address in when they are read, so that whatever stores, compares or prices a
player knows where it is asked. Addresses are written into run folders and ledgers, so they may hold
no secret; keys are read from the environment by name and never written anywhere.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from soulkit.errors import ModelLoadError
from soulkit.keys import remember, shown_address
from soulkit.text import web_address

OPENAI_URL = "https://api.openai.com/v1"
VARIABLE = "OPENAI_BASE_URL"
PATH = "/chat/completions"
"""Of the requests, behind the base URL."""
_VERSION = re.compile(r"api-version=([\w.-]+)", re.ASCII)
_EXAMPLE = "Give an address such as http://localhost:8000/v1"
_recorded: ContextVar[bool] = ContextVar("recorded", default=False)


def checked_url(base_url: str | None) -> str:
    """The base URL without a trailing slash, fit to stand in run folders and ledger keys.

    None is the default. Raises ModelLoadError when it cannot be used.
    """
    return _checked(base_url) if base_url else default_url()


def default_url() -> str:
    """Where players are asked that name no address. Raises ModelLoadError when it is unusable."""
    address = "" if _recorded.get() else os.environ.get(VARIABLE, "").strip()
    return _checked(address, VARIABLE) if address else OPENAI_URL


@contextmanager
def as_recorded() -> Iterator[None]:
    """Within it the default is OpenAI's own, whatever the environment says: what a run recorded
    without an address was asked there. For reading records; a key would go to the wrong host."""
    token = _recorded.set(True)
    try:
        yield
    finally:
        _recorded.reset(token)


def addressed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of a served model with the default address where they name none.

    A version behind an address becomes a setting of its own; ValueError where there is another.
    """
    address = settings.get("base_url") or default_url()
    base_url, version = split_version(address) if isinstance(address, str) else (address, None)
    if version is None:
        return {**settings, "base_url": base_url}
    if settings.get("api_version") not in (None, version):
        raise ValueError(f"the address says api-version {version}, and api_version says another")
    return {**settings, "base_url": base_url, "api_version": version}


def split_version(address: str) -> tuple[str, str | None]:
    """An address as Azure shows it, `...?api-version=V`, as base URL and version; without one as it
    is. What is copied may end in the path of the requests."""
    base_url, question, query = address.partition("?")
    version = _VERSION.fullmatch(query) if question else None
    return (base_url.removesuffix(PATH), version[1]) if version else (address, None)


def _checked(base_url: str, variable: str = "") -> str:
    """`variable` is the environment variable that holds the address, where one does."""
    url = base_url.rstrip("/")
    parts = web_address(url)
    way_out = f", or run: unset {variable}" if variable else ""
    if parts is None or any(c.isspace() or not c.isprintable() for c in url):
        # What stands in a variable may be anything, a key for instance.
        subject = f"in {variable}" if variable else f"'{shown_address(url)}'"
        raise ModelLoadError(
            f"The base URL {subject} is no http or https address.",
            "Requests go to its path /chat/completions.",
            f"{_EXAMPLE}{way_out}.",
        )
    subject = f"in {variable}" if variable else f"of '{parts.hostname}'"
    if parts.username or parts.password:
        raise ModelLoadError(
            f"The base URL {subject} holds a user name or password.",
            "Base URLs are written into run folders, where no secret may stand.",
            "Put the secret into an environment variable and give its name as the key variable.",
        )
    if parts.query or parts.fragment:
        raise ModelLoadError(
            f"The base URL {subject} goes on behind its path, with ? or #.",
            "/chat/completions is appended to it, and a key in it would be stored with the run.",
            f"{_EXAMPLE}, and a key by its variable's name{way_out}.",
        )
    return url


def is_loopback(url: str) -> bool:
    """Whether the server at `url` is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def read_key(name: str, *, optional: bool) -> str:
    """The key in the environment variable `name`, empty when it is unset and `optional`.

    Raises ModelLoadError when it is missing or can be no key.
    """
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
    remember(key)
    return key
