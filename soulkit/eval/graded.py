"""The judged episodes of a run, by task: what the judge said of each, and on which scale.

Nothing is asked and no task's code is run: episodes tell the verdicts, and the run's ledger tells
the scale of each dimension, since the JSON Schema that a judge was asked with stands in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soulkit.errors import ConfigError, DataError, RunError
from soulkit.eval.rescore import command_of
from soulkit.judge.reliability import Grade, dimensions
from soulkit.judge.sheets import MAX_LABELS, RatingScale
from soulkit.models.ledger.view import View
from soulkit.runs.records import drafts, load_records
from soulkit.types import Record

_NUMBER = ("score", "value", "rating")
_ASKED = 5
"""Episodes of a task whose questions are looked up: all are asked in the same form."""
_STEPS = 10
"""Steps of a scale of fractions."""


@dataclass(frozen=True, slots=True)
class GradedEpisode:
    """An episode with what every judge said of it, each time."""

    record: Record
    grades: Mapping[str, tuple[Grade, ...]]
    """Dimension → the grades of all verdicts."""

    @property
    def cluster(self) -> str:
        return self.record.cluster or self.record.example_id


def graded_episodes(folder: Path) -> dict[str, list[GradedEpisode]]:
    """Task → its scored drafts that a judge has graded, in the order of their keys.

    RunError for a training run; DataError, naming the tasks, when no judge was asked.
    """
    command = command_of(folder)
    if command.startswith("train"):
        raise RunError(
            f"{folder} was made by 'soul {command}'.",
            "People rate what one model did: the drafts of a training are of many.",
            "Name the folder of a soul eval run.",
        )
    records = drafts(load_records(folder / "episodes.jsonl"))
    graded: dict[str, list[GradedEpisode]] = {}
    for record in sorted(records, key=lambda r: (r.task, r.key)):
        grades = _grades_of(record)
        if record.score.scored and grades:
            graded.setdefault(record.task, []).append(GradedEpisode(record, grades))
    if not graded:
        names = ", ".join(sorted({record.task for record in records})) or "none was played"
        raise DataError(
            f"{folder} holds no episode that a judge has graded.",
            f"Its tasks ({names}) are scored by rules, or their verdicts were not recorded.",
            "Name the run of a judged task; soul tasks list says which ask for a judge.",
        )
    return graded


def _grades_of(record: Record) -> dict[str, tuple[Grade, ...]]:
    """Dimensions of other purposes than `score` are called `purpose/field`, as a check does."""
    grades: dict[str, tuple[Grade, ...]] = {}
    for verdict in record.score.verdicts:
        for field, grade in ({} if verdict.problem else dimensions(verdict)).items():
            name = field if verdict.purpose == "score" else f"{verdict.purpose}/{field}"
            grades[name] = (*grades.get(name, ()), grade)
    return grades


def dimensions_of(episodes: Sequence[GradedEpisode]) -> list[str]:
    """What judges said of every episode: the questions of the score, or all where there is none."""
    names = list(dict.fromkeys(name for episode in episodes for name in episode.grades))
    return [name for name in names if "/" not in name] or names


# -- scales --------------------------------------------------------------------------------------


def rating_scales(
    folder: Path,
    episodes: Sequence[GradedEpisode],
    names: Sequence[str],
    stated: Mapping[str, RatingScale],
) -> list[RatingScale]:
    """The scale of each dimension: as stated, as the judge was asked, or the names it has used.

    ConfigError for numbers whose lowest and highest value nobody knows.
    """
    asked_scales = _asked_scales(folder, [e.record.example_id for e in episodes[:_ASKED]])
    scales = []
    for name in names:
        scale = stated.get(name) or asked_scales.get(name.rpartition("/")[2])
        labels = {grade for e in episodes for grade in e.grades.get(name, ())}
        if scale is None and labels and all(isinstance(label, str) for label in labels):
            scale = RatingScale(name, tuple(sorted(map(str, labels))), False)
        if scale is None:
            raise _unknown_scale(name)
        scales.append(RatingScale(name, scale.labels, scale.numeric))
    return scales


def known_scales(folder: Path, episodes: Sequence[GradedEpisode]) -> dict[str, RatingScale]:
    """The scale of each dimension whose question to the judge stands in the run's ledger."""
    asked_scales = _asked_scales(folder, [e.record.example_id for e in episodes[:_ASKED]])
    names = dict.fromkeys(name for episode in episodes for name in episode.grades)
    scales = {name: asked_scales.get(name.rpartition("/")[2]) for name in names}
    return {
        name: RatingScale(name, scale.labels, scale.numeric)
        for name, scale in scales.items()
        if scale is not None
    }


def _unknown_scale(name: str) -> ConfigError:
    return ConfigError(
        f"The scale of '{name}' is not known.",
        "The run's ledger, where the question to the judge would say it, has none or is gone.",
        f"Write --scale {name}=0:10 for whole numbers, or --scale {name}=good,poor for names.",
    )


def stated_scales(texts: Sequence[str]) -> dict[str, RatingScale]:
    """`NAME=0:10` and `NAME=good,poor` as scales by dimension; ConfigError for anything else."""
    scales = {}
    for text in texts:
        name, _, values = text.rpartition("=")
        labels = _whole_numbers(values) if ":" in values else tuple(values.split(","))
        if not name or len(labels) < 2 or len(set(labels)) < len(labels) or "" in labels:
            raise ConfigError(
                f"'{text}' is no scale.",
                f"A scale has two labels or more, and {MAX_LABELS} at most.",
                "Write --scale quality=0:10 or --scale style=plain,lively.",
            )
        scales[name] = RatingScale(name, labels, ":" in values)
    return scales


def _whole_numbers(values: str) -> tuple[str, ...]:
    low, _, high = values.partition(":")
    try:
        first, last = int(low), int(high)
    except ValueError:
        return ()
    return tuple(str(i) for i in range(first, last + 1)) if last - first < MAX_LABELS else ()


def _asked_scales(folder: Path, examples: Sequence[str]) -> dict[str, RatingScale]:
    """Field → its scale in the forms that judges of these examples were asked with.

    Only the ledger in the run's own folder is read. Two forms that differ on a field say nothing.
    """
    path, scales = folder / "ledger.sqlite", dict[str, set[RatingScale]]()
    if not path.is_file():
        return {}
    with View(path) as view:
        for schema in _schemas(view, examples):
            for name, node in schema.get("properties", {}).items():
                scale = _scale_of(name, node, schema)
                scales.setdefault(name, set()).update(() if scale is None else (scale,))
    return {name: next(iter(forms)) for name, forms in scales.items() if len(forms) == 1}


def _schemas(view: View, examples: Sequence[str]) -> Iterator[dict[str, Any]]:
    for example in examples:
        for stored in view.entries(example=example, role="judge"):
            form = stored.request.sampling.get("form") if stored.request else None
            if isinstance(form, Mapping):
                schema = json.loads(str(form.get("schema", "{}")))
                yield schema if isinstance(schema, dict) else {}


def _scale_of(name: str, node: Any, schema: Mapping[str, Any]) -> RatingScale | None:
    """The scale of one field of a JSON Schema; None for prose."""
    node = _resolved(node, schema)
    inner = next((f for f in _NUMBER if f in node.get("properties", {})), None)
    if inner is not None:
        node = _resolved(node["properties"][inner], schema)
    if isinstance(node.get("enum"), list):
        return RatingScale(name, tuple(map(str, node["enum"])), False)
    if node.get("type") == "boolean":
        return RatingScale(name, ("false", "true"), False)
    low, high = node.get("minimum"), node.get("maximum")
    if node.get("type") not in ("integer", "number") or low is None or high is None or low >= high:
        return None
    if node["type"] == "integer":
        labels = _whole_numbers(f"{low:.0f}:{high:.0f}")
    else:
        labels = tuple(f"{low + (high - low) * i / _STEPS:g}" for i in range(_STEPS + 1))
    return RatingScale(name, labels, True) if labels else None


def _resolved(node: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """What a node of a JSON Schema refers to."""
    reference = node.get("$ref", "") if isinstance(node, Mapping) else ""
    if reference:
        node = schema.get("$defs", {}).get(reference.rpartition("/")[2], {})
    return dict(node) if isinstance(node, Mapping) else {}


def chosen_dimensions(
    task: str, episodes: Sequence[GradedEpisode], chosen: Sequence[str]
) -> list[str]:
    """Those of `chosen` that the judges of a task have graded, or `dimensions_of` without any."""
    if not chosen:
        return dimensions_of(episodes)
    return [name for name in chosen if any(name in episode.grades for episode in episodes)]


def headline_of(episode: GradedEpisode) -> float:
    """The score of an episode, which is what the run's mean is over."""
    assert episode.record.score.value is not None
    return episode.record.score.value
