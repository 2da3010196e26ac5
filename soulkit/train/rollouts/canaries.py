"""Canaries during training: detect a judge that rewards nonsense, and replies that become alike.

Every `canary_every` steps, starting with the first, the judges score canaries (nonsense replies,
`tasks/kit/rewards.py`) for a few fixed examples. Their means are logged in `metrics.jsonl` as
`canary/<name>` or `canary/<task>/<name>`. An alarm is raised if a canary rises more than
`canary_margin` of the metric's scale above its first value (`rose`) or above the mean of the step's
drafts (`above_drafts`), or if a metric that the task lists as `watched` falls by more than the
margin (`fell`).

Alarms do not stop the run: they appear on the console, in `metrics.jsonl`, in the summary and in
the report. A resumed run reads first values from `metrics.jsonl`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Self

from soulkit.errors import ConfigError
from soulkit.models.base import Cast
from soulkit.play.engine import Engine, Job
from soulkit.tasks.kit.base import Task
from soulkit.tasks.kit.rewards import Canary, canary_episodes, fixed_examples
from soulkit.train.config import TrainConfig
from soulkit.train.setup.rows import TaskRows
from soulkit.train.state.metrics import Alarm, CanaryScores, StepLine, read_step_lines
from soulkit.types import BatchMetric, Example, Record

EXAMPLES = 2
"""Number of rows per task that canaries are scored on."""


def alarm_reasons(value: float, first: float, drafts: float | None, allowed: float) -> list[str]:
    """Reasons for an alarm on a canary with score `value`: `rose`, `above_drafts`, both or none.

    `allowed` is how far it may rise above its `first` value, in points of the metric.
    """
    rose = value > first + allowed
    above = drafts is not None and value > drafts
    return [name for name, true in (("rose", rose), ("above_drafts", above)) if true]


def canaries_of(pool: TaskRows) -> list[Canary]:
    """The canaries of a pool; ConfigError if none of its tasks has a judge."""
    rows: dict[str, tuple[Task, list[Example]]] = {}
    for task, example in pool:
        rows.setdefault(task.name, (task, []))[1].append(example)
    canaries = [
        c
        for task, rows_of_task in rows.values()
        for c in canary_episodes(task, fixed_examples(rows_of_task, EXAMPLES))
    ]
    if not canaries:
        raise ConfigError(
            f"--canary-every needs a judge, and {', '.join(rows)} is scored by rules.",
            "Canaries show whether a judge rewards nonsense; rules do not need that check.",
            "Remove --canary-every, or train a judged task.",
        )
    return canaries


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _raised(alarms: Iterable[Alarm | None]) -> tuple[Alarm, ...]:
    return tuple(alarm for alarm in alarms if alarm is not None)


def first_values(lines: Iterable[StepLine]) -> dict[str, float]:
    """Label → first value in a run's step lines."""
    first: dict[str, float] = {}
    for line in lines:
        for name, value in line.canaries.means.items():
            if value is not None:
                first.setdefault(name, value)
    return first


FELL = "fell"
"""Reason of an alarm on a watched metric."""


@dataclass
class CanaryMonitor:
    """Watches the canaries of a run's judges, and the `watched` metrics of its drafts."""

    tasks: Mapping[str, Task]
    margin: float
    """Share of a metric's scale that a canary may rise, and that a watched metric may fall."""
    canaries: Sequence[Canary] = ()
    every: int = 1
    """Steps from one score of the canaries to the next."""
    seed: int = 0
    concurrency: int = 16
    first: dict[str, float] = field(default_factory=dict)
    """Label → first value of a canary or metric."""

    @classmethod
    def of(
        cls, config: TrainConfig, pool: TaskRows, tasks: Mapping[str, Task], metrics: Path
    ) -> Self:
        """The monitor of a run; `metrics` is its metrics file, with first values for a resume."""
        every = config.canary_every
        canaries = () if every is None else canaries_of(pool)
        return cls(tasks, config.canary_margin, canaries, every or 1, config.seed,
                   config.concurrency, first_values(read_step_lines(metrics)))  # fmt: skip

    async def score(self, step: int, cast: Cast, records: Sequence[Record]) -> CanaryScores:
        """Scores of the canaries, if they are due, and watched metrics at `step`, whose drafts are
        in `records`."""
        due = self.canaries and step % self.every == 0
        rewards = await self._rewards(step, cast) if due else {}
        means = {self._label(*key): _mean(values) for key, values in rewards.items()}
        self._note_first(means)
        alarms = (self._alarm(step, *key, means[self._label(*key)], records) for key in rewards)
        unscored = sum(value is None for values in rewards.values() for value in values)
        scores = CanaryScores(means=means, unscored=unscored, alarms=_raised(alarms))
        return self.look(step, records, scores)

    def look(self, step: int, records: Sequence[Record], scores: CanaryScores) -> CanaryScores:
        """The canary scores of a step with the watched metrics of its drafts added."""
        metrics = self._metrics(records)
        means = {label: metric.value for label, metric in metrics.items()}
        self._note_first(means)
        alarms = (self._fall(step, label, metric) for label, metric in metrics.items())
        return replace(scores, means={**scores.means, **means},
                       alarms=(*scores.alarms, *_raised(alarms)))  # fmt: skip

    def _note_first(self, means: Mapping[str, float | None]) -> None:
        for label, mean in means.items():
            if mean is not None:
                self.first.setdefault(label, mean)

    async def _rewards(self, step: int, cast: Cast) -> dict[tuple[str, str], list[float | None]]:
        """(task, canary) → its reward on each example; None if the judge gave no verdict."""
        engine = Engine(cast, self.seed, self.concurrency)
        jobs = [Job(c.task, c.example, i, step) for i, c in enumerate(self.canaries)]
        rewards = await engine.each(jobs, lambda job: self._reward(job, cast))
        by_canary: dict[tuple[str, str], list[float | None]] = defaultdict(list)
        for canary, reward in zip(self.canaries, rewards, strict=True):
            by_canary[canary.task.name, canary.name].append(reward)
        return by_canary

    async def _reward(self, job: Job, cast: Cast) -> float | None:
        canary = self.canaries[job.index]
        episode = replace(canary.episode, step=job.step)
        # None is counted as unscored and never replaced by a number.
        own = cast.in_task(canary.task.name)
        return (await canary.task.judged(canary.example, episode, own)).reward

    def _label(self, task: str, name: str) -> str:
        several = len({canary.task.name for canary in self.canaries}) > 1
        return f"{task}/{name}" if several else name

    def _alarm(
        self, step: int, task: str, name: str, value: float | None, records: Sequence[Record]
    ) -> Alarm | None:
        label = self._label(task, name)
        if value is None:
            return None
        first = self.first[label]
        drafts = _mean(r.score.reward for r in records if r.task == task and r.kind == "draft")
        metric = next(c.task.spec.metric for c in self.canaries if c.task.name == task)
        why = alarm_reasons(value, first, drafts, self.margin * (metric.high - metric.low))
        alarm = Alarm(
            canary=label, value=value, first=first, drafts=drafts, why=tuple(why), step=step
        )
        return alarm if why else None

    def _metrics(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Label → watched metric of the step's drafts."""
        metrics: dict[str, BatchMetric] = {}
        for name, task in self.tasks.items():
            rows = [r for r in records if r.task == name and r.kind == "draft"]
            over_rows = task.batch_metrics(rows) if task.spec.metric.watched and rows else {}
            for metric in set(task.spec.metric.watched) & set(over_rows):
                label = metric if len(self.tasks) == 1 else f"{name}/{metric}"
                metrics[label] = over_rows[metric]
        return dict(sorted(metrics.items()))

    def _fall(self, step: int, label: str, metric: BatchMetric) -> Alarm | None:
        low, high = metric.low or 0.0, 1.0 if metric.high is None else metric.high
        value, first = metric.value, self.first.get(label)
        if value is None or first is None or value >= first - self.margin * (high - low):
            return None
        return Alarm(canary=label, value=value, first=first, drafts=None, why=(FELL,), step=step)
