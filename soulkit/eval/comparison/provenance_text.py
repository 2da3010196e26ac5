"""The provenance of a run as text for the top of a report: judges, rows and model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from soulkit.models.vllm.settings import engine_words
from soulkit.runs.conditions import SCORING, prompt_in
from soulkit.text import join_and, sanitise

BASES = {"declared": "weights declared, not verified", "verified": "weights verified"}
"""Basis of the weights of an attached server → its text in reports."""
_DIGITS = 8
"""Shown digits of a hash."""


def provenance_facts(origin: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) pairs of a run's provenance: players, rows, the model's revision and, unless
    it ran in this process, the engine."""
    tasks = {name: entry for name, entry in _members(origin, "tasks").items()
             if isinstance(entry, Mapping)}  # fmt: skip
    lines = [(role, role_text(origin, role)) for role in SCORING if _plays(tasks, role)]
    rows = (rows_text(name, entry) for name, entry in tasks.items())
    lines += [("rows", "; ".join(text for text in rows if text))]
    lines += [("revision", revision_text(_members(origin, "actor")))]
    lines += [("system prompt", prompt_in(origin))]
    lines += [("engine", engine_text(_members(origin, "engine")))]
    return [(label, text) for label, text in lines if text]


def provenance_json(origin: Mapping[str, Any]) -> str:
    """The whole provenance as indented JSON; empty if the run recorded none."""
    return sanitise(json.dumps(origin, indent=1, ensure_ascii=False)) if origin else ""


def role_text(origin: Mapping[str, Any], role: str) -> str:
    """`gpt-5-nano@https://api.openai.com/v1`, several joined with `and`. Players of single tasks
    are listed with the task names, fewest tasks first. The run's own players are listed only if
    at least one task uses them."""
    everybody = _names(_members(origin, "players").get(role, ()))
    by_task = {
        name: _names(_members(entry, "players").get(role, ()))
        for name, entry in _members(origin, "tasks").items()
        if isinstance(entry, Mapping) and _plays({name: entry}, role)
    }
    tasks: dict[str, list[str]] = {}
    for name, players in by_task.items():
        if players not in ("", everybody):
            tasks.setdefault(players, []).append(name)
    special = [
        f"{players} for {join_and(names)}"
        for players, names in sorted(tasks.items(), key=lambda item: len(item[1]))
    ]
    alone = all(by_task.values()) and everybody not in by_task.values()
    return ", ".join([everybody, *special] if everybody and not (special and alone) else special)


def rows_text(task: str, entry: Mapping[str, Any]) -> str:
    """`TASK 450 from 32 people (3fa9c1d2)`: the number of rows, of people if rows name them, and
    the first digits of the rows' hash."""
    rows = entry.get("rows")
    if not isinstance(rows, Mapping):
        return ""
    digest = str(rows.get("sha256", ""))[:_DIGITS]
    n = entry.get("people")
    of = f" from {n} {'person' if n == 1 else 'people'}" if n else ""
    return f"{task} {rows.get('n')}{of}" + (f" ({digest})" if digest else "")


def revision_text(actor: Mapping[str, Any]) -> str:
    """The Hub commit or weight hash of the model and its adapter; for attached servers also
    whether the weights were verified."""
    base = str(actor.get("revision") or actor.get("weights") or "")[: _DIGITS + 4]
    adapter = str(actor.get("adapter_weights") or "")[: _DIGITS + 4]
    text = " + adapter ".join(text for text in (base, adapter) if text)
    return (
        f"{text} ({BASES[basis]})".lstrip()
        if (basis := actor.get("weights_basis")) in BASES
        else text
    )


def engine_text(engine: Mapping[str, Any]) -> str:
    """`vllm 0.32.0`; empty if the model was sampled in this process."""
    return engine_words(engine) if engine.get("kind") == "vllm" else ""


def unknown_text(origin: Mapping[str, Any]) -> str:
    """The players whose servers have unknown defaults for omitted request parameters."""
    return " and ".join(
        name for name, one in _members(origin, "servers").items()
        if isinstance(one, Mapping) and one.get("defaults") == "unknown"
    )  # fmt: skip


def _plays(tasks: Mapping[str, Mapping[str, Any]], role: str) -> bool:
    """Whether a task uses the role; a task without recorded roles may use any."""
    return any(role in entry.get("roles", (role,)) for entry in tasks.values())


def _names(players: object) -> str:
    several = players if isinstance(players, list | tuple) else ()
    return " and ".join(_player(one) for one in several if isinstance(one, Mapping))


def _player(one: Mapping[str, Any]) -> str:
    address = f"@{one['address']}" if one.get("address") else ""
    basis = f" ({BASES['declared']})" if one.get("weights_basis") == "declared" else ""
    return f"{one.get('model') or one.get('kind', '')}{address}{basis}"


def _members(value: object, name: str) -> Mapping[str, Any]:
    inner = value.get(name) if isinstance(value, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}
