"""Is B better than A, and how surely?

Two runs are compared on the very episodes that both scored, pair by pair: the same example and
rollout number (and training step, where there are several). That takes the difficulty of the rows
out of the difference, and keeps a run with many unscored episodes from winning by what it lost.
Runs that were measured under other conditions (`likeness.py`) are refused unless mixing them is
asked for by name, and then the result says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soulkit.errors import DataError, RunError, did_you_mean
from soulkit.eval.conditions import read_conditions
from soulkit.eval.likeness import condition_differences, grouped, likeness_remarks
from soulkit.eval.summary import cluster_of, metric_values, records_by_task
from soulkit.metrics.comparisons import PairedDifference, holm, paired_difference
from soulkit.runs.records import drafts, load_records
from soulkit.types import Record

Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDifference:
    """B minus A on one task."""

    task: str
    paired: PairedDifference
    p_holm: float | None
    """`paired.p`, adjusted for the number of tasks compared (Holm)."""
    n_a: int
    """Episodes of A that the metric applies to, scored or not."""
    n_b: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `soul compare` prints."""

    a: str
    b: str
    metric: str
    tasks: tuple[TaskDifference, ...]
    only_a: tuple[str, ...]
    """Tasks that only A has."""
    only_b: tuple[str, ...]
    mixed: tuple[str, ...]
    """What differs between the runs although it should not (empty unless mixing was allowed)."""
    remarks: tuple[str, ...] = ()
    """What differs and is part of what is compared, and what was not recorded."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; `paired` is laid out flat beside the task's name."""
        rows = [
            {"task": t.task, **asdict(t.paired), "p_holm": t.p_holm, "n_a": t.n_a, "n_b": t.n_b}
            for t in self.tasks
        ]
        return {
            "a": self.a,
            "b": self.b,
            "metric": self.metric,
            "tasks": rows,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "mixed": list(self.mixed),
            "remarks": list(self.remarks),
        }


def compare_runs(
    a: Path, b: Path, metric: str = "value", *, allow_mixed: bool = False
) -> Comparison:
    """Compare two run folders on `metric`, task by task.

    Raises DataError when the episodes cannot be read or neither side has the metric, RunError when
    the runs share no task or no episode, or (without `allow_mixed`) may not be compared.
    """
    records = [load_records(path / "episodes.jsonl") for path in (a, b)]
    runs_a, runs_b = (records_by_task(side) for side in records)
    shared = sorted(runs_a.keys() & runs_b.keys())
    if not shared:
        raise _nothing_shared(a, b, sorted(runs_a), sorted(runs_b))
    pairs = {task: (drafts(runs_a[task]), drafts(runs_b[task])) for task in shared}
    one, other = (read_conditions(p, side) for p, side in zip((a, b), records, strict=True))
    mixed = grouped(
        (task, line) for task in shared for line in condition_differences(one, other, task)
    )
    if mixed and not allow_mixed:
        raise _refused(mixed)
    _check_metric(metric, pairs.values())
    differences = [_difference(task, x, y, metric) for task, (x, y) in pairs.items()]
    if not any(t.paired.n_shared for t in differences):
        raise _no_common_episode(a, b, metric)
    adjusted = holm([t.paired.p for t in differences])
    return Comparison(
        a=str(a),
        b=str(b),
        metric=metric,
        tasks=tuple(
            TaskDifference(task=t.task, paired=t.paired, p_holm=p, n_a=t.n_a, n_b=t.n_b)
            for t, p in zip(differences, adjusted, strict=True)
        ),
        only_a=tuple(sorted(runs_a.keys() - runs_b.keys())),
        only_b=tuple(sorted(runs_b.keys() - runs_a.keys())),
        mixed=mixed,
        remarks=grouped(
            (task, line) for task in shared for line in likeness_remarks(one, other, task)
        ),
    )


def _difference(task: str, a: Sequence[Record], b: Sequence[Record], metric: str) -> TaskDifference:
    values_a, values_b = metric_values(a, metric), metric_values(b, metric)
    clusters: dict[Hashable, Hashable] = {_key(r): cluster_of(r) for r in [*a, *b]}
    paired = paired_difference(
        {_key(r): v for r, v in values_a}, {_key(r): v for r, v in values_b}, clusters
    )
    return TaskDifference(
        task=task, paired=paired, p_holm=None, n_a=len(values_a), n_b=len(values_b)
    )


def _key(record: Record) -> Key:
    return record.step, record.example_id, record.rollout


def _check_metric(metric: str, pairs: Iterable[tuple[list[Record], list[Record]]]) -> None:
    names = {"value"} | {m for x, y in pairs for r in [*x, *y] for m in r.score.metrics}
    if metric not in names:
        raise DataError(
            f"Neither run has a metric '{metric}'.",
            "Only what the episodes recorded can be compared.",
            did_you_mean(metric, names),
        )


def _nothing_shared(a: Path, b: Path, in_a: Sequence[str], in_b: Sequence[str]) -> RunError:
    return RunError(
        "The two runs have no task in common.",
        f"'{a}' has {', '.join(in_a) or 'no episodes'}; '{b}' has {', '.join(in_b) or 'none'}.",
        "Evaluate both models on the same task or suite, then compare again.",
    )


def _no_common_episode(a: Path, b: Path, metric: str) -> RunError:
    return RunError(
        f"No episode of '{a}' and '{b}' has a '{metric}' on both sides.",
        "The comparison is paired: it needs the same rows, played and scored in both runs.",
        "Run both with the same data, --limit and --seed; `soul report` shows what is unscored.",
    )


def _refused(mixed: Sequence[str]) -> RunError:
    return RunError(
        f"The two runs were not measured the same way ({'; '.join(mixed)}).",
        "A difference would mix the models with the change of what they were measured with.",
        "Run one of them again with the other's judge, partner, samples, rows and prompts, or "
        "accept the mixture with --force-mixed.",
    )
