"""Settings as strings: how a command line and a settings file write lists, mappings and players.

a,b:0.5              task → mixing ratio
TAG=REGEX            name → text
[TASK=]ROWS         task, or `*` for every other one → where its rows are
[TASK=]PLAYER           a player of a role, for all tasks or for one
[TASK=]ADAPTER       an adapter, for all tasks or for one
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError, did_you_mean

BY_TASK = "[TASK=]PLAYER"
"""The metavar of a player for all tasks or for one task."""
ADAPTERS = "[TASK=]ADAPTER"
"""The metavar of an adapter for all tasks or for one task; adapters for one task are stored in the
setting with the plural name."""

_PAIRS = {
    "--option": "NAME=VALUE; soul tasks show TASK lists the names",
    "--headers": "NAME=ENV, such as --headers X-Team=MY_TEAM; ENV is the variable with its value",
    "--vllm-arg": "FLAG=VALUE, or --vllm-arg FLAG= for a flag that takes no value",
}


def text_form(annotation: Any, metavar: str | None) -> str:
    """How several strings of an option are read; empty for a single value.

    `players`, `panel` and `adapters` are for all tasks or for single ones; `rows`, `numbers` and
    `texts` have names; `tasks` and `list` are lists.
    """
    parts = plain_parts(annotation)
    several = typing.get_origin(parts[0]) if len(parts) == 1 else None
    if metavar == BY_TASK:
        return "panel" if several is tuple else "players"
    if metavar == ADAPTERS:
        return "adapters"
    if several is dict:
        if (metavar or "").startswith("[TASK=]"):
            return "rows"
        return "numbers" if float in typing.get_args(parts[0]) else "texts"
    if several in (tuple, list):
        return "tasks" if metavar == "TASK" else "list"
    return ""


def plain_parts(annotation: Any) -> list[Any]:
    """The alternatives of an annotation, without None."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if union else (annotation,)
    return [part for part in parts if part is not type(None)]


def settings_from_texts(name: str, form: str, flag: str, value: Any) -> dict[str, Any]:
    """The settings that strings in the given form stand for."""
    if form == "numbers":
        return {name: mixing_ratios(",".join(value))}
    if form == "texts":
        return {name: named_texts(flag, value)}
    if form in ("players", "panel"):
        return player_settings(name, value, flag, form == "panel")
    if form == "adapters":
        return adapter_settings(name, value, flag)
    return {name: split_names(value) if form == "tasks" else value}


def given_twice(option: str, command: str = "", how: str = "") -> ConfigError:
    """The error for an option given twice; `how` adds the task, or the two ways in which it was
    given."""
    see = f"; see: {command} --help" if command else ""
    return ConfigError(
        f"{option} is given twice{f' {how}' if how else ''}.",
        "The option takes one value, and only the last one would count.",
        f"Remove one of them{see}.",
    )


def split_names(texts: Sequence[str] | None) -> list[str]:
    """The names in strings such as `a,b`."""
    return [name.strip() for text in texts or () for name in text.split(",") if name.strip()]


def named_texts(flag: str, texts: Sequence[str]) -> dict[str, str]:
    """`TAG=REGEX` or `NAME=VALUE` options as tag or name → regular expression or value."""
    forms: dict[str, str] = {}
    for text in texts:
        name, equals, form = text.partition("=")
        if not equals or not name.strip():
            raise _nameless(flag, text)
        if name.strip() in forms:
            raise given_twice(f"{flag} {name.strip()}")
        forms[name.strip()] = form
    return forms


def _nameless(flag: str, text: str) -> ConfigError:
    shown = flag if flag == "--headers" else f"{flag} {text}"  # a header's value may be a secret
    return ConfigError(
        f"{shown} has no equals sign after a name.",
        "The option takes pairs of a name and a value.",
        f"Write {flag} {_PAIRS.get(flag, 'TAG=REGEX; soul data show FILE names the tags')}.",
    )


def mixing_ratios(text: str) -> dict[str, float]:
    """`a,b:0.5` → task → mixing ratio."""
    mixture: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, colon, number = part.partition(":")
        try:
            ratio = float(number) if colon else 1.0
        except ValueError:
            ratio = -1.0
        if not 0 < ratio < math.inf:
            raise ConfigError(
                f"'{part}' is not a task with a mixing ratio.",
                "A ratio is a positive number after a colon: 0.5 uses half of the rows.",
                f"Write {name} or {name}:0.5.",
            )
        if mixture.get(name, ratio) != ratio:
            raise given_twice("A mixing ratio", how=f"for '{name}'")
        mixture[name] = ratio
    return mixture


def values_by_task(texts: Sequence[str] | None, tasks: str) -> dict[str, str]:
    """Task → file, from `TASK=FILE` options. With a single task, FILE alone is enough."""
    names = list(mixing_ratios(tasks)) if tasks else []
    rows: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals and len(names) == 1:
            name, value = names[0], text
        elif not equals:
            raise ConfigError(
                f"'{text}' does not say which task it is for.",
                f"The command has {len(names)} tasks.",
                f"Write --data TASK={text} for each task.",
            )
        if name in rows:
            raise given_twice("--data", how=f"for '{name}'")
        rows[name] = value
    return rows


def row_sources(texts: Sequence[str], tasks: Sequence[str]) -> dict[str, str]:
    """`TASK=ROWS` options as task → rows; ROWS alone is for every other task."""
    rows: dict[str, str] = {}
    for text in texts:
        name, equals, where = text.partition("=")
        named = bool(equals) and (name in tasks or name.isidentifier())
        key, value = (name, where) if named else ("*", text)
        if key in rows:
            raise given_twice("--data", how=f"for {'every task' if key == '*' else repr(key)}")
        if named and tasks and name not in tasks:
            raise ConfigError(
                f"--data has rows for '{name}', but this command does not evaluate that task.",
                "The rows would be ignored.",
                did_you_mean(name, tasks),
            )
        rows[key] = value
    return rows


def player_settings(
    role: str, texts: Sequence[str] | str, flag: str, several: bool
) -> dict[str, Any]:
    """`PLAYER` and `TASK=PLAYER` options of a role as settings, for all tasks and for single ones.

    `several`: more than one player may fill the role.
    """
    everywhere: list[str] = []
    alone: dict[str, list[str]] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        task, equals, who = text.partition("=")
        # A path or address may contain an =, but a text form never starts with a name and an =.
        if equals and task.isidentifier():
            alone.setdefault(task, []).append(who)
        else:
            everywhere.append(text)
    settings = {f"task_players.{task}.{role}": who for task, who in alone.items()}
    settings |= {role: everywhere} if everywhere else {}
    if several:
        return settings
    for name, players in settings.items():
        if len(players) > 1:
            raise given_twice(flag, how="" if name == role else f"for '{name.split('.')[1]}'")
    return {name: who for name, (who,) in settings.items()}


def adapter_settings(setting: str, texts: Sequence[str], flag: str) -> dict[str, Any]:
    """`ADAPTER` and `TASK=ADAPTER` options as settings, for all tasks and for single ones.

    An existing folder counts as an adapter even if its name contains an equals sign.
    """
    settings: dict[str, Any] = {}
    alone: dict[str, str] = {}
    for text in texts:
        task, equals, adapter = text.partition("=")
        if equals and task.isidentifier() and not Path(text).exists():
            if task in alone:
                raise given_twice(flag, how=f"for '{task}'")
            alone[task] = adapter
        else:
            if settings:
                raise given_twice(flag)
            settings[setting] = text
    return settings | ({f"{setting}s": alone} if alone else {})
