"""Greedy episodes on rows that nothing is learned from: dev splits, rows of general ability.

The same engine and cast as for the rollouts that are learned from, at temperature 0.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from soulkit.models.base import Cast, Sampler, TrainedWeights
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.runs.records import RecordWriter
from soulkit.tasks.base import Task
from soulkit.tasks.guarding import attempt, finite_or_none
from soulkit.train.config import TrainConfig
from soulkit.train.material.sampling import TaskRows
from soulkit.types import Record, Sampling


def engine_of(
    config: TrainConfig, cast: Cast, task: Task, feedback: FeedbackPolicy | None = None,
    temperature: float = 0.0,
) -> Engine:  # fmt: skip
    """What plays one task as a training run has it."""
    sampling = Sampling(
        temperature=temperature,
        max_tokens=config.reply_limit(task.spec.sampling),
        seed=config.seed,
        thinking=config.thinking,
    )
    seated = cast.in_task(task.name)
    seated = replace(seated, actor=replace(seated.actor, sampling=sampling))
    return Engine(seated, config.seed, config.concurrency, feedback)


async def played_greedily(
    config: TrainConfig, cast: Cast, rows: TaskRows, step: int
) -> AsyncIterator[tuple[Task, list[Record]]]:
    """One episode of every row, task by task in the order in which the tasks first appear."""
    jobs = [Job(task, example, 0, step) for task, example in rows]
    for jobs_of_task in jobs_by_task(jobs).values():
        task = jobs_of_task[0].task
        engine = engine_of(config, cast, task)
        yield task, await engine.run(jobs_of_task, nobody_reads)


@dataclass(frozen=True)
class DevScores:
    """Scores the weights of a run on its dev rows."""

    config: TrainConfig
    sampler: Sampler
    cast: Cast
    rows: TaskRows
    log: Path | None = None
    """Where the episodes are kept."""

    async def after(
        self, step: int, weights: TrainedWeights, begin: Callable[[str], None]
    ) -> dict[str, float | None]:
        """`now` every so many steps, as the settings say; empty between turns."""
        every = self.config.eval_every
        if every is None or (step + 1) % every or not self.rows:
            return {}
        return await self.now(step, weights, begin)

    async def now(
        self, step: int, weights: TrainedWeights, begin: Callable[[str], None]
    ) -> dict[str, float | None]:
        """Greedy headline of the weights that `step` moved, per task; `begin` hears of it."""
        begin("held-out rows")
        await self.sampler.take(weights)
        values: dict[str, float | None] = {}
        async for task, records in played_greedily(self.config, self.cast, self.rows, step):
            self._keep(records)
            value = attempt(task, "headline", partial(task.headline, records), None)
            values[task.name] = finite_or_none(value)
        return values

    def _keep(self, records: Sequence[Record]) -> None:
        if self.log is not None:
            writer = RecordWriter(self.log)
            writer.write(
                *(replace(record, episode=replace(record.episode, traces=())) for record in records)
            )
            writer.close()


def jobs_by_task(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Jobs by the name of their task, tasks in the order they first appear."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.task.name, []).append(job)
    return groups


def nobody_reads(record: Record) -> None:
    """The sink of whoever takes all records at once, when they are complete."""
