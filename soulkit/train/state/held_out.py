"""The dev score as the headline of a training run.

What a run learned shows on rows that it held out; the drafts of its last steps were sampled from
a policy that moved under way, on the rows it was moved by. So where there is a dev score, it is the
headline, and the drafts stand beside it under their own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from soulkit.eval.batch import summary_terms
from soulkit.eval.summary import DEV, Summary, headline, headline_shown, summarise
from soulkit.tasks.base import Task
from soulkit.train.state.summary import TrainSummary
from soulkit.types import Record


def with_dev(
    summary: TrainSummary, records: Sequence[Record], tasks: Iterable[Task]
) -> TrainSummary:
    """`summary` with the headline of each task over `records`, the newest dev episodes, as its
    headline; as it was without any."""
    if not records:
        return summary
    scored = _dev_summary(summary, records, tasks)
    cells = {task: dict(of_task) for task, of_task in summary.tasks.items()}
    for task, of_dev in scored.tasks.items():
        drafts = cells.get(task, {})
        cells[task] = {name: replace(cell, headline=False) for name, cell in drafts.items()}
        cells[task][DEV] = replace(headline(of_dev), headline=True, name=headline_shown(of_dev))
    return replace(summary, tasks=cells, dev_steps=records[0].step + 1)


def without_dev(summary: TrainSummary) -> TrainSummary:
    """`summary` without the dev score of its last evaluation."""
    tasks = {
        task: {name: cell for name, cell in cells.items() if name != DEV}
        for task, cells in summary.tasks.items()
    }
    return replace(summary, tasks=tasks, dev_steps=None)


def _dev_summary(summary: Summary, records: Sequence[Record], tasks: Iterable[Task]) -> Summary:
    played = {record.task for record in records}
    return summarise(
        records, command=summary.command, model=summary.model, protocol=summary.protocol,
        seconds=0.0, cost=None, training=True,
        **summary_terms(task for task in tasks if task.name in played),
    )  # fmt: skip
