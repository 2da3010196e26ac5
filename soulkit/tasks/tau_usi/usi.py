"""How like people simulated customers are, over all conversations: the user simulation index.

    row      mean of each feature over the tasks that both sides have (shares in percent)
    D        100 · mean over a dimension's features of 2·min(m, h) / (m + h), 1 where both are 0
    ECE      Σ share of the tasks in a bin · |success of simulated − success of people|, in five
             bins of difficulty (the pooled success of published simulators)
    Eval     100 · (1 − mean |difference|) over the answers to the survey, each in [0, 1]
    USI      mean(D1, D2, D3, D4, [Eval,] 100·(1 − ECE)), averaged over the batches of people

Pure arithmetic; what is read from files is read in `people.py`. Eval is there only
where answers of the model to the survey about the people's own conversations are; it is one number
for all batches, as published. An answer that the model did not give is drawn from the question's
places, from one stream for all (seed 42): the published code draws from NumPy's generator, so that
its draws differ from these.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from soulkit.tasks.tau_usi.features import DIMENSIONS, PERCENT, Features
from soulkit.tasks.tau_usi.survey import SURVEY, ordinal

BINS = (0.2, 0.4, 0.6, 0.8)
MANY = 170
"""A model with more conversations than this has several runs, told apart by the ends of the ids."""
_TASK = re.compile(r"([a-z_]*[a-z])_(\d+)")
_RUN = re.compile(r"(.+)_([123])")


@dataclass(frozen=True, slots=True)
class MeasuredTalk:
    """One conversation: its features, whether the service succeeded, what the customer answered."""

    features: Features
    success: bool
    answers: Mapping[str, str] = field(default_factory=dict)


Talks = Mapping[str, MeasuredTalk]
"""Instance id → its conversation."""


@dataclass(frozen=True, slots=True)
class Index:
    """The index against all batches: means, and the population's spread of the index over them."""

    usi: float
    spread: float
    dimensions: Mapping[str, float]
    ece: float
    survey: float | None
    tasks: int
    """Tasks that both sides have, in any batch."""


def task_of(instance: str) -> str:
    """`retail_12` of `retail_12_3`; an id of another form is its own task."""
    match = _TASK.match(instance)
    return f"{match[1]}_{match[2]}" if match else instance


def split_runs(talks: Talks) -> list[Talks]:
    """The runs of a model: one, unless it has more conversations than there are tasks."""
    if len(talks) <= MANY:
        return [talks]
    runs: dict[str, dict[str, MeasuredTalk]] = {}
    for instance, talk in talks.items():
        match = _RUN.fullmatch(instance)
        name, base = (match[2], match[1]) if match else ("0", instance)
        runs.setdefault(name, {})[base] = talk
    return [runs[name] for name in sorted(runs)]


# -- dimensions ------------------------------------------------------------------------------------


def feature_row(talks: Sequence[MeasuredTalk]) -> dict[str, float]:
    """The mean of each feature over conversations that all have it."""
    row = {}
    for names in DIMENSIONS.values():
        for name in names:
            values = [value for t in talks if (value := t.features.get(name)) is not None]
            if values:
                row[name] = fmean(values) * (100 if name in PERCENT else 1)
    return row


def similarity(one: float, other: float) -> float:
    """In [0, 1]; two that are both 0 are alike."""
    total = abs(one) + abs(other)
    return 2 * min(abs(one), abs(other)) / total if total else 1.0


def dimension_scores(model: Features, people: Features) -> dict[str, float]:
    """Dimension → 0 to 100, of those whose features are all there on both sides."""
    scores = {}
    for name, keys in DIMENSIONS.items():
        pairs = [(model.get(key), people.get(key)) for key in keys]
        alike = [similarity(m, h) for m, h in pairs if m is not None and h is not None]
        if len(alike) == len(keys):
            scores[name] = 100 * fmean(alike)
    return scores


def _against(runs: Sequence[Talks], people: Talks) -> tuple[dict[str, float], set[str]]:
    """(scores of the dimensions, ids on both sides): rows of runs are averaged."""
    rows, shared = [], set()
    for run in runs:
        ids = sorted(run.keys() & people.keys())
        if ids:
            rows.append(feature_row([run[i] for i in ids]))
            shared |= set(ids)
    if not rows:
        return {}, shared
    common = set.intersection(*(set(row) for row in rows))
    model = {name: fmean(row[name] for row in rows) for name in common}
    return dimension_scores(model, feature_row([people[i] for i in sorted(shared)])), shared


# -- calibration -----------------------------------------------------------------------------------


def bin_of(difficulty: float) -> int:
    """Which of the five bins; a cut-off belongs to the bin above it."""
    return sum(difficulty >= cut for cut in BINS)


def calibration_error(
    model: Mapping[str, bool], people: Mapping[str, bool], difficulty: Mapping[str, float]
) -> float | None:
    """ECE over tasks that all three know; None where there is no such task."""
    tasks = [task for task in model if task in people and task in difficulty]
    gaps = []
    for number in range(len(BINS) + 1):
        inside = [task for task in tasks if bin_of(difficulty[task]) == number]
        if inside:
            gap = abs(fmean(model[t] for t in inside) - fmean(people[t] for t in inside))
            gaps.append(len(inside) / len(tasks) * gap)
    return sum(gaps) if tasks else None


def _ece(runs: Sequence[Talks], people: Talks, difficulty: Mapping[str, float]) -> float | None:
    human = {task_of(i): talk.success for i, talk in people.items()}
    errors = [
        calibration_error({task_of(i): t.success for i, t in run.items()}, human, difficulty)
        for run in runs
    ]
    readable = [error for error in errors if error is not None]
    return fmean(readable) if readable else None


# -- survey ----------------------------------------------------------------------------------------


def answer_agreement(
    people: Mapping[str, str], model: Mapping[str, str], rng: random.Random
) -> float | None:
    """0 to 100 over the questions that the person answered; None where that is none."""
    gaps = []
    for question, places in SURVEY.items():
        human = ordinal(question, people.get(question))
        if human is None:
            continue
        answer = ordinal(question, model.get(question))
        if answer is None:
            low, *_, high = scale = sorted(set(places.values()))
            answer = (rng.choice(scale) - low) / (high - low)
        gaps.append(abs(human - answer))
    return 100 * (1 - fmean(gaps)) if gaps else None


def survey_agreement(
    batches: Sequence[Talks], answers: Sequence[Mapping[str, Mapping[str, str]]]
) -> float | None:
    """Eval: per batch the mean over conversations, then the mean over batches."""
    rng, means = random.Random(42), []
    for people, model in zip(batches, answers, strict=False):
        ids = sorted(people.keys() & model.keys())
        scores = [answer_agreement(people[i].answers, model[i], rng) for i in ids]
        answered = [score for score in scores if score is not None]
        if answered:
            means.append(fmean(answered))
    return fmean(means) if means else None


# -- the index -------------------------------------------------------------------------------------


def index(
    runs: Sequence[Talks], batches: Sequence[Talks], difficulty: Mapping[str, float],
    survey: float | None = None,
) -> Index | None:  # fmt: skip
    """The index of a model's runs; None unless every dimension and the ECE can be computed against
    at least one batch."""
    parts: list[tuple[dict[str, float], float]] = []
    shared: set[str] = set()
    for people in batches:
        dimensions, ids = _against(runs, people)
        ece = _ece(runs, people, difficulty)
        if len(dimensions) == len(DIMENSIONS) and ece is not None:
            parts.append((dimensions, ece))
            shared |= ids
    if not parts:
        return None
    values = [_mean_of_terms(dimensions, ece, survey) for dimensions, ece in parts]
    return Index(
        usi=fmean(values), spread=pstdev(values),
        dimensions={d: fmean(one[d] for one, _ in parts) for d in DIMENSIONS},
        ece=fmean(ece for _, ece in parts), survey=survey, tasks=len(shared),
    )  # fmt: skip


def _mean_of_terms(dimensions: Mapping[str, float], ece: float, survey: float | None) -> float:
    terms = [*dimensions.values(), 100 * (1 - ece)]
    return fmean(terms if survey is None else [*terms, survey])
