"""A distillation as a table, a page and a figure: how much of its experts the generalist kept.

Everything is read from the folder's summary.json; nothing is computed here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from soulkit.distill.measure import SIDES
from soulkit.distill.report import KEPT, REGRESSIONS, Distillation, TaskResult
from soulkit.errors import RunError
from soulkit.eval.comparison.comparability import NOT_ALIKE
from soulkit.eval.gates import GateResult
from soulkit.metrics.intervals import (
    DASH,
    estimate_text,
    interval_remark,
    number,
    percent,
    signed,
)
from soulkit.metrics.retention import Retention
from soulkit.report.figures import Chart, Dot, Plot
from soulkit.report.findings import difference_text
from soulkit.report.grid import Grid, GridRow, grid_parts
from soulkit.report.tables import cell_text, task_label
from soulkit.runs.jsonl import write_json
from soulkit.text import counted, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADS = ("task", *SIDES, "expert's gain", "generalist's gain", "vs expert", "retention",
         "rows", "acceptance")  # fmt: skip
MEANING = (
    "Retention is the generalist's gain over the base divided by the expert's gain, on rows that "
    "all three models scored, with Fieller's 95% interval over clusters. It is given only if the "
    "expert's gain is significantly above zero."
)


# -- texts -----------------------------------------------------------------------------------------


def retention_text(kept: Retention) -> str:
    """`83% [71%, 96%]`; `none` if a remark gives the reason."""
    if kept.ratio is None:
        return "none" if kept.why else DASH
    if kept.ci_low is None or kept.ci_high is None:
        return f"{percent(kept.ratio)}, no interval"
    return estimate_text(kept.ratio, kept.ci_low, kept.ci_high, percent)


def shared_rows_text(result: TaskResult) -> str:
    """`480 of 500, 96 clusters`: the rows that all sides scored."""
    cells = list(result.cells.values())
    shared = result.kept.n_shared or min((c.n_scored for c in cells), default=0)
    n = max((cell.n for cell in cells), default=0)
    clusters = result.kept.n_clusters or min((c.n_clusters for c in cells), default=0)
    return ", ".join(filter(None, (f"{shared} of {n}", interval_remark(clusters))))


def acceptance_text(result: TaskResult) -> str:
    """`62%, 310 taken`."""
    part = result.selection
    return DASH if part is None else f"{percent(part.acceptance)}, {part.taken} taken"


def row_of(result: TaskResult) -> tuple[str, ...]:
    """The cells of a table row as text; the columns are HEADS."""
    cells = [result.cells.get(side) for side in SIDES]
    return (
        task_label(result.task, result.metric_name),
        *(DASH if cell is None else cell_text(cell) for cell in cells),
        difference_text(result.expert_gain),
        difference_text(result.generalist_gain),
        difference_text(result.lost),
        retention_text(result.kept) if "expert" in result.cells else DASH,
        shared_rows_text(result),
        acceptance_text(result),
    )


def macro_row(result: Distillation) -> tuple[str, ...]:
    """The last row of the table: the mean over the tasks."""
    lines = [DASH] * (len(HEADS) - 4)
    rows = f"{result.macro.n_shared}, {interval_remark(result.macro.n_clusters)}"
    return ("mean over tasks", *lines, retention_text(result.macro), rows.strip(", "), DASH)


def remarks_of(result: Distillation) -> list[str]:
    """Remarks below the table: regressions, differences in measurement, gates."""
    lines = []
    if result.regressions:
        lines.append(f"significantly worse than the base: {', '.join(result.regressions)}")
    for one in _results(result):
        lines += [f"{one.task}, {NOT_ALIKE}: {line}" for line in one.mixed]
        lines += [f"{one.task}: no {_lacking(one.kept)}, {one.kept.why}"] if one.kept.why else []
        lines += [
            f"{one.task}: {cell.n_scored} of {cell.n} episodes of the {side} are scored"
            for side, cell in one.cells.items()
            if cell.n_scored < cell.n
        ]
        for part in one.beside:
            means = ", ".join(f"{side} {number(mean)}" for side, mean in part.means.items())
            worse = "; worse than the base" if part.worse else ""
            moved = difference_text(part.paired)
            lines.append(f"{one.task} {part.metric}: {means}; {moved} vs the base{worse}")
    if result.macro.why:
        lines.append(f"mean over tasks: no {_lacking(result.macro)}, {result.macro.why}")
    lines += [gate_line(gate) for gate in result.gates]
    if result.shares:
        shares = ", ".join(f"{task} {percent(share)}" for task, share in result.shares.items())
        lines.append(f"training data: {shares}")
    return [*lines, *result.remarks]


def _lacking(kept: Retention) -> str:
    return "retention" if kept.ratio is None else "interval"


def gate_line(result: GateResult) -> str:
    """`gate retention>=0.6: pass, 83% [71%, 96%] (TASK: 480 rows)`; others as `soul compare`."""
    if result.gate.target == REGRESSIONS:
        return result.line(partial(number, digits=0))
    kept = KEPT in (result.gate.target, result.gate.metric)
    return result.line(percent if kept else signed)


def _results(result: Distillation) -> list[TaskResult]:
    return [*result.tasks, *([result.ability] if result.ability else [])]


# -- forms -----------------------------------------------------------------------------------------


def distillation_grid(result: Distillation) -> Grid:
    """The table of tasks, with the mean over them if there are several."""
    rows = [GridRow.of(*row_of(one)) for one in _results(result)]
    rows += [GridRow.of(*macro_row(result), level="suite")] if len(result.tasks) > 1 else []
    notes = (*remarks_of(result), MEANING)
    return Grid(head=HEADS, rows=tuple(rows), n_below=len(HEADS) - 4, notes=notes)


def distillation_parts(result: Distillation) -> list[RenderableType]:
    """The output of `soul distill` and `soul report`: rich renderables, top to bottom."""
    from rich.text import Text

    head = [kept_text(result), *(f"{label}: {text}" for label, text in facts_of(result))]
    return [Text("\n".join(map(one_line, head))), *grid_parts(distillation_grid(result))]


def kept_text(result: Distillation) -> str:
    """One sentence: how much of the experts' gains the generalist keeps."""
    kept = result.macro if len(result.tasks) > 1 else result.tasks[0].kept
    if kept.ratio is None:
        return f"How much of the experts' gains the generalist keeps is unknown: {kept.why}."
    return f"The generalist keeps {retention_text(kept)} of the experts' gains."


def facts_of(result: Distillation) -> list[tuple[str, str]]:
    """(label, text) of the base model, the training method and the experts."""
    how = {"sft": "imitation of selected samples", "opd": "experts as on-policy teachers"}
    experts = [(f"expert of {task}", where) for task, where in result.experts.items()]
    trained = f"{how.get(result.by, result.by)}, {result.steps} steps"
    return [("base", result.base), ("trained by", trained), *experts]


def write_distillation_page(result: Distillation, path: Path) -> Path:
    """Write the page to the file `path`, or `index.html` and `distillation.json` to the folder
    `path`; return the page's path."""
    from soulkit.distill.report import distillation_values
    from soulkit.report.pages import page_folder, write_comparison_page

    if folder := page_folder(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "distillation.json", distillation_values(result))
    n = len(result.experts)
    return write_comparison_page(
        folder / "index.html" if folder else path,
        title=f"One generalist distilled from {counted(n, 'expert')}",
        finding=kept_text(result), grid=distillation_grid(result),
        charts=distillation_charts(result), facts=facts_of(result),
    )  # fmt: skip


def read_for_report(folder: Path) -> Distillation | None:
    """The distillation in `folder`; None for a folder of another command, RunError for one without
    a report."""
    from soulkit.distill.config import COMMAND
    from soulkit.distill.report import read_distillation
    from soulkit.report.load import command_in

    if command_in(folder) != COMMAND:
        return None
    result = read_distillation(folder)
    if result is None:
        raise RunError(
            f"The distillation in '{folder}' has no report yet.",
            "The generalist has not been compared with the base and the experts.",
            "Run the same soul distill command again, or give soul report a folder inside samples "
            "or measured.",
        )
    return result


# -- figure ----------------------------------------------------------------------------------------


def distillation_charts(result: Distillation) -> list[Chart]:
    """Scores of the three sides, and retention, by task."""
    shown = _results(result) if result.tasks else []
    rows = [one_line(one.task) for one in shown]
    scores = [
        Dot(label=side, row=i, lane=lane, colour=lane + 1, value=cell.mean, low=cell.ci_low,
            high=cell.ci_high)
        for i, one in enumerate(shown) for lane, side in enumerate(SIDES)
        if (cell := one.cells.get(side)) is not None and cell.mean is not None
    ]  # fmt: skip
    retained = [
        Dot(label="generalist", row=i, lane=2, colour=3, value=kept.ratio,
            low=_near(kept.ci_low), high=_near(kept.ci_high))
        for i, kept in enumerate(one.kept for one in shown) if kept.ratio is not None
    ]  # fmt: skip
    panels = [Plot(title="Scores", rows=rows, dots=scores, axis="score")]
    if retained:
        panels.append(Plot(title="Retention", rows=rows, dots=retained, axis="retention",
                            rules=[("none", 0.0), ("all", 1.0)]))  # fmt: skip
    caption = (
        "Scores of base, expert and generalist on the same rows, with 95% intervals. Retention: "
        "the share of the expert's gain that the generalist keeps (dashed: 0% and 100%)."
    )
    return [
        Chart(name="scores", title="Scores and retention", caption=caption, panels=panels)
    ] if scores else []  # fmt: skip


def _near(end: float | None) -> float | None:
    """The end of an interval, at most 200%: one that is hardly known would take all the room."""
    return None if end is None else min(max(end, -1.0), 2.0)
