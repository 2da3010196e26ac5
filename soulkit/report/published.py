"""Published figures next to runs.

The figures, their sources and the judges that a source states are in `published.yaml`. No source
states protocol, temperature, rows or prompts, and soulkit's prompts have their own wording, so no
figure is comparable with a run's: `CAVEAT` says so below every table.

A figure is shown next to a run only if the run's rows are published ones, from the released file or
from an importer. A headline with missing parts gets none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from soulkit.eval.comparison.comparability import MeasuredRun, read_measured
from soulkit.eval.config import INSTEAD
from soulkit.eval.results.cells import Cell, headline
from soulkit.eval.run.provenance import PUBLISHED
from soulkit.parse import parse_yaml
from soulkit.report.load import RunData
from soulkit.runs.conditions import Conditions, prompt_in
from soulkit.tasks.kit.spec import Suite

CAVEAT = (
    "Published elsewhere, for context: comparable with these runs only if protocol, prompts, "
    "judge, temperature and rows match. soulkit uses its own prompt wording, and the source does "
    "not state protocol, temperature and rows."
)


@dataclass(frozen=True, slots=True)
class Publication:
    """One published table; figures are in the unit of the score, usually [0, 1]."""

    name: str
    title: str
    source: str
    sample: str
    """The evaluated rows, as far as the source states them."""
    note: str
    models: tuple[str, ...]
    highlight: tuple[str, ...]
    """The columns to show if there is no space for all."""
    figures: dict[str, tuple[float, ...]]
    """Task → one figure per model."""
    axes: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Axis → one mean per model, if the source gives no rows to average."""
    average: tuple[float, ...] = ()
    """The printed mean over all rows, one per model."""
    judges: Mapping[str, str] = field(default_factory=dict)
    """Task → its judge, as far as the source states it; `*` for all others."""
    differs: dict[str, str] = field(default_factory=dict)
    """Task → known difference in measurement, whatever the judge."""

    @property
    def about(self) -> str:
        """Source, rows and note in one line."""
        return f"Source: {self.source}. Rows: {self.sample}. {self.note}".strip()

    def figure(self, task: str, model: str) -> float | None:
        """The published figure; None if the table has none for that task or model."""
        row = self.figures.get(task)
        return row[self.models.index(model)] if row and model in self.models else None

    def mean(self, members: Sequence[str], model: str, axis: str = "") -> float | None:
        """The mean over `members`: as printed for them or their `axis`, else from the rows.

        None if a row is missing.
        """
        column = self.models.index(model)
        if axis in self.axes:
            return self.axes[axis][column]
        if self.average and set(members) == set(self.figures):
            return self.average[column]
        rows = [self.figures[name][column] for name in members if name in self.figures]
        return fmean(rows) if rows and len(rows) == len(members) else None


@cache
def publications() -> tuple[Publication, ...]:
    """All published tables in the package, in file order."""
    text = (files("soulkit.report") / "published.yaml").read_text(encoding="utf-8")
    tables = parse_yaml(text, ours=True)
    return tuple(_publication(name, raw) for name, raw in tables.items())


def _publication(name: str, raw: dict[str, Any]) -> Publication:
    models = tuple(raw["models"])
    figures, axes = (_rows(raw.get(part, {}), raw["per"]) for part in ("figures", "axes"))
    average = _rows({"": raw.get("average", ())}, raw["per"])[""]
    lengths = {**figures, **axes, **({"average": average} if average else {})}
    short = [task for task, row in lengths.items() if len(row) != len(models)]
    if short or not set(raw["highlight"]) <= set(models):
        raise ValueError(
            f"published.yaml: {name} has rows or highlights that match no column: {short}"
        )
    return Publication(
        name=name,
        title=raw["title"],
        source=raw["source"],
        sample=raw["sample"],
        note=raw.get("note", ""),
        models=models,
        highlight=tuple(raw["highlight"]),
        figures=figures,
        axes=axes,
        average=average,
        judges=dict(raw.get("judges", {})),
        differs=dict(raw.get("differs", {})),
    )


def _rows(raw: Mapping[str, Sequence[float]], per: float) -> dict[str, tuple[float, ...]]:
    return {name: tuple(round(value / per, 6) for value in row) for name, row in raw.items()}


# -- which figures are shown -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBeside:
    """The published tables to show next to runs, and the notes on them."""

    tables: tuple[Publication, ...] = ()
    footnote: str = ""
    """Differences between their conditions and the runs'; empty without figures."""
    left_out: str = ""
    """Why some rows have no figures; empty if all have them."""
    others: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Table → task with other than the published rows → which rows."""

    @property
    def notes(self) -> list[str]:
        """The lines below the tables."""
        return [note for note in (self.footnote, self.left_out) if note]


def published_beside(runs: Sequence[RunData], suite: Suite | None = None) -> PublishedBeside:
    """The published tables that `suite` names, whole; without a suite those of evaluated tasks, cut
    to them, because draft means of training runs get none."""
    runs = runs if suite else [run for run in runs if run.kind == "eval"]
    if any(prompt_in(run.provenance).endswith(INSTEAD) for run in runs):
        return PublishedBeside(left_out=f"No published figures: a system prompt is {INSTEAD}.")
    played = {task for run in runs for task in run.tasks}
    partial = {task for run in runs for task, cells in run.tasks.items()
               if not has_published(headline(cells))}  # fmt: skip
    tables = [table for table in publications() if not suite or table.name in suite.published]
    sides = with_conditions(runs) if tables else []
    shown, differing, others = [], [], {}
    for table in tables:
        tasks = suite.tasks if suite else [task for task in table.figures if task in played]
        others[table.name] = other = unpublished_rows(tasks, sides)
        tasks_shown = [task for task in tasks if task not in other and task not in partial]
        if (other and played & set(tasks) <= other.keys()) or not (suite or tasks_shown):
            continue
        figures = table.figures if suite else {task: table.figures[task] for task in tasks_shown}
        shown.append(replace(table, figures=figures))
        differing.append((table.title, published_differences(table, tasks_shown, sides)))
    return PublishedBeside(
        tables=tuple(shown), others=others, left_out=left_out_text(others.values()),
        footnote=published_footnote(differing),
    )  # fmt: skip


def published_during_training(runs: Sequence[RunData]) -> dict[str, list[tuple[str, float]]]:
    """Task → (label, figure) of each published table, for the model that it shows last: lines next
    to evaluations during training. Only for tasks whose dev rows are published ones in all runs."""
    lines: dict[str, list[tuple[str, float]]] = {}
    for table in publications():
        for task, row in table.figures.items():
            folders = [r.path for r in runs if any(task in means for _, means in r.evals)]
            recorded = [conditions for path in folders if (conditions := Conditions.read(path))]
            origins = {frozenset(one.of_task(task).origins) for one in recorded}
            if origins == {frozenset([PUBLISHED])} and len(recorded) == len(folders):
                model = table.highlight[-1]
                figure = row[table.models.index(model)]
                lines.setdefault(task, []).append((f"{model}, {table.title}", figure))
    return lines


def has_published(cell: Cell) -> bool:
    """Whether a published figure may be shown next to a headline."""
    return not cell.missing and not cell.origin


Sides = Sequence[tuple[RunData, MeasuredRun]]
"""Runs with their measurement conditions."""


def with_conditions(runs: Sequence[RunData]) -> Sides:
    """The runs with the conditions recorded in their folders."""
    return [(run, read_measured(run.path, run.records or None)) for run in runs]


def unpublished_rows(tasks: Iterable[str], sides: Sides) -> dict[str, str]:
    """The tasks for which a run used other than the published rows: task → which rows."""
    found = {}
    for task in tasks:
        origins = (side.of_task(task).origins for run, side in sides if task in run.tasks)
        names = dict.fromkeys(name for one in origins for name in one if name != PUBLISHED)
        if names:
            found[task] = ", ".join(names)
    return found


def left_out_text(others: Iterable[Mapping[str, str]]) -> str:
    """One line on the tasks without published figures, with the rows that were used."""
    tasks = {task: rows for several in others for task, rows in several.items()}
    if not tasks:
        return ""
    listed = ", ".join(f"{task} ({rows})" for task, rows in sorted(tasks.items()))
    return (
        "Published figures are shown only for published rows, released or imported. These tasks "
        f"used other rows: {listed}."
    )


def published_footnote(differing: Sequence[tuple[str, str]]) -> str:
    """The footnote on published figures, from (title of a table, its differences); empty without
    tables."""
    parts = [f"{title}: {text}" for title, text in differing if text]
    if not differing:
        return ""
    return " ".join([CAVEAT, *([f"Differences: {'. '.join(parts)}."] if parts else [])])


def published_differences(table: Publication, tasks: Iterable[str], sides: Sides) -> str:
    """Known differences between the measurements of `table` and the runs'; names the run if the
    runs differ in this."""
    texts = []
    for run, side in sides:
        played = [task for task in tasks if task in run.tasks]
        texts.append(_differences(table, played, side))
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{run.name}: {text}" for (run, _), text in zip(sides, texts, strict=True)
                     if text)  # fmt: skip


def _differences(table: Publication, tasks: Sequence[str], run: MeasuredRun) -> str:
    """`judge gpt-5.4, this run: gpt-5-nano (TASK)`; empty without a known difference."""
    by_reason: dict[str, list[str]] = {}
    for task in tasks:
        for reason in (_judge_difference(table, task, run), table.differs.get(task, "")):
            if reason:
                by_reason.setdefault(reason, []).append(task)
    named = {reason: ", ".join(several) if len(several) <= 3 else f"{len(several)} tasks"
             for reason, several in by_reason.items()}  # fmt: skip
    return "; ".join(reason if len(by_reason[reason]) == len(tasks) else f"{reason} ({names})"
                     for reason, names in named.items())  # fmt: skip


def _judge_difference(table: Publication, task: str, run: MeasuredRun) -> str:
    if "judge" not in run.of_task(task).roles:
        return ""
    there = table.judges.get(task, table.judges.get("*", "not stated"))
    here = ", ".join(judge.model for judge in run.players(task, "judge")) or "not recorded"
    return "" if there == here else f"judge {there}, this run: {here}"
