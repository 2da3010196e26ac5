"""The rollouts of a step, and greedy scores on held-out rows.

The prompts of all tasks are played together and returned in the order in which the step drew them,
because mini-batches are cut in that order and should mix tasks. Greedy episodes use the same engine
and cast at temperature 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from soulkit.errors import CallError, ProviderError, SoulError, TaskError
from soulkit.models.base import Cast, Player, Sampler, TrainedWeights
from soulkit.models.local.footprint import free_memory
from soulkit.play.engine import Engine, FeedbackPolicy, Job, gather
from soulkit.reporting import Reporter
from soulkit.runs.records import DEV_JUDGED, RecordWriter
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.rewards import with_group_rewards
from soulkit.tasks.kit.user_code import finite_or_none, or_default
from soulkit.train.config import TrainConfig
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.sequences import Slot
from soulkit.train.rollouts.feedback import feedback_policy, swap_feedback, with_swapped
from soulkit.train.rollouts.push import ServedPolicy
from soulkit.train.setup.rows import TaskRows, batch
from soulkit.train.state.stops import BY_DEV_JUDGE
from soulkit.types import COACH_FAILURE, Feedback, Record, Sampling, Segment


class StaleRollout(SoulError):
    """A rollout was not sampled with the trainer's current weights."""


def refuse_stale(records: Sequence[Record], version: str) -> None:
    """StaleRollout unless every token was sampled with the current weights (on-policy)."""
    for record in records:
        for trace in record.episode.traces:
            for turn in trace.turns:
                if turn.completion.policy != version:
                    raise StaleRollout(
                        f"{record.key} was sampled by '{turn.completion.policy}', not '{version}'"
                    )


def with_reward(record: Record) -> Record:
    """The record, marked unscored if its score has no reward."""
    score = record.score
    if not score.scored or score.reward is not None:
        return record
    why = score.reason or "no_reward"
    words = "; ".join(v.problem for v in score.verdicts if v.problem) or score.words
    lost = replace(score, value=None, status="unscored", reason=why, words=words)
    return replace(record, score=lost)


def step_failure(records: Sequence[Record]) -> Exception | None:
    """The error if no draft of a step was scored or all its feedback failed; else None.

    It stops the run, which could otherwise spend hours on a server that is down. Without memory for
    a single reply it is torch's error, for which a training has its own advice.
    """
    drafts = [r for r in records if r.kind == "draft"]
    scored = [r for r in drafts if r.score.scored]
    if drafts and not scored:
        last = drafts[-1].score
        if last.words.startswith(torch.OutOfMemoryError.__name__):
            return torch.OutOfMemoryError(last.words)
        return _of_reason(last.reason)(
            f"None of {len(drafts)} drafts was scored; the last one failed with {last.reason}: "
            f"{last.words}"
        )
    failed = [r.episode.notes.get(COACH_FAILURE) for r in scored]
    if failed and all(failed):
        return _of_reason(str(failed[-1]).partition(":")[0])(
            f"The coach failed on all {len(failed)} drafts, the last time with {failed[-1]}"
        )
    return None


def _of_reason(reason: str) -> type[CallError]:
    return TaskError if reason == TaskError.reason else ProviderError


def task_engine(
    config: TrainConfig, cast: Cast, task: Task, feedback: FeedbackPolicy | None = None,
    temperature: float = 0.0,
) -> Engine:  # fmt: skip
    """The engine that plays one task in a training run."""
    sampling = Sampling(
        temperature=temperature, max_tokens=config.reply_limit(task.spec.sampling),
        seed=config.seed, thinking=config.thinking,
    )  # fmt: skip
    seated = cast.in_task(task.name)
    seated = replace(seated, actor=replace(seated.actor, sampling=sampling))
    return Engine(seated, config.seed, config.concurrency, feedback)


async def played_greedily(
    config: TrainConfig, cast: Cast, rows: TaskRows, step: int
) -> AsyncIterator[tuple[Task, list[Record]]]:
    """One greedy episode per row, task by task, in order of the tasks' first appearance."""
    jobs = [Job(task, example, 0, step) for task, example in rows]
    for jobs_of_task in jobs_by_task(jobs).values():
        task = jobs_of_task[0].task
        engine = task_engine(config, cast, task)
        yield task, await engine.run(jobs_of_task, ignore_record)


@dataclass(frozen=True)
class DevScores:
    """Scores the weights of a run on its dev rows."""

    config: TrainConfig
    sampler: Sampler
    cast: Cast
    rows: TaskRows
    log: Path | None = None
    """File for the episodes."""
    second: Cast | None = None
    """The cast with --dev-judge as its judge."""

    async def now(
        self, step: int, weights: TrainedWeights, reporter: Reporter
    ) -> dict[str, float | None]:
        """Greedy headline score per task of the weights after `step`, also by --dev-judge."""
        reporter.phase("held-out rows")
        await self.sampler.take(weights)
        values: dict[str, float | None] = {}
        async for task, records in played_greedily(self.config, self.cast, self.rows, step):
            values[task.name] = self._kept(task, records, self.log)
            if self.second and any("judge" in task.calls(e) for t, e in self.rows if t is task):
                rows, cast = {e.id: e for _, e in self.rows}, self.second.in_task(task.name)
                scores = await gather(
                    task.judged(rows[r.example_id], r.episode, cast) for r in records
                )
                again = [replace(r, score=s) for r, s in zip(records, scores, strict=True)]
                log = self.log and self.log.with_name(DEV_JUDGED)
                values[task.name + BY_DEV_JUDGE] = self._kept(task, again, log)
                counts = Counter(r.score.reason or "scored" for r in again)
                words = ", ".join(f"{n} of {len(again)} {why}" for why, n in counts.items())
                reporter.note(f"dev judge, {task.name}: {words}")
        return values

    def _kept(self, task: Task, records: Sequence[Record], log: Path | None) -> float | None:
        """The headline of the records, which are written to `log`."""
        if log is not None:
            writer = RecordWriter(log)
            writer.write(
                *(replace(record, episode=replace(record.episode, traces=())) for record in records)
            )
            writer.close()
        value = or_default(task, "headline", partial(task.headline, records), None)
        return finite_or_none(value)


def jobs_by_task(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Jobs by task name, in order of the tasks' first appearance."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.task.name, []).append(job)
    return groups


def step_jobs(config: TrainConfig, pool: TaskRows, step: int) -> list[Job]:
    """G rollouts per prompt; an example drawn twice in a step gets 2G."""
    seen: dict[str, int] = {}
    jobs = []
    for task, example in batch(pool, config.prompts_per_step, step, config.seed):
        first = seen.get(example.id, 0)
        seen[example.id] = first + config.group_size
        indices = range(first, first + config.group_size)
        jobs += [Job(task, example, index, step) for index in indices]
    return jobs


def ignore_record(record: Record) -> None:
    """Record callback of callers that use the returned records instead."""


@dataclass(frozen=True)
class Rollouts:
    """Plays the rollouts of every step of a run."""

    config: TrainConfig
    objective: Objective
    sampler: Sampler
    cast: Cast
    pool: TaskRows
    dev: DevScores
    blind_reader: Player | None = None

    def jobs(self, step: int) -> list[Job]:
        """The jobs of a step."""
        return step_jobs(self.config, self.pool, step)

    async def take(self, weights: TrainedWeights) -> str:
        """Sample with these weights from now on; returns their hash, recorded in rollouts."""
        await self.sampler.take(weights)
        return self.sampler.policy_version

    async def rest(self) -> None:
        """Release the memory of the sampler on a GPU, which an update needs."""
        if isinstance(self.sampler, ServedPolicy):
            await self.sampler.pusher.sleep()
        if torch.cuda.is_available():
            free_memory()  # torch keeps blocks of the sampler's sizes, which updates cannot use

    async def sample(self, jobs: Sequence[Job]) -> list[Record]:
        """The records of all jobs, sampled with the weights from the last `take`."""
        groups = [
            (self._playing(jobs_of_task[0].task), jobs_of_task)
            for jobs_of_task in jobs_by_task(jobs).values()
        ]
        if self.config.shuffle_feedback and self.objective.uses_feedback:
            records = await self._shuffled(groups)
        else:
            records = await gather(self._in_order(*group) for group in groups)
        place = {(job.example.id, job.index): place for place, job in enumerate(jobs)}
        together = with_group_rewards({job.task.name: job.task for job in jobs},
                                      (record for one in records for record in one))  # fmt: skip
        return sorted(map(with_reward, together), key=lambda r: place[r.example_id, r.rollout])

    def as_read(self, records: Sequence[Record], step: int) -> Sequence[Record]:
        """The records as a self-teacher reads them, with swapped feedback if it is shuffled."""
        if self.config.shuffle_feedback and self.objective.reader == "self":
            return with_swapped(records, self.shuffle_key(step))
        return records

    async def evaluate(
        self, step: int, weights: TrainedWeights, reporter: Reporter
    ) -> dict[str, float | None]:
        """Greedy headline score per task on the dev split after `step`; empty if none is due."""
        every = self.config.eval_every
        if every is None or (step + 1) % every or not self.dev.rows:
            return {}
        return await self.dev.now(step, weights, reporter)

    def _playing(self, task: Task) -> Engine:
        policy = None
        if self.objective.uses_feedback:
            policy = feedback_policy(self.config, self.blind_reader, task.name)
        return task_engine(self.config, self.cast, task, policy, self.config.temperature)

    def shuffle_key(self, step: int) -> str:
        return f"{self.config.seed}/{step}"

    async def _in_order(self, engine: Engine, jobs: Sequence[Job]) -> list[Record]:
        if not self.objective.refines:
            return await engine.each(jobs, engine.draft_with_feedback)
        return await engine.run(jobs, ignore_record)

    async def _shuffled(self, groups: Sequence[tuple[Engine, list[Job]]]) -> list[list[Record]]:
        """Records with feedback swapped among drafts. All tasks draft first, because sampling waves
        wait for every job."""
        drafts = await gather(
            engine.each(jobs, engine.draft_with_feedback) for engine, jobs in groups
        )
        if not self.objective.refines:
            return drafts
        refined = await gather(
            self._misled(*group, drafts_of_task)
            for group, drafts_of_task in zip(groups, drafts, strict=True)
        )
        return [[*first, *second] for first, second in zip(drafts, refined, strict=True)]

    async def _misled(
        self, engine: Engine, jobs: Sequence[Job], drafts: Sequence[Record]
    ) -> list[Record]:
        swapped = swap_feedback(drafts, self.shuffle_key(jobs[0].step))
        hints = {
            (draft.example_id, draft.rollout): (feedback, draft)
            for draft, feedback in zip(drafts, swapped, strict=True)
            if feedback is not None
        }
        refinable = [job for job in jobs if (job.example.id, job.index) in hints]
        return await engine.each(
            refinable, lambda job: engine.refine(job, *hints[job.example.id, job.index])
        )


def feedback_slots(jobs: Sequence[Job]) -> Slot:
    """A function that returns the filled feedback slot of a record of these jobs."""
    by_id = {job.example.id: (job.task, job.example) for job in jobs}

    def slot(record: Record, seat: str, feedback: Feedback) -> Segment:
        task, example = by_id[record.example_id]
        return task.slot(example, seat, feedback)

    return slot
