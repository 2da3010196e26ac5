"""Scores of the checkpoints of a training run against the training step: table, page, JSON.

Reads the folder of `soul eval local --run RUN --checkpoints all`: an ordinary run for each
checkpoint. Each score has the interval of its run. Differences from the first checkpoint are paired
by row, and a checkpoint that cannot be compared with it is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.eval.comparison.compare import Comparison
from soulkit.eval.grid import grid_comparisons, grid_runs
from soulkit.eval.results.cells import Cell, headline, headline_shown
from soulkit.metrics.intervals import DASH, estimate_text, signed
from soulkit.report.figures import Chart, Curve, Plot
from soulkit.report.grid import Grid, GridRow
from soulkit.report.load import RunData, load_runs
from soulkit.report.pages import write_comparison_page
from soulkit.runs.jsonl import write_json


@dataclass(frozen=True, slots=True)
class CheckpointScores:
    """The runs of a folder by step, and their comparisons with the first one."""

    runs: dict[int, RunData]
    comparisons: Sequence[Comparison]
    problems: Sequence[str]
    """Why checkpoints are not compared."""

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for run in self.runs.values() for task in run.tasks))

    def cell(self, step: int, task: str) -> Cell:
        return headline(self.runs[step].tasks.get(task, {}))

    def difference(self, step: int, task: str) -> str:
        for one in self.comparisons:
            for line in one.tasks:
                if Path(one.b).name == self.runs[step].path.name and line.task == task:
                    paired = line.paired
                    return estimate_text(paired.difference, paired.ci_low, paired.ci_high, signed)
        return DASH


def load_checkpoint_scores(folder: Path) -> CheckpointScores:
    """The finished runs in `folder`, by step."""
    scored = [path for path in grid_runs(folder) if (path / "summary.json").is_file()]
    runs = load_runs(scored, episodes=False) if scored else []
    by_step = {int(run.path.name.removeprefix("step_")): run for run in runs}
    return CheckpointScores(dict(sorted(by_step.items())), *grid_comparisons(folder))


def checkpoint_table(scores: CheckpointScores) -> Grid:
    """One row for each task and step."""
    rows = [
        GridRow.of(
            task, str(step), estimate_text(cell.mean, cell.ci_low, cell.ci_high),
            scores.difference(step, task), f"{cell.n_scored}/{cell.n}",
        )
        for task in scores.tasks for step in scores.runs for cell in [scores.cell(step, task)]
    ]  # fmt: skip
    return Grid(
        head=("task", "step", "score", "difference from the first", "scored"), rows=tuple(rows),
        notes=("Scores and paired differences with 95% intervals over clusters of rows.",
               *scores.problems),
        n_names=2, grouped=True,
    )  # fmt: skip


def checkpoint_chart(scores: CheckpointScores) -> Chart:
    """Score against step, one panel for each task."""
    steps, panels = list(scores.runs), []
    for task in scores.tasks:
        cells = [scores.cell(step, task) for step in steps]
        curve = Curve(
            label="score", steps=steps, values=[cell.mean for cell in cells],
            low=[cell.ci_low for cell in cells], high=[cell.ci_high for cell in cells],
        )  # fmt: skip
        name = next(filter(None, (headline_shown(r.tasks.get(task, {})) for r in
                                  scores.runs.values())), "score")  # fmt: skip
        panels.append(Plot(title=f"{task}: {name}", curves=[curve]))
    caption = "Headline score of each checkpoint on the same rows. Bands are 95% intervals."
    return Chart(name="checkpoints", title="Score against step", caption=caption, panels=panels)


def checkpoints_json(scores: CheckpointScores) -> dict[str, Any]:
    """The scores by step, the comparisons, and why some checkpoints are not compared."""
    runs = {str(step): run.summary.to_json() for step, run in scores.runs.items() if run.summary}
    return {"checkpoints": runs, "comparisons": [one.as_dict() for one in scores.comparisons],
            "problems": list(scores.problems)}  # fmt: skip


def write_checkpoints(scores: CheckpointScores, folder: Path, run: Path) -> Path:
    """Write `checkpoints.json` and `index.html` to `folder`; returns the page."""
    write_json(folder / "checkpoints.json", checkpoints_json(scores))
    return write_comparison_page(
        folder / "index.html", title=f"Checkpoints of {run.name}",
        finding=f"{len(scores.runs)} checkpoints were evaluated on the same rows.",
        grid=checkpoint_table(scores), charts=[checkpoint_chart(scores)],
        facts=[("training run", str(run)), ("tasks", ", ".join(scores.tasks))],
    )  # fmt: skip
