"""Reliability of judges: statistics with intervals, computed from repeated judgements.

* retest: the same judge asked again; between: two judges; people: a judge and human labels
* length: do longer answers score higher, also at equal numbers of turns?
* position: does the first of two answers win, regardless of content?
* reading: how often was a verdict unreadable, and how often was the question asked again?

Agreement is Krippendorff's alpha of single opinions: interval level for numbers, nominal level for
labels. Episodes that rules scored without asking the judge are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soulkit.judge.pairwise import Ballot
from soulkit.metrics import agreement as stats
from soulkit.metrics.agreement import Level, Rating, Statistic
from soulkit.metrics.intervals import Floats, estimate
from soulkit.types import Score, Verdict

Grade = float | str
OpinionKey = tuple[str, int]
"""An episode, and the number of the opinion on it."""
HEADLINE = "headline"
"""The dimension of the score itself."""
PROSE = frozenset(
    ("reasoning", "reason", "reasons", "explanation", "comment", "quote", "evidence", "analysis")
)
"""Verdict fields with explanations, which are not part of the decision."""
_NUMBER = ("score", "value", "rating")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One opinion of one judge on one episode."""

    key: str
    """Key of the episode."""
    cluster: str
    judge: str
    sample: int
    said: Mapping[str, Grade] = field(default_factory=dict)
    """Dimension → number or label; empty if there is no verdict."""
    problem: str = ""
    """Why there is no verdict; empty if there is one."""
    answered: bool = True
    """False if the judge itself failed (server, context), which does not count as unreadable."""
    asked: int = 0
    """Number of questions; 0 if rules alone scored the episode."""
    again: int = 0
    """Number of re-asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Facts about an episode that do not depend on a judge."""

    words: int
    """Words of the actor."""
    turns: int
    people: Mapping[str, Grade] = field(default_factory=dict)
    """Dimension → human label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairJudgement:
    """A judge's preference between two answers to one example, in both orders; `flips` as in
    `pairwise.PairOutcome`."""

    key: str
    cluster: str
    judge: str
    ballots: tuple[Ballot, ...] = ()
    flips: tuple[bool, ...] = ()
    problem: str = ""


# -- from a score to numbers and labels ----------------------------------------------------------


def grades_in(score: Score) -> dict[str, Grade]:
    """Dimension → number or label, for a score based on one opinion of one judge.

    `headline` is the score's value. The dimensions of a verdict are its fields that are numbers,
    labels or `{score, reasoning}` objects, without explanations (PROSE). Dimensions of purposes
    other than `score` are named `purpose/field`."""
    grades: dict[str, Grade] = {}
    if score.value is not None:
        grades[HEADLINE] = score.value
    for verdict in score.verdicts:
        for name, value in dimensions(verdict).items():
            grades[name if verdict.purpose == "score" else f"{verdict.purpose}/{name}"] = value
    return grades


def dimensions(verdict: Verdict) -> dict[str, Grade]:
    """Field → number or label of a verdict."""
    decided = {name: _grade_of(value) for name, value in verdict.said.items() if name not in PROSE}
    return {name: value for name, value in decided.items() if value is not None}


def _grade_of(value: Any) -> Grade | None:
    if isinstance(value, Mapping):
        inner = next((value[name] for name in _NUMBER if name in value), None)
        return _grade_of(inner) if not isinstance(inner, Mapping) else None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return float(value)
    return value if isinstance(value, str) else None


# -- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ratings:
    values: Floats
    keys: tuple[str, ...]
    """The episode of each unit."""
    clusters: tuple[str, ...]
    level: Level

    def agreement(self) -> dict[str, Any]:
        """All statistics for the level of measurement as plain JSON values, with alpha in words:
        `trust` for its value, `at_worst` for the lower end of its interval."""
        statistics = {"alpha": self._with_interval(lambda t: stats.alpha(t, self.level), 2)}
        statistics["exact"] = self._point_value(stats.exact_agreement)
        if self.level == "interval":
            statistics["icc"] = self._with_interval(stats.icc, self.values.shape[-1])
            statistics["spearman"] = self._with_interval(_over_pairs(stats.spearman), 2)
            statistics["pearson"] = self._with_interval(_over_pairs(stats.pearson), 2)
            statistics["kappa"] = self._point_value(stats.kappa)
            statistics["mean_gap"] = self._point_value(stats.mean_gap)
        written = {name: value.as_dict() for name, value in statistics.items()}
        alpha = statistics["alpha"]
        words = {
            "trust": stats.alpha_in_words(alpha.value),
            "at_worst": stats.alpha_in_words(alpha.low),
        }
        return {"n": self.n, **written, **words}

    @property
    def n(self) -> int:
        """Number of episodes with two or more values."""
        return len(
            {key for key, rated in zip(self.keys, self._has_ratings(2), strict=True) if rated}
        )

    def _has_ratings(self, least: int) -> NDArray[np.bool_]:
        if not self.values.size:
            return np.zeros(len(self.clusters), dtype=bool)
        return (~np.isnan(self.values)).sum(axis=1) >= least

    def _with_interval(self, statistic: Callable[[Floats], Rating], least: int) -> Statistic:
        rated = self._has_ratings(least)
        clusters = [c for c, is_rated in zip(self.clusters, rated, strict=True) if is_rated]
        return stats.with_interval(self.values[rated], statistic, clusters)

    def _point_value(self, statistic: Callable[[Floats, Floats], Rating]) -> Statistic:
        value = _over_pairs(statistic)(self.values) if self.values.size else None
        return Statistic(value=value, n=self.n, why="" if value is not None else "no spread")


def _over_pairs(statistic: Callable[[Floats, Floats], Rating]) -> Callable[[Floats], Rating]:
    """The mean of a two-rater statistic over all pairs of raters for which it is defined."""

    def mean(table: Floats) -> Rating:
        pair_values = []
        for i, j in combinations(range(table.shape[1]), 2):
            both = ~np.isnan(table[:, i]) & ~np.isnan(table[:, j])
            pair_values.append(statistic(table[both, i], table[both, j]))
        defined = [value for value in pair_values if value is not None]
        return float(np.mean(defined)) if defined else None

    return mean


def _ratings(
    rows: Mapping[OpinionKey, Sequence[Grade | None]], clusters: Mapping[str, str], level: Level
) -> _Ratings:
    units = sorted(rows)
    labels = sorted({_name(v) for row in rows.values() for v in row if v is not None})
    codes = {label: float(place) for place, label in enumerate(labels)}

    def coded(value: Grade | None) -> Rating:
        if value is None:
            return None
        return _as_number(value) if level == "interval" else codes[_name(value)]

    table = stats.rating_table([[coded(v) for v in rows[unit]] for unit in units])
    keys = tuple(key for key, _ in units)
    return _Ratings(table, keys, tuple(clusters[key] for key in keys), level)


def _name(value: Grade) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _as_number(value: Grade) -> Rating:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


# -- the report ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reliability:
    """The judgements of one task, and the statistics computed from them."""

    judgements: Sequence[Judgement]
    subjects: Mapping[str, Subject]
    """Episode → facts about it."""
    matches: Sequence[PairJudgement] = ()

    def report(self) -> dict[str, Any]:
        """All statistics as plain JSON values."""
        return {
            "episodes": len({j.key for j in self.judgements if j.asked}),
            "by_rules": len({j.key for j in self.judgements if not j.asked}),
            "dimensions": {name: self._dimension(name) for name in self.dimensions},
            "reading": {judge: self._reading(judge) for judge in self.judges},
            "position": {judge: self._position(judge) for judge in self.judges},
            "unmatched_labels": self._unmatched(),
        }

    def _unmatched(self) -> list[str]:
        """Dimensions that people labelled but no verdict has; empty if there is no verdict."""
        if not self.dimensions:
            return []
        labelled = {name for s in self.subjects.values() for name in s.people}
        return sorted(labelled.difference(self.dimensions))

    @property
    def judges(self) -> list[str]:
        return list(dict.fromkeys(j.judge for j in self.judgements))

    @property
    def dimensions(self) -> list[str]:
        return list(dict.fromkeys(name for j in self.judgements for name in j.said))

    def level(self, dimension: str) -> Level:
        """`interval` if every value is a number, else `nominal`."""
        values = [j.said[dimension] for j in self.judgements if dimension in j.said]
        return "nominal" if any(isinstance(v, str) for v in values) else "interval"

    def _dimension(self, name: str) -> dict[str, Any]:
        level = self.level(name)
        report: dict[str, Any] = {"level": level, "retest": {}, "between": {}, "people": {}}
        for judge in self.judges:
            report["retest"][judge] = self._retest(name, judge)
            if any(name in s.people for s in self.subjects.values()):
                report["people"][judge] = self._people(name, judge)
        for one, other in combinations(self.judges, 2):
            report["between"][f"{one} and {other}"] = self._between(name, (one, other))
        if level == "interval":
            report["length"] = {judge: self._length(name, judge) for judge in self.judges}
        return report

    # -- agreement --

    def _retest(self, dimension: str, judge: str) -> dict[str, Any] | None:
        judgements = [j for j in self.judgements if j.judge == judge]
        samples = sorted({j.sample for j in judgements})
        if len(samples) < 2:
            return None
        rows: dict[OpinionKey, list[Grade | None]] = {
            (j.key, 0): [None] * len(samples) for j in judgements
        }
        for j in judgements:
            rows[j.key, 0][samples.index(j.sample)] = j.said.get(dimension)
        return self._agreement(rows, dimension)

    def _between(self, dimension: str, judges: Sequence[str]) -> dict[str, Any]:
        raters = [self._single(dimension, judge) for judge in judges]
        return self._agreement(_shared_units(raters), dimension)

    def _people(self, dimension: str, judge: str) -> dict[str, Any]:
        labels = {k: s.people[dimension] for k, s in self.subjects.items() if dimension in s.people}
        judged = self._single(dimension, judge)
        people = {(key, i): labels[key] for key, i in judged if key in labels}
        agreement = self._agreement(_shared_units([judged, people]), dimension)
        if self.level(dimension) == "interval":
            agreement["no_numbers"] = sum(_as_number(label) is None for label in labels.values())
        return agreement

    def _single(self, dimension: str, judge: str) -> dict[OpinionKey, Grade]:
        judgements = (j for j in self.judgements if j.judge == judge and dimension in j.said)
        return {(j.key, j.sample): j.said[dimension] for j in judgements}

    def opinion(self, dimension: str, judge: str) -> dict[str, float]:
        """Episode → the mean number that a judge gave it."""
        numbers_by_episode: dict[str, list[float]] = {}
        for (key, _), grade in sorted(self._single(dimension, judge).items()):
            if not isinstance(grade, str):
                numbers_by_episode.setdefault(key, []).append(grade)
        return {key: sum(numbers) / len(numbers) for key, numbers in numbers_by_episode.items()}

    def _agreement(
        self, rows: Mapping[OpinionKey, Sequence[Grade | None]], dimension: str
    ) -> dict[str, Any]:
        clusters = {j.key: j.cluster for j in self.judgements}
        return _ratings(rows, clusters, self.level(dimension)).agreement()

    # -- biases --

    def _length(self, dimension: str, judge: str) -> dict[str, Any]:
        """Correlation of score and length in words; the slope is in points per 100 words."""
        judged = self.opinion(dimension, judge)
        keys = sorted(key for key in judged if key in self.subjects)
        clusters = {j.key: j.cluster for j in self.judgements}
        rows = np.array(
            [[judged[k], self.subjects[k].words, self.subjects[k].turns] for k in keys], dtype=float
        ).reshape(len(keys), 3)
        of = [clusters[k] for k in keys]

        def measured(
            statistic: Callable[[Floats], Rating], *, smooth: bool = False
        ) -> dict[str, Any]:
            lacking = "scores or lengths do not vary"
            return stats.with_interval(
                rows, statistic, of, lacking=lacking, smooth=smooth
            ).as_dict()

        return {
            "spearman": measured(lambda t: stats.spearman(t[:, 0], t[:, 1])),
            "at_equal_turns": measured(stats.columns(stats.partial_spearman)),
            "points_per_100_words": measured(
                lambda t: stats.slope(t[:, 1] / 100, t[:, 0]), smooth=True
            ),
        }

    def _position(self, judge: str) -> dict[str, Any] | None:
        """Position bias; None if no pair was judged. Ties are left out of `prefers_first`."""
        pairs = [m for m in self.matches if m.judge == judge]
        if not pairs:
            return None
        flips = [(flip, m.cluster) for m in pairs for flip in m.flips]
        first = [
            (b.verdict == "A", m.cluster) for m in pairs for b in m.ballots if b.verdict != "Tie"
        ]
        return {
            "pairs": len(pairs),
            "unreadable": sum(bool(m.problem) for m in pairs),
            "flips": _share(flips),
            "prefers_first": _share(first),
        }

    # -- reading --

    def _reading(self, judge: str) -> dict[str, Any]:
        judgements = [j for j in self.judgements if j.judge == judge and j.asked]
        answered = [j for j in judgements if j.answered]
        questions = sum(j.asked for j in answered)
        return {
            "judgements": len(judgements),
            "no_answer": len(judgements) - len(answered),
            "unreadable": _share([(bool(j.problem), j.cluster) for j in answered]),
            "reasons": dict(Counter(j.problem for j in judgements if j.problem).most_common(5)),
            "asked_again": sum(j.again for j in answered) / questions if questions else None,
        }


def _shared_units(
    raters: Sequence[Mapping[OpinionKey, Grade]],
) -> dict[OpinionKey, list[Grade | None]]:
    shared = set(raters[0]).intersection(*raters[1:])
    return {unit: [one[unit] for one in raters] for unit in shared}


def _share(hits: Sequence[tuple[bool, Hashable]]) -> dict[str, Any]:
    values = [float(hit) for hit, _ in hits]
    share = estimate(values, [cluster for _, cluster in hits], binary=True)
    interval = {"ci_low": share.ci_low, "ci_high": share.ci_high}
    return {
        "value": share.mean, **interval, "n": share.n_scored, "n_clusters": share.n_clusters,
    }  # fmt: skip


def rater_agreement(
    rows: Mapping[OpinionKey, Sequence[Grade | None]],
    clusters: Mapping[str, str],
    level: Level,
) -> dict[str, Any]:
    """Agreement of raters (the columns of `rows`) as plain JSON values.

    `clusters` maps episode → cluster. With fewer than two raters, n is 0.
    """
    return _ratings(rows, clusters, level).agreement()
