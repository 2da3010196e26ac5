"""What `soul doctor` checks outside of this machine: API keys, the hub, rows that were pulled."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator

from soulkit.api_keys import remember, shown_address
from soulkit.data.files import folder_note, released_files
from soulkit.doctor.machine import CheckLine, Health
from soulkit.errors import DataError, ModelLoadError
from soulkit.models.api.addresses import VARIABLE, checked_url, read_key
from soulkit.models.api.transport import make_client
from soulkit.tasks.kit.registry import Registry
from soulkit.text import web_address

PART = "outside"
HUB = "https://huggingface.co"
HUB_S = 3.0
"""Seconds that the hub may take to say anything."""
NO_HEAD = 501
"""What a server says that is there and knows no HEAD."""
_KEY = re.compile(r"[A-Z][A-Z0-9_]*_API_KEY|HF_TOKEN|HUGGING_FACE_HUB_TOKEN")
_TRUE = ("1", "ON", "YES", "TRUE")
LISTED = 8
"""Names in one line at most."""


# -- keys ------------------------------------------------------------------------------------------


def key_lines(wanted_keys: Collection[str] = ()) -> Iterator[CheckLine]:
    """A line with the NAMES of all keys in the environment, and a problem for each that no request
    could carry. Who misses one of `wanted_keys` is told by whoever knows the players."""
    names = sorted({*filter(_KEY.fullmatch, os.environ), *wanted_keys})
    here, broken = [], []
    for name in names:
        value = os.environ.get(name, "").strip()
        remember(value)  # whatever else is printed today does not show it
        try:
            here += [name] if read_key(name, optional=True) else []
        except ModelLoadError as error:
            broken.append(CheckLine.of_error(PART, name, error))
    words = ", ".join(here) or "none in the environment (needed for servers off this machine)"
    yield _line("keys", "ok" if here else "note", words)
    yield from broken
    yield from _default_address()


def _default_address() -> Iterator[CheckLine]:
    """Where players without an address are asked, if the environment says so."""
    if not (address := os.environ.get(VARIABLE, "").strip()):
        return
    try:
        yield _line(VARIABLE, "note", f"players without an address: {checked_url(address)}")
    except ModelLoadError:
        # The words of that error quote what stands there, which may be anything.
        yield _line(VARIABLE, "problem", "it holds no address of a server", f"unset {VARIABLE}")


# -- the hub ---------------------------------------------------------------------------------------


def hub_line() -> CheckLine:
    """Whether models and rows can be downloaded. Waits HUB_S seconds at most."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(name, "").upper() in _TRUE:
            return _line("hub", "note", f"not asked: {name} is set", f"unset {name}")
    address = os.environ.get("HF_ENDPOINT", "").strip() or HUB
    shown = shown_address(address)
    if web_address(address) is None:
        return _line("hub", "problem", "HF_ENDPOINT holds no address", "unset HF_ENDPOINT")
    way = "check network and proxy; without it: models and rows as folders, HF_HUB_OFFLINE=1"
    try:
        why = _unreachable(address)
    except ModelLoadError as error:
        return CheckLine.of_error(PART, "hub", error)
    if why:
        return _line("hub", "note", f"{shown} does not answer ({why})", way)
    return _line("hub", "ok", f"{shown} answers")


def _unreachable(address: str) -> str:
    """Why the server at `address` says nothing of use; empty where it answers."""
    import asyncio

    import httpx2

    async def ask() -> str:
        async with make_client(address, HUB_S, 1) as client:
            reply = await client.head(address)
        broken = reply.status_code >= 500 and reply.status_code != NO_HEAD
        return f"HTTP {reply.status_code}" if broken else ""

    async def in_time() -> str:
        return await asyncio.wait_for(ask(), HUB_S)

    try:
        return asyncio.run(in_time())
    except TimeoutError:
        return f"nothing within {HUB_S:g} s"
    except (httpx2.HTTPError, OSError) as error:
        return type(error).__name__


# -- rows ------------------------------------------------------------------------------------------


def rows_lines(registry: Registry) -> Iterator[CheckLine]:
    """Of how many tasks rows lie where they are looked for, by kind of rows."""
    for kind in ("eval", "train"):
        here: list[str] = []
        lacking: list[str] = []
        broken: list[CheckLine] = []
        for name, spec in registry.specs.items():
            if not (files := getattr(spec.files, kind)):
                continue
            try:
                (here if released_files(name, files) else lacking).append(name)
            except DataError as error:
                broken.append(CheckLine.of_error("rows", name, error))
        words = f"{len(here)} of {len(here) + len(lacking) + len(broken)} tasks in {folder_note()}"
        words += f": {_some(here)}" if here else ""
        way = f"soul data pull --task TASK --split {kind}" if lacking else ""
        yield CheckLine(part="rows", name=f"{kind} rows", health="ok" if here else "note",
                        words=words, way="" if here else way)  # fmt: skip
        yield from broken


def _some(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more


def _line(name: str, health: Health, words: str, way: str = "") -> CheckLine:
    return CheckLine(part=PART, name=name, health=health, words=words, way=way)
