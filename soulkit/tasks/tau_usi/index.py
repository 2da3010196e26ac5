"""The user simulation index (USI): how closely simulated customers resemble people.

    row      mean of each feature over the tasks of both sides (shares in percent)
    D1..D4   conversation, information, clarification, reaction: 100 · mean over a dimension's
             features of 2·min(m, h) / (m + h), 1 where both are 0
    ECE      Σ share of the tasks in a bin · |success of simulated − success of people|, five bins
    Eval     100 · (1 − mean |difference|) over the answers to the survey, each in [0, 1]
    USI      mean(D1, D2, D3, D4, [Eval,] 100·(1 − ECE)), averaged over the batches of people

Only the customer's words count, without tool markup and thinking. Features that need a word list
are None without the user's copy of it (`people.py`). A missing answer is drawn (seed 42).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from soulkit.judge.structured import LENIENT, scan
from soulkit.judge.verdict import spoken

Features = Mapping[str, float | None]
Lexicons = Mapping[str, re.Pattern[str]]
"""Feature → pattern that is searched for in a lower-cased turn."""

DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "D1_conv": ("politeness_rate", "short_msg_rate", "formality_rate", "ack_only_rate",
                "verbosity_cv", "repeat_rate", "id_confuse_rate"),
    "D2_info": ("info_frontload", "id_density", "user_words_per_turn", "opening_words"),
    "D3_clarif": ("uncertainty_rate", "certainty_rate", "pushback_q_rate", "clarify_q_rate",
                  "info_q_rate"),
    "D4_react": ("emotion_rate", "accusation_rate", "pivot_rate"),
}  # fmt: skip
QUESTIONS = ("pushback_q_rate", "clarify_q_rate", "info_q_rate")
"""Kinds of questions; a turn counts as the first kind that matches."""
RATES = ("politeness_rate", "uncertainty_rate", "certainty_rate", "emotion_rate",
         "accusation_rate", "pivot_rate")  # fmt: skip
LISTED = (*RATES, "ack_only_rate", "id_confuse_rate", "id_density", *QUESTIONS)
"""The features that need a word list."""
PERCENT = tuple(
    name for names in DIMENSIONS.values() for name in names
    if name not in ("verbosity_cv", "id_density", "user_words_per_turn", "opening_words")
)  # fmt: skip
"""The features that a row of means holds in percent."""

STOP = "###STOP###"
SHORT, REPEATS, PARROT = 3, 3, 10
_CALL = "<function="
_MARKUP = (("<|think|>", "<|/think|>"), ("<|tool|>", "<|/tool|>"), (_CALL, "</function>"))
_DASH = re.compile("[\u2013\u2014]")
_COMMANDS = ("\\tau ", "\\reward")
_TAGS = ("<|canvas|>", "<|highlight|>", "<|survey|>")


def talk_features(turns: Sequence[str], lexicons: Lexicons) -> dict[str, float | None]:
    """Every feature of one customer's turns; empty if there are none."""
    if not turns:
        return {}
    plain = [without_markup(turn) for turn in turns]
    lowered = [turn.lower() for turn in plain]
    return {**_shape(plain), **_listed(lowered, lexicons)}


def _shape(plain: Sequence[str]) -> dict[str, float]:
    """The features that need no word list. Spread is the population's, divided by the mean."""
    words = [len(turn.split()) for turn in plain]
    mean = fmean(words)
    return {
        "short_msg_rate": fmean(n <= SHORT for n in words),
        "formality_rate": fmean(bool(_DASH.search(turn)) for turn in plain),
        "verbosity_cv": pstdev(words) / mean if mean else 0.0,
        "repeat_rate": float(_repeats(plain)),
        "info_frontload": sum(words[:2]) / sum(words) if mean else 0.0,
        "user_words_per_turn": mean,
        "opening_words": float(words[0]),
    }


def _repeats(plain: Sequence[str]) -> bool:
    """Whether any three consecutive words occur more than ten times."""
    counts: Counter[tuple[str, ...]] = Counter()
    for turn in plain:
        words = turn.lower().split()
        counts.update(zip(*(words[i:] for i in range(REPEATS)), strict=False))
    return any(n > PARROT for n in counts.values())


def _listed(lowered: Sequence[str], lexicons: Lexicons) -> dict[str, float | None]:
    def share(name: str, hit: Callable[[re.Pattern[str], str], bool]) -> float | None:
        pattern = lexicons.get(name)
        return None if pattern is None else fmean(hit(pattern, turn) for turn in lowered)

    rates = {
        name: share(name, lambda pattern, turn: pattern.search(turn) is not None) for name in RATES
    }
    confused, ids = lexicons.get("id_confuse_rate"), lexicons.get("id_density")
    return {
        **rates,
        "ack_only_rate": share("ack_only_rate", lambda p, turn: bool(p.match(turn.strip()))),
        "id_confuse_rate": confused and float(any(confused.search(turn) for turn in lowered)),
        "id_density": ids and fmean(sum(1 for _ in ids.finditer(turn)) for turn in lowered),
        **_question_rates(lowered, lexicons),
    }  # fmt: skip


def _question_rates(lowered: Sequence[str], lexicons: Lexicons) -> dict[str, float | None]:
    """Shares of the kinds of questions; each turn counts once, so all lists are needed."""
    if any(name not in lexicons for name in QUESTIONS):
        return dict.fromkeys(QUESTIONS)
    kinds = Counter(
        next((name for name in QUESTIONS if lexicons[name].search(turn)), "") for turn in lowered
    )
    return {name: kinds[name] / len(lowered) for name in QUESTIONS}


# -- messages --------------------------------------------------------------------------------------


def without_markup(text: str) -> str:
    """The text without thinking and tool calls; an unclosed call extends to the end."""
    for start, end in _MARKUP:
        text = "".join(_outside(text, start, end))
    return text


def _outside(text: str, start: str, end: str) -> Iterator[str]:
    """The text outside of everything between `start` and `end`."""
    place = 0
    while (opened := text.find(start, place)) >= 0:
        closed = text.find(end, opened + len(start))
        if closed < 0 and start != _CALL:
            break
        yield text[place:opened]
        place = len(text) if closed < 0 else closed + len(end)
    yield text[place:]


def is_persons_message(message: str) -> bool:
    """Whether a recorded person's message is part of the talk, not a command of the study."""
    if message.startswith(_COMMANDS) or message.strip() == "/stop":
        return False
    return not any(tag in message for tag in _TAGS)


def is_customer_message(message: str) -> bool:
    """Whether a simulated customer's message is part of the talk, not just a stop mark."""
    return message.strip() != STOP


SURVEY: Mapping[str, Mapping[str, int]] = {
    "task_success": {
        "No - Task failed": 1,
        "No - Due to a policy issue, which the agent clearly explained": 2,
        "Partially - Some progress": 3,
        "Yes - Task completed": 4,
        "Fully - Exceeded expectations": 5,
    },
    "efficiency": {
        "Very inefficient - Too many steps": 1,
        "Somewhat inefficient": 2,
        "About right": 3,
        "Very efficient": 4,
    },
    "question_amount_preference": {"Too many": 1, "About right": 2, "Too few": 1},
    "answer_effort_time": {"High": 1, "Medium": 2, "Low": 3},
    "human_like": {"No": 1, "Partially": 2, "Yes": 3},
    "interaction_flow": {"Not smooth": 1, "OK": 2, "Smooth": 3, "Excellent": 4},
    "overall_score": {
        "1 (Very poor)": 1, "2 (Poor)": 2, "3 (Acceptable)": 3, "4 (Good)": 4, "5 (Excellent)": 5,
    },
    "reuse": {"Absolutely no": 1, "No": 2, "Maybe": 3, "Yes": 4, "Absolutely yes": 5},
}  # fmt: skip
"""Question → option → its position, in the order of the form."""


def ordinal(question: str, answer: Any) -> float | None:
    """The position of an answer on its question's scale, in [0, 1]; None for an unknown option."""
    places = SURVEY[question]
    if not isinstance(answer, str) or answer not in places:
        return None
    low, high = min(places.values()), max(places.values())
    return (places[answer] - low) / (high - low)


def read_answers(text: str) -> dict[str, str]:
    """Question → the chosen option, from the last object with any answer; empty if there is
    none."""
    for span in reversed(scan(spoken(text, "paper"), LENIENT).spans):
        answers = {q: span.value[q] for q in SURVEY if ordinal(q, span.value.get(q)) is not None}
        if answers:
            return answers
    return {}


BINS = (0.2, 0.4, 0.6, 0.8)
MANY = 170
"""A model with more conversations than this has several runs, told apart by suffixes of the ids."""
_TASK = re.compile(r"([a-z_]*[a-z])_(\d+)")
_RUN = re.compile(r"(.+)_([123])")


@dataclass(frozen=True, slots=True)
class MeasuredTalk:
    """One conversation: its features, the service's success, and the customer's answers."""

    features: Features
    success: bool | None
    """None if the file does not say."""
    answers: Mapping[str, str] = field(default_factory=dict)


Talks = Mapping[str, MeasuredTalk]
"""Instance id → its conversation."""


@dataclass(frozen=True, slots=True)
class SimulationIndex:
    """The index over all batches: its mean, and the population's standard deviation over them."""

    usi: float
    spread: float
    dimensions: Mapping[str, float]
    ece: float
    survey: float | None
    tasks: int
    """Tasks that both sides have, in any batch."""


def task_of(instance: str) -> str:
    """`retail_12` from `retail_12_3`; any other id is its own task."""
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
    """The mean of each feature over the conversations that have it."""
    row = {}
    for names in DIMENSIONS.values():
        for name in names:
            values = [value for t in talks if (value := t.features.get(name)) is not None]
            if values:
                row[name] = fmean(values) * (100 if name in PERCENT else 1)
    return row


def similarity(one: float, other: float) -> float:
    """Similarity in [0, 1]; two zeros are equal."""
    total = abs(one) + abs(other)
    return 2 * min(abs(one), abs(other)) / total if total else 1.0


def dimension_scores(model: Features, people: Features) -> dict[str, float]:
    """Dimension → 0 to 100, for dimensions whose features all exist on both sides."""
    scores = {}
    for name, keys in DIMENSIONS.items():
        pairs = [(model.get(key), people.get(key)) for key in keys]
        alike = [similarity(m, h) for m, h in pairs if m is not None and h is not None]
        if len(alike) == len(keys):
            scores[name] = 100 * fmean(alike)
    return scores


def _against(runs: Sequence[Talks], people: Talks) -> tuple[dict[str, float], set[str]]:
    """(dimension scores, ids on both sides); feature rows of several runs are averaged."""
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
    """The index of one of the five bins; a value on a boundary belongs to the upper bin."""
    return sum(difficulty >= cut for cut in BINS)


def calibration_error(
    model: Mapping[str, bool], people: Mapping[str, bool], difficulty: Mapping[str, float]
) -> float | None:
    """ECE over the tasks that all three arguments contain; None if there are none."""
    tasks = [task for task in model if task in people and task in difficulty]
    gaps = []
    for number in range(len(BINS) + 1):
        inside = [task for task in tasks if bin_of(difficulty[task]) == number]
        if inside:
            gap = abs(fmean(model[t] for t in inside) - fmean(people[t] for t in inside))
            gaps.append(len(inside) / len(tasks) * gap)
    return sum(gaps) if tasks else None


def _successes(talks: Talks) -> dict[str, bool]:
    return {task_of(i): talk.success for i, talk in talks.items() if talk.success is not None}


def _ece(runs: Sequence[Talks], people: Talks, difficulty: Mapping[str, float]) -> float | None:
    human = _successes(people)
    errors = [calibration_error(_successes(run), human, difficulty) for run in runs]
    readable = [error for error in errors if error is not None]
    return fmean(readable) if readable else None


# -- survey ----------------------------------------------------------------------------------------


def answer_agreement(
    people: Mapping[str, str], model: Mapping[str, str], rng: random.Random
) -> float | None:
    """Agreement from 0 to 100 over the questions that the person answered; None if they answered
    none."""
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
    """Eval: the mean over conversations per batch, then the mean over batches."""
    rng, means = random.Random(42), []
    for people, model in zip(batches, answers, strict=False):
        ids = sorted(people.keys() & model.keys())
        scores = [answer_agreement(people[i].answers, model[i], rng) for i in ids]
        answered = [score for score in scores if score is not None]
        if answered:
            means.append(fmean(answered))
    return fmean(means) if means else None


# -- the index -------------------------------------------------------------------------------------


def simulation_index(
    runs: Sequence[Talks], batches: Sequence[Talks], difficulty: Mapping[str, float],
    survey: float | None = None,
) -> SimulationIndex | None:  # fmt: skip
    """The index of a model's runs; None unless every dimension and the ECE can be computed for at
    least one batch."""
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
    evaluation = [] if survey is None else [survey]
    values = [fmean([*scores.values(), 100 * (1 - ece), *evaluation]) for scores, ece in parts]
    return SimulationIndex(
        usi=fmean(values), spread=pstdev(values),
        dimensions={d: fmean(one[d] for one, _ in parts) for d in DIMENSIONS},
        ece=fmean(ece for _, ece in parts), survey=survey, tasks=len(shared),
    )  # fmt: skip
