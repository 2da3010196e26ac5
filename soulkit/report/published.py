"""Published figures next to runs, and whether they were measured the same way.

The figures and their sources are in `published.yaml`. Protocol, prompts, judge, temperature and
rows must all match, for the task of the figure. Conditions that a source does not state count as
different. soulkit's prompts have their own wording, so a source without prompt hashes used other
prompts; `CAVEAT` says so next to the figures.

A figure is shown next to a run only if the run's rows are published ones: from the released file,
from an importer, or with the hash that the source states. A headline with missing parts gets none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

from soulkit.eval.comparison.comparability import MeasuredRun, read_measured
from soulkit.eval.results.cells import Cell, headline
from soulkit.eval.run.provenance import PUBLISHED
from soulkit.report.load import RunData
from soulkit.runs.conditions import Conditions, rows_hash

CAVEAT = (
    "Published elsewhere, for context: comparable with these runs only if protocol, prompts, "
    "judge, temperature and rows match. soulkit uses its own prompt wording."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """The conditions that a source states; unstated ones are empty."""

    protocol: str = ""
    temperature: float | None = None
    judges: Mapping[str, str] = field(default_factory=dict)
    """Task → its judge; `*` for all others."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Task → `prompts_digest` of its templates."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Task → `rows_hash` of the rows, as in a run's summary under `rows`."""

    def judge(self, task: str) -> str:
        """The judge of a task; empty if the source names none."""
        return self.judges.get(task, self.judges.get("*", ""))


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
    stated: Stated = Stated()
    differs: dict[str, str] = field(default_factory=dict)
    """Task → known difference in measurement, whatever the judge."""

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
    import yaml

    text = (files("soulkit.report") / "published.yaml").read_text(encoding="utf-8")
    return tuple(_publication(name, raw) for name, raw in yaml.safe_load(text).items())


def published_for(tasks: Collection[str]) -> tuple[Publication, ...]:
    """The published tables, reduced to `tasks`; tables without any of them are omitted."""
    tables = []
    for whole in publications():
        rows = {task: row for task, row in whole.figures.items() if task in tasks}
        if rows:
            differs = {task: why for task, why in whole.differs.items() if task in tasks}
            tables.append(replace(whole, figures=rows, differs=differs))
    return tuple(tables)


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
        stated=Stated(**raw.get("stated", {})),
        differs=dict(raw.get("differs", {})),
    )


def _rows(raw: Mapping[str, Sequence[float]], per: float) -> dict[str, tuple[float, ...]]:
    return {name: tuple(round(value / per, 6) for value in row) for name, row in raw.items()}


UNSTATED = " unstated"
WORDED_HERE = "soulkit's own prompts"


def prompts_digest(prompts: Mapping[str, Iterable[str]]) -> str:
    """One hash of a task's prompts (template → its hashes), independent of their order."""
    named = sorted((name, " ".join(sorted(hashes))) for name, hashes in prompts.items())
    lines = "".join(f"{name} {digest}\n" for name, digest in named)
    return hashlib.sha256(lines.encode()).hexdigest()


# -- which figures are shown -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBeside:
    """The published figures to show next to runs, and the notes on them."""

    tables: tuple[Publication, ...] = ()
    footnote: str = ""
    """Differences between their conditions and the runs'; empty without figures."""
    left_out: str = ""
    """Why some rows have no figures; empty if all have them."""

    @property
    def notes(self) -> list[str]:
        """The lines below the tables."""
        return [note for note in (self.footnote, self.left_out) if note]


def published_beside(runs: Sequence[RunData]) -> PublishedBeside:
    """The published figures for evaluated tasks; draft means of training runs get none."""
    evaluated = [run for run in runs if run.kind == "eval"]
    played = [(task, cells) for run in evaluated for task, cells in run.tasks.items()]
    partial = {task for task, cells in played if not has_published(headline(cells))}
    whole = published_for({task for task, _ in played})
    sides = with_conditions(evaluated) if whole else []
    others = {table.name: unpublished_rows(table, table.figures, sides) for table in whole}
    cut = [
        replace(t, figures={task: row for task, row in t.figures.items()
                            if task not in partial | others[t.name].keys()})
        for t in whole
    ]  # fmt: skip
    tables = tuple(table for table in cut if table.figures)
    return PublishedBeside(
        tables=tables, left_out=left_out_text(others.values()),
        footnote=published_footnote(
            [(t.title, published_differences(t, t.figures, sides)) for t in tables]
        ),
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


def unpublished_rows(table: Publication, tasks: Iterable[str], sides: Sides) -> dict[str, str]:
    """The tasks for which a run used other than the published rows: task → which rows."""
    found = {}
    for task in tasks:
        rows = [_other_rows(table, task, side) for run, side in sides if task in run.tasks]
        if names := dict.fromkeys(name for of_run in rows for name in of_run):
            found[task] = ", ".join(names)
    return found


def _other_rows(table: Publication, task: str, run: MeasuredRun) -> list[str]:
    """Which rows a run used instead of published ones; empty if none, or if unknown."""
    stated = table.stated.rows.get(task)
    if stated and rows_hash(run.rows(task)) == stated:
        return []
    return [name for name in run.of_task(task).origins if name != PUBLISHED]


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
    """Why figures of `table` for these tasks are not comparable with the runs'; empty if everything
    matches. Names the run if the runs differ in this."""
    texts = []
    for run, side in sides:
        played = [task for task in tasks if task in run.tasks]
        doubts = context_doubts(table, played, side)
        texts.append(
            doubts_text(doubts, len(played)) if played else "this run has none of its tasks"
        )
    if len(set(texts)) == 1:
        return texts[0]
    return "; ".join(f"{run.name}: {text}" for (run, _), text in zip(sides, texts, strict=True)
                     if text)  # fmt: skip


# -- conditions ----------------------------------------------------------------------------------


def context_doubts(
    table: Publication, tasks: Iterable[str], conditions: MeasuredRun
) -> dict[str, list[str]]:
    """Why figures of `table` for these tasks are not comparable with the run's.

    Reason → the tasks concerned. Empty if protocol, prompts, judge, temperature and rows match.
    """
    doubts: dict[str, list[str]] = {}
    for task in tasks:
        known = [table.differs[task]] if task in table.differs else []
        for reason in (*_doubts(table.stated, task, conditions), *known):
            doubts.setdefault(reason, []).append(task)
    return doubts


def doubts_text(doubts: Mapping[str, Sequence[str]], n_tasks: int) -> str:
    """`temperature 1, this run: 0 (two tasks); the source does not state rows`."""
    unstated = [reason.removesuffix(UNSTATED) for reason in doubts if reason.endswith(UNSTATED)]
    parts = [
        reason if len(tasks) == n_tasks else f"{reason} ({_named(tasks)})"
        for reason, tasks in doubts.items() if not reason.endswith(UNSTATED)
    ]  # fmt: skip
    return "; ".join([*parts, *([f"the source does not state {', '.join(unstated)}"]
                                if unstated else [])])  # fmt: skip


def _named(tasks: Sequence[str]) -> str:
    return ", ".join(tasks) if len(tasks) <= 3 else f"{len(tasks)} tasks"


def _doubts(stated: Stated, task: str, run: MeasuredRun) -> list[str]:
    doubts = [
        _difference_text("protocol", stated.protocol, str(run.settings.get("protocol") or "")),
        _prompt_doubt(stated, task, run),
        _judge_doubt(stated, task, run),
        _difference_text("temperature", _degrees(stated.temperature), _temperature(run, task)),
        _row_doubt(stated, task, run),
    ]
    return [doubt for doubt in doubts if doubt]


def _difference_text(what: str, there: str, here: str) -> str:
    """The difference in words; empty if both values are known and equal."""
    if not there:
        return f"{what}{UNSTATED}"
    if not here:
        return f"{what} not recorded by this run"
    return "" if there == here else f"{what} {there}, this run: {here}"


def _prompt_doubt(stated: Stated, task: str, run: MeasuredRun) -> str:
    there, prompts = stated.prompts.get(task, ""), run.shown(task).prompts
    if not there:
        return WORDED_HERE
    if not prompts:
        return _difference_text("prompts", there, "")
    return "" if prompts_digest(prompts) == there else "other prompts"


def _temperature(run: MeasuredRun, task: str) -> str:
    if any("temperature" in one for one in run.dropped(task, "actor") or ()):
        return "rejected by the server"
    return _degrees(run.actor(task).get("temperature"))


def _degrees(value: object) -> str:
    return f"{value:g}" if isinstance(value, int | float) else ""


def _judge_doubt(stated: Stated, task: str, run: MeasuredRun) -> str:
    if "judge" not in run.of_task(task).roles:
        return ""
    judges = ", ".join(judge.model for judge in run.players(task, "judge"))
    return _difference_text("judge", stated.judge(task), judges)


def _row_doubt(stated: Stated, task: str, run: MeasuredRun) -> str:
    there, rows = stated.rows.get(task, ""), run.rows(task)
    if not there or not rows:
        return _difference_text("rows", there, "")
    return "" if rows_hash(rows) == there else "other rows"
