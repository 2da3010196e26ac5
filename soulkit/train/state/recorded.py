"""A training run as `soul rescore` needs it: its rows by id, its judges, its means.

The rows are those that training read, dev rows among them. Means are over all recorded steps, not
over the last ones as in the run's own summary: what is compared is one scorer with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soulkit.eval.again import Absent, Recorded, from_ledger
from soulkit.eval.batch import task_scales
from soulkit.eval.rescore import ledger_of, load_recorded
from soulkit.eval.summary import Summary, summarise
from soulkit.eval.templates import PROMPTS, distinct_tasks, put_prompts
from soulkit.models.base import Cast, Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.roles.checkpoints import checkpoint_player
from soulkit.models.roles.players import Players, cast_of
from soulkit.play.settings import configured_tasks
from soulkit.runs.records import load_records
from soulkit.tasks.base import Task
from soulkit.tasks.registry import load_registry
from soulkit.train.config import TrainConfig, settings_class
from soulkit.train.material.assemble import training_rows
from soulkit.train.objectives.registry import built_in
from soulkit.trust import run_settings
from soulkit.types import ControlRecord, Example, Record


def recorded_training(path: Path, *, trust: bool = False) -> Recorded:
    """The training run in `path`; RunError or DataError when it cannot be read.

    TrustError when it is not known to be the user's own, unless `trust`. Its actor is gone (the
    weights have moved on), and scorers that ask it meet a miss.
    """
    config, settings, sealed = load_recorded(_kind(path, trust), path, trust=trust)

    def cast(ledger: Ledger) -> Cast:
        actor = Absent(config.model)
        players = Players(ledger, actor, Absent, config.call_arguments(ledger))
        players.serve = from_ledger(ledger)
        return cast_of(config, players, Player(actor), config.seed)

    rows = _rows(config)
    put_prompts(distinct_tasks(rows), path / PROMPTS)
    scale = task_scales(task for task, _ in rows.values())
    names = {task.name: task.spec.metric.name for task, _ in rows.values()}

    def summary(
        records: Sequence[Record], seconds: float, cost: float | None,
        controls: Sequence[ControlRecord],
    ) -> Summary:  # fmt: skip
        return summarise(
            records, command=f"train {config.method}", model=config.model,
            protocol=config.protocol, seconds=seconds, cost=cost, scale=scale,
            names=names, training=True,
        )  # fmt: skip

    return Recorded(
        path=path, command=f"train {config.method}", settings=settings, sealed=sealed,
        rows=rows,
        records=load_records(path / "episodes.jsonl"), ledger=ledger_of(path, settings),
        cast=cast, sampling=None, summary=summary, grouped=True, config=config,
        seed=config.seed, actor=lambda: Absent(config.model), load=checkpoint_player,
    )  # fmt: skip


def _kind(path: Path, trust: bool) -> type[TrainConfig]:
    """The settings of the run's method; a package's is imported for a run that may act."""
    settings, sealed = run_settings(path)
    method = str(settings.get("method", ""))
    return settings_class(method) if sealed or trust or method in built_in() else TrainConfig


def _rows(config: TrainConfig) -> dict[str, tuple[Task, Example]]:
    registry = load_registry(*([Path(config.tasks_file)] if config.tasks_file else []))
    tasks = configured_tasks(registry, config.tasks, config, training=True).values()
    every = config.model_copy(update={"limit": None})  # added rows push none out of the sample
    return {row.id: (task, row) for task in tasks for row in training_rows(task, every)}
