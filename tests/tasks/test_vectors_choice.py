"""Conformance of the choice tasks: answers, rewards and golds; every vector in both protocols.

Under `reference` every line has to come out exactly. Under `paper` a line may come out differently
only where it carries a quirk that `paper` repairs, where the answer was salvaged, or where the task
says why (`Choice.departs`); rows that `Choice.refused` names are bad rows there.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.judge.verdict import spoken
from soulkit.tasks.lifechoices.task import climb
from soulkit.types import Score
from tests.support.letters import THINKING, logged, released
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, conformance

FIRST_TAG = {"first-tag-wins": "the last tag decides"}
FOLDED = {"unicode-casefold-letter": "letters are normalised before they are read"}


def never(*_: Any) -> bool:
    return False


def only_more_is_read(vector: Vector, score: Score) -> bool:
    """Something in the tag that is no answer in the reference."""
    return vector.expected["predicted"] is None and "<answer>" in output(vector).lower()


def in_paper_alone(vector: Vector, score: Score) -> bool:
    return score.status == "salvaged"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the vectors of a task hold, and where `paper` differs."""

    vectors: str
    repaired: Mapping[str, str] = field(default_factory=dict)
    """Quirk → what `paper` does instead."""
    gold: str = ""
    """Under which name the vectors hold the gold's letter."""
    refused: Callable[[Vector], bool] = never
    departs: Callable[[Vector, Score], bool] = in_paper_alone
    row: Callable[[Mapping[str, Any]], Any] = lambda row: row
    predicted: Callable[[Any, Any, Score], Any] = lambda task, example, score: score.words or None
    more: Callable[[Any, Any, Score], Mapping[str, Any]] = field(default=lambda *_: {})
    """What else the vectors hold."""
    metrics: bool = True
    """Whether every metric has a counterpart; otherwise only those that are the reward."""
    measures: bool = False
    """Whether the vectors hold the task's own measures."""
    accepted: Callable[[Vector], bool] = never
    """Rows that the reference refuses alone."""
    variants: tuple[str, ...] = ("",)
    """Added to the name of the task: tasks that read alike."""


def output(vector: Vector) -> str:
    return vector.input["output_text"] or ""


def options_of_node(vector: Vector) -> Any:
    row = json.loads(vector.input["row"]["raw"])
    return row.get("options_dict") or row.get("options")


def letter_of_mmtom(vector: Vector) -> str:
    return str(vector.input["row"].get("answer") or "").strip().lower()


def bounds(vector: Vector) -> tuple[Any, Any]:
    row = vector.input["row"]
    return row.get("r_min"), row.get("r_max")


def off_the_scale(vector: Vector) -> bool:
    fields = task_of("socsci210", "reference").example(vector.input["row"]).fields
    return not fields["r_min"] <= float(fields["response"]) <= fields["r_max"]


LETTERED = {**THINKING, **FIRST_TAG, "think-not-stripped": "an answer inside thinking is none"}
CHOICES: dict[str, Choice] = {
    "alignx": Choice(
        vectors="alignx.choice", repaired={**THINKING, **FIRST_TAG}, gold="gold_letter",
        departs=only_more_is_read, more=lambda task, example, _: {"flip": example.fields["flip"]},
        variants=("_demo", "_pair", "_ugc", "_arbitrary", "_history16"),
    ),
    "behaviorchain": Choice(
        vectors="behavior_chain.choice", repaired=LETTERED, gold="correct_letter", row=released,
        metrics=False, refused=lambda v: not options_of_node(v),
    ),
    "fantom": Choice(vectors="fantom.choice", predicted=lambda task, example, score: score.words),
    "hitom": Choice(vectors="hitom.choice", predicted=lambda task, example, score: score.words),
    "humanllm": Choice(
        vectors="humanllm.choice",
        repaired={**FIRST_TAG, "unclosed-think-kept": THINKING["unclosed-think-kept"]},
        departs=only_more_is_read,
        predicted=lambda task, example, score: list(task.ranking(example, score.words)) or None,
        more=lambda task, example, score: {"rank": task.rank(example, score.words) or -1},
        measures=True,
    ),
    "lifechoices": Choice(
        vectors="lifechoices.choice", gold="correct_answer",
        repaired={
            **THINKING, **FIRST_TAG,
            "first-abcd-character-fallback": "prose is not searched for letters",
            "letter-taken-from-a-word": "prose is not searched for letters",
        },
        refused=lambda v: v.note in ("gold missing", "fewer options"),
        departs=lambda v, score: climb(spoken(output(v), "reference"))[1] == "salvaged",
    ),
    "mistakes": Choice(
        vectors="mistakes.choice", repaired={**THINKING, **FIRST_TAG}, gold="correct",
        refused=lambda v: not v.expected["correct"],
        # `A)` is no letter to the reference, and the letter A to `paper`.
        departs=lambda v, score: (
            in_paper_alone(v, score) or v.note == "target longer than a letter"
        ),
    ),
    "mmtom": Choice(
        vectors="mmtom.choice",
        repaired={
            **THINKING, **FIRST_TAG, **FOLDED,
            "empty-gold-matches-empty-prediction": "a row without gold is a bad row",
        },
        predicted=lambda task, example, score: score.words,
        refused=lambda v: letter_of_mmtom(v).strip("(). ") not in ("a", "b"),
        departs=lambda v, score: (
            in_paper_alone(v, score) or letter_of_mmtom(v) not in ("a", "b")
        ),
    ),
    "paratomi": Choice(
        vectors="paratomi.choice", predicted=lambda task, example, score: score.words
    ),
    "social_r1": Choice(
        vectors="social_r1.choice", gold="correct",
        repaired={
            **THINKING, **FIRST_TAG,
            "gold-first-character": "a gold is an option's letter or text, or the row is bad",
            "unicode-casefold-letter": "the Kelvin sign and the long s are no letters of an option",
            "gold-letter-not-trimmed": "`B.` is the letter B",
        },
    ),
    "socsci210": Choice(
        vectors="socsci210.choice",
        repaired={
            **THINKING, **FIRST_TAG, **FOLDED,
            "gold-truncated": "a fraction is no point of a list of options: a bad row",
            "out-of-range-clamped": "a number off the scale is no answer",
        },
        predicted=lambda task, example, score: float(score.words) if score.words else None,
        more=lambda task, example, score: {"is_exact": score.metrics["exact"] == 1},
        refused=lambda v: off_the_scale(v) or "gold-truncated" in v.quirks,
        accepted=lambda v: None in bounds(v),  # joined files are full of nulls
        departs=lambda v, score: (
            score.status in ("salvaged", "malformed") or None in bounds(v)
            or re.search(r"<answer>\s*<answer>", output(v), re.IGNORECASE) is not None
        ),
    ),
    "tombench": Choice(
        vectors="tombench.choice", gold="correct_letter", row=released, metrics=False,
        repaired={**LETTERED, "null-output-crash": "a reply without text is empty"},
        refused=lambda v: not str(v.input["row"].get("correct_letter") or "").strip(),
    ),
    "twinvoice": Choice(
        vectors="twinvoice.choice", repaired=LETTERED, gold="correct_letter", row=released,
        metrics=False, refused=lambda v: "negative-index-wraps" in v.quirks,
    ),
}  # fmt: skip
REFERENCE_ALONE = ("fantom", "hitom", "paratomi")
"""Tasks whose departures under `paper` have tests of their own."""
NAMES = {choice.vectors: name for name, choice in CHOICES.items()}


def answered(vector: Vector, protocol: str, variant: str = "", **changes: Any) -> Any:
    """(score, what the vectors hold of it) of a vector's reply."""
    name = NAMES[vector.file]
    choice, task = CHOICES[name], task_of(f"{name}{variant}", protocol)
    example = task.example(choice.row({**vector.input["row"], **changes}))
    score = score_text(task, example, output(vector))
    actual = {
        "predicted": choice.predicted(task, example, score),
        "reward": score.reward,
        **({choice.gold: task.gold_letter(example)} if choice.gold else {}),
        **choice.more(task, example, score),
    }
    if choice.metrics:
        measures = score.metrics if choice.measures else {}
        task_metrics = {f"{name}/{measure}": value for measure, value in measures.items()}
        actual["metrics"] = logged(name, vector, score) | task_metrics
    return score, actual


@conformance(*NAMES)
def test_reference(vector: Vector) -> None:
    choice = CHOICES[NAMES[vector.file]]
    if "null-output-crash" in vector.quirks:  # an empty reply here, in both protocols
        score, _ = answered(vector, "reference")
        assert (score.reward, score.status) == (0.0, "empty")
        return
    if vector.raises:
        if choice.accepted(vector):
            pytest.skip("a bound that is null counts as absent")
        with pytest.raises(DataError):
            answered(vector, "reference", choice.variants[0])
        return
    for variant in choice.variants:
        _, actual = answered(vector, "reference", variant)
        if choice.metrics:
            assert_matches(actual, vector.expected)
            continue
        names_held = actual.keys() & vector.expected.keys()
        assert_matches(
            {k: actual[k] for k in names_held}, {k: vector.expected[k] for k in names_held}
        )
        names = {f"{choice.vectors.partition('.')[0]}/reward", "all/score", "all/score_v1"}
        metrics = vector.expected["metrics"]
        paid = [metrics[name] for name in names & metrics.keys()]
        assert paid and set(paid) == {actual["reward"]}


@conformance(*(file for file, name in NAMES.items() if name not in REFERENCE_ALONE))
def test_paper(vector: Vector) -> None:
    choice = CHOICES[NAMES[vector.file]]
    order = {"flip": vector.expected["flip"]} if vector.expected.get("flip") is not None else {}
    crashed = "null-output-crash" in vector.quirks
    if (
        not crashed
        and not (vector.raises and choice.accepted(vector))
        and (vector.raises or choice.refused(vector))
    ):
        with pytest.raises(DataError):
            answered(vector, "paper", choice.variants[0], **order)
        return
    score, actual = answered(vector, "paper", choice.variants[0], **order)
    if crashed:
        assert score.status == "empty"
    elif not vector.raises and not set(vector.quirks) & set(choice.repaired):
        same = actual["predicted"] == vector.expected["predicted"]
        same &= actual["reward"] == pytest.approx(vector.expected["reward"])
        assert same or choice.departs(vector, score), vector.note


# -- published arithmetic that no command runs ----------------------------------------------------

Result = Mapping[str, Any]


def dimension_of(result: Result) -> str:
    logged = (result.get("extra_fields") or {}).get("reward_extra_info") or {}
    return str(logged.get("twinvoice/dimension") or result.get("dimension") or "unknown")


GROUPS: dict[str, Callable[[Result], list[str]]] = {
    "mistakes": lambda r: [f"target_{str(r.get('correct') or '').strip().upper() or 'unknown'}"],
    "mmtom": lambda r: [
        f"type_{r.get('question_type', 'unknown')}", f"episode_{r.get('episode', 'unknown')}"
    ],
    "twinvoice": lambda r: [dimension_of(r)],
}  # fmt: skip
"""Task → the groups of a result whose accuracies the reference's helper gives."""


@conformance(*(f"{name}.lexical" for name in GROUPS), formula={"aggregates"})
def test_aggregates(vector: Vector) -> None:
    groups = GROUPS[vector.file.partition(".")[0]]
    rewards: dict[str, list[float]] = defaultdict(list)
    for result in (r for r in vector.input["results"] if r is not None):
        for group in ("overall", *groups(result)):
            rewards[f"accuracy_{group}"].append(float(result.get("reward") or 0.0))
    accuracies = {group: sum(values) / len(values) for group, values in rewards.items()}
    assert_matches(accuracies, vector.expected["result"])
