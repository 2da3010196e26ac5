"""Who plays a role: one way of writing it for partner, environment, judge, auditor and coach.

endpoint:MODEL@URL#KEY   an OpenAI-compatible server; KEY is the NAME of the variable with its
                         key (OPENAI_API_KEY without it); without @URL it is what
                         OPENAI_BASE_URL says, else OpenAI's own service. Headers stand behind
                         the key, each with the NAME of a variable: #KEY,X-Team=MY_TEAM
local:PATH               a checkpoint on this machine, in this process
vllm:PATH                the same, behind a vLLM server that soulkit starts for it
actor                    the model under test, or in training the one that is trained, itself
scripted:FILE            replies from a file (scripted.py): trials without any model
NAME                     an entry of the endpoints file (endpoints.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from soulkit.config import Settings
from soulkit.models.api.access import checked_headers
from soulkit.models.api.address import OPENAI_URL, addressed, checked_url
from soulkit.models.vllm.settings import checked_flags
from soulkit.runs.folder import is_secret
from soulkit.types import Sampling

FORMS = (
    "endpoint:MODEL@URL, local:PATH, vllm:PATH, actor, scripted:FILE, or a name in --endpoints FILE"
)
REPLY: dict[str, tuple[float, int]] = {
    "partner": (1.0, 4096),
    "environment": (1.0, 4096),
    "judge": (0.0, 4096),
    "auditor": (0.0, 4096),
    "coach": (1.0, 2048),
    "blind_reader": (1.0, 256),
    "drafter": (1.0, 4096),
    "filter": (0.0, 4096),
}
"""Role → temperature and longest reply where nothing else is said. Reasoning counts as reply, so
that a reasoning partner says nothing within a few hundred tokens."""
VERSION = r"^[A-Za-z0-9_.-]+$"
"""Of an interface's version, a date at Azure."""
SELDOM = ("headers", "api_version", "args")
"""Settings that are written only where they say something."""
PANELS = ("judge", "auditor")
"""Roles that several players may fill together."""
RULES = ("symbolic", "terse", "none")
"""What a coach may be beside a player."""


class RoleSettings(Settings):
    """One player of a role. A text in the forms above is read as these settings."""

    kind: Literal["endpoint", "local", "vllm", "actor", "scripted"] = "endpoint"
    model: str = ""
    """The name on its server, the folder or hub id, or the file of the script."""
    base_url: str | None = None
    """Of an endpoint: filled in where it is left out, with OPENAI_BASE_URL or OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """NAME of the environment variable with the key."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with every request: header → NAME of the environment variable with its value."""
    api_version: str | None = Field(default=None, pattern=VERSION)
    """What Azure's deployments want behind the path."""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int | None = Field(default=None, gt=0)
    thinking: bool | None = None
    reasoning_effort: str | None = None
    requests_per_minute: float | None = Field(default=None, gt=0)
    tokens_per_minute: float | None = Field(default=None, gt=0)
    price_in: float | None = Field(default=None, ge=0)
    """US dollars per million prompt tokens."""
    price_out: float | None = Field(default=None, ge=0)
    args: dict[str, str] = Field(default_factory=dict)
    """Of a vLLM server: flag → value, "" for a flag without one; beside those of the command."""
    by_batch: bool = True
    """Whether it may be asked through its server's batch service, where a run asks for that."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        settings = parse_spec(raw) if isinstance(raw, str) else raw
        served = isinstance(settings, Mapping) and settings.get("kind", "endpoint") == "endpoint"
        return addressed(settings) if served else settings

    @field_validator("headers")
    @classmethod
    def _named(cls, headers: dict[str, str]) -> dict[str, str]:
        return dict(checked_headers(headers))

    @field_validator("args")
    @classmethod
    def _flags(cls, args: dict[str, str]) -> dict[str, str]:
        return checked_flags(args)

    @model_serializer(mode="wrap")
    def _plain(self, write: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """What most players do without is left out, as in runs from before it could be said."""
        return {k: v for k, v in write(self).items() if v or k not in SELDOM}

    @model_validator(mode="after")
    def _checked(self) -> RoleSettings:
        if self.base_url is not None:
            checked_url(self.base_url)
        if self.kind != "actor" and not self.model:
            raise ValueError(f"it names no model; write {FORMS}")
        if self.args and self.kind != "vllm":
            raise ValueError("args are flags of a vLLM server: they need kind: vllm")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("a cost needs both price_in and price_out")
        return self

    def sampling(self, role: str, seed: int | None, samples: int = 1) -> Sampling:
        """How it is sampled in `role`: repeated opinions of a greedy judge would be one opinion."""
        temperature, reply = REPLY[role]
        if role in PANELS and samples > 1:
            temperature = 1.0
        return Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens or reply,
            seed=seed,
            thinking=self.thinking,
            reasoning_effort=self.reasoning_effort,
        )

    def written(self) -> str:
        """The settings in short, for messages and tables."""
        where = "" if self.base_url in (None, OPENAI_URL) else f"@{self.base_url}"
        return "actor" if self.kind == "actor" else f"{self.kind}:{self.model}{where}"


Coach = Literal["symbolic", "terse", "none"] | RoleSettings
"""Who writes feedback: the task's rules, with or without remarks on the draft, nobody, or a
player."""


class TaskPlayers(Settings):
    """Who plays in one task; what is left out is as in all tasks."""

    partner: RoleSettings | None = None
    environment: RoleSettings | None = None
    judge: tuple[RoleSettings, ...] = ()
    auditor: tuple[RoleSettings, ...] = ()
    coach: Coach | None = None

    def named(self, role: str) -> Any:
        """What stands under `role`; None for nothing."""
        return getattr(self, role, None) or None


def parse_spec(text: str) -> dict[str, Any]:
    """`endpoint:MODEL@URL#KEY` and its siblings as settings; ValueError for anything else."""
    if text.strip() == "actor":
        return {"kind": "actor"}
    kind, colon, rest = text.strip().partition(":")
    if not colon or kind not in ("endpoint", "local", "vllm", "scripted") or not rest:
        shown = "(a secret, not shown)" if is_secret(text.strip()) else f"'{text}'"
        raise ValueError(f"{shown} says no player; write {FORMS}")
    if kind != "endpoint":
        return {"kind": kind, "model": rest}
    rest, _, secrets = rest.partition("#")
    key, headers = _key_and_headers(secrets)
    # The address begins before its scheme: behind that an @ would end a user name.
    before, sep, after = rest.partition("://")
    model, at, scheme = before.rpartition("@") if sep else (rest, "", "")
    url = f"{scheme}{sep}{after}" if at else ""
    if sep and not at:
        raise ValueError(f"an address stands without a model; write {FORMS}")
    fields = {"kind": kind, "model": model, "base_url": url or None, "api_key_env": key or None,
              "headers": headers or None}  # fmt: skip
    return {name: value for name, value in fields.items() if value is not None}


def _key_and_headers(text: str) -> tuple[str, dict[str, str]]:
    """`KEY,NAME=ENV` behind an address: names of variables, of the key's and of headers' values."""
    parts = [part.strip() for part in text.split(",")]
    headers = [part.partition("=") for part in parts if "=" in part]
    key = next((part for part in parts if part and "=" not in part), "")
    return key, {name: variable for name, _, variable in headers}
