"""Where a server is and the key to it, both checked before anything is asked.

Addresses are written into run folders and ledgers, so they may hold no secret; keys are read from
the environment by name and never written anywhere.
"""

from __future__ import annotations

import ipaddress
import os
from urllib.parse import urlsplit

from soulkit.errors import ModelLoadError
from soulkit.text import web_address

OPENAI_URL = "https://api.openai.com/v1"


def checked_url(base_url: str | None) -> str:
    """The base URL without a trailing slash, fit to stand in run folders and ledger keys.

    None is OpenAI's own. Raises ModelLoadError when it cannot be used.
    """
    url = (base_url or OPENAI_URL).rstrip("/")
    parts = web_address(url)
    if parts is None:
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
    if parts.query or parts.fragment:
        raise ModelLoadError(
            f"The base URL of '{parts.hostname}' goes on behind its path, with ? or #.",
            "/chat/completions is appended to it, and a key in it would be stored with the run.",
            "Give an address such as http://localhost:8000/v1, and a key by its variable's name.",
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
    return key
