"""The scheduler: plays rollouts and passes every record to a sink immediately.

Rollouts run independently, without barriers: draft, score, critique, leak check, refined, score. A
CallError, including one in a task's own code, becomes a Failure of its record. Any other exception
is a bug and stops the run; recorded episodes are kept. If a sampler in the cast is deterministic,
each worker has a fixed share of the jobs and takes part in the sampler's waves
(`models/local/batching.py`).

Controls are asked after all drafts of a row are scored, one job per control and row or draft. A
control of an unscored draft stays unscored, because the draft will be played again.
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
from soulkit.models.players.settings import Coach
from soulkit.play.plan import Work
from soulkit.runs.record_lines import first_prompts
from soulkit.tasks.kit.base import Control, Rollout, Task
from soulkit.tasks.kit.user_code import checked_episode, checked_feedback, or_default, task_code
from soulkit.text import one_line
from soulkit.types import (
    COACH_FAILURE,
    ControlRecord,
    Episode,
    Example,
    Failure,
    Feedback,
    Kind,
    LeakCheck,
    Record,
    Score,
    Trace,
    Turn,
    record_key,
    unscored,
)

Sink = Callable[[Record], None]
T = TypeVar("T")
J = TypeVar("J")
"""The kind of job: Job or ControlJob."""


@dataclass(frozen=True, slots=True)
class Job:
    """One rollout to play."""

    task: Task
    example: Example
    index: int = 0
    step: int = 0

    def rollout(self, seed: int, kind: Kind = "draft", feedback: Feedback | None = None) -> Rollout:
        return Rollout(index=self.index, kind=kind, step=self.step, seed=seed, feedback=feedback)


BLIND_READS = 8
"""Answers of a blind reader per feedback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackPolicy:
    """When a draft gets feedback, and how it is checked for leaks."""

    when: str = "all"
    """`all` | `imperfect` (reward below the task's maximum) | `task` (the task's own gate, as in
    the reference protocol)."""
    coach: Coach | None = None
    """`terse` (the task's rules, without remarks on the draft), `raw` (the judge's words about the
    draft, unchanged) or `none`; for anything else the task asks the coach in the cast."""
    blind_reader: Player | None = None
    """A model for the leak check; None checks by rules only."""
    blind_reads: int = BLIND_READS
    show_draft: bool = False
    """Show the draft together with the feedback in the refined rollout. The leak check then reads
    only the coach's text and assumes that the reader knows the draft's answer."""
    leak_check: LeakCheck = "drop"
    """`drop`: record leaking feedback but do not use it; `log`: use it anyway; `off`: no check."""
    worked_examples: bool = False
    """Allow feedback for tasks whose feedback is a worked example that includes the answer."""

    def wants(self, task: Task, score: Score, step: int) -> bool:
        worked = task.spec.feedback.kind == "worked_example"
        if score.reward is None or self.coach == "none" or (worked and not self.worked_examples):
            return False
        if self.when == "imperfect":
            return score.reward < task.spec.metric.high
        if self.when == "task":
            with task_code(task, "gate"):
                return task.gate(score, step)
        return True


@dataclass(frozen=True)
class Engine:
    """Plays with one cast, at most `concurrency` rollouts at a time."""

    cast: Cast
    seed: int = 0
    concurrency: int = 256
    feedback: FeedbackPolicy | None = None

    async def draft(self, job: Job) -> Record:
        """Play and score a draft."""
        return await self._play_and_score(job, job.rollout(self.seed))

    async def refine(self, job: Job, feedback: Feedback, draft: Record | None = None) -> Record:
        """Play and score again with feedback in the context, and with `draft` if the policy shows
        drafts."""
        rollout = job.rollout(self.seed, "refined", feedback)
        if draft is not None and self.feedback is not None and self.feedback.show_draft:
            try:
                rollout = replace(rollout, feedback=with_draft(job, feedback, draft))
            except CallError as error:
                return await self._scored(job, rollout, failed(job, rollout, error))
        return await self._play_and_score(job, rollout)

    async def critique(self, job: Job, draft: Record) -> Record:
        """The draft's record with its leak-checked feedback, if the policy wants any."""
        policy = self.feedback
        try:
            if policy is None or not policy.wants(job.task, draft.score, job.step):
                return draft
            feedback = await self._feedback(job, draft, policy.coach)
            checked = await self._check_leaks(job, draft, feedback) if feedback else None
        except CallError as error:
            # If the coach fails, keep the draft without feedback and record the failure.
            notes = {**draft.episode.notes, COACH_FAILURE: f"{error.reason}: {error.detail}"}
            return replace(draft, episode=replace(draft.episode, notes=notes))
        return replace(draft, received=checked)

    async def _feedback(self, job: Job, draft: Record, coach: Coach | None) -> Feedback | None:
        if coach == "terse":
            return terse(job)
        if coach == "raw":
            return raw(job, draft.score)
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
        # The task itself may also have found a leak.
        return replace(checked, kept=bool(checked.leak) and policy.leak_check != "drop")

    async def _read_blind(
        self, job: Job, checked: Feedback, view: LeakView, reader: Player
    ) -> Feedback:
        rollout = job.rollout(self.seed)
        reads = self.feedback.blind_reads if self.feedback else 0
        calls = [rollout.call("judge", job.example, sample=i) for i in range(reads)]
        return await read_blind(checked, view, reader, calls)

    async def draft_with_feedback(self, job: Job) -> Record:
        """Play a draft and get its feedback."""
        return await self.critique(job, await self.draft(job))

    async def walk(self, job: Job, sink: Sink) -> list[Record]:
        """Play a draft, get feedback if the policy wants it, and play a refined rollout if the
        feedback does not leak."""
        draft = await self.draft_with_feedback(job)
        sink(draft)
        if draft.received is None or not draft.received.usable:
            return [draft]
        refined = await self.refine(job, draft.received, draft)
        sink(refined)
        return [draft, refined]

    async def rounds(self, job: Job, count: int) -> list[Record]:
        """A draft and up to `count` refined rollouts, each with feedback on the reply before it.
        The first reply without usable feedback is the last. Round k has step k - 1."""
        records = [await self.draft(job)]
        for number in range(count):
            turn = replace(job, step=number)
            records[-1] = await self.critique(turn, records[-1])
            received = records[-1].received
            if received is None or not received.usable:
                break
            records.append(await self.refine(turn, received, records[-1]))
        return records

    async def run(self, jobs: Iterable[Job], sink: Sink) -> list[Record]:
        """Play every job. The sink gets records as they finish; the returned list is in job
        order."""
        walked = await self.each(jobs, lambda job: self.walk(job, sink))
        return [record for records in walked for record in records]

    async def each(self, jobs: Iterable[J], walk: Callable[[J], Awaitable[T]]) -> list[T]:
        """Call `walk` for every job, `concurrency` at a time, and return the results in job order.

        The first error cancels the rest and is raised. With a deterministic sampler in the cast,
        jobs are assigned to workers in advance; otherwise a free worker takes the next job.
        """
        work = list(enumerate(jobs))
        places = min(self.concurrency, len(work))
        members, common = self._participants(places), iter(work)
        results: dict[int, T] = {}
        broken = asyncio.Event()

        async def take_part(place: int, participant: Participant) -> None:
            with participant:
                for index, job in work[place::places] if participant.waited_for else common:
                    if broken.is_set():  # do not start another call after an error
                        return
                    try:
                        results[index] = await walk(job)
                    except BaseException:
                        broken.set()
                        raise

        try:
            await gather(take_part(place, participant) for place, participant in enumerate(members))
        finally:
            for participant in members:  # one that was cancelled before it started
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
        # Judges use the step in their call keys, so tasks need not set it.
        episode = replace(episode, step=job.step)
        score = await job.task.judged(job.example, episode, self.cast)
        seen = self.cast.actor.instructions.added_to
        traces = [Trace(one.seat, tuple(Turn(seen(t.context), t.completion) for t in one.turns))
                  for one in episode.traces]  # fmt: skip
        return record_of(job, rollout, replace(episode, traces=tuple(traces)), score)


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order. The first error cancels the rest, so that no more calls are made."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in coroutines]
    except BaseExceptionGroup as errors:
        # Raise only the first error; the others usually have the same cause.
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def failed(job: Job, rollout: Rollout, error: CallError) -> Episode:
    """An episode that failed with `error`."""
    return Episode(
        example_id=job.example.id, task=job.task.name, kind=rollout.kind,
        rollout=job.index, stop="failed", failure=Failure(error.reason, error.detail),
    )  # fmt: skip


def terse(job: Job) -> Feedback | None:
    """Feedback from the task's rules about the example, independent of the draft."""
    with task_code(job.task, "explain"):
        text = job.task.explain(job.example, None, None)
    feedback = replace(job.task.symbolic(text), author="terse") if text else None
    return checked_feedback(job.task, feedback)


def raw(job: Job, score: Score) -> Feedback | None:
    """The judge's words about the draft as feedback; None if it has no readable verdict."""
    judges = dict.fromkeys(one.judge for one in score.verdicts if not one.problem)
    if not judges or not score.words.strip():
        return None
    feedback = Feedback(text=score.words, author=f"raw {', '.join(judges)}")
    return checked_feedback(job.task, feedback)


def with_draft(job: Job, feedback: Feedback, draft: Record) -> Feedback:
    """The feedback together with its draft, rendered with `shown_draft.md`."""
    with task_code(job.task, "public_words"):
        lines = [(line.seat, job.task.public_words(line)) for line in draft.episode.transcript]
    several = (f"{seat}: {one_line(text)}" for seat, text in lines)  # no line break can fake a line
    draft_text = lines[0][1] if len(lines) == 1 else "\n".join(several)
    text = job.task.prompts.render("shown_draft", draft=draft_text, feedback=feedback.text)
    return replace(feedback, text=text)


def record_of(job: Job, rollout: Rollout, episode: Episode, score: Score) -> Record:
    """The record of one rollout, a line of `episodes.jsonl`."""
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
"""Unscored reason: the control was not asked because its draft has no score."""


@dataclass(frozen=True, slots=True)
class ControlJob:
    """One control to ask."""

    task: Task
    control: Control
    example: Example
    index: int = 0
    """Rollout of the draft; 0 for a control of the row."""

    @property
    def key(self) -> str:
        """The key of its record."""
        return self.record(unscored(Failure(""))).key

    def record(self, score: Score) -> ControlRecord:
        """The record with this score, a line of `controls.jsonl`."""
        return ControlRecord(
            task=self.task.name, example_id=self.example.id, rollout=self.index,
            name=self.control.name, score=score, cluster=self.example.cluster,
        )  # fmt: skip


def control_jobs(part: Work, repeats: int) -> list[ControlJob]:
    """All controls of a task's rows in order; `repeats` per row for controls of drafts."""
    return [
        ControlJob(part.task, control, example, index)
        for control in part.controls
        for example in part.examples
        for index in range(repeats if control.per == "episode" else 1)
    ]


async def ask_control(job: ControlJob, episode: Episode | None, cast: Cast) -> ControlRecord:
    """Ask a control and return its record. `episode` is the draft for a control of drafts, None if
    the draft has no score."""
    if job.control.per == "row":
        episode = job.task.gold(job.example)
    elif episode is None:
        return job.record(unscored(Failure(NO_DRAFT), job.task.protocol))
    score = await job.task.controlled(job.control.name, job.example, episode, cast)
    return job.record(score)


def control_names(work: Sequence[Work]) -> str:
    """The controls of the tasks as text: `TASK (human_human, proxy_proxy)`."""
    return ", ".join(
        f"{part.task.name} ({', '.join(control.name for control in part.task.controls)})"
        for part in work
        if part.task.controls
    )
