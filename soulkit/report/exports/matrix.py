"""Transfer between tasks: what a training on some tasks does to all tasks of a suite.

Reads the output of `soul train matrix`: the evaluations of the base model and of every trained
model, all with the same settings. A cell is the paired difference from the base model with its 95%
interval over clusters of rows. A whole interval on the worse side of 0 is a regression. Runs that
`soul compare` would refuse to compare have no cells, and the reason is listed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from soulkit.eval.comparison.compare import TaskDifference
from soulkit.eval.grid import GRID, grid_comparisons
from soulkit.eval.results.cells import headline
from soulkit.metrics.intervals import DASH, estimate_text, signed
from soulkit.report.ablation import missing_text
from soulkit.report.grid import Grid, GridRow, grid_parts
from soulkit.report.load import load_runs
from soulkit.report.pages import write_comparison_page
from soulkit.runs.folder import read_config
from soulkit.runs.jsonl import read_object, unlinked, write_json
from soulkit.train.ablate import FINAL, STATE, ListedRun

NOTE = (
    "Paired differences from the base model with 95% intervals over clusters of rows, not adjusted "
    "for the number of cells (matrix.json has Holm's p). In brackets: rows that both scored / rows."
)


def matrix_results(out: Path) -> tuple[Path, dict[str, Any], list[Any]]:
    """The matrix in the folder of `soul train matrix` as page, JSON (both written to `out/report`)
    and table."""
    listed = [ListedRun.from_json(line) for line in read_object(out / STATE)["runs"]]
    rows_of = {f"{one.path}/{FINAL}": one.arm for one in listed if one.status == "finished"}
    (base,) = load_runs([out / "base" / FINAL], episodes=False)
    write_json(out / GRID, {"runs": [f"base/{FINAL}", *rows_of]})
    comparisons, problems = grid_comparisons(out)
    rows = {rows_of[Path(one.b).relative_to(out).as_posix()]: one for one in comparisons}
    cells = {row: {cell.task: cell for cell in one.tasks} for row, one in rows.items()}
    regressions = [{"row": row, "task": task} for row, own in cells.items()
                   for task, cell in own.items() if regressed(cell)]  # fmt: skip
    notes = [missing_text(one) for one in listed if one.status != "finished"] + problems
    notes += dict.fromkeys(f"{row}: {line}" for row, one in rows.items() for line in one.remarks)
    scores = {task: headline(own) for task, own in base.tasks.items()}
    texts = [f"{estimate_text(score.mean, score.ci_low, score.ci_high)} "
             f"({score.n_scored}/{score.n})" for score in scores.values()]  # fmt: skip
    rows_below = [GridRow.of(row, *(transfer_text(own.get(task)) for task in scores))
                  for row, own in cells.items()]  # fmt: skip
    grid = Grid(
        head=("trained on", *scores), notes=(NOTE, *notes),
        rows=(GridRow.of("base model (scores)", *texts), *rows_below),
    )  # fmt: skip
    content = {"base": base.summary.to_json() if base.summary else {},
               "rows": {row: one.as_dict() for row, one in rows.items()},
               "regressions": regressions, "notes": notes}  # fmt: skip
    unlinked(out, "report").mkdir(exist_ok=True)
    write_json(out / "report" / "matrix.json", content)
    worse = ", ".join(f"{one['task']} after {one['row']}" for one in regressions)
    page = write_comparison_page(
        out / "report" / "index.html", title="Transfer between tasks", grid=grid, charts=[],
        finding=f"Regressions: {worse}." if worse else "There is no clear regression.",
        facts=[("model", str(read_config(base.path)["model"])), ("trainings", str(len(listed)))],
    )  # fmt: skip
    return page, content, grid_parts(grid)


def regressed(cell: TaskDifference) -> bool:
    """Whether the whole interval is worse than the base model."""
    end = cell.paired.ci_low if cell.less_is_better else cell.paired.ci_high
    return end is not None and (end > 0 if cell.less_is_better else end < 0)


def transfer_text(cell: TaskDifference | None) -> str:
    """The difference, its interval, n scored / n, and whether it is a regression."""
    if cell is None:
        return DASH
    paired = cell.paired
    number = estimate_text(paired.difference, paired.ci_low, paired.ci_high, signed)
    mark = " regression" if regressed(cell) else ""
    return f"{number} ({paired.n_shared}/{cell.n_b}){mark}"
