"""How a server is reached: its address, its key, and the headers of every request.

* **Address**: defaults to OPENAI_BASE_URL, or else OpenAI. Addresses are written into run folders
  and ledgers, so they must not contain secrets. An api-version in an Azure address is moved to its
  own setting.
* **Key**: read from an environment variable and never stored. Sent as `Authorization: Bearer KEY`,
  or to Azure hosts as `api-key: KEY`.
* **Headers**: written as NAME=ENV, where ENV is the environment variable that holds the value. A
  header called `Authorization` or `api-key` replaces the key. OPENAI_ORG_ID and OPENAI_PROJECT_ID
  are only sent to the default address.
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
_EXAMPLE = "Use an address such as http://localhost:8000/v1"


def checked_url(base_url: str | None) -> str:
    """The base URL without a trailing slash, safe to store in run folders and ledger keys.

    None: the default address. ModelLoadError if the address cannot be used.
    """
    return _checked(base_url) if base_url else default_url()


def default_url() -> str:
    """The address for players that set none. ModelLoadError if it cannot be used."""
    address = os.environ.get(VARIABLE, "").strip()
    return _checked(address, VARIABLE) if address else OPENAI_URL


def with_address(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` of an API model, with the default address if they set none.

    An api-version in the address becomes its own setting. ValueError if the two differ.
    """
    address = settings.get("base_url") or default_url()
    base_url, version = split_version(address) if isinstance(address, str) else (address, None)
    if version is None:
        return {**settings, "base_url": base_url}
    if settings.get("api_version") not in (None, version):
        raise ValueError(
            f"the address has api-version {version}, but the api_version setting differs"
        )
    return {**settings, "base_url": base_url, "api_version": version}


def split_version(address: str) -> tuple[str, str | None]:
    """(base URL, version) of an Azure address `...?api-version=V`; other addresses are returned
    unchanged. A copied address may end in the request path, which is removed."""
    base_url, question, query = address.partition("?")
    version = _VERSION.fullmatch(query) if question else None
    return (base_url.removesuffix(CHAT.path), version[1]) if version else (address, None)


def _checked(base_url: str, variable: str = "") -> str:
    """`variable` is the environment variable that holds the address, if any."""
    url = base_url.rstrip("/")
    parts = web_address(url)
    way_out = f", or run: unset {variable}" if variable else ""
    if parts is None or any(c.isspace() or not c.isprintable() for c in url):
        # An environment variable may hold anything, even a key, so its value is not shown.
        subject = f"in {variable}" if variable else f"'{shown_address(url)}'"
        raise ModelLoadError(
            f"The base URL {subject} is not an http or https address.",
            "Requests are sent to /chat/completions under this URL.",
            f"{_EXAMPLE}{way_out}.",
        )
    subject = f"in {variable}" if variable else f"of '{parts.hostname}'"
    if parts.username or parts.password:
        raise ModelLoadError(
            f"The base URL {subject} contains a user name or password.",
            "Base URLs are written into run folders, which must not contain secrets.",
            "Put the secret into an environment variable and use its name as the key variable.",
        )
    if parts.query or parts.fragment:
        raise ModelLoadError(
            f"The base URL {subject} must not contain ? or #.",
            "soulkit appends /chat/completions, and a key in the URL would be stored with the run.",
            f"{_EXAMPLE}, and give a key as the name of an environment variable{way_out}.",
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
    """The key in the environment variable `name`; `what` as in `environment_value`."""
    hint = "any value works if the server needs no key"
    return environment_value(name, what, optional=optional, hint=hint, spaces=False)


def environment_value(
    name: str, what: str, *, optional: bool, hint: str = "", spaces: bool = True
) -> str:
    """The value of the environment variable `name`, sent as a header; empty if it is unset and
    `optional`. Error messages call the value `what` and show `hint` if it is missing.

    ModelLoadError if it is missing or cannot be sent.
    """
    value = os.environ.get(name, "").strip()
    if not value and not optional:
        raise ModelLoadError(
            f"The environment variable '{name}' is not set.",
            f"{what} is read from this variable, so that it is never stored.",
            f"Run: export {name}=...  ({hint}).",
        )
    if not (value.isascii() and value.isprintable()) or (" " in value and not spaces):
        raise ModelLoadError(
            f"The environment variable '{name}' contains characters that cannot be sent.",
            f"{what} is sent in an HTTP header, which only allows printable ASCII"
            f"{'' if spaces else ' without spaces'}.",
            f"Copy the value again and run: export {name}=...",
        )
    remember(value.replace(" ", ""))
    if value.count(" ") == 1:  # also mask the key of `Bearer KEY`
        remember(value.partition(" ")[2])
    return value


AZURE = (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com")
"""Host suffixes that expect the key in the header `api-key`."""
DEPLOYMENT = "/openai/deployments/"
"""Part of the path of Azure addresses that need an api-version."""
FOR_KEYS = frozenset(("authorization", "api-key"))
"""Headers that replace the key."""
ACCOUNT = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
"""Header → environment variable, sent to the default address only."""
_OURS = frozenset(("host", "content-type", "content-length", "transfer-encoding", "connection"))
_NAME = re.compile(r"[!#$%&'*+.^`|~\w-]+", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Access:
    """Address and headers of one server. Its `repr` hides header values."""

    base_url: str
    headers: Mapping[str, str] = field(repr=False)
    key_env: str
    """Name of the variable that holds the key, for messages."""
    api_version: str | None = None
    has_key: bool = True
    protocol: ApiProtocol = CHAT

    @property
    def request_url(self) -> str:
        """URL of chat requests."""
        return self.url(self.protocol.path)

    def url(self, path: str) -> str:
        """URL of `path`, which starts with a slash."""
        version = f"?api-version={self.api_version}" if self.api_version else ""
        return f"{self.base_url}{path}{version}"

    def root_url(self, path: str) -> str:
        """URL of a `path` at the server's root instead of under `/v1`."""
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
    """Address and headers for a server; `headers` maps header names to environment variables.

    The key is optional for servers on this machine and if nothing will be sent (`keyless`).
    ModelLoadError for an unusable address, or a missing key or header value.
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
    """Whether the environment variable with a player's key must be set."""
    return not (is_loopback(checked_url(base_url)) or FOR_KEYS & {name.lower() for name in headers})


def account_headers(base_url: str) -> dict[str, str]:
    """OpenAI's organisation and project headers (header → environment variable) if they are sent to
    `base_url`, else empty."""
    there = {name: variable for name, variable in ACCOUNT.items() if os.environ.get(variable)}
    return there if there and _is_default(base_url) else {}


def _is_default(base_url: str) -> bool:
    """Whether this is the default address."""
    try:
        return base_url == default_url()
    except ModelLoadError:
        return False


def checked_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Validate `headers`: header → environment variable. ValueError, which shows no value, if a
    name is invalid."""
    names = [name.lower() for name in headers]
    for name, variable in headers.items():
        if names.count(name.lower()) > 1:
            raise ValueError(f"the header '{name}' is set twice (case does not matter)")
        if not _NAME.fullmatch(name) or name.lower() in _OURS:
            raise ValueError(
                f"'{name}' cannot be set as a header; use NAME=ENV, such as X-Team=MY_TEAM"
            )
        if not _VARIABLE.fullmatch(variable):
            raise ValueError(
                f"the header '{name}' needs the name of an environment variable that holds its "
                "value; use NAME=ENV"
            )
    return headers


def _account(url: str, own: Mapping[str, str]) -> dict[str, str]:
    """Values of `account_headers` that the user does not override."""
    names = {name.lower() for name in own}
    return {
        name: _header_value(name, variable, optional=True)
        for name, variable in account_headers(url).items()
        if name.lower() not in names
    }


def _header_value(header: str, variable: str, *, optional: bool) -> str:
    what, hint = f"The value of the header '{header}'", "or remove the header"
    return environment_value(variable, what, optional=optional, hint=hint)


def _versionless(url: str) -> ModelLoadError:
    return ModelLoadError(
        f"The address of the deployment at '{urlsplit(url).hostname}' has no api-version.",
        "Azure requires the API version for this kind of address.",
        "Append it to the address (...?api-version=2024-10-21), or use --api-version; an address "
        "that ends in /openai/v1 needs none.",
    )
