"""One player as it is written, in a text, in settings or in the endpoints file.

endpoint:MODEL@URL#KEY   an OpenAI-compatible server; KEY is the NAME of the variable with its
                         key (OPENAI_API_KEY without it); without @URL it is what
                         OPENAI_BASE_URL says, else OpenAI's own service. Headers follow the
                         key, each with the NAME of a variable: #KEY,X-Team=MY_TEAM
local:PATH               a checkpoint on this machine, in this process
vllm:PATH                the same, behind a vLLM server that soulkit starts for it
actor                    the model under test, or in training the one that is trained
scripted:FILE            replies from a file (stand_ins.py): trials without any model
NAME                     an entry of the endpoints file

The endpoints file is YAML, a name for each model, with everything that a command line is too
short for:

    endpoints:
      nano:
        model: gpt-5-nano
        base_url: https://api.openai.com/v1
        api_key_env: OPENAI_API_KEY
        requests_per_minute: 500
        tokens_per_minute: 200000
        price_in: 0.05
        price_out: 0.40
    roles:                                    # in every task
      judge: {use: nano, reasoning_effort: low}
      partner: nano
    tasks:                                    # in one task; goes before what holds for every one
      my_task: {judge: [nano, "endpoint:other@http://localhost:8000/v1"]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_serializer, model_validator

from soulkit.config import Settings, merge
from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.api.addresses import checked_headers, checked_url
from soulkit.models.players.kinds import FORMS, KINDS, PlayerFields, PlayerKind, is_spec, parse_kind
from soulkit.models.vllm.settings import checked_flags
from soulkit.runs.folder import is_secret
from soulkit.runs.jsonl import first_problem
from soulkit.types import Sampling

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
SELDOM = ("headers", "api_version", "args", "top_k", "min_p")
"""Settings that are written only where they say something."""
PANELS = ("judge", "auditor")
"""Roles that several players may fill together."""
RULES = ("symbolic", "terse", "none")
"""What a coach may be beside a player."""


class RoleSettings(PlayerFields):
    """One player of a role. A text in the forms above is read as these settings."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, raw: Any) -> Any:
        settings = parse_spec(raw) if isinstance(raw, str) else raw
        if not isinstance(settings, Mapping):
            return settings
        kind = KINDS.get(str(settings.get("kind", "endpoint")))
        return kind.completed(settings) if kind else settings

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
        if self.player_kind.is_named and not self.model:
            raise ValueError(f"it names no model; write {FORMS}")
        if self.args and self.kind != "vllm":
            raise ValueError("args are flags of a vLLM server: they need kind: vllm")
        if (self.price_in is None) != (self.price_out is None):
            raise ValueError("a cost needs both price_in and price_out")
        return self

    @property
    def player_kind(self) -> PlayerKind:
        """What tells this kind of player from the others."""
        return KINDS[self.kind]

    def sampling(self, role: str, seed: int | None, samples: int = 1) -> Sampling:
        """How it is sampled in `role`: repeated opinions of a greedy judge would be one opinion."""
        temperature, reply = REPLY[role]
        if role in PANELS and samples > 1:
            temperature = 1.0
        usual = {"temperature": temperature, "max_tokens": reply}
        return Sampling.first_of({"seed": seed}, vars(self), usual)

    def written(self) -> str:
        """The settings in short, for messages and tables."""
        return self.player_kind.written(self)


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
    found = parse_kind(text.strip())
    if found is None:
        shown = "(a secret, not shown)" if is_secret(text.strip()) else f"'{text}'"
        raise ValueError(f"{shown} says no player; write {FORMS}")
    kind, rest = found
    try:
        return {"kind": kind.name, **(kind.parse(rest) if kind.is_named else {})}
    except ValueError as error:
        raise ValueError(f"{error}; write {FORMS}") from None


Book = Mapping[str, Mapping[str, Any]]
"""Name → the settings of a model."""


class EndpointsFile(Settings):
    """The contents of an endpoints file, before names are looked up."""

    endpoints: dict[str, dict[str, Any]] = Field(default_factory=dict)
    roles: dict[str, Any] = Field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = Field(default_factory=dict)


def player_entry(entry: Any, book: Book, words: Sequence[str] = ()) -> Any:
    """A role's value with names looked up in `book`: `nano`, or `{use: nano, temperature: 0}`.

    Raises ValueError for a bare word that is no entry; `words` are what else could be meant.
    """
    if isinstance(entry, list | tuple):
        return [player_entry(one, book) for one in entry]
    if isinstance(entry, Mapping) and "use" in entry:
        rest = {key: value for key, value in entry.items() if key != "use"}
        return merge(player_entry(entry["use"], book), rest)
    if not isinstance(entry, str) or is_spec(entry):
        return parse_spec(entry) if isinstance(entry, str) else entry
    if entry not in book:
        near = did_you_mean(entry, [*book, *words]) if book or words else ""
        hint = near if book else f"{near} Write {FORMS}.".lstrip()
        shown = "(a secret, not shown)" if is_secret(entry) else f"'{entry}'"
        raise ValueError(f"no endpoint is called {shown}. {hint}")
    return dict(book[entry])


def players_by_name(raw: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Settings in which the roles `names` are players, not names of players; so are those of
    `task_players`."""
    file = _opened(raw.get("endpoints"))
    # One file serves evaluation and training: a coach in it is no mistake where nobody is coached.
    filled = {role: who for role, who in file.roles.items() if role in names}
    settings = {**filled, **{key: value for key, value in raw.items() if value is not None}}
    book = file.endpoints
    named = {name: settings[name] for name in names if settings.get(name) is not None}
    settings |= {name: _looked_up(name, who, book) for name, who in named.items()}
    in_tasks = settings.get("task_players")
    if isinstance(in_tasks, Mapping):
        settings["task_players"] = {
            task: _roles_looked_up(roles, book) for task, roles in in_tasks.items()
        }
    return settings


def players_in_tasks(file: str | None) -> dict[str, TaskPlayers]:
    """Task → who plays in it alone, as an endpoints file says; empty without one."""
    read = _opened(file)
    try:
        return {
            task: TaskPlayers.model_validate(_roles_looked_up(roles, read.endpoints))
            for task, roles in read.tasks.items()
        }
    except ValueError as error:
        raise ConfigError(
            f"The endpoints file '{file}' names players of a task that cannot be read.",
            _problem(error),
            f"Under 'tasks:' write  TASK: {{judge: NAME}}, a player as {FORMS}.",
        ) from error


def _problem(error: ValueError) -> str:
    """What is wrong, without what was written: that may be a key in the wrong place."""
    if not isinstance(error, ValidationError):
        return f"{error}."
    return f"{first_problem(error, 'the file')}."


def _roles_looked_up(roles: Any, book: Book) -> Any:
    if not isinstance(roles, Mapping):
        return roles
    return {role: _looked_up(role, who, book) for role, who in roles.items() if who is not None}


def _looked_up(role: str, value: Any, book: Book) -> Any:
    if role == "coach" and value in RULES:
        return value
    players = player_entry(value, book, RULES if role == "coach" else ())
    return [players] if role in PANELS and not isinstance(players, list) else players


def _opened(file: Any) -> EndpointsFile:
    if file is None:
        return EndpointsFile()
    # Whoever named the file was asked already whether a stranger's is to be trusted.
    read = EndpointsFile.load(Path(str(file)), env={}, trust=True)
    _refuse_unknown(file, read.roles, REPLY)
    for roles in read.tasks.values():
        _refuse_unknown(file, roles, TaskPlayers.model_fields)
    return read


def _refuse_unknown(file: Any, roles: Iterable[str], known_roles: Iterable[str]) -> None:
    for role in roles:
        if role not in known_roles:
            raise ConfigError(
                f"The endpoints file '{file}' fills a role '{role}'.",
                "Nobody would ever ask that player.",
                did_you_mean(role, known_roles),
            )
