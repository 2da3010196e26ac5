"""Rollouts of a step: which are played, by whom, with whose feedback; and the greedy dev scores.

Nothing here learns. The prompts of all tasks are played at once, and come back in the order in
which the step drew them: mini-batches are cut in that order, and task by task an update would be
one task's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from soulkit.models.base import Cast, Player, Sampler, TrainedWeights
from soulkit.play.engine import Engine, FeedbackPolicy, Job, gather
from soulkit.tasks.base import Task
from soulkit.tasks.grouped import with_group_rewards
from soulkit.train.config import TrainConfig
from soulkit.train.material.sampling import TaskRows, batch
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.sequences import Slot
from soulkit.train.rollouts.checks import with_reward
from soulkit.train.rollouts.feedback import feedback_policy
from soulkit.train.rollouts.greedy import DevScores, engine_of, jobs_by_task, nobody_reads
from soulkit.train.rollouts.shuffle import swap_feedback, with_swapped
from soulkit.types import Feedback, Record, Segment


@dataclass(frozen=True)
class Rollouts:
    """Plays the rollouts of every step of a run."""

    config: TrainConfig
    objective: Objective
    sampler: Sampler
    cast: Cast
    pool: TaskRows
    dev: TaskRows
    blind_reader: Player | None = None
    dev_log: Path | None = None
    """Where the episodes on the dev split are kept."""

    def jobs(self, step: int) -> list[Job]:
        """G rollouts of every prompt; an example drawn twice in a step gets 2G."""
        config = self.config
        seen: dict[str, int] = {}
        jobs = []
        for task, example in batch(self.pool, config.prompts_per_step, step, config.seed):
            first = seen.get(example.id, 0)
            seen[example.id] = first + config.group_size
            indices = range(first, first + config.group_size)
            jobs += [Job(task, example, index, step) for index in indices]
        return jobs

    async def take(self, weights: TrainedWeights) -> str:
        """Sample with these weights from now on; returns their hash, which rollouts will carry."""
        await self.sampler.take(weights)
        return self.sampler.policy_version

    async def sample(self, jobs: Sequence[Job]) -> list[Record]:
        """The records of all jobs, sampled by the weights that were taken last."""
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
        """The records as a self-teacher reads them: where feedback is shuffled, with others'."""
        if self.config.shuffle_feedback and self.objective.reader == "self":
            return with_swapped(records, self.shuffle_key(step))
        return records

    async def evaluate(
        self, step: int, weights: TrainedWeights, begin: Callable[[str], None]
    ) -> dict[str, float | None]:
        """Greedy headline of the moved weights on the dev split, per task; empty between turns.

        `begin` is told where that takes its time.
        """
        scores = DevScores(self.config, self.sampler, self.cast, self.dev, self.dev_log)
        return await scores.after(step, weights, begin)

    def _playing(self, task: Task) -> Engine:
        """What plays the rollouts that are learned from."""
        policy = None
        if self.objective.uses_feedback:
            policy = feedback_policy(self.config, self.blind_reader, task.name)
        return self.engine(task, policy, self.config.temperature)

    def engine(self, task: Task, feedback: FeedbackPolicy | None, temperature: float) -> Engine:
        """What plays the rollouts of one task."""
        return engine_of(self.config, self.cast, task, feedback, temperature)

    def shuffle_key(self, step: int) -> str:
        return f"{self.config.seed}/{step}"

    async def _in_order(self, engine: Engine, jobs: Sequence[Job]) -> list[Record]:
        if not self.objective.refines:
            return await engine.each(jobs, engine.draft_with_feedback)
        return await engine.run(jobs, nobody_reads)

    async def _shuffled(self, groups: Sequence[tuple[Engine, list[Job]]]) -> list[list[Record]]:
        """The control: drafts first, then everybody gets somebody else's feedback.

        The drafts of all tasks first: where waves decide, nobody may sit down while others play.
        """
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
        """The refined rollouts of one task, each with another example's feedback."""
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
    """The feedback slot of every record of these jobs, filled by its task."""
    by_id = {job.example.id: (job.task, job.example) for job in jobs}

    def slot(record: Record, seat: str, feedback: Feedback) -> Segment:
        task, example = by_id[record.example_id]
        return task.slot(example, seat, feedback)

    return slot
