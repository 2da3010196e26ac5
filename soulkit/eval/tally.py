"""What is counted while a run plays: the mean so far, and failures in a row."""

from __future__ import annotations

from collections.abc import Iterable

from soulkit.errors import ProviderError, TaskError
from soulkit.types import Record, Score

_OUTSIDE = ("provider_error", "partner_error", "judge_error", TaskError.reason)


class MeanSoFar:
    """The mean of the scores so far, in words: of episodes, which need not be the headline."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.total, self.count, self.failed = 0.0, 0, 0
        for record in records:
            if record.score.scored:  # the others are about to be played again
                self.add(record)

    def add(self, record: Record) -> None:
        if record.score.value is None:
            self.failed += 1
        else:
            self.total, self.count = self.total + record.score.value, self.count + 1

    def words(self) -> str:
        mean = f"mean over episodes {self.total / self.count:.3f}" if self.count else "no score yet"
        return f"{mean}, {self.failed} unscored" if self.failed else mean


class Streak:
    """Counts failures in a row and stops the run when there are too many."""

    def __init__(self, limit: int) -> None:
        self.limit, self.length = limit, 0

    def add(self, score: Score) -> None:
        """CallError after `limit` scores in a row that something outside the actor broke: TaskError
        where the last of them was the task's own code."""
        failed = not score.scored and score.reason in _OUTSIDE
        self.length = self.length + 1 if failed else 0
        if self.length >= self.limit:
            kind = TaskError if score.reason == TaskError.reason else ProviderError
            raise kind(f"{self.length} episodes in a row failed, the last with: {score.words}")
