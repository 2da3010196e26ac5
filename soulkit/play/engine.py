"""The only scheduler: plays rollouts and hands every record to a sink at once.

A rollout is played alone, without a barrier: draft, score, critique, leak check, refined, score. A
CallError, also one of the task's own code, becomes a Failure on the record it concerns; anything
else is a bug of soulkit and stops the run (what is recorded stays). Where a sampler in the cast is
deterministic, each worker has a fixed share of the jobs and takes part in the sampler's waves
(`models/local/batching.py`).

Controls are asked about once all drafts of a row are scored: one job for each control of each row
or draft. A control of a draft without a score stays unscored: the draft will be played again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from soulkit.errors import CallError
from soulkit.judge.leaks import LeakView, check_leak, read_blind
from soulkit.models.base import Cast, Player
from soulkit.models.local.batching import Participant, participants
from soulkit.play.plan import Work
from soulkit.runs.record_lines import first_prompts
from soulkit.tasks.kit.base import Control, Rollout, Task
from soulkit.tasks.kit.user_code import checked_episode, checked_feedback, or_default, task_code
from soulkit.text import one_line
from soulkit.types import (
    ControlRecord,
    Episode,
    Example,
    Failure,
    Feedback,
    Kind,
    LeakCheck,
    Record,
    Score,
    record_key,
    unscored,
)

Sink = Callable[[Record], None]
T = TypeVar("T")
J = TypeVar("J")
"""What is walked: a Job, or whatever else is asked in the same places."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to walk."""

    task: Task
    example: Example
    index: int = 0
    step: int = 0

    def rollout(self, seed: int, kind: Kind = "draft", feedback: Feedback | None = None) -> Rollout:
        return Rollout(index=self.index, kind=kind, step=self.step, seed=seed, feedback=feedback)


BLIND_READS = 8
"""Answers that a blind reader gives on each feedback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackPolicy:
    """When a draft gets feedback. `blind_reader` adds a model to the leak check."""

    when: str = "all"
    """`all` | `imperfect` (reward below the task's maximum) | `task` (the reference's gates) |
    `never`."""
    terse: bool = False
    """The task's own rules without remarks on the draft, instead of the cast's coach."""
    blind_reader: Player | None = None
    blind_reads: int = BLIND_READS
    show_draft: bool = False
    """The refined rollout's feedback slot holds the draft as well; the leak check reads only what
    the coach wrote, to a reader who knows what the draft answered."""
    leak_check: LeakCheck = "drop"
    """`drop`: feedback that leaks is recorded and not used; `log`: it is used all the same; `off`:
    nothing is looked for."""
    worked_examples: bool = False
    """Tasks whose feedback shows a worked example, answer included, give feedback at all."""

    def wants(self, task: Task, score: Score, step: int) -> bool:
        worked = task.spec.feedback.kind == "worked_example"
        if score.reward is None or self.when == "never" or (worked and not self.worked_examples):
            return False
        if self.when == "imperfect":
            return score.reward < task.spec.metric.high
        if self.when == "task":
            with task_code(task, "gate"):
                return task.gate(score, step)
        return True


@dataclass(frozen=True)
class Engine:
    """Plays with one cast. `concurrency` bounds the rollouts that are under way at once."""

    cast: Cast
    seed: int = 0
    concurrency: int = 256
    feedback: FeedbackPolicy | None = None

    async def draft(self, job: Job) -> Record:
        """Play and score once."""
        return await self._play_and_score(job, job.rollout(self.seed))

    async def refine(self, job: Job, feedback: Feedback, draft: Record | None = None) -> Record:
        """Play and score again, with feedback in the context.

        Where the policy shows drafts, `draft` stands in the slot with the feedback.
        """
        rollout = job.rollout(self.seed, "refined", feedback)
        if draft is not None and self.feedback is not None and self.feedback.show_draft:
            try:
                rollout = replace(rollout, feedback=with_draft(job, feedback, draft))
            except CallError as error:
                return await self._scored(job, rollout, failed(job, rollout, error))
        return await self._play_and_score(job, rollout)

    async def critique(self, job: Job, draft: Record) -> Record:
        """The draft's record with the feedback it earned, leak check done."""
        policy = self.feedback
        try:
            if policy is None or not policy.wants(job.task, draft.score, job.step):
                return draft
            feedback = terse(job) if policy.terse else await self._coach_feedback(job, draft)
            checked = await self._check_leaks(job, draft, feedback) if feedback else None
        except CallError as error:
            # A coach that failed gave no feedback: the draft stands, and the failure is on record.
            notes = {**draft.episode.notes, "coach_failure": f"{error.reason}: {error.detail}"}
            return replace(draft, episode=replace(draft.episode, notes=notes))
        return replace(draft, received=checked)

    async def _coach_feedback(self, job: Job, draft: Record) -> Feedback | None:
        rollout, task = job.rollout(self.seed), job.task
        with task_code(task, "critique"):
            feedback = await task.critique(
                job.example, draft.episode, draft.score, self.cast, rollout
            )
        return checked_feedback(task, feedback)

    async def _check_leaks(self, job: Job, draft: Record, feedback: Feedback) -> Feedback:
        policy = self.feedback or FeedbackPolicy()
        checked = feedback
        if policy.leak_check != "off":
            with task_code(job.task, "leak_view"):
                view = job.task.draft_view(job.example, draft.score)
            if view is not None:
                view = replace(view, shown=policy.show_draft)
            checked = check_leak(feedback, view)
            if policy.blind_reader is not None and view is not None and not checked.leak:
                checked = await self._read_blind(job, checked, view, policy.blind_reader)
        # A task may have found a leak itself, whatever the run asks for.
        return replace(checked, kept=bool(checked.leak) and policy.leak_check != "drop")

    async def _read_blind(
        self, job: Job, checked: Feedback, view: LeakView, reader: Player
    ) -> Feedback:
        rollout = job.rollout(self.seed)
        reads = self.feedback.blind_reads if self.feedback else 0
        calls = [rollout.call("judge", job.example, sample=i) for i in range(reads)]
        return await read_blind(checked, view, reader, calls)

    async def draft_with_feedback(self, job: Job) -> Record:
        """A draft with the feedback it earned."""
        return await self.critique(job, await self.draft(job))

    async def walk(self, job: Job, sink: Sink) -> list[Record]:
        """Draft, feedback where the policy wants it, refined where the feedback does not leak."""
        draft = await self.draft_with_feedback(job)
        sink(draft)
        if draft.received is None or not draft.received.usable:
            return [draft]
        refined = await self.refine(job, draft.received, draft)
        sink(refined)
        return [draft, refined]

    async def run(self, jobs: Iterable[Job], sink: Sink) -> list[Record]:
        """Walk every job; records reach the sink as they come and are returned in job order."""
        walked = await self.each(jobs, lambda job: self.walk(job, sink))
        return [record for records in walked for record in records]

    async def each(self, jobs: Iterable[J], walk: Callable[[J], Awaitable[T]]) -> list[T]:
        """What `walk` gives for every job, in job order, at most `concurrency` of them at once.

        The first error cancels the rest and is raised. With a deterministic sampler in the cast the
        jobs of one place are fixed beforehand; otherwise a free place takes the next.
        """
        work = list(enumerate(jobs))
        places = min(self.concurrency, len(work))
        members, common = self._participants(places), iter(work)
        results: dict[int, T] = {}
        broken = asyncio.Event()

        async def take_part(place: int, participant: Participant) -> None:
            with participant:
                for index, job in work[place::places] if participant.waited_for else common:
                    if broken.is_set():  # a place that an error frees must not start another call
                        return
                    try:
                        results[index] = await walk(job)
                    except BaseException:
                        broken.set()
                        raise

        try:
            await gather(take_part(place, participant) for place, participant in enumerate(members))
        finally:
            for participant in members:  # one cancelled before its first line never entered
                participant.leave()
        return [results[index] for index, _ in work]

    def _participants(self, count: int) -> list[Participant]:
        reader = self.feedback.blind_reader if self.feedback else None
        players = [*self.cast.players, *([reader] if reader else [])]
        return participants([player.model for player in players], count)

    async def _play_and_score(self, job: Job, rollout: Rollout) -> Record:
        try:
            with task_code(job.task, "play"):
                episode = await job.task.play(job.example, self.cast, rollout)
            episode = checked_episode(job.task, episode)
        except CallError as error:
            episode = failed(job, rollout, error)
        return await self._scored(job, rollout, episode)

    async def _scored(self, job: Job, rollout: Rollout, episode: Episode) -> Record:
        # Whoever judges keys its calls with the step: no task has to think of it.
        episode = replace(episode, step=job.step)
        score = await job.task.judged(job.example, episode, self.cast)
        return record_of(job, rollout, episode, score)


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first error cancels the rest: nothing is paid for after a bug."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in coroutines]
    except BaseExceptionGroup as errors:
        # One cause, one error: the others are its echoes or would be shown on the next run.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def failed(job: Job, rollout: Rollout, error: CallError) -> Episode:
    """The episode that could not be played."""
    return Episode(
        example_id=job.example.id, task=job.task.name, kind=rollout.kind,
        rollout=job.index, stop="failed", failure=Failure(error.reason, error.detail),
    )  # fmt: skip


def terse(job: Job) -> Feedback | None:
    """What the task's rules say about the example whatever the draft."""
    with task_code(job.task, "explain"):
        text = job.task.explain(job.example, None, None)
    feedback = replace(job.task.symbolic(text), author="terse") if text else None
    return checked_feedback(job.task, feedback)


def with_draft(job: Job, feedback: Feedback, draft: Record) -> Feedback:
    """The feedback and the draft that it is about, in the words of `shown_draft.md`."""
    with task_code(job.task, "public_words"):
        lines = [(line.seat, job.task.public_words(line)) for line in draft.episode.transcript]
    several = (f"{seat}: {one_line(text)}" for seat, text in lines)  # a line break forges no line
    draft_text = lines[0][1] if len(lines) == 1 else "\n".join(several)
    text = job.task.prompts.render("shown_draft", draft=draft_text, feedback=feedback.text)
    return replace(feedback, text=text)


def record_of(job: Job, rollout: Rollout, episode: Episode, score: Score) -> Record:
    """The line of `episodes.jsonl` for one play."""
    return Record(
        key=record_key(job.step, job.example.id, job.index, rollout.kind),
        task=job.task.name,
        example_id=job.example.id,
        rollout=job.index,
        kind=rollout.kind,
        step=job.step,
        episode=episode,
        score=score,
        cluster=job.example.cluster,
        tags=job.example.tags,
        origin=job.example.origin,
        given=rollout.feedback,
        prompt=first_prompts(episode),
        gold=or_default(job.task, "gold_text", lambda: job.task.gold_text(job.example), ""),
    )


NO_DRAFT = "unscored_draft"
"""Why a control is unscored that was never asked about: its draft has no score."""


@dataclass(frozen=True, slots=True)
class ControlJob:
    """One control that is to be asked about."""

    task: Task
    control: Control
    example: Example
    index: int = 0
    """Rollout of the draft; 0 for a control of the row."""

    @property
    def key(self) -> str:
        """That of its record."""
        return self.record(unscored(Failure(""))).key

    def record(self, score: Score) -> ControlRecord:
        """The line of `controls.jsonl` for this score."""
        return ControlRecord(
            task=self.task.name, example_id=self.example.id, rollout=self.index,
            name=self.control.name, score=score, cluster=self.example.cluster,
        )  # fmt: skip


def control_jobs(part: Work, repeats: int) -> list[ControlJob]:
    """Every control of a task's rows, each with `repeats` drafts, in order."""
    return [
        ControlJob(part.task, control, example, index)
        for control in part.controls
        for example in part.examples
        for index in range(repeats if control.per == "episode" else 1)
    ]


async def ask_control(job: ControlJob, episode: Episode | None, cast: Cast) -> ControlRecord:
    """The record of a control; `episode` is the draft that a control of episodes is about, None
    where that has no score."""
    if job.control.per == "row":
        episode = job.task.gold(job.example)
    elif episode is None:
        return job.record(unscored(Failure(NO_DRAFT), job.task.protocol))
    score = await job.task.controlled(job.control.name, job.example, episode, cast)
    return job.record(score)


def control_names(work: Sequence[Work]) -> str:
    """The controls that the tasks have, in words: `TASK (human_human, proxy_proxy)`."""
    return ", ".join(
        f"{part.task.name} ({', '.join(control.name for control in part.task.controls)})"
        for part in work
        if part.task.controls
    )
