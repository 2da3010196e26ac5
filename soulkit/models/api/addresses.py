"""How a server is reached: its address, its key, and the headers of every request.

* **Address**: a player without one is asked where OPENAI_BASE_URL says, else at OpenAI. Addresses
  are written into run folders and ledgers, so they may hold no secret. Azure's api-version is a
  setting of its own, and is taken off an address that was copied with it.
* **Key**: read from an environment variable and never written anywhere. It travels as
  `Authorization: Bearer KEY`, to Azure's hosts as `api-key: KEY`.
* **Headers** are written as NAME=ENV, where ENV names the variable with the value; one that is
  called `Authorization` or `api-key` replaces the key. OpenAI's organisation and project
  (OPENAI_ORG_ID, OPENAI_PROJECT_ID) go to its own address alone.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from soulkit.api_keys import remember, shown_address
from soulkit.errors import ModelLoadError
from soulkit.models.api.protocol import CHAT, ApiProtocol
from soulkit.text import web_address

OPENAI_URL = "https://api.openai.com/v1"
VARIABLE = "OPENAI_BASE_URL"
_VERSION = re.compile(r"api-version=([\w.-]+)", re.ASCII)
_EXAMPLE = "Give an address such as http://localhost:8000/v1"


def checked_url(base_url: str | None) -> str:
    """The base URL without a trailing slash, fit to stand in run folders and ledger keys.

    None is the default. Raises ModelLoadError when it cannot be used.
    """
    return _checked(base_url) if base_url else default_url()


def default_url() -> str:
    """Where players are asked that name no address. Raises ModelLoadError when it is unusable."""
    address = os.environ.get(VARIABLE, "").strip()
    return _checked(address, VARIABLE) if address else OPENAI_URL


def with_address(settings: Mapping[str, Any]) -> dict[str, Any]:
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
    return (base_url.removesuffix(CHAT.path), version[1]) if version else (address, None)


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


def read_key(name: str, *, optional: bool, what: str = "The server's key") -> str:
    """The key in the environment variable `name`; `what` names it in messages, as in
    `environment_value`."""
    hint = "any value will do for a server that asks for no key"
    return environment_value(name, what, optional=optional, hint=hint, spaces=False)


def environment_value(
    name: str, what: str, *, optional: bool, hint: str = "", spaces: bool = True
) -> str:
    """The value of the environment variable `name`, which is sent as a header; empty when it is
    unset and `optional`. Messages call it `what`, and give the `hint` where it is missing.

    Raises ModelLoadError when it is missing or cannot be sent.
    """
    value = os.environ.get(name, "").strip()
    if not value and not optional:
        raise ModelLoadError(
            f"The environment variable '{name}' is not set.",
            f"{what} is read from there and never written into a configuration.",
            f"Run: export {name}=...  ({hint}).",
        )
    if not (value.isascii() and value.isprintable()) or (" " in value and not spaces):
        raise ModelLoadError(
            f"The environment variable '{name}' holds characters that cannot be sent.",
            f"{what} goes into an HTTP header, which allows printable ASCII"
            f"{'' if spaces else ' without spaces'} only.",
            f"Copy it again and run: export {name}=...",
        )
    remember(value.replace(" ", ""))
    if value.count(" ") == 1:  # of `Bearer KEY` the key alone as well
        remember(value.partition(" ")[2])
    return value


AZURE = (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com")
"""Ends of the hosts that want the key under the name `api-key`."""
DEPLOYMENT = "/openai/deployments/"
"""In the path of an Azure address that is of no use without an api-version."""
FOR_KEYS = frozenset(("authorization", "api-key"))
"""Headers that stand in for the key."""
ACCOUNT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
"""Header → variable, for the default address alone."""
_OURS = frozenset(("host", "content-type", "content-length", "transfer-encoding", "connection"))
_NAME = re.compile(r"[!#$%&'*+.^`|~\w-]+", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Access:
    """One server, as requests are sent to it. No `repr` shows the values of its headers."""

    base_url: str
    headers: Mapping[str, str] = field(repr=False)
    key_env: str
    """Where the key is read from, in words for messages."""
    api_version: str | None = None
    has_key: bool = True
    protocol: ApiProtocol = CHAT

    @property
    def request_url(self) -> str:
        """The address of requests to a model."""
        return self.url(self.protocol.path)

    def url(self, path: str) -> str:
        """The address of `path`, which begins with a slash."""
        version = f"?api-version={self.api_version}" if self.api_version else ""
        return f"{self.base_url}{path}{version}"

    def root_url(self, path: str) -> str:
        """The address of a `path` of the server itself, which stands beside its `/v1`."""
        return f"{self.base_url.removesuffix('/v1')}{path}"


def open_access(
    base_url: str | None,
    api_key_env: str,
    headers: Mapping[str, str] | None = None,
    api_version: str | None = None,
    *,
    keyless: bool = False,
    protocol: ApiProtocol = CHAT,
) -> Access:
    """The access to a server; `headers` maps names to names of variables.

    The key may be missing for a server on this machine, and where nothing is going to be asked
    (`keyless`). Raises ModelLoadError for an address that is of no use, and for missing values.
    """
    url, named = checked_url(base_url), headers or {}
    if DEPLOYMENT in f"{url}/" and api_version is None:
        raise _versionless(url)
    own = {
        name: _header_value(name, variable, optional=keyless) for name, variable in named.items()
    }
    standing_in = [variable for name, variable in named.items() if name.lower() in FOR_KEYS]
    if standing_in:
        names = ", ".join(standing_in)
        return Access(url, {**_account(url, own), **own}, names, api_version, protocol=protocol)
    key = read_key(api_key_env, optional=keyless or is_loopback(url))
    kept_by_azure = (urlsplit(url).hostname or "").endswith(AZURE)
    proof = {"api-key": key} if kept_by_azure else {"Authorization": f"Bearer {key or 'unused'}"}
    return Access(
        url, {**proof, **_account(url, own), **own}, api_key_env, api_version, bool(key), protocol
    )


def wants_key(base_url: str | None, headers: Mapping[str, str]) -> bool:
    """Whether the key variable of a player has to be set."""
    return not (is_loopback(checked_url(base_url)) or FOR_KEYS & {name.lower() for name in headers})


def account_headers(base_url: str) -> dict[str, str]:
    """Header → variable of OpenAI's organisation and project, as far as they go to `base_url`."""
    there = {name: variable for name, variable in ACCOUNT.items() if os.environ.get(variable)}
    return there if there and _is_default(base_url) else {}


def _is_default(base_url: str) -> bool:
    """Whether players are asked there that name no address; not where that one is unusable."""
    try:
        return base_url == default_url()
    except ModelLoadError:
        return False


def checked_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Header → variable; ValueError, which shows no value, for what can be neither."""
    names = [name.lower() for name in headers]
    for name, variable in headers.items():
        if names.count(name.lower()) > 1:
            raise ValueError(f"the header '{name}' is there twice, in other letters")
        if not _NAME.fullmatch(name) or name.lower() in _OURS:
            raise ValueError(f"'{name}' can be no header here; write NAME=ENV, as X-Team=MY_TEAM")
        if not _VARIABLE.fullmatch(variable):
            raise ValueError(
                f"of the header '{name}' no environment variable is named: its value is read from "
                "one and never written down; write NAME=ENV"
            )
    return headers


def _account(url: str, own: Mapping[str, str]) -> dict[str, str]:
    """Values of `account_headers` that the user does not give otherwise."""
    names = {name.lower() for name in own}
    return {
        name: _header_value(name, variable, optional=True)
        for name, variable in account_headers(url).items()
        if name.lower() not in names
    }


def _header_value(header: str, variable: str, *, optional: bool) -> str:
    what, hint = f"The value of the header '{header}'", "or leave the header out"
    return environment_value(variable, what, optional=optional, hint=hint)


def _versionless(url: str) -> ModelLoadError:
    return ModelLoadError(
        f"The address of the deployment at '{urlsplit(url).hostname}' has no api-version.",
        "Azure answers such an address only with the version of its interface behind it.",
        "Write it behind the address, as ...?api-version=2024-10-21, or with --api-version; an "
        "address that ends in /openai/v1 needs none.",
    )
