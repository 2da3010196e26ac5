"""Numbers over all rows of a step that no reward may be bought with.

A reward that is made within a row can rise while the rows become alike: eight bland lines that
differ a little from each other are paid for it. So what a task names as `watched` (under `metric:`
in tasks.yaml) is computed from the drafts of every step, stands in `metrics.jsonl` as
`canary/<name>`, and raises an alarm where it falls more than `canary_margin` of its scale below its
first value. An alarm stops nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from soulkit.tasks.base import Task
from soulkit.train.config import TrainConfig
from soulkit.train.rollouts.canaries import first_values
from soulkit.train.state.lines import Alarm, CanaryScores, read_step_lines
from soulkit.types import BatchMetric, Record

FELL = "fell"
"""Why a watched number raises an alarm."""


@dataclass
class BatchWatch:
    """The watched numbers of a run and what they were at first."""

    tasks: Mapping[str, Task]
    margin: float
    """Share of a number's scale that it may fall."""
    first: dict[str, float] = field(default_factory=dict)
    """Label → the first value."""

    @classmethod
    def of(cls, config: TrainConfig, tasks: Mapping[str, Task], metrics: Path) -> Self:
        """That of a run; `metrics` is its file, which knows the first values of a run taken up."""
        first = first_values(read_step_lines(metrics))
        return cls(tasks, config.canary_margin, first)

    def look(self, step: int, records: Sequence[Record], scores: CanaryScores) -> CanaryScores:
        """The step's canaries with what is watched of its drafts."""
        metrics = self._metrics(records)
        for label, metric in metrics.items():
            if metric.value is not None:
                self.first.setdefault(label, metric.value)
        means = {label: metric.value for label, metric in metrics.items()}
        alarms = (self._alarm(step, label, metric) for label, metric in metrics.items())
        raised = tuple(alarm for alarm in alarms if alarm is not None)
        return replace(scores, means={**scores.means, **means}, alarms=(*scores.alarms, *raised))

    def _metrics(self, records: Sequence[Record]) -> dict[str, BatchMetric]:
        """Label → the number, where the step's drafts have one."""
        metrics: dict[str, BatchMetric] = {}
        for name, task in self.tasks.items():
            rows = [r for r in records if r.task == name and r.kind == "draft"]
            over_rows = task.batch_metrics(rows) if task.spec.metric.watched and rows else {}
            for metric in set(task.spec.metric.watched) & set(over_rows):
                label = metric if len(self.tasks) == 1 else f"{name}/{metric}"
                metrics[label] = over_rows[metric]
        return dict(sorted(metrics.items()))

    def _alarm(self, step: int, label: str, metric: BatchMetric) -> Alarm | None:
        low, high = metric.low or 0.0, 1.0 if metric.high is None else metric.high
        value, first = metric.value, self.first.get(label)
        if value is None or first is None or value >= first - self.margin * (high - low):
            return None
        return Alarm(canary=label, value=value, first=first, drafts=None, why=(FELL,), step=step)
