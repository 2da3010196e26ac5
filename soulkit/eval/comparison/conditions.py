"""Under which conditions a run was measured, as far as its folder tells.

What a run recorded goes before what can be inferred: provenance.json, then config.yaml, then its
episodes. What an older run did not record is None or empty here, and counts as unknown.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from soulkit.errors import UserError
from soulkit.eval.run.provenance import (
    ENGINE,
    SAMPLING,
    Print,
    actor_identity,
    player_identities,
    read_provenance,
)
from soulkit.models.api.addresses import as_recorded
from soulkit.models.players.config import RolesConfig
from soulkit.models.vllm.settings import LOCAL
from soulkit.runs.folder import CONFIG, read_config
from soulkit.runs.jsonl import has_lines
from soulkit.runs.records import stream_records
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.registry import load_registry
from soulkit.types import Record

MATERIAL = "material.json"
"""Where a training keeps hashes of its rows."""
ACTOR = (*SAMPLING, "max_context", "seed", "repeats")
"""Settings of the actor, which are part of what is compared."""
PANEL = {"samples": "judge_samples", "combine": "judge_combine", "orders": "judge_order"}
"""How several opinions become one, and the setting that says it."""


@dataclass(slots=True)
class Evidence:
    """What the episodes of one task show."""

    protocols: set[str] = field(default_factory=set)
    prompts: dict[str, set[str]] = field(default_factory=dict)
    """Template → its hashes."""
    judges: dict[str, set[str]] = field(default_factory=dict)
    """Question → the names of those who answered it."""
    ids: set[str] = field(default_factory=set)
    """The examples that were played."""
    company: bool = False
    """Whether anybody but the actor speaks."""

    def add(self, record: Record) -> None:
        """Take up one episode."""
        score = record.score
        self.ids.add(record.example_id)
        self.protocols |= {score.protocol} if score.scored else set()
        for name, digest in score.prompts.items():
            self.prompts.setdefault(name, set()).add(digest)
        for verdict in score.verdicts:
            self.judges.setdefault(verdict.purpose, set()).add(verdict.judge)
        seats = {trace.seat for trace in record.episode.traces}
        self.company |= any(line.seat not in seats for line in record.episode.transcript)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What is known of a run."""

    settings: Print
    """`config.yaml`."""
    record: Print
    """`provenance.json`."""
    players: Mapping[str, Sequence[Print]] | None
    """Role → players; None: nobody knows."""
    material: Print
    """`material.json` of a training."""
    finished: bool
    tasks: Mapping[str, Evidence]

    @property
    def trained(self) -> bool:
        """Whether the run is known to be a training."""
        return bool(self.material) or "method" in self.settings

    @property
    def engine(self) -> Mapping[str, Any]:
        """By what the actor was sampled; empty for an endpoint."""
        if self.settings.get("kind") == "api":
            return {}
        engine: Mapping[str, Any] = self.record.get(ENGINE, LOCAL)
        return engine

    def evidence(self, task: str) -> Evidence:
        """What the episodes of a task show; nothing where there are none."""
        return self.tasks.get(task, Evidence())

    def of_task(self, task: str) -> Print:
        """What `provenance.json` says of a task."""
        entry: Print = self.record.get("tasks", {}).get(task, {})
        return entry

    def roles(self, task: str) -> set[str] | None:
        """Who is asked beside the actor; None where it is not known."""
        entry = self.of_task(task)
        if "roles" in entry:
            return set(entry["roles"])
        return set() if _by_rules(task) else None

    def rows(self, task: str) -> dict[str, str] | None:
        """Example → hash of its row ("" unknown), played or not; None: the run was cut short and
        did not record them."""
        entry = self.of_task(task)
        if "rows" in entry:
            return dict(entry["rows"])
        played = self.evidence(task).ids
        return dict.fromkeys(played, "") if played and self.finished else None

    def within(self, rows: Mapping[str, Container[str]], records: Iterable[Record]) -> Self:
        """What would be known of a run of these rows alone, by task, with these episodes."""
        entries = dict(self.record.get("tasks", {}))
        for task, kept in rows.items():
            if "rows" in self.of_task(task):
                only = {id: digest for id, digest in entries[task]["rows"].items() if id in kept}
                entries[task] = {**entries[task], "rows": only}
        record = {**self.record, "tasks": entries} if entries else self.record
        return replace(self, record=record, tasks=_evidence_by_task(records))

    def actor(self, task: str) -> Print:
        """How the actor was sampled: as it came to be, else as it was asked for."""
        settings = {name: self.settings[name] for name in ACTOR if name in self.settings}
        return settings | self.of_task(task).get("sampling", {})

    def dropped(self, task: str, role: str) -> list[Mapping[str, float]] | None:
        """For each player of a role whose server refused settings: setting → share of its calls
        that were sent without it. None: not recorded."""
        recorded = self.of_task(task).get("dropped_settings")
        if recorded is None:
            return None
        return [shares for shares in recorded.get(role, {}).values() if shares]

    def named(self, task: str, role: str) -> Sequence[Print] | None:
        """The players of a role in a task; None: nobody knows."""
        seated = self.of_task(task).get("players", self.players)
        return None if seated is None else seated.get(role, ())

    def panel(self, task: str) -> Print:
        """How several opinions become one; a setting that is not named has its default.

        `samples` is a number, or numbers by question where a task asks some more than once.
        """
        usual = asdict(RolesConfig().panel)
        panel = {n: self.settings.get(setting, usual[n]) for n, setting in PANEL.items()}
        panel |= self.record.get("panel", {})
        if panel["samples"] is None:
            by_question = {q: n for q, n in self.of_task(task).get("samples", {}).items() if n > 1}
            panel["samples"] = by_question or 1
        return panel


def read_conditions(folder: Path, records: Iterable[Record] | None = None) -> Conditions:
    """The conditions of the run in `folder`, from its episodes where they are at hand.

    Without `records` the summary tells of protocol and prompts; where an older version wrote it,
    the episodes are read. RunError or DataError when a file is damaged.
    """
    summary = _read_object(folder / "summary.json")
    episodes = folder / "episodes.jsonl"
    if records is None and "prompts" not in summary and has_lines(episodes):
        records = stream_records(episodes, light=True)
    return conditions_of(
        read_config(folder) if (folder / CONFIG).is_file() else {},
        folder,
        record=read_provenance(folder),
        tasks=_summarised(summary) if records is None else _evidence_by_task(records),
        finished=bool(summary),
        material=_read_object(folder / MATERIAL),
    )


def conditions_of(
    settings: Mapping[str, Any], folder: Path, *, record: Print | None = None,
    tasks: Mapping[str, Evidence] | None = None, finished: bool = False,
    material: Print | None = None,
) -> Conditions:  # fmt: skip
    """The conditions that settings alone announce, with whatever else is known of the run."""
    record = _with_owner(record or _configured_tasks(settings), folder)
    return Conditions(
        settings=dict(settings), record=record, material=material or {}, finished=finished,
        players=_owned(record.get("players", _configured_players(settings)), folder),
        tasks=tasks or {},
    )  # fmt: skip


def _read_object(path: Path) -> Print:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (
        OSError,
        ValueError,
        RecursionError,
    ):  # a run that was cut short or damaged tells nothing by this file
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _evidence_by_task(records: Iterable[Record]) -> dict[str, Evidence]:
    tasks: dict[str, Evidence] = {}
    for record in records:
        tasks.setdefault(record.task, Evidence()).add(record)
    return tasks


def _summarised(summary: Print) -> dict[str, Evidence]:
    """What a summary keeps of the episodes; which rows they were stands in provenance.json."""
    protocols = {str(summary["protocol"])} if summary.get("protocol") else set()
    return {
        task: Evidence(set(protocols), {name: set(hashes) for name, hashes in prompts.items()})
        for task, prompts in summary.get("prompts", {}).items()
    }


def _configured_players(
    settings: Mapping[str, Any], task: str = ""
) -> dict[str, list[Print]] | None:
    """The players that a config.yaml names, in one task or in any; None where nobody can tell."""
    if not settings:
        return None
    roles = {n: v for n, v in settings.items() if n in RolesConfig.model_fields}
    try:
        # The file of names may be gone; whoever was named stands in the settings whole.
        with as_recorded():
            config = RolesConfig.model_validate({**roles, "endpoints": None})
            return player_identities(config, actor_identity(settings), task=task)
    except (ValidationError, UserError):
        return None


def _configured_tasks(settings: Mapping[str, Any]) -> Print:
    """The players of tasks that have their own, in the form of a record; empty without any."""
    alone = settings.get("task_players") or {}
    players = {task: _configured_players(settings, task) for task in alone}
    tasks = {task: {"players": one} for task, one in players.items() if one is not None}
    return {"tasks": tasks} if tasks else {}


def _owned(
    players: Mapping[str, Sequence[Print]] | None, folder: Path
) -> dict[str, list[Print]] | None:
    """The model that a run trains is in no other run."""
    if players is None:
        return None
    mark = {"run": str(folder.resolve())}
    return {
        role: [{**one, **(mark if one.get("trained") else {})} for one in several]
        for role, several in players.items()
    }


def _with_owner(record: Print, folder: Path) -> Print:
    """`record` with the players of each task owned, as far as it names them."""
    tasks = {
        task: {**entry, "players": _owned(entry["players"], folder)}
        if "players" in entry
        else entry
        for task, entry in record.get("tasks", {}).items()
    }
    return {**record, "tasks": tasks} if tasks else record


@cache
def _by_rules(task: str) -> bool:
    """Whether a built-in task asks nobody but the actor: one prompt, one reply, fixed rules.

    No module of another task is loaded: a run folder may come from anywhere.
    """
    registry = load_registry()
    declared = registry.specs.get(task)
    if declared is None or not declared.home.builtin_task:
        return False
    try:
        kind = type(registry.task(task))
    except UserError:
        return False
    rules = issubclass(kind, ChoiceTask)
    return rules and kind.play is ChoiceTask.play and kind.score is ChoiceTask.score
