"""What to look at next: the command behind every count that is not as it should be.

A table says that twelve replies were truncated; a line below it says how to read them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from soulkit.eval.summary import Summary
from soulkit.report.lookup import CUT, HACKED, LEAKED
from soulkit.text import one_line
from soulkit.train.state.summary import TrainSummary


def odd_cells(summary: Summary, run: Path) -> list[str]:
    """A line for every status other than `ok` and for hacked ones, the commonest first:
    `12 truncated (TASK 10, OTHER 2): soul show runs/x --status truncated`. Then one for texts that
    budgets cut, and one for feedback that leaked."""
    counts = _statuses(summary)
    hacked = _hacked(summary)
    if hacked and HACKED not in counts:
        counts[HACKED] = hacked
    lines = sorted(counts.items(), key=lambda item: (-sum(item[1].values()), item[0]))
    shown = [_line(status, tasks, run) for status, tasks in lines]
    cuts = {task: one["episodes"] for task, one in summary.cuts.items() if one.get("episodes")}
    shown += [_line(CUT, cuts, run, "with words cut by budgets")] if cuts else []
    if isinstance(summary, TrainSummary) and summary.feedback is not None:
        dropped = {author: c.dropped for author, c in summary.feedback.coaches.items() if c.dropped}
        shown += [_line(LEAKED, dropped, run, "feedback leaked")] if dropped else []
    return shown


def _statuses(summary: Summary) -> dict[str, dict[str, int]]:
    """Status other than `ok` → task → episodes."""
    statuses: dict[str, dict[str, int]] = {}
    for task, counts in summary.statuses.items():
        for status, count in counts.items():
            if status != "ok" and count:
                statuses.setdefault(status, {})[task] = count
    return statuses


def _hacked(summary: Summary) -> dict[str, int]:
    """Task → episodes of which an auditor says so, where it is a metric and no status."""
    cells = {task: metrics.get(HACKED) for task, metrics in summary.tasks.items()}
    counts = {
        task: round((cell.mean or 0.0) * cell.n_scored) for task, cell in cells.items() if cell
    }
    return {task: count for task, count in counts.items() if count}


def _line(status: str, counts: Mapping[str, int], run: Path, words: str = "") -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{one_line(name)} {count}" for name, count in counts.items())
    by = f" ({parts})" if len(counts) > 1 else ""
    return f"{total} {words or one_line(status)}{by}: {show_command(run, status)}"


def show_command(run: Path, status: str = "") -> str:
    """The command that shows episodes of `run`, as a shell reads it."""
    selector = f" --status {shlex.quote(status)}" if status else ""
    return f"soul show {shell_path(run)}{selector}"


def shell_path(path: Path) -> str:
    """A path as a shell reads it."""
    return shlex.quote(str(path))
