"""What `soul compare` prints: one row a task, then what qualifies the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soulkit.metrics.intervals import interval_remark
from soulkit.report.alike import NOT_ALIKE
from soulkit.report.table import DASH, interval_text, literal_text, number, plain_table
from soulkit.text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from soulkit.eval.compare import Comparison, TaskDifference
    from soulkit.metrics.comparisons import PairedDifference


def comparison_parts(result: Comparison) -> list[RenderableType]:
    """The table of differences and its notes: rich renderables, top to bottom."""
    from rich.text import Text

    shown: list[RenderableType] = [
        Text(f"A  {one_line(result.a)}\nB  {one_line(result.b)}\nmetric  {one_line(result.metric)}")
    ]
    table = plain_table()
    table.add_column("task")
    for head in ("A", "B", "B \u2212 A", "95% CI", "p", "p (Holm)", "shared", "clusters"):
        table.add_column(head, justify="right", no_wrap=True)
    for task in result.tasks:
        table.add_row(*map(literal_text, _comparison_row(task)))
    shown.append(table)
    notes = [f"{NOT_ALIKE}: {line}" for line in result.mixed]
    notes += [f"beside the difference: {line}" for line in result.remarks]
    notes += [f"only in A: {', '.join(result.only_a)}"] if result.only_a else []
    notes += [f"only in B: {', '.join(result.only_b)}"] if result.only_b else []
    notes += [
        f"{t.task}: {t.paired.n_only_a} scored only in A, {t.paired.n_only_b} only in B"
        for t in result.tasks
        if t.paired.n_only_a or t.paired.n_only_b
    ]
    notes += [
        "A, B and the difference are over the shared episodes, those both runs scored.",
        "p belongs to the interval beside it; p (Holm) is adjusted for the number of tasks.",
    ]
    return [*shown, *(Text(one_line(note), style="dim") for note in notes)]


def _comparison_row(task: TaskDifference) -> list[str]:
    pair = task.paired
    difference = number(pair.difference)
    plus = "+" if pair.difference is not None and pair.difference > 0 else ""
    return [
        one_line(task.task),
        number(pair.mean_a),
        number(pair.mean_b),
        plus + difference,
        interval_text(pair.ci_low, pair.ci_high),
        number(pair.p, 4),
        number(task.p_holm, 4),
        str(pair.n_shared),
        _clusters(pair),
    ]


def _clusters(pair: PairedDifference) -> str:
    """`32`, `7: few`, `no spread in 7`: how many clusters the difference rests on."""
    if not pair.n_clusters:
        return DASH
    remark = interval_remark(pair.n_clusters, pair.method)
    return remark.replace(" clusters", "").replace(" cluster", "")
