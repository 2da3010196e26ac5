"""The conditions under which a run was measured, as its folder recorded them when it started.

config.yaml says what was asked for, provenance.json what it came to (players, rows, sampling),
material.json which rows a training played; summary or episodes tell the prompts that were used.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from soulkit.eval.run.provenance import (
    SAMPLING,
    SCORING,
    JsonObject,
    actor_identity,
    panel_facts,
    player_identities,
    read_provenance,
)
from soulkit.play.settings import PlayConfig
from soulkit.runs.folder import CONFIG, plain_config, read_config
from soulkit.runs.jsonl import has_lines, read_object
from soulkit.runs.records import stream_records
from soulkit.types import Record

ACTOR = (*SAMPLING, "max_context", "seed", "repeats")
"""Settings of the actor, which are part of what is compared."""


@dataclass(slots=True)
class Evidence:
    """What the episodes of one task show."""

    prompts: dict[str, set[str]] = field(default_factory=dict)
    """Template → its hashes."""
    judges: dict[str, set[str]] = field(default_factory=dict)
    """Question → the names of the judges that answered it."""
    ids: set[str] = field(default_factory=set)
    """The examples that were played."""

    def add(self, record: Record) -> None:
        """Take up one episode."""
        score = record.score
        self.ids.add(record.example_id)
        for name, digest in score.prompts.items():
            self.prompts.setdefault(name, set()).add(digest)
        for verdict in score.verdicts:
            self.judges.setdefault(verdict.purpose, set()).add(verdict.judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Under which conditions a run was measured."""

    folder: Path
    settings: JsonObject
    """`config.yaml`."""
    record: JsonObject
    """`provenance.json`; empty where the folder has none, and nothing can be compared with it."""
    material: JsonObject = field(default_factory=dict)
    """`material.json` of a training."""
    tasks: Mapping[str, Evidence] = field(default_factory=dict)

    @property
    def trained(self) -> bool:
        """Whether the run is a training."""
        return bool(self.material) or "method" in self.settings

    def evidence(self, task: str) -> Evidence:
        """What the episodes of a task show; nothing where there are none."""
        return self.tasks.get(task, Evidence())

    def of_task(self, task: str) -> JsonObject:
        """What `provenance.json` says of a task."""
        entry: JsonObject = self.record.get("tasks", {}).get(task, {})
        return entry

    def roles(self, task: str) -> set[str]:
        """The roles that are asked beside the actor."""
        return set(self.of_task(task).get("roles", SCORING))

    def rows(self, task: str) -> dict[str, str]:
        """Example → hash of its row, played or not."""
        return dict(self.of_task(task).get("rows", {}))

    def within(self, rows: Mapping[str, Container[str]], records: Iterable[Record]) -> Self:
        """The conditions of a run of these rows alone, by task, with these episodes."""
        entries = dict(self.record.get("tasks", {}))
        for task, kept in rows.items():
            only = {id: digest for id, digest in self.rows(task).items() if id in kept}
            entries[task] = {**self.of_task(task), "rows": only}
        return replace(self, record={**self.record, "tasks": entries}, tasks=_evidence(records))

    def actor(self, task: str) -> JsonObject:
        """How the actor was sampled."""
        settings = {name: self.settings[name] for name in ACTOR if name in self.settings}
        return settings | self.of_task(task).get("sampling", {})

    def dropped(self, task: str, role: str) -> list[Mapping[str, float]] | None:
        """For each player of a role whose server refused settings: setting → share of its calls
        that were sent without it. None: the run has not ended."""
        recorded = self.of_task(task).get("dropped_settings")
        if recorded is None:
            return None
        return [shares for shares in recorded.get(role, {}).values() if shares]

    def players(self, task: str, role: str) -> Sequence[JsonObject]:
        """The players of a role in a task. The model that a run trains is in no other run."""
        seated: JsonObject = self.of_task(task).get("players") or self.record.get("players", {})
        owner = {"run": str(self.folder.resolve())}
        return [{**one, **(owner if one.get("trained") else {})} for one in seated.get(role, ())]

    def panel(self, task: str) -> JsonObject:
        """How several opinions become one. `samples` is a number, or numbers by question where a
        task asks some more than once."""
        panel = dict(self.record.get("panel", {}))
        if panel.get("samples") is None:
            by_question = {q: n for q, n in self.of_task(task).get("samples", {}).items() if n > 1}
            panel["samples"] = by_question or 1
        return panel


def read_conditions(folder: Path, records: Iterable[Record] | None = None) -> Conditions:
    """The conditions of the run in `folder`. The prompts are those of `records`, else those that
    the summary counts, or the episodes of an unfinished run.

    RunError or DataError when a file is damaged.
    """
    return Conditions(
        folder=folder,
        settings=read_config(folder) if (folder / CONFIG).is_file() else {},
        record=read_provenance(folder),
        material=read_object(folder / "material.json"),
        tasks=_summarised(folder) if records is None else _evidence(records),
    )


def announced_conditions(config: PlayConfig, folder: Path) -> Conditions:
    """The conditions that settings announce, before anything is loaded or played."""
    settings = config.model_dump()
    actor = actor_identity(settings)
    entries = {
        task: {"players": player_identities(config, actor, task=task)} for task in settings["tasks"]
    }
    return Conditions(
        folder=folder, settings=plain_config(config.identity()),
        record={"panel": panel_facts(config), "tasks": entries},
    )  # fmt: skip


def _summarised(folder: Path) -> dict[str, Evidence]:
    """The prompts that the summary counts; of an unfinished run what its episodes show."""
    prompts = read_object(folder / "summary.json").get("prompts")
    if prompts is None:
        episodes = folder / "episodes.jsonl"
        return _evidence(stream_records(episodes, light=True) if has_lines(episodes) else ())
    return {
        task: Evidence({name: set(hashes) for name, hashes in templates.items()})
        for task, templates in prompts.items()
    }


def _evidence(records: Iterable[Record]) -> dict[str, Evidence]:
    tasks: dict[str, Evidence] = {}
    for record in records:
        tasks.setdefault(record.task, Evidence()).add(record)
    return tasks
