"""`soul judge correct`: estimate people's mean rating of a run from its judge's scores and some
human labels.

By task and dimension: the judge's mean, the mean of people's labels, a prediction-powered mean of
both (`metrics.ppi`) whose interval is valid even if the judge is wrong, the judge's bias, and the
agreement of people with each other and with the judge. For named labels the shares are reported:
`style=lively` is the share of episodes with that label. Labels of pairs show how often people
prefer the answer that the judge scored higher.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from soulkit.errors import DataError
from soulkit.eval.judges.rating import GradedEpisode, graded_episodes, headline_grade, known_scales
from soulkit.judge.rating_sheets import PREFERENCE, RatingScale, scales_in, text_print
from soulkit.judge.reliability import HEADLINE, Grade, OpinionKey, rater_agreement
from soulkit.metrics.agreement import Level
from soulkit.metrics.ppi import MIN_LABELLED, powered_mean
from soulkit.runs.jsonl import read_jsonl
from soulkit.text import one_line

COMMAND = "judge correct"
_EXACT = 1e-9
"""Tolerance for recognising a headline as a weighted sum of dimensions."""
_FIELDS = ("task", "example", "dimension", "label")


@dataclass(frozen=True, slots=True)
class PersonLabel:
    """One person's label of one dimension of an episode, or of a pair."""

    key: tuple[str, int]
    """Example and rollout."""
    dimension: str
    label: str
    rater: str
    record: str = ""
    other: str = ""
    """The keys of both records of a pair."""
    shown: str = ""
    prints: tuple[str, ...] = ()
    """`text_print` of each record as the rater read it, if the sheet recorded it."""


@dataclass
class TaskLabels:
    """The labels of one task, and counts of labels that fit no judged episode."""

    labels: list[PersonLabel] = field(default_factory=list)
    strays: int = 0
    of_others: int = 0
    """Labels of a different reply to the same row, such as another model's."""


def read_labels(path: Path, graded: Mapping[str, Sequence[GradedEpisode]]) -> dict[str, TaskLabels]:
    """Task → labels from a file that `soul judge import` wrote, or another file of the same format.

    A line needs task, example, dimension and label; rollout defaults to 0 and rater to `people`.
    DataError for an unreadable line, or if no label fits a judged episode of the run.
    """
    if not path.is_file():
        raise DataError(
            f"There is no label file at '{path}'.",
            "The correction needs human labels of some of the episodes.",
            "Write a sheet with soul judge sheet RUN, have people fill it in, and read it with "
            "soul judge import.",
        )
    by_task: dict[str, TaskLabels] = {}
    prints = {
        task: {e.record.key: text_print(e.record) for e in episodes}
        for task, episodes in graded.items()
    }
    judged = {task: {_episode_key(e) for e in episodes} for task, episodes in graded.items()}
    for number, line in enumerate(read_jsonl(path), start=1):
        task, label = _label_of(line, path, number)
        labels = by_task.setdefault(task, TaskLabels())
        if label.key not in judged.get(task, ()):
            labels.strays += 1
        elif label.prints and label.prints != tuple(
            prints[task].get(key) for key in (label.record, label.other) if key
        ):
            labels.of_others += 1
        else:
            labels.labels.append(label)
    if not any(labels.labels for labels in by_task.values()):
        if any(labels.of_others for labels in by_task.values()):
            raise DataError(
                f"The labels in '{path}' belong to another run.",
                "This run has the same rows, but the raters read different replies.",
                "Give the run that the sheet was written for, or write a sheet for this run.",
            )
        raise DataError(
            f"No label in '{path}' belongs to a judged episode of this run.",
            "Labels are matched to episodes by example and rollout.",
            "Give the run that the sheet was written for.",
        )
    return by_task


def _label_of(line: Mapping[str, Any], path: Path, number: int) -> tuple[str, PersonLabel]:
    rollout, label = line.get("rollout", 0), line.get("label")
    if any(line.get(name) is None for name in _FIELDS) or not isinstance(rollout, int):
        raise DataError(
            f"Line {number} of '{path}' is not a valid label.",
            f"A label needs {', '.join(_FIELDS)}, and rollout must be an integer.",
            "Correct that line, or write the file with soul judge import.",
        )
    return str(line["task"]), PersonLabel(
        key=(str(line["example"]), rollout),
        dimension=str(line["dimension"]),
        label=str(label).lower() if isinstance(label, bool) else str(label),
        rater=str(line.get("rater") or "people"),
        record=str(line.get("key") or ""),
        other=str(line.get("other") or ""),
        shown=str(line.get("shown") or ""),
        prints=tuple(map(str, line.get("prints") or ())),
    )


def _episode_key(episode: GradedEpisode) -> tuple[str, int]:
    return episode.record.example_id, episode.record.rollout


# -- the report ----------------------------------------------------------------------------------


def correct_run(run: Path, labels: Path, key: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The report on a run with human labels of some episodes, as plain JSON values.

    The scales come from `key`, the key of the labels' sheet, else from the run's ledger if
    possible. UserError if the run has no judged episode, or if no label belongs to one.
    """
    graded = graded_episodes(run)
    by_task = read_labels(labels, graded)
    tasks, remarks = {}, []
    for task, task_labels in by_task.items():
        if task_labels.strays:
            remarks.append(
                f"{task}: labels without a judged episode in this run: {task_labels.strays}"
            )
        if task_labels.of_others:
            others = task_labels.of_others
            remarks.append(f"{task}: labels of replies that differ from this run's: {others}")
        if task_labels.labels:
            scales = scales_in(key, task) if key else known_scales(run, graded[task])
            correction = Correction(graded[task], task_labels.labels, scales)
            tasks[task] = correction.report()
            remarks += [f"{task}: {remark}" for remark in correction.remarks]
    if not any(report["dimensions"] or report.get("pairs") for report in tasks.values()):
        raise DataError(
            f"No label in '{labels}' can be used.",
            f"{'; '.join(remarks)}.",
            "Label the judge's dimensions on its scales: soul judge sheet RUN lists them.",
        )
    return {
        "command": COMMAND, "run": str(run), "labels": str(labels), "tasks": tasks,
        "remarks": remarks,
    }  # fmt: skip


@dataclass
class Correction:
    """The correction of one task: its judged episodes, human labels of some of them, and scales."""

    episodes: Sequence[GradedEpisode]
    labels: Sequence[PersonLabel]
    scales: Mapping[str, RatingScale]
    remarks: list[str] = field(default_factory=list)

    def report(self) -> dict[str, Any]:
        """Plain JSON values: `dimensions` by name (the headline first, if it can be computed),
        `pairs` and `raters`."""
        single = self._on_scale([label for label in self.labels if not label.other])
        by_dimension: dict[str, list[PersonLabel]] = {}
        for label in single:
            by_dimension.setdefault(label.dimension, []).append(label)
        cells: dict[str, Any] = {}
        for name, labels in by_dimension.items():
            if name != HEADLINE and not any(name in e.grades for e in self.episodes):
                self.remarks.append(f"people labelled '{one_line(name, 60)}', but no judge did")
                continue
            cells |= self._dimension(name, labels)
        headline = self._headline(by_dimension)
        pairs = self._pairs([label for label in self.labels if label.other])
        return {
            "dimensions": {**headline, **cells},
            **({"pairs": pairs} if pairs else {}),
            "raters": sorted({label.rater for label in self.labels}),
        }

    def _on_scale(self, labels: Sequence[PersonLabel]) -> list[PersonLabel]:
        """The labels, without numbers that are off the scale of their dimension."""
        fitting, off = [], dict[str, int]()
        for label in labels:
            scale, number = self.scales.get(label.dimension), _number(label.label)
            low, high = scale.ends if scale and scale.numeric else (-math.inf, math.inf)
            if number is None or low <= number <= high:
                fitting.append(label)
            else:
                off[label.dimension] = off.get(label.dimension, 0) + 1
        for name, count in off.items():
            low, high = self.scales[name].ends
            self.remarks.append(
                f"labels of '{name}' left out because they are outside its scale ({low:g} to "
                f"{high:g}): {count}"
            )
        return fitting

    # -- one dimension --

    def _dimension(self, name: str, labels: Sequence[PersonLabel]) -> dict[str, Any]:
        """The cells of a dimension: one if it is numeric, else one per reported label."""
        agreement = self._agreement(name, labels)
        if agreement["level"] == "interval":
            people = _means(labels)
            lost = len({label.key for label in labels}) - len(people)
            if lost:
                self.remarks.append(
                    f"labels of '{name}' left out because they are not numbers: {lost}"
                )
            scale = self.scales.get(name)
            ends = scale.ends if scale else None
            return {name: {**self._powered(self._judged(name), people, ends), **agreement}}
        cells = {}
        for label in self._counted(name, labels):
            people = _shares(labels, label)
            judged = self._judged(name, label)
            cells[f"{name}={label}"] = {**self._powered(judged, people, (0.0, 1.0)), **agreement}
        return cells

    def _counted(self, name: str, labels: Sequence[PersonLabel]) -> list[str]:
        """The labels whose shares are reported; of two labels only the second."""
        names = {str(grade) for e in self.episodes for grade in e.grades.get(name, ())}
        names |= {label.label for label in labels}
        scale = self.scales.get(name)
        ordered = [n for n in scale.labels if n in names] if scale else sorted(names)
        return ordered[1:] if len(ordered) == 2 else ordered

    def _judged(self, name: str, label: str | None = None) -> dict[tuple[str, int], float]:
        """Episode → mean grade of the judges, or the share of judges that chose `label`."""
        judged = {}
        for episode in self.episodes:
            grades = episode.grades.get(name, ())
            if name == HEADLINE:
                grades = (headline_grade(episode),)
            numbers = [float(g == label) if label is not None else g for g in grades]
            numeric = [float(n) for n in numbers if not isinstance(n, str)]
            if numeric:
                judged[_episode_key(episode)] = sum(numeric) / len(numeric)
        return judged

    def _powered(
        self,
        judged: Mapping[tuple[str, int], float],
        people: Mapping[tuple[str, int], float],
        scale: tuple[float, float] | None,
    ) -> dict[str, Any]:
        rated = [e for e in self.episodes if _episode_key(e) in judged]
        keys = [_episode_key(e) for e in rated]
        mean = powered_mean(
            [judged[key] for key in keys],
            [people.get(key) for key in keys],
            [e.cluster for e in rated],
            scale,
        )
        if mean.labelled_clusters < MIN_LABELLED:
            few = (
                f"{mean.labelled_clusters} labelled clusters are too few to use the judge's scores"
            )
            if few not in self.remarks:
                self.remarks.append(few)
        return mean.as_dict()

    # -- agreement --

    def _agreement(self, name: str, labels: Sequence[PersonLabel]) -> dict[str, Any]:
        level = self._level(name)
        raters = sorted({label.rater for label in labels})
        units: dict[OpinionKey, list[Grade | None]] = {}
        for label in labels:
            grades = units.setdefault((_unit(label.key), 0), [None] * len(raters))
            grades[raters.index(label.rater)] = label.label
        clusters = {_unit(_episode_key(e)): e.cluster for e in self.episodes}
        between = rater_agreement(units, clusters, level) if len(raters) > 1 else None
        judged = self._first_opinions(name)
        both: dict[OpinionKey, list[Grade | None]] = {
            unit: [judged[unit[0]], _commonest(grades, level)]
            for unit, grades in units.items()
            if unit[0] in judged
        }
        return {
            "level": level,
            "between_raters": between,
            "judge_and_people": rater_agreement(both, clusters, level),
        }

    def _level(self, name: str) -> Level:
        grades = [grade for e in self.episodes for grade in e.grades.get(name, ())]
        return "nominal" if any(isinstance(grade, str) for grade in grades) else "interval"

    def _first_opinions(self, name: str) -> dict[str, Grade]:
        if name == HEADLINE:
            return {_unit(_episode_key(e)): headline_grade(e) for e in self.episodes}
        return {
            _unit(_episode_key(e)): e.grades[name][0] for e in self.episodes if name in e.grades
        }

    # -- the headline --

    def _headline(self, by_dimension: Mapping[str, Sequence[PersonLabel]]) -> dict[str, Any]:
        """The headline's cell, if the headline is a weighted sum of dimensions that people rated.

        The weights are fitted to the judged episodes. If they are not exact for every episode or
        not unique, there is no headline for people's labels, and a remark says so.
        """
        if HEADLINE in by_dimension:
            return {}
        names = [n for n in by_dimension if self._level(n) == "interval" and self._judged(n)]
        judged = {name: self._judged(name) for name in names}
        episodes = [e for e in self.episodes if all(_episode_key(e) in judged[n] for n in names)]
        weights = _weights(
            [[judged[n][_episode_key(e)] for n in names] for e in episodes],
            [headline_grade(e) for e in episodes],
        )
        if weights is None:
            self.remarks.append(
                "the headline is not corrected: it is not a weighted sum of the dimensions that "
                "people rated, or some of them never vary"
            )
            return {}
        people = {n: _means(by_dimension[n]) for n in names}
        shared = set.intersection(*(set(people[n]) for n in names))
        of_people = {
            key: float(
                weights[0]
                + sum(w * people[n][key] for w, n in zip(weights[1:], names, strict=True))
            )
            for key in shared
        }
        cell = self._powered(self._judged(HEADLINE), of_people, self._headline_ends(weights, names))
        shown = {"constant": weights[0], **dict(zip(names, weights[1:], strict=True))}
        return {HEADLINE: {**cell, "level": "interval", "weights": shown}}

    def _headline_ends(
        self, weights: Sequence[float], names: Sequence[str]
    ) -> tuple[float, float] | None:
        if not all(name in self.scales for name in names):
            return None
        ends = [
            sorted(w * end for end in self.scales[n].ends)
            for w, n in zip(weights[1:], names, strict=True)
        ]
        return weights[0] + sum(low for low, _ in ends), weights[0] + sum(high for _, high in ends)

    # -- pairs --

    def _pairs(self, labels: Sequence[PersonLabel]) -> dict[str, Any] | None:
        values = {e.record.key: headline_grade(e) for e in self.episodes}
        fitting = [x for x in labels if x.record in values and x.other in values]
        if not fitting:
            return None
        units: dict[OpinionKey, list[Grade | None]] = {}
        raters = sorted({label.rater for label in fitting})
        for label in fitting:
            opinion = units.setdefault((f"{label.record}+{label.other}", 0), [None] * len(raters))
            opinion[raters.index(label.rater)] = label.label
        sides = {f"{x.record}+{x.other}": (x.record, x.other) for x in fitting}
        cluster_of = {e.record.key: e.cluster for e in self.episodes}
        clusters = {pair: cluster_of[record] for pair, (record, _) in sides.items()}
        both: dict[OpinionKey, list[Grade | None]] = {
            (pair, i): [_order(*(values[key] for key in sides[pair])), _commonest(o, "nominal")]
            for (pair, i), o in units.items()
        }
        first = [label.shown == "A" for label in fitting if label.shown in ("A", "B")]
        return {
            "dimension": PREFERENCE,
            "n": len(units),
            "between_raters": rater_agreement(units, clusters, "nominal") if raters[1:] else None,
            "judge_and_people": rater_agreement(both, clusters, "nominal"),
            "first_preferred": sum(first) / len(first) if first else None,
        }


def _unit(key: tuple[str, int]) -> str:
    return f"{key[0]}/{key[1]}"


def _order(a: float, b: float) -> str:
    """The preference that follows from the judge's two scores."""
    return "Tie" if a == b else "A" if a > b else "B"


def _number(label: str) -> float | None:
    try:
        number = float(label)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _means(labels: Sequence[PersonLabel]) -> dict[tuple[str, int], float]:
    numbers: dict[tuple[str, int], list[float]] = {}
    for label in labels:
        number = _number(label.label)
        if number is not None:
            numbers.setdefault(label.key, []).append(number)
    return {key: sum(some) / len(some) for key, some in numbers.items()}


def _shares(labels: Sequence[PersonLabel], name: str) -> dict[tuple[str, int], float]:
    hits: dict[tuple[str, int], list[bool]] = {}
    for label in labels:
        hits.setdefault(label.key, []).append(label.label == name)
    return {key: sum(some) / len(some) for key, some in hits.items()}


def _commonest(grades: Sequence[Grade | None], level: Level) -> Grade | None:
    present = [grade for grade in grades if grade is not None]
    if level == "nominal":
        return min(present, key=lambda g: (-present.count(g), str(g)), default=None)
    numbers = [n for n in (_number(str(grade)) for grade in present) if n is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _weights(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """Constant and weights of the unique weighted sum that fits every value; None if there is
    none."""
    table = np.array([[1.0, *row] for row in rows], dtype=np.float64)
    if not rows or not rows[0] or len(rows) <= table.shape[1]:
        return None
    target = np.array(values, dtype=np.float64)
    solution, _, rank, _ = np.linalg.lstsq(table, target, rcond=None)
    fits = float(np.abs(table @ solution - target).max()) <= _EXACT
    return [float(w) for w in solution] if fits and rank == table.shape[1] else None
