"""Results of runs as a terminal table, as Markdown and as JSON.

All three show the recorded summaries. A mean is always shown with its context: `0.720 [0.624,
0.799] (98/100, 32 clusters)` is the mean, its interval, scored of all episodes, and the number of
clusters behind the interval. If episodes are unscored or truncated, the lowest and highest possible
mean follow. Metrics have the names that their tasks declare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from soulkit.eval.comparison.comparability import unlike_pairs
from soulkit.eval.comparison.provenance_text import provenance_facts, unknown_text
from soulkit.eval.results.cells import missing_parts_text, named_with_origin
from soulkit.eval.results.summary import (
    DEV,
    VALUE,
    Cell,
    Summary,
    headline,
    headline_name,
    headline_shown,
    metric_name,
)
from soulkit.eval.results.warnings import (
    cuts_text,
    dropped_text,
    ignored_text,
    limits_text,
    truncation_text,
    uniform_text,
)
from soulkit.metrics.intervals import (
    DASH,
    estimate_text,
    few_independent_events,
    interval_remark,
    number,
)
from soulkit.metrics.repeats import needed
from soulkit.report.grid import Grid, GridRow, grid_markdown, grid_parts, md_text
from soulkit.report.load import RunData
from soulkit.report.published import Publication, published_beside
from soulkit.report.training import facts_of_training, steps_grid
from soulkit.text import counted, dollars, duration, one_line
from soulkit.train.state.summary import TrainSummary

if TYPE_CHECKING:
    from rich.console import RenderableType


HEADS = ("run", "task", "role", "calls", "tokens", "cost")


def dollar_text(cost: float | None) -> str:
    """US dollars; a dash if no price is known."""
    return DASH if cost is None else dollars(cost)


def cost_rows(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """The table by run, task and role, under `HEADS`; empty without calls over HTTP."""
    return [
        (run.name, task, role, f"{one.get('calls', 0):,}", f"{one.get('tokens', 0):,}",
         dollar_text(one.get("cost")))
        for run in runs if run.summary is not None
        for task, roles in run.summary.costs.items()
        for role, one in roles.items()
    ]  # fmt: skip


def cost_by_role(summary: Summary) -> str:
    """`judge $0.4000, actor $0.0120`, most expensive first; empty if fewer than two roles cost
    anything."""
    sums: dict[str, float] = {}
    for roles in summary.costs.values():
        for role, one in roles.items():
            sums[role] = sums.get(role, 0.0) + (one.get("cost") or 0.0)
    paid = sorted((cost, role) for role, cost in sums.items() if cost)
    if len(paid) < 2:
        return ""
    return ", ".join(f"{role} {dollar_text(cost)}" for cost, role in reversed(paid))


def mean_text(cell: Cell) -> str:
    """`0.720 [0.624, 0.799] (98/100, 32 clusters)`, as far as known."""
    more = ", ".join(filter(None, (clusters_text(cell), missing_parts_text(cell))))
    return f"{scored_text(cell)[:-1]}, {more})" if more else scored_text(cell)


def scored_text(cell: Cell) -> str:
    """`0.720 [0.624, 0.799] (98/100)`; for a metric that applies to no row, the reason."""
    if cell.not_applicable:
        return f"{DASH} ({cell.not_applicable})"
    return f"{cell_text(cell)} ({cell.n_scored}/{cell.n})"


def cell_text(cell: Cell) -> str:
    """`0.720 [0.624, 0.799]`."""
    return estimate_text(cell.mean, cell.ci_low, cell.ci_high)


def clusters_text(cell: Cell, *, headed: bool = False) -> str:
    """`32 clusters`, `7 clusters: few`, `no spread in 7 clusters`; empty if unknown. `headed` omits
    the word clusters, which is in the column head."""
    few = few_independent_events(cell, cell.method)
    text = interval_remark(cell.n_clusters, cell.method, cell.events, few=few)
    return text.replace(" clusters", "").replace(" cluster", "") if headed else text


def bounds_text(cell: Cell) -> str:
    """The mean if everything unscored or truncated had the worst or best score; empty if complete.
    It is formatted differently from an interval."""
    if cell.worst is None or cell.best is None:
        return ""
    between = " to " if cell.worst < 0 else "\u2013"
    return f"{number(cell.worst)}{between}{number(cell.best)}"


def unscored_text(cell: Cell) -> str:
    """`2 judge_error, 1 provider_error`, or empty; for a metric that applies to no row, the reason.
    For a mean over parts, the missing parts."""
    if cell.not_applicable:
        return cell.not_applicable
    counts = ", ".join(f"{count} {reason}" for reason, count in cell.unscored.items())
    return "; ".join(filter(None, (missing_parts_text(cell), counts)))


def runs_as_json(runs: Sequence[RunData]) -> dict[str, Any]:
    """The output of `--json`: recorded summaries by run, training runs with their last step, and
    pairs of runs that cannot be compared."""
    shown = {}
    for run in runs:
        shown[run.name] = {
            **(run.summary.to_json() if run.summary else {}),
            "kind": run.kind,
            "finished": run.progress is None,
            "provenance": dict(run.provenance),
            **({"progress": run.progress.as_dict()} if run.progress else {}),
            **({"last_step": run.steps[-1].to_json()} if run.steps else {}),
        }
    return {
        "runs": shown,
        "unlike": [pair.as_dict() for pair in unlike_pairs(comparable_runs(runs))],
    }


def facts(run: RunData) -> list[tuple[str, str]]:
    """The facts in the head of a run: label and text."""
    summary = run.summary or Summary()
    steps = str(run.steps[-1].step + 1) if run.steps else ""
    lines = [
        ("command", summary.command),
        ("model", summary.model),
        ("protocol", summary.protocol),
        ("steps", steps),
        ("time", "" if summary.seconds is None else duration(summary.seconds, 1)),
        ("cost", _cost(summary)),
        ("cost by role", cost_by_role(summary)),
        ("answers", answers_text(summary)),
        ("origin", origins_text(summary)),
        *provenance_facts(run.provenance),
        ("truncated", truncation_text(summary.statuses)),
        ("at token limit", limits_text(summary.limits, summary.statuses)),
        ("words cut", cuts_text(summary.cuts)),
        ("identical verdicts", uniform_text(summary.uniform_verdicts)),
        ("ignored by servers", ignored_text(summary.ignored)),
        ("rejected by servers", dropped_text(summary.dropped_settings)),
        ("unknown server defaults", unknown_text(run.provenance)),
    ]
    if isinstance(summary, TrainSummary):
        lines += facts_of_training(summary)
    return [(label, one_line(text, 200)) for label, text in lines if text]


REMARKS = (
    "truncated", "at token limit", "words cut", "identical verdicts", "ignored by servers",
    "rejected by servers", "feedback texts", "canaries", "general ability", "left out",
)  # fmt: skip
"""Labels of facts that limit how far the numbers can be trusted."""


def answers_text(summary: Summary) -> str:
    """`TASK 30 ok, 2 salvaged` for tasks in which some answers lacked the requested format.

    Unscored episodes have no answer; the table counts them by reason.
    """
    several = summary.statuses.items()
    return "; ".join(f"{task} {statuses_text(counts)}" for task, counts in several
                     if counts.keys() - {"ok", "unscored"})  # fmt: skip


def statuses_text(counts: Mapping[str, int]) -> str:
    """`30 ok, 2 salvaged`: the episodes with a score by status."""
    order = sorted(counts.keys() - {"unscored"}, key=lambda status: (status != "ok", status))
    return ", ".join(f"{counts[status]} {status}" for status in order)


def origins_text(summary: Summary) -> str:
    """`TASK 40 rows from my_chats.jsonl`: rows made from a user's own files."""
    return "; ".join(
        f"{task} {', '.join(f'{n} rows from {file}' for file, n in files.items())}"
        for task, files in summary.origins.items()
    )


def _cost(summary: Summary) -> str:
    """Dollars; `unknown` if no paid call has a price, `at least` if only some have one."""
    cost, missing = summary.cost, summary.unpriced_calls
    if cost is not None and missing:
        return f"at least {dollars(cost)}, {counted(missing, 'call')} without a known price"
    if cost is not None:
        return dollars(cost)
    return "unknown" if missing or summary.command == "eval api" else ""


def comparable_runs(runs: Sequence[RunData]) -> list[RunData]:
    """The runs whose headlines may be shown next to each other.

    Training runs average over a changing policy, so they are used only if there are no evaluations.
    Supervised training has a loss and no headline.
    """
    scored = [run for run in runs if any(map(headline_name, run.tasks.values()))]
    return [run for run in scored if run.kind == "eval"] or scored


Block = Grid | RunData | str
"""A part of a report: a table, the head of a run, or a note."""


def blocks(runs: Sequence[RunData], *, details: bool = False) -> list[Block]:
    """The report from top to bottom; with `details` every metric."""
    made: list[Block] = []
    if len(comparable_runs(runs)) > 1:
        made.append(_overview(comparable_runs(runs), side_by_side(runs)))
    for run in runs:
        made += [run, *([_cells_grid(run, details)] if run.tasks else [])]
        made += repeats_grids(run)
        made += [steps_grid(run)] if run.steps else []
    if details and (costs := cost_rows(runs)):
        rows = tuple(GridRow.of(*row) for row in costs)
        made.append(Grid(title="cost by task and role", head=HEADS, words=HEADS[:3], rows=rows))
    published = published_beside(runs)
    return [*made, *map(_published_grid, published.tables), *published.notes]


def report_parts(shown: Iterable[Block]) -> list[RenderableType]:
    """The blocks for a terminal: rich renderables, top to bottom."""
    from rich.text import Text

    parts: list[RenderableType] = []
    for block in shown:
        if isinstance(block, Grid):
            parts += grid_parts(block)
        elif isinstance(block, str):
            parts.append(Text(one_line(block), "dim"))
        else:
            parts.append(_run_head(block))
    return parts


def markdown(shown: Iterable[Block]) -> str:
    """The blocks as Markdown."""
    parts = []
    for block in shown:
        if isinstance(block, Grid):
            parts.append(grid_markdown(block))
        elif isinstance(block, str):
            parts.append(f"{md_text(block)}\n")
        else:
            labelled = (f"{label}: {md_text(text)}" for label, text in facts(block))
            parts.append(f"## {md_text(block.name)}\n\n{' · '.join(labelled)}\n")
            if block.progress is not None:
                parts.append(f"This run is unfinished: {block.progress.text()}.\n")
    return "\n".join(parts)


def repeats_grids(run: RunData) -> list[Grid]:
    """The statistics of repeats and what would make the intervals narrower; empty if there are
    none."""
    rows, notes = [], []
    for task, made in (run.summary or Summary()).repeats.items():
        for name, one in made["statistics"].items():
            mean = estimate_text(one["mean"], one["ci_low"], one["ci_high"])
            counts = f"{one['n_scored']}/{one['n']}", str(one["n_clusters"])
            rows.append(GridRow.of(one_line(task), name, mean, *counts))
        ways = [f"{n} {name} (now {made['sizes'][name]:.3g})"
                for name, n in needed(made).items() if n]  # fmt: skip
        notes += [f"{task}: a 10% narrower interval needs {' or '.join(ways)}"] if ways else []
    head, title = ("task", "statistic", "mean [95% CI]", "rows", "clusters"), f"repeats: {run.name}"
    grid = Grid(title=title, head=head, rows=tuple(rows), notes=tuple(notes), words=head[:2],
                n_names=2, grouped=True)  # fmt: skip
    return [grid] if rows else []


def _published_grid(table: Publication) -> Grid:
    return Grid(
        title=table.title, head=("task", *table.highlight),
        notes=(table.about,),
        rows=tuple(GridRow.of(task, *(number(table.figure(task, m)) for m in table.highlight))
                   for task in table.figures),
    )  # fmt: skip


def side_by_side(runs: Sequence[RunData]) -> list[str]:
    """Notes on comparing several runs; empty for one run."""
    return [line for pair in unlike_pairs(comparable_runs(runs)) for line in pair.lines()]


def rows_across(runs: Sequence[RunData]) -> list[tuple[str, list[Cell | None]]]:
    """(task, headline cell of each run), tasks in order of first appearance."""
    tasks = dict.fromkeys(task for run in runs for task in run.tasks)
    sides = {task: [run.tasks.get(task, {}) for run in runs] for task in tasks}
    return [
        (task, [headline(cells) if headline_name(cells) else None for cells in several])
        for task, several in sides.items()
    ]


_HEAD = ("task", "metric", "mean [95% CI] (scored)", "clusters", "worst to best", "unscored")


def metric_label(run: RunData, task: str, metric: str) -> str:
    """The declared name of a metric, in a training run with the rows it was measured on."""
    cells = run.tasks[task]
    if metric == DEV:
        return f"{cells[DEV].name or DEV} (held-out rows)"
    name = metric_name(metric, cells)
    if isinstance(run.summary, TrainSummary) and metric == VALUE:
        return f"{name} (drafts, last {run.summary.summary_steps} steps)"
    return name


def with_round(name: str, cell: Cell) -> str:
    """The name of a metric; `round=1 (with feedback)` after a round of `--refine`."""
    return f"{name} (with feedback)" if cell.beside and is_round(name) else name


def is_round(name: str) -> bool:
    """Whether a metric is the score or gain of a round of `--refine`."""
    return name.rpartition("/")[2].startswith("round=")


def task_label(task: str, *metrics: str) -> str:
    """`TASK (accuracy)`; only the task if its metric has no name."""
    named = [one_line(name) for name in dict.fromkeys(metrics) if name]
    return one_line(task) if named in ([], [VALUE]) else f"{one_line(task)} ({', '.join(named)})"


def headline_label(runs: Sequence[RunData], task: str) -> str:
    """A task with the name of its headline, or names if the runs differ."""
    return task_label(task, *(_headline_of(run.tasks.get(task, {})) for run in runs))


def _headline_of(cells: Mapping[str, Cell]) -> str:
    name = named_with_origin(headline_shown(cells), headline(cells))
    return f"{name}, held-out rows" if headline_name(cells) == DEV != name else name


def _cells(run: RunData, details: bool) -> list[tuple[str, str, Cell]]:
    """(task, metric, cell) of the headline and its companions; with `details` of all metrics."""
    return [
        (task, metric, cell)
        for task, metrics in run.tasks.items()
        for metric, cell in in_order(metrics)
        if details or cell.beside or metric == headline_name(metrics) or not headline_name(metrics)
    ]


def in_order(metrics: Mapping[str, Cell]) -> list[tuple[str, Cell]]:
    """The headline, rounds with feedback, companions, breakdowns, then the others."""

    first = headline_name(metrics)

    def place(item: tuple[str, Cell]) -> int:
        name, cell = item
        if name == first:
            return -1
        if name == VALUE:
            return 0
        if cell.beside:
            return 1 if is_round(name) else 2
        return 3 if name.startswith("value/") else 4

    return sorted(metrics.items(), key=place)


def extra_cells(runs: Sequence[RunData], task: str) -> list[tuple[str, list[Cell | None]]]:
    """(metric name, its cell of each run) of the metrics shown together with a task's headline."""
    sides = [
        {metric_name(name, metrics): cell for name, cell in metrics.items()}
        for metrics in (run.tasks.get(task, {}) for run in runs)
    ]
    names = {n: with_round(n, c) for one in sides for n, c in in_order(one) if c.beside}
    return [(label, [metrics.get(name) for metrics in sides]) for name, label in names.items()]


def _row(run: RunData, task: str, metric: str, cell: Cell) -> tuple[str, ...]:
    """The texts of a table row; breakdowns of the mean score are shortened to their value."""
    part = metric.removeprefix(f"{VALUE}/")
    inner = part != metric or is_round(metric)
    short = f" {one_line(with_round(part, cell))}" if inner else ""
    label = with_round(named_with_origin(metric_label(run, task, metric), cell), cell)
    return (
        one_line(task),
        short or one_line(label, 60),
        DASH if cell.not_applicable else scored_text(cell),
        clusters_text(cell, headed=True),
        bounds_text(cell),
        unscored_text(cell),
    )


def _cells_grid(run: RunData, details: bool) -> Grid:
    """The scores of a run; on a narrow terminal the last columns move below the means."""
    rows = (_row(run, *item) for item in _cells(run, details))
    return Grid(
        head=_HEAD, rows=tuple(GridRow.of(*row) for row in rows),
        words=("metric", "unscored"), n_names=2, n_below=2, grouped=True, ruled=details,
        # On a narrow terminal numbers stay whole; names and clusters may wrap.
        whole=("mean [95% CI] (scored)", "worst to best"), least={"metric": 12, "clusters": 8},
    )  # fmt: skip


def _overview(runs: Sequence[RunData], notes: Sequence[str]) -> Grid:
    """The headline of each task and its companions, one column per run."""

    def texts(cells: Sequence[Cell | None]) -> list[str]:
        return [mean_text(cell) if cell else DASH for cell in cells]

    rows = []
    for task, cells in rows_across(runs):
        rows.append(GridRow.of(headline_label(runs, task), *texts(cells)))
        rows += [GridRow.of(f"  {one_line(name)}", *texts(others), level="part")
                 for name, others in extra_cells(runs, task)]  # fmt: skip
    names = (one_line(run.name, 40) for run in runs)
    return Grid(head=("task", *names), rows=tuple(rows), notes=tuple(notes))


def _run_head(run: RunData) -> RenderableType:
    """A run's name and facts on one line, then the progress if it is unfinished."""
    from rich.text import Text

    head = Text("\n" + one_line(run.name), style="bold")
    head.append("   " + _facts_line(run), style="not bold dim")
    if run.progress is not None:
        head.append(f"\nunfinished: {run.progress.text()}", style="not bold yellow")
    return head


def _facts_line(run: RunData) -> str:
    clear = ("command", "model", "time", "cost by role", "answers", "identical verdicts", "engine",
             "feedback texts")  # fmt: skip
    return " · ".join(text if k in clear else f"{k} {text}" for k, text in facts(run))
