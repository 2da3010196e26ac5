"""The endpoints file: models by name, and who plays a role that no option fills.

It is YAML, a name for each model, with everything that a command line is too short for:

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

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from soulkit.config import Settings, merge
from soulkit.errors import ConfigError, did_you_mean
from soulkit.models.roles.settings import FORMS, PANELS, REPLY, RULES, TaskPlayers, parse_spec
from soulkit.runs.folder import is_secret

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
    if not isinstance(entry, str) or ":" in entry or entry == "actor":
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
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}."


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
