"""Rejudging of training runs: for `soul rescore`, and with one judge for all compared methods.

Scores of methods that were trained with different judges are not comparable. One common judge
therefore scores the newest held-out episodes of each run, or its drafts of the last steps if there
are none. The result is a run folder inside that of the method.

The rows are those of the training, dev rows included. Means are over all recorded steps, not only
the last ones as in the run's own summary, because they compare one scorer with another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from soulkit.eval.results.batch_statistics import task_scales
from soulkit.eval.results.recorded import RecordedRun, UnrecordedModel, from_ledger
from soulkit.eval.results.rejudge import rejudge, rejudge_plan
from soulkit.eval.results.rescore import (
    PROMPTS,
    distinct_tasks,
    ledger_of,
    load_recorded,
    put_prompts,
)
from soulkit.eval.results.summary import Summary, summarise
from soulkit.models.base import Cast, Player
from soulkit.models.ledger.ledger import Ledger
from soulkit.models.players.config import RolesConfig
from soulkit.models.players.players import Players, cast_of, checkpoint_player
from soulkit.models.players.settings import RoleSettings
from soulkit.play.plan import CostUnconfirmed, is_paid
from soulkit.play.settings import configured_tasks
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.records import drafts, load_records, newest_dev
from soulkit.train.ablate import PlannedRun
from soulkit.train.config import TrainConfig, settings_class
from soulkit.train.objectives.base import built_in
from soulkit.train.setup.data import training_rows
from soulkit.train.state.summary import LAST_STEPS
from soulkit.trust import run_settings
from soulkit.types import ControlRecord, Record


def recorded_training(
    path: Path, *, trust: bool = False, tasks_file: Path | None = None
) -> RecordedRun:  # fmt: skip
    """The training run in `path`. RunError or DataError if it cannot be read; TrustError for a
    run of unknown origin, unless `trust`. Scorers cannot call its actor."""
    config, settings, sealed = load_recorded(
        _kind(path, trust), path, trust=trust, tasks_file=tasks_file
    )

    def cast(ledger: Ledger) -> Cast:
        actor = UnrecordedModel(config.model)
        players = Players(ledger, actor, UnrecordedModel, config.call_arguments(ledger))
        players.serve = from_ledger(ledger)
        return cast_of(config, players, Player(actor), config.seed)

    registry = config.registry()
    tasks = configured_tasks(registry, config.tasks, config, training=True).values()
    every = config.model_copy(update={"limit": None})  # rows added later do not change the sample
    rows = {row.id: (task, row) for task in tasks for row in training_rows(task, every)}
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

    return RecordedRun(
        path=path, command=f"train {config.method}", settings=settings, sealed=sealed,
        rows=rows,
        records=load_records(path / "episodes.jsonl"), ledger=ledger_of(path, settings),
        cast=cast, sampling=None, summary=summary, grouped=True, config=config,
        seed=config.seed, actor=lambda: UnrecordedModel(config.model), load=checkpoint_player,
    )  # fmt: skip


def _kind(path: Path, trust: bool) -> type[TrainConfig]:
    """The settings class of the run's method; packages are only imported for trusted runs."""
    settings, sealed = run_settings(path)
    method = str(settings.get("method", ""))
    return settings_class(method) if sealed or trust or method in built_in() else TrainConfig


JUDGED_END = "judged_end"
"""Prefix of the run folders with rejudged final episodes, inside the training run's folder."""


def judging_folder(judge: str) -> str:
    """Name of the run folder for final episodes scored by `judge`; each judge has its own."""
    return f"{JUDGED_END}-{hashlib.sha256(judge.encode()).hexdigest()[:8]}" if judge else ""


def final_episodes(run: Path) -> list[Record]:
    """The last episodes of a training run; DataError if they cannot be read."""
    held_out = newest_dev(run)
    if held_out:
        return held_out
    played = drafts(load_records(run / "episodes.jsonl"))
    last = max((record.step for record in played), default=0)
    return [record for record in played if record.step > last - LAST_STEPS]


def confirm_final_judge(judge: RoleSettings, config: RolesConfig, reporter: Reporter) -> None:
    """Before training, confirm a judge that costs money, because its cost is not known yet.

    CostUnconfirmed if it is not confirmed.
    """
    if not is_paid(config, judge) or config.yes or config.max_cost is not None:
        return
    paid = "scores the final episodes of all methods; every call costs money"
    reporter.note(f"{judge.written()} {paid}")
    if not reporter.confirm("Continue?"):
        raise CostUnconfirmed(
            f"The judge {judge.written()} costs money, and the cost was not confirmed.",
            "It scores the final episodes of all methods after training.",
            "Confirm with --yes, or limit the cost with --max-cost DOLLARS.",
        )


def judge_final_episodes(
    runs: Sequence[PlannedRun],
    judge: RoleSettings,
    *,
    trust: bool = False,
    reporter: Reporter = SILENT,
) -> None:
    """Score the final episodes of the finished runs; recorded judge calls are not repeated."""
    for run in runs:
        if not (run.path / "summary.json").is_file():
            continue
        recorded = recorded_training(run.path, trust=trust)
        given = {name: getattr(run.config, name) for name in run.config.OUTSIDE_IDENTITY}
        recorded = replace(
            recorded, records=final_episodes(run.path),
            config=recorded.config.model_copy(update=given),
        )  # fmt: skip
        renewal = rejudge_plan(
            recorded, (judge,), None, run.path / judging_folder(judge.written()), run.path,
            yes=True, max_cost=run.config.max_cost,
        )  # fmt: skip
        reporter.note(f"{judge.written()} scores {len(recorded.records)} episodes of {run.name}")
        rejudge(renewal, reporter=reporter)
