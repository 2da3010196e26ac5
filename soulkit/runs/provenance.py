"""What a summary says of how its numbers came about: with whom, on which rows, by which model.

    summary.json   "provenance": {command, dates, versions, seed, protocol, prompts, actor, engine,
                                  teacher, players, panel, servers,
                                  tasks: {task: {sampling, sent, dropped_settings, budgets,
                                                 options, rows}},
                                  batches: [{batch_id, model, base_url, requests, status}]}

Gathered from the files that the run itself keeps: config.yaml, environment.json, provenance.json,
material.json. Rows are told by their number and one hash over all of them, so that two summaries
alone tell whether rows were the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from soulkit.runs.folder import CONFIG, ENVIRONMENT, read_config, read_environment
from soulkit.runs.jsonl import SCHEMA, SUMMARY_SCHEMA, read_object
from soulkit.types import row_id

SummaryProvenance = dict[str, Any]
"""The provenance of a run, as plain JSON values."""

RECORD, MATERIAL, BATCHES = "provenance.json", "material.json", "batches.json"
SETTINGS = ("seed", "repeats", "steps")
"""Numbers of config.yaml that say how much was played, and from which seed."""
_VERSIONS = ("soulkit", "python", "commit", "packages")


def with_provenance(folder: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """A summary about to be written, with its schema, its provenance and the date of now."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    origin = provenance_of(folder, summary)
    return {
        SCHEMA: SUMMARY_SCHEMA,
        **summary,
        "provenance": {**origin, "dates": {**origin["dates"], "finished": now}},
    }


def provenance_of(folder: Path, summary: Mapping[str, Any]) -> SummaryProvenance:
    """The provenance of the run in `folder`, as far as its files tell; RunError when one is
    damaged. That which the summary holds goes before them: it was written with the numbers."""
    written = summary.get("provenance")
    if isinstance(written, Mapping):
        return dict(written)
    settings = read_config(folder) if (folder / CONFIG).is_file() else {}
    noted = read_environment(folder) if (folder / ENVIRONMENT).is_file() else {}
    record, material = read_object(folder / RECORD), read_object(folder / MATERIAL)
    origin: SummaryProvenance = {
        "command": str(noted.get("command", "")),
        "dates": {
            "started": noted.get("started"),
            "resumed": [start.get("started") for start in noted.get("resumed", [])],
        },
        "versions": {name: noted[name] for name in _VERSIONS if name in noted},
        **{name: settings[name] for name in SETTINGS if name in settings},
        "protocol": summary.get("protocol") or settings.get("protocol", ""),
        "prompts": summary.get("prompts", {}),
        "actor": {**_actor(settings), **_base(material), **record.get("actor", {})},
        "engine": record.get("engine", {}),
        "teacher": record.get("teacher", {}),
        "players": record.get("players", {}),
        "panel": record.get("panel", {}),
        "servers": record.get("servers", {}),
        "tasks": _tasks(record.get("tasks", {}), material),
        "batches": _batches(read_object(folder / BATCHES)),
    }
    return {name: value for name, value in origin.items() if value not in ("", {}, None, [])}


def _actor(settings: Mapping[str, Any]) -> SummaryProvenance:
    names = ("kind", "model", "adapter", "base_url")
    return {name: settings[name] for name in names if settings.get(name) is not None}


def _base(material: Mapping[str, Any]) -> SummaryProvenance:
    """The hashes of the model that a training started from."""
    model, adapter = material.get("model"), material.get("adapter")
    weights = {"weights": model["weights"]} if isinstance(model, Mapping) else {}
    return {**weights, **({"adapter_weights": adapter} if adapter else {})}


def _batches(book: Mapping[str, Any]) -> list[SummaryProvenance]:
    """The batches in which replies came. How they travelled is no part of what is compared."""
    names = ("batch_id", "model", "base_url", "requests", "status")
    return [{name: one.get(name) for name in names} for one in book.get("batches", ())]


def _tasks(
    recorded: Mapping[str, Mapping[str, Any]], material: Mapping[str, Any]
) -> SummaryProvenance:
    tasks: SummaryProvenance = {name: _counted(entry) for name, entry in recorded.items()}
    for kind, label in (("training", "rows"), ("dev", "dev_rows")):
        for name, entry in (material.get(kind) or {}).items():
            count = {"n": entry.get("rows", 0), "sha256": entry.get("ids", "")}
            tasks[name] = {**tasks.get(name, {}), label: count}
    return tasks


def _counted(entry: Mapping[str, Any]) -> SummaryProvenance:
    """The entry of a task with its rows as one number and one hash."""
    if (rows := entry.get("rows")) is None:
        return dict(entry)
    return {**entry, "rows": {"n": len(set(map(row_id, rows))), "sha256": rows_hash(rows)}}


def rows_hash(rows: Mapping[str, str]) -> str:
    """sha256 over the ids and contents of rows, in whatever order they were read."""
    text = json.dumps(sorted(rows.items()), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
