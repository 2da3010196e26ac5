"""What samples on this machine or on servers of one's own, as it is written:

    auto                           vLLM where it is installed and a GPU is there, else local
    local                          transformers, in this process
    vllm                           a vLLM server that soulkit starts, watches and stops
    vllm@http://a:8000,http://b    servers that run already: the least loaded one is asked

and what a server is started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from pydantic import field_validator

from soulkit.config import Settings, setting
from soulkit.models.calling import ASKING

HERE = ("local", "rollouts")
"""Traits of the commands whose actor is sampled on this machine, or on servers of one's own."""
ENGINES = ("auto", "local", "vllm", "vllm@URL,URL")
"""What `engine` may be."""

EngineKind = Literal["auto", "local", "vllm"]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine as it was asked for."""

    kind: EngineKind
    urls: tuple[str, ...] = ()
    """Of servers that run already, without a path; none: soulkit starts its own."""

    @property
    def attached(self) -> bool:
        """Whether servers are asked that somebody else has started."""
        return bool(self.urls)


def parse_engine(text: str) -> EngineChoice:
    """What `text` asks for; ValueError, in words, for anything else."""
    name, at, places = text.strip().partition("@")
    if name == "vllm" and at:
        urls = tuple(dict.fromkeys(_address(place) for place in places.split(",")))
        return EngineChoice("vllm", urls)
    if at or name not in ("auto", "local", "vllm"):
        raise ValueError(f"no engine of that name; write --engine {' or '.join(ENGINES)}")
    return EngineChoice(name)  # type: ignore[arg-type]


def _address(text: str) -> str:
    """`http://host:8000` from that, with or without a slash or /v1 behind it."""
    url = text.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    parts = urlsplit(url)
    try:
        port_is_one = parts.port is None or parts.port > 0
    except ValueError:
        port_is_one = False
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise ValueError(f"'{text.strip()}' is no address of a server; write vllm@http://host:8000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("an address of a server holds neither names, keys nor a query")
    return url


class VllmSettings(Settings):
    """How a vLLM server is started. Base of every command that plays."""

    vllm_arg: dict[str, str] = setting(
        factory=dict,
        section="Machine",
        only=ASKING,
        metavar="FLAG=VALUE",
        unset="none",
        help="A flag for every vLLM server that is started: tensor-parallel-size=2; FLAG= for one "
        "without a value; may be repeated.",
    )
    vllm_python: str | None = setting(
        None,
        section="Machine",
        only=ASKING,
        metavar="PATH",
        unset="this one",
        help="The Python interpreter that has vLLM.",
    )
    vllm_start_s: float = setting(
        300.0,
        gt=0,
        section="Machine",
        only=ASKING,
        flag="--vllm-start",
        metavar="SECONDS",
        help="How long a vLLM server may take until it answers.",
    )

    @field_validator("vllm_arg")
    @classmethod
    def _flags(cls, flags: dict[str, str]) -> dict[str, str]:
        return checked_flags(flags)


def checked_flags(flags: Mapping[str, str]) -> dict[str, str]:
    """Flags of a server as vLLM writes them, without their dashes: flag → value."""
    return {name.strip().lstrip("-").replace("_", "-"): flags[name] for name in flags}
