"""Figures that others published, to stand beside one's own as context.

They live in `published.yaml` with their sources. A figure here was measured by someone else, with
their judge, their temperature and their sample of rows: it is comparable with a run of one's own
only when protocol, judge, temperature and row sample match, and `CAVEAT` says so beside them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

CAVEAT = (
    "Published elsewhere, for context: comparable with these runs only when protocol, judge, "
    "temperature and row sample match."
)


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

    def figure(self, task: str, model: str) -> float | None:
        """The published figure, or None when the table has none for that task or model."""
        row = self.figures.get(task)
        return row[self.models.index(model)] if row and model in self.models else None


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
            tables.append(replace(whole, figures=rows))
    return tuple(tables)


def _publication(name: str, raw: dict[str, Any]) -> Publication:
    models = tuple(raw["models"])
    figures = {
        task: tuple(round(value / raw["per"], 6) for value in row)
        for task, row in raw["figures"].items()
    }
    short = [task for task, row in figures.items() if len(row) != len(models)]
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
    )
