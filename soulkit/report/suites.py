"""A suite as a table: one row per member, axis means, the suite mean; one column per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soulkit.errors import RunError
from soulkit.eval.comparison.comparability import UnlikePair, unlike_pairs
from soulkit.eval.results.cells import Scales, SuiteLine, missing_parts_text, suite_lines
from soulkit.eval.results.summary import VALUE, Cell, headline, headline_name
from soulkit.metrics.intervals import DASH, Interval, number
from soulkit.report.grid import Grid, GridCell, GridRow
from soulkit.report.load import RunData
from soulkit.report.published import (
    Publication,
    has_published,
    published_beside,
)
from soulkit.report.tables import (
    bounds_text,
    cell_text,
    clusters_text,
    dollar_text,
    headline_label,
    mean_text,
)
from soulkit.tasks.kit.registry import Registry
from soulkit.tasks.kit.spec import Suite
from soulkit.text import one_line
from soulkit.train.state.summary import TrainSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextColumn:
    """One published column next to the runs."""

    table: Publication
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLine:
    """One row of the table: the results of each run, and published figures."""

    name: str
    level: str
    axis: str
    runs: tuple[SuiteLine, ...]
    figures: tuple[float | None, ...]
    """One per context column."""
    best_runs: tuple[int, ...]
    """The runs with the best mean of the row; empty if there is nothing to compare."""
    best_figures: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteTable:
    """The output of `soul report --suite`."""

    name: str
    suite: Suite
    runs: tuple[RunData, ...]
    context: tuple[ContextColumn, ...]
    lines: tuple[TableLine, ...]
    absent: Mapping[str, str]
    """Task that no run has → reason."""
    notes: tuple[str, ...]
    """Notes below the table, one sentence each."""
    footnote: str = ""
    """Differences between the conditions of the published columns and of the runs."""
    playable: bool = False
    """Show only members that a run has."""
    details: bool = False
    """Show the tasks of groups, as if the suite asked for them."""

    @property
    def partial(self) -> bool:
        """Whether a run lacks a member. A member whose headline applies to none of its rows was
        played and is not lacking."""
        return any(line.lacks for row in self.lines for line in row.runs)

    @property
    def shown(self) -> list[TableLine]:
        """The rows to print."""
        parts = self.details or self.suite.parts
        return [
            line for line in self.lines
            if (parts or line.level != "part")
            and not (self.playable and line.level in ("task", "group", "part") and _unplayed(line))
        ]  # fmt: skip


def _unplayed(line: TableLine) -> bool:
    cells = [one.cell for one in line.runs]
    return not any(cell.n or cell.not_applicable or cell.missing for cell in cells)


def suite_table(
    runs: Sequence[RunData], name: str | None, registry: Registry, *, all_context: bool = False
) -> SuiteTable:
    """The table of the suite `name`; ConfigError for an unknown name.

    Without a name: all tasks of the runs, without an average. Published tables contribute their
    highlighted columns, or all of them with `all_context`.
    """
    suite = registry.suite_spec(name) if name else _of_all(runs)
    sides = [suite_lines(suite, run.tasks, scales_of(registry)) for run in runs]
    published, unlike = published_beside(runs, suite), unlike_pairs(runs)
    columns = tuple(
        ContextColumn(table=table, model=model) for table in published.tables
        for model in (table.models if all_context else table.highlight)
    )  # fmt: skip
    lines = tuple(_line(suite, rows, columns, published.others, unlike)
                  for rows in zip(*sides, strict=True))  # fmt: skip
    absent = _absent(suite, runs, registry)
    return SuiteTable(
        name=name or "", suite=suite, runs=tuple(runs), context=columns, lines=lines,
        absent=absent, footnote=published.footnote,
        notes=(*_partial_notes(runs, sides), *_draft_notes(suite, runs), *_absent_notes(absent),
               *(f"{table.title}: {table.about}" for table in published.tables),
               *([published.left_out] if published.left_out else []),
               *(line for pair in unlike for line in pair.lines())),
    )  # fmt: skip


def common_suite(runs: Sequence[RunData], registry: Registry) -> str | None:
    """The suite that all runs played, if it is declared; else None."""
    names = {run.summary.suite if run.summary else "" for run in runs}
    name = names.pop() if len(names) == 1 else ""
    return name if name in registry.suites else None


def _of_all(runs: Sequence[RunData]) -> Suite:
    tasks = dict.fromkeys(task for run in runs for task in run.tasks)
    if not tasks:
        raise RunError(
            "None of these runs has scores yet.",
            "A run writes its summary when it finishes.",
            "Rerun the command of the run to resume it.",
        )
    return Suite(members=tuple(tasks))


def scales_of(registry: Registry) -> Scales:
    """The declared scales of tasks, for tasks that a run lacks."""

    def scale(task: str) -> Interval | None:
        spec = registry.specs.get(task)
        return (spec.metric.low, spec.metric.high) if spec else None

    return scale


def draft_steps(run: RunData, task: str) -> int:
    """Number of steps in a headline that averages drafts; 0 if it does not."""
    trained = run.summary if isinstance(run.summary, TrainSummary) else None
    drafted = headline_name(run.tasks.get(task, {})) == VALUE
    return trained.summary_steps if trained and drafted else 0


# -- lines ---------------------------------------------------------------------------------------


def _line(
    suite: Suite, rows: Sequence[SuiteLine], columns: Sequence[ContextColumn],
    others: Mapping[str, Mapping[str, str]], unlike: Sequence[UnlikePair],
) -> TableLine:  # fmt: skip
    first = rows[0]
    whole = all(has_published(row.cell) for row in rows)
    figures = tuple(_figure(suite, first, column, others[column.table.name], whole)
                    for column in columns)  # fmt: skip
    means = [row.cell.mean if row.cell.whole else None for row in rows]
    return TableLine(
        name=first.name, level=first.level, axis=first.axis, runs=tuple(rows), figures=figures,
        best_runs=() if any(pair.mixed for pair in unlike) else _best(means),
        best_figures=_best_of_tables(figures, columns),
    )  # fmt: skip


def _best(values: Sequence[float | None]) -> tuple[int, ...]:
    """Indices of the highest value if there are several; values that print equal are all best."""
    rounded = [None if value is None else round(value, 3) for value in values]
    highest = max((value for value in rounded if value is not None), default=None)
    several = sum(value is not None for value in rounded) > 1
    return tuple(i for i, value in enumerate(rounded) if several and value == highest)


def _best_of_tables(
    figures: Sequence[float | None], context: Sequence[ContextColumn]
) -> tuple[int, ...]:
    best: list[int] = []
    for name in dict.fromkeys(column.table.name for column in context):
        places = [i for i, column in enumerate(context) if column.table.name == name]
        best += [places[i] for i in _best([figures[place] for place in places])]
    return tuple(best)


def _figure(
    suite: Suite, line: SuiteLine, column: ContextColumn, others: Mapping[str, str], whole: bool
) -> float | None:
    """The published figure of a row; None if one of its tasks used other rows, or if its headline
    is not `whole`."""
    members = line.members or (line.name,)
    if others.keys() & {task for member in members for task in suite.tasks_of(member)}:
        return None
    if not line.mean_over:
        return column.table.figure(line.name, column.model) if whole else None
    return column.table.mean(line.members, column.model, line.axis)


# -- what is missing -------------------------------------------------------------------------------


def _absent(suite: Suite, runs: Sequence[RunData], registry: Registry) -> dict[str, str]:
    """The tasks of the suite that no run has, with the reason."""
    reasons = {t: why for run in runs if run.summary for t, why in run.summary.left_out.items()}
    played = {task for run in runs for task in run.tasks}
    for name, spec in registry.specs.items():
        if spec.rows_only:
            reasons.setdefault(name, "this version cannot play it")
    return {t: reasons.get(t, "not played") for t in suite.tasks if t not in played}


def _absent_notes(absent: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for task, why in absent.items():
        reasons.setdefault(why, []).append(task)
    return [f"{why}: {', '.join(tasks)}" for why, tasks in reasons.items()]


def _draft_notes(suite: Suite, runs: Sequence[RunData]) -> list[str]:
    """Notes on training runs whose scores are from drafts, not from held-out rows."""
    notes = []
    for run in runs:
        drafted = {task: n for task in suite.tasks if (n := draft_steps(run, task))}
        if drafted:
            steps = max(drafted.values())
            notes.append(f"{run.name}: {', '.join(drafted)}: mean over drafts of the last {steps} "
                         "steps; no score on held-out rows")  # fmt: skip
    return notes


def _partial_notes(runs: Sequence[RunData], sides: Sequence[Sequence[SuiteLine]]) -> list[str]:
    """Notes on runs with only part of the suite, on headlines that apply to no row, and on the
    effect on means."""
    notes = []
    for run, lines in zip(runs, sides, strict=True):
        whole = next((line for line in lines if line.level == "suite"), None)
        average = "" if whole is None else "; no average, only its bounds"
        notes += [f"{run.name}: {line.name}: {line.cell.not_applicable}{average}"
                  for line in lines if line.cell.not_applicable]  # fmt: skip
        notes += [f"{run.name}: {line.name}: {missing_parts_text(line.cell)}"
                  for line in lines if line.cell.missing]  # fmt: skip
        if whole is not None and whole.lacks:
            notes.append(
                f"{run.name} covers part of the suite: {whole.coverage} members have a mean. Means "
                "with a missing member are shown as bounds only."
            )
    return notes


CONTEXT = "*"
"""Marks a published column."""


def suite_grid(table: SuiteTable) -> Grid:
    """The table as texts. A single run has columns for interval, clusters and bounds; several runs
    have one column each."""
    lines = table.shown
    single = len(table.runs) == 1
    # In a complete run this column would be empty.
    bounded = any(bounds_text(line.runs[0].cell) for line in lines)
    costs = single and any(line_cost(table, line) is not None for line in lines)
    head = [
        "task",
        *(_SINGLE[: 4 if bounded else 3] if single else [one_line(r.name, 40) for r in table.runs]),
    ]
    head += ["cost"] if costs else []
    head += [c.model + CONTEXT for c in table.context]
    return Grid(
        title=table_title(table), head=tuple(head), notes=_notes(table),
        n_below=len(table.context),
        rows=tuple(_row(table, line, before, bounded, costs)
                   for before, line in zip([None, *lines], lines, strict=False)),
    )  # fmt: skip


_SINGLE = ("mean [95% CI]", "scored", "clusters", "worst to best")


def table_title(table: SuiteTable) -> str:
    """`soul-23 (partial): The 23 rows …`; empty without a suite."""
    if not table.name:
        return ""
    partial = " (partial)" if table.partial else ""
    title = f": {table.suite.title}" if table.suite.title else ""
    return f"{table.name}{partial}{title}"


def line_label(table: SuiteTable, line: TableLine) -> str:
    """The head of a row: a task, a group, or a mean and its members."""
    first = line.runs[0]
    match line.level:
        case "part":
            return f"  {one_line(line.name)}"
        case "group":
            return f"{one_line(line.name)} (mean of {len(first.members)})"
        case "axis":
            return f"{line.name} mean ({_coverage(line)})"
        case "suite":
            return f"{table.name} mean ({_coverage(line)}{_files(table)})"
    return headline_label(table.runs, line.name)


def _coverage(line: TableLine) -> str:
    """`4 of 5`; for several runs all different values."""
    return ", ".join(dict.fromkeys(one.coverage for one in line.runs))


def _files(table: SuiteTable) -> str:
    """`; 27 of 27 tasks` if the tasks of groups are shown too; for several runs the minimum."""
    if not table.suite.parts:
        return ""
    tasks = table.suite.tasks
    counts = [sum(headline(run.tasks.get(task, {})).whole for task in tasks) for run in table.runs]
    return f"; {min(counts)} of {len(tasks)} tasks"


def line_cost(table: SuiteTable, line: TableLine) -> float | None:
    """US dollars that a single run paid for a row's tasks; None if unknown."""
    summary = table.runs[0].summary
    members = line.runs[0].members if line.level in ("axis", "suite") else (line.name,)
    tasks = [task for member in members for task in table.suite.tasks_of(member)]
    costs = summary.costs if summary is not None else {}
    sums = [one["cost"] for task in tasks for one in costs.get(task, {}).values()
            if one.get("cost") is not None]  # fmt: skip
    return sum(sums) if sums else None


def _row(
    table: SuiteTable, line: TableLine, before: TableLine | None, bounded: bool, costs: bool
) -> GridRow:
    single = len(table.runs) == 1
    texts = _single(line.runs[0], bounded) if single else [_beside(c.cell) for c in line.runs]
    texts += [dollar_text(line_cost(table, line))] if costs else []
    bold = () if single else line.best_runs
    cells = [GridCell(line_label(table, line))]
    cells += [GridCell(text, i in bold) for i, text in enumerate(texts)]
    cells += [GridCell(number(f), i in line.best_figures) for i, f in enumerate(line.figures)]
    rule = before is not None and before.level != line.level and line.level in ("axis", "suite")
    return GridRow(cells=tuple(cells), level=line.level, rule=rule)


def _single(line: SuiteLine, bounded: bool) -> list[str]:
    cell = line.cell
    scored = f"{cell.n_scored}/{cell.n}" if cell.n else DASH
    texts = [cell_text(cell), scored, clusters_text(cell, headed=True)]
    return [*texts, bounds_text(cell)] if bounded else texts


def _beside(cell: Cell) -> str:
    bounds = bounds_text(cell)
    return f"{_mean(cell)}, could be {bounds}" if bounds else _mean(cell)


def _mean(cell: Cell) -> str:
    """The mean as elsewhere; a dash for a task that was not run or applies to no row."""
    return mean_text(cell) if cell.n or cell.missing else DASH


def _notes(table: SuiteTable) -> tuple[str, ...]:
    marked = any(line.best_figures or line.best_runs for line in table.lines)
    bold = "Bold: the best value in a row, separately for the runs and for each published table."
    caveat = [f"{CONTEXT} {table.footnote}"] if table.footnote else []
    return (*table.notes, *([bold] if marked else []), *caveat)
