"""The output of `soul compare`: one row per task, suite means, gates and remarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soulkit.eval.comparison.comparability import NOT_ALIKE
from soulkit.eval.comparison.provenance_text import provenance_facts
from soulkit.metrics.intervals import DASH, estimate_text, interval_remark, number, signed
from soulkit.report.grid import Grid, GridRow, grid_parts
from soulkit.report.tables import task_label
from soulkit.text import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from soulkit.eval.comparison.compare import Comparison
    from soulkit.eval.comparison.contrasts import MeanDifference
    from soulkit.eval.comparison.gates import GateResult
    from soulkit.metrics.comparisons import PairedDifference

_HEADS = ("A", "B", "B \u2212 A [95% CI]", "p", "p (Holm)", "shared", "clusters")


def comparison_parts(result: Comparison) -> list[RenderableType]:
    """The table of differences and its notes: rich renderables, top to bottom."""
    from rich.text import Text

    alike, rows = len(_metrics(result)) == 1, []
    for task in result.tasks:
        name = task.task if alike else task_label(task.task, task.metric)
        name += f" ({', '.join(task.over)})" if task.over else ""
        rows.append(_row(one_line(name), task.paired, p_text(task.p_holm)))
    rows += [_row(f"{m.name} ({m.level})", m.paired, DASH, level="suite") for m in result.means]
    table = grid_parts(Grid(head=("task", *_HEADS), rows=tuple(rows), n_below=4))
    gates = [Text(one_line(gate_text(gate))) for gate in result.gates]
    notes = [Text(one_line(note), style="dim") for note in _notes(result)]
    return [Text("\n".join(map(one_line, _head(result)))), *table, *gates, *notes]


def _head(result: Comparison) -> list[str]:
    """The two runs with their judge and rows, and what is compared."""
    lines = [f"A: {result.a}", f"B: {result.b}", f"metric: {', '.join(_metrics(result))}"]
    for place, origin in enumerate(result.origins):
        facts = " · ".join(f"{label} {text}" for label, text in provenance_facts(origin))
        lines[place] += f" · {facts}" if facts else ""
    if result.shared_rows:
        rows = (f"{task} {one.words()}" for task, one in result.shared_rows.items())
        lines += [f"shared rows only: {', '.join(rows)}"]
    return [*lines, f"suite: {result.suite}"] if result.suite else lines


def gate_text(result: GateResult) -> str:
    """`gate TASK/METRIC>=-0.2: pass, −0.050 [−0.120, +0.020] (METRIC, 450 episodes)`."""
    where = estimate_text(result.difference, result.low, result.high, signed)
    where = where if "[" in where else "no interval"
    why = f" ({result.why})" if result.why else ""
    return f"gate {result.gate.text}: {result.outcome}, {where}{why}"


def _notes(result: Comparison) -> list[str]:
    notes = [f"{NOT_ALIKE}: {line}" for line in result.mixed]
    notes += [f"note: {line}" for line in result.remarks]
    notes += [f"only in A: {', '.join(result.only_a)}"] if result.only_a else []
    notes += [f"only in B: {', '.join(result.only_b)}"] if result.only_b else []
    notes += [
        f"{t.task}: {t.paired.n_only_a} scored only in A, {t.paired.n_only_b} only in B"
        for t in result.tasks
        if t.paired.n_only_a or t.paired.n_only_b
    ]
    for mean in result.means:
        notes += [_signs(mean)]
    return [
        *notes,
        "A, B and B \u2212 A cover only the episodes that both runs scored (shared).",
        "p is the p-value of B \u2212 A; p (Holm) is corrected for the number of tasks.",
    ]


def _clusters(pair: PairedDifference) -> str:
    """`32`, `7: few`, `no spread in 7`: the number of clusters behind the difference."""
    if not pair.n_clusters:
        return DASH
    remark = interval_remark(pair.n_clusters, pair.method)
    return remark.replace(" clusters", "").replace(" cluster", "")


def _signs(mean: MeanDifference) -> str:
    """`COG: 2 of 3 members better, 1 worse`, then missing members and the bounds of the mean."""
    counted = f"{mean.name}: {mean.better} of {mean.members} members better, {mean.worse} worse"
    if not mean.missing:
        return counted
    low, high = number(mean.worst), number(mean.best)
    bounds = "" if mean.worst is None else f"; it would be between {low} and {high}"
    return f"{counted}; no mean ({', '.join(mean.missing)} missing){bounds}"


def _metrics(result: Comparison) -> list[str]:
    """The compared metrics, under the names that the tasks declare."""
    return list(dict.fromkeys(task.metric for task in result.tasks))


def p_text(p: float | None) -> str:
    """A p-value with four digits; a smaller one is `<0.0001`, not zero."""
    return "<0.0001" if p is not None and p < 0.0001 else number(p, 4)


def _row(name: str, pair: PairedDifference, p_holm: str, level: str = "task") -> GridRow:
    return GridRow.of(
        name,
        number(pair.mean_a),
        number(pair.mean_b),
        estimate_text(pair.difference, pair.ci_low, pair.ci_high, signed),
        p_text(pair.p),
        p_holm,
        str(pair.n_shared),
        _clusters(pair),
        level=level,
    )
