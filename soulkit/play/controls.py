"""Asking about controls: which there are of some rows, and what becomes of one.

    drafts, all scored ──▶ one job for each control of each row or draft ──▶ ControlRecord

A control of a draft that has no score is not asked about: the draft will be played again, and with
other words perhaps. It is unscored for that reason, and so the records stay complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soulkit.models.base import Cast
from soulkit.play.plan import Work
from soulkit.tasks.base import Task
from soulkit.tasks.controls import Control
from soulkit.types import ControlRecord, Episode, Example, Failure, Score, unscored

NO_DRAFT = "unscored_draft"
"""Why a control is unscored that nobody was asked about: its draft has no score."""


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
