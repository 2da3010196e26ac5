"""Figures that others published, to stand beside one's own as context.

They live in `published.yaml` with their sources. A figure here was measured by someone else, with
their judge, their temperature and their sample of rows: it is comparable with a run of one's own
only when protocol, prompts, judge, temperature and row sample match, and `CAVEAT` says so beside
them. Prompts are worded here, so that those of a source are other ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from statistics import fmean
from typing import Any

CAVEAT = (
    "Published elsewhere, for context: comparable with these runs only when protocol, prompts, "
    "judge, temperature and row sample match. soulkit words its own prompts."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    """What a source says of how it measured; what it does not say is empty."""

    protocol: str = ""
    temperature: float | None = None
    judges: Mapping[str, str] = field(default_factory=dict)
    """Task → its judge; `*` for all others."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Task → `prompts_digest` of its templates."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Task → `rows_digest` of the rows."""

    def judge(self, task: str) -> str:
        """The judge of a task, empty where the source names none."""
        return self.judges.get(task, self.judges.get("*", ""))


@dataclass(frozen=True, slots=True)
class Publication:
    """One published table; every figure is in the unit of a score, usually [0, 1]."""

    name: str
    title: str
    source: str
    sample: str
    """Which rows were evaluated, as far as the source says."""
    note: str
    models: tuple[str, ...]
    highlight: tuple[str, ...]
    """The columns to show where there is no room for all."""
    figures: dict[str, tuple[float, ...]]
    """Task → one figure per model."""
    axes: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Axis → one mean per model, where the source gives no rows to take it of."""
    average: tuple[float, ...] = ()
    """The mean over all rows as printed, one per model."""
    stated: Stated = Stated()
    differs: dict[str, str] = field(default_factory=dict)
    """Task → what is known to be measured otherwise here, whatever the judge."""

    def figure(self, task: str, model: str) -> float | None:
        """The published figure, or None when the table has none for that task or model."""
        row = self.figures.get(task)
        return row[self.models.index(model)] if row and model in self.models else None

    def mean(self, members: Sequence[str], model: str, axis: str = "") -> float | None:
        """The mean over `members`: as printed for them or their `axis`, else of the printed rows.

        None where a row is missing: a mean of the others would be one of something else.
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
    """Every published table the package carries, in file order."""
    import yaml

    text = (files("soulkit.report") / "published.yaml").read_text(encoding="utf-8")
    return tuple(_publication(name, raw) for name, raw in yaml.safe_load(text).items())


def published_for(tasks: Collection[str]) -> tuple[Publication, ...]:
    """The published tables, cut down to `tasks`; tables without any of them are left out."""
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
            f"published.yaml: {name} has rows or highlights that fit no column: {short}"
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
