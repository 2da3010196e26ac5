"""One RL step: prompts → drafts → feedback → refined → sequences → learn. Reads top to bottom.

What is learned from the records is `learn.py`; which sequences they become, the objective.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from soulkit.errors import ProviderError, SoulError
from soulkit.models.base import Cast, Player
from soulkit.models.local.sampler import LocalModel
from soulkit.play.engine import Engine, FeedbackPolicy, Job, gather
from soulkit.tasks.base import Task
from soulkit.train.config import TrainConfig
from soulkit.train.forward.policy import Policy
from soulkit.train.learn import learn
from soulkit.train.material.sampling import Pool, batch
from soulkit.train.objectives.base import Objective
from soulkit.train.objectives.sequences import Slot, TrainSequence
from soulkit.train.rollouts.canaries import Tripwire
from soulkit.train.rollouts.feedback import Vigil, feedback_policy
from soulkit.train.rollouts.measure import feedback_metrics, reward_metrics
from soulkit.train.state.loop import Loop, StepMetrics
from soulkit.types import Feedback, Record, Sampling, Segment


class StaleRollout(SoulError):
    """A rollout carries the hash of other weights than the trainer's."""


@dataclass
class RolloutStep:
    """Takes RL steps for a Loop."""

    loop: Loop
    objective: Objective
    sampler: LocalModel
    cast: Cast
    pool: Pool
    dev: Pool
    recent: deque[Sequence[Record]]
    """The records of the last steps, for the run's summary; without their tokens."""
    blind_reader: Player | None = None
    teacher: Policy | None = None
    """The second model of on-policy distillation, from `teacher.load_teacher`."""
    tripwire: Tripwire | None = None
    vigil: Vigil | None = None
    """Watches over feedback, in methods that learn from it."""

    @property
    def config(self) -> TrainConfig:
        return self.loop.config

    async def __call__(self, step: int) -> StepMetrics:
        config, policy = self.config, self.loop.policy
        started = time.monotonic()
        self.sampler.policy_version = version = policy.version()
        jobs = self.jobs(step)
        records = await self.rollouts(jobs)
        refuse_stale(records, version)
        self.refuse_silence(records)
        self.loop.episodes.write(*records)
        self.recent.append([without_tokens(record) for record in records])
        sung = await self.tripwire.watch(step, self.cast, records) if self.tripwire else {}
        sampled = time.monotonic()

        heard = records
        if config.shuffle_feedback and self.objective.reader == "self":
            heard = with_swapped(records, self.shuffle_key(step))
        found = self.objective.sequences(heard, policy.renderer, slots(jobs))
        found = without_truncated(found, records) if config.mask_truncated else found
        learned = learn(policy, self.loop.optimizer, found, config, self.teacher)
        trained = time.monotonic()

        line: StepMetrics = {
            **reward_metrics(records),
            **feedback_metrics(records),
            **(self.vigil.watch(records, heard) if self.vigil else {}),
            **learned,
            **sung,
            "policy": version,
            "seconds_sample": round(sampled - started, 3),
            "seconds_train": round(trained - sampled, 3),
        }
        if config.eval_every and (step + 1) % config.eval_every == 0:
            line["eval"] = await self.evaluate(step)
        return line

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

    def engine(self, task: Task, feedback: FeedbackPolicy | None, temperature: float) -> Engine:
        sampling = Sampling(
            temperature=temperature,
            max_tokens=self.config.reply_limit(task.spec.sampling),
            seed=self.config.seed,
            thinking=self.config.thinking,
        )
        cast = replace(self.cast, actor=replace(self.cast.actor, sampling=sampling))
        return Engine(cast, self.config.seed, self.config.concurrency, feedback)

    async def rollouts(self, jobs: Sequence[Job]) -> list[Record]:
        policy = None
        if self.objective.uses_feedback:
            policy = feedback_policy(self.config, self.blind_reader)
        by_task: dict[str, list[Job]] = {}
        for job in jobs:
            by_task.setdefault(job.task.name, []).append(job)
        walks = [
            (self.engine(mine[0].task, policy, self.config.temperature), mine)
            for mine in by_task.values()
        ]
        if self.config.shuffle_feedback and policy:
            found = await self.shuffled(walks)
        else:
            found = await gather(self.in_order(*walk) for walk in walks)
        # Mini-batches are cut in this order: task by task, an update would be one task's alone.
        place = {(job.example.id, job.index): place for place, job in enumerate(jobs)}
        together = [record for records in found for record in records]
        return sorted(together, key=lambda r: place[r.example_id, r.rollout])

    async def in_order(self, engine: Engine, jobs: Sequence[Job]) -> list[Record]:
        if not self.objective.refines:
            return await engine.each(jobs, engine.critiqued)
        return await engine.run(jobs, _ignore)

    async def shuffled(self, walks: Sequence[tuple[Engine, list[Job]]]) -> list[list[Record]]:
        """The control: drafts first, then everybody gets somebody else's feedback.

        The drafts of all tasks first: where waves decide, nobody may sit down while others play.
        """
        drafts = await gather(engine.each(jobs, engine.critiqued) for engine, jobs in walks)
        if not self.objective.refines:
            return drafts
        refined = await gather(
            self.misled(*walk, mine) for walk, mine in zip(walks, drafts, strict=True)
        )
        return [[*mine, *theirs] for mine, theirs in zip(drafts, refined, strict=True)]

    async def misled(
        self, engine: Engine, jobs: Sequence[Job], drafts: Sequence[Record]
    ) -> list[Record]:
        """The refined rollouts of one task, each with another example's feedback."""
        swapped = swap_feedback(drafts, self.shuffle_key(jobs[0].step))
        given = {
            (draft.example_id, draft.rollout): (feedback, draft)
            for draft, feedback in zip(drafts, swapped, strict=True)
            if feedback is not None
        }
        told = [job for job in jobs if (job.example.id, job.index) in given]
        return await engine.each(
            told, lambda job: engine.refine(job, *given[job.example.id, job.index])
        )

    def shuffle_key(self, step: int) -> str:
        return f"{self.config.seed}/{step}"

    def refuse_silence(self, records: Sequence[Record]) -> None:
        """ProviderError when a step brought nothing but failures.

        The weights so far are kept, and so is the evidence, behind the checkpoint's offset.
        """
        found = silence(records)
        if found:
            if self.loop.step:
                self.loop.checkpoint(within_step=True)
            self.loop.episodes.write(*records)
            raise ProviderError(found)

    async def evaluate(self, step: int) -> dict[str, float | None]:
        """Greedy accuracy of the moved weights on the dev split, per task."""
        self.sampler.policy_version = self.loop.policy.version()
        values: dict[str, list[float]] = {}
        jobs: dict[str, list[Job]] = {}
        for task, example in self.dev:
            jobs.setdefault(task.name, []).append(Job(task, example, 0, step))
        for name, mine in jobs.items():
            records = await self.engine(mine[0].task, None, 0.0).run(mine, _ignore)
            values[name] = [r.score.value for r in records if r.score.value is not None]
        return {name: sum(v) / len(v) if v else None for name, v in values.items()}


def slots(jobs: Sequence[Job]) -> Slot:
    """The feedback slot of every record of these jobs, filled by its task."""
    by_id = {job.example.id: (job.task, job.example) for job in jobs}

    def slot(record: Record, seat: str, feedback: Feedback) -> Segment:
        task, example = by_id[record.example_id]
        return task.slot(example, seat, feedback)

    return slot


def without_tokens(record: Record) -> Record:
    """What a summary reads of a record; ids and log-probs are nearly all of its memory."""
    return replace(record, episode=replace(record.episode, traces=()))


def refuse_stale(records: Sequence[Record], version: str) -> None:
    """On-policy means: every trained token was sampled by the weights that are about to move."""
    for record in records:
        for trace in record.episode.traces:
            for turn in trace.turns:
                if turn.completion.policy != version:
                    raise StaleRollout(
                        f"{record.key} was sampled by '{turn.completion.policy}', not '{version}'"
                    )


def silence(records: Sequence[Record]) -> str:
    """Why a step has nothing to learn from, or has no feedback at all; empty when it has.

    A run that went on would spend hours on a dead server, or be another method than was asked for.
    """
    drafts = [r for r in records if r.kind == "draft"]
    scored = [r for r in drafts if r.score.scored]
    if drafts and not scored:
        last = drafts[-1].score
        return f"None of {len(drafts)} drafts was scored, the last for {last.reason}: {last.words}"
    failed = [r.episode.notes.get("coach_failure") for r in scored]
    if failed and all(failed):
        return f"The coach failed on all of {len(failed)} drafts, the last time with {failed[-1]}"
    return ""


def without_truncated(
    sequences: Sequence[TrainSequence], records: Sequence[Record]
) -> list[TrainSequence]:
    """The same with weight 0 for episodes that ran into the length limit in any turn.

    They stay in the statistics of their group: their rewards were earned like any other.
    """
    cut = {(r.example_id, f"{r.rollout}/{r.kind}") for r in records if _ran_out(r)}
    return [replace(s, weight=0.0) if (s.example_id, s.rollout) in cut else s for s in sequences]


def _ran_out(record: Record) -> bool:
    turns = (turn for trace in record.episode.traces for turn in trace.turns)
    return any(turn.completion.stop_reason == "length" for turn in turns)


def swap_feedback(drafts: Sequence[Record], key: str) -> list[Feedback | None]:
    """Each draft's usable feedback handed to a draft of another example; None where there is none.

    A rotation over examples in random order: everybody gives one and takes one, unless one example
    has more feedback than all others together and some must be given twice.
    """
    usable = [i for i, d in enumerate(drafts) if d.received is not None and d.received.usable]
    by_example: dict[str, list[int]] = {}
    for i in usable:
        by_example.setdefault(drafts[i].example_id, []).append(i)
    groups = list(by_example.values())
    random.Random(key).shuffle(groups)
    ordered = [i for group in groups for i in group]
    shift = max((len(group) for group in groups), default=0)
    swapped: list[Feedback | None] = [None] * len(drafts)
    if len(groups) > 1:
        for place, i in enumerate(ordered):
            turned = ordered[(place + shift) % len(ordered) :] + ordered
            others = (k for k in turned if drafts[k].example_id != drafts[i].example_id)
            swapped[i] = drafts[next(others)].received
    return swapped


def with_swapped(drafts: Sequence[Record], key: str) -> list[Record]:
    """The drafts, each as if it had received what `swap_feedback` gives it, task by task."""
    by_task: dict[str, list[Record]] = {}
    for draft in drafts:
        by_task.setdefault(draft.task, []).append(draft)
    return [
        replace(draft, received=feedback)
        for mine in by_task.values()
        for draft, feedback in zip(mine, swap_feedback(mine, key), strict=True)
    ]


def _ignore(record: Record) -> None:
    """Training writes a whole step's records at once, when the step is complete."""
