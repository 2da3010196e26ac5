"""What the judge of all ends said of a method's end: one number a run, read from its folder."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from soulkit.eval.summary import headline
from soulkit.report.load import load_runs

ENDS = "The judged end is the score that {} gave to what each method said last: its newest " \
    "episodes on held-out rows, else its drafts of the last steps."  # fmt: skip


def judged_end(run: Path, end: str) -> float | None:
    """The mean over tasks of the headlines of the end in the folder `end`, of a judge whom
    `end_folder` names; None where nobody judged it."""
    folder = run / end
    if not end or not (folder / "summary.json").is_file():
        return None
    (judged,) = load_runs([folder], episodes=False)
    means = [headline(cells).mean for cells in judged.tasks.values()]
    scored = [mean for mean in means if mean is not None]
    return fmean(scored) if scored and len(scored) == len(means) else None
