"""Conformance of Humanual: every line under `reference`, and where `paper` differs, why."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.humanual import scores
from soulkit.tasks.humanual.replies import field_text, read_comment
from soulkit.types import Score
from tests.support.humanual import example, scored
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.humanual import reference

REPAIRED = {
    "first-tag-wins": "the last tag decides",
    "unclosed-think-kept": "unclosed thinking is not said",
    "unclosed-tag-kept-in-text": "a mark is no part of what is said",
    "missing-tag-returns-whole-text": "marks that are left over are no part of what is said",
    "per-dimension-score-not-clamped": "a score off its scale is unreadable",
    "nan-score-becomes-full-reward": "a score that is no number is unreadable",
    "judge-failure-becomes-zero": "the episode is unscored",
}
"""Quirk → what `paper` does instead."""
UNUSED: dict[str, Callable[[Any], float]] = {
    "judge_response": reference.judge_response,
    "judge_response_subscores": reference.judge_response_subscores,
}
COUNTED: dict[str, Callable[..., Any]] = {
    "lexical_f1": scores.lexical_f1,
    "length_factor": scores.length_factor,
    "aggregates": reference.reference_aggregates,
}
LOOP = [p for p in load_vectors("humanual.judged")
        if p.values[0] is None or not p.values[0].family]  # fmt: skip


@pytest.mark.parametrize("vector", load_vectors("humanual.parse"))
def test_parse(vector: Vector) -> None:
    inputs = vector.input
    if vector.family == "tokenize":
        assert_matches({"result": scores.word_tokens(inputs["text"])}, vector.expected)
        return
    actual = field_text(inputs["text"], inputs["field"])
    assert_matches({"result": actual}, vector.expected)


@pytest.mark.parametrize("vector", load_vectors("humanual.parse"))
def test_replies_under_paper(vector: Vector) -> None:
    if vector.family != "extract_field" or vector.input["field"] != "response":
        return
    comment, status = read_comment(vector.input["text"] or "", "paper")
    if comment != vector.expected["result"]:
        assert set(vector.quirks) & set(REPAIRED) and status in ("salvaged", "empty", "ok")
    elif "missing-tag-returns-whole-text" in vector.quirks:
        assert status == "salvaged"


@pytest.mark.parametrize("vector", load_vectors("humanual.lexical", formula={"aggregates"}))
def test_lexical(vector: Vector) -> None:
    arguments = {k: v for k, v in vector.input.items() if k != "fn"}
    assert_matches({"result": COUNTED[vector.family](**arguments)}, vector.expected)


# -- judged --------------------------------------------------------------------------------------


def as_logged(numbers: Mapping[str, Any]) -> dict[str, Any]:
    value = numbers["likeness"]
    names = {"sides_mean": "judge_score", "length_factor": "length_factor",
             "lexical_f1": "lexical_f1"}  # fmt: skip
    sides = {f"{axis}_score": numbers[f"axis/{axis}"] for axis in scores.AXES
             if f"axis/{axis}" in numbers}  # fmt: skip
    parts = {label: numbers[name] for name, label in names.items() if name in numbers}
    logged = {"score": value, "parse_success": bool(sides), **sides, **parts}
    return {**{f"humanual/{name}": number for name, number in logged.items()}, "all/score": value}


@pytest.mark.parametrize(
    "vector", load_vectors("humanual.judged", formula={"", *UNUSED})
)  # fmt: skip
def test_published_numbers(vector: Vector) -> None:
    inputs = vector.input
    if vector.raises:
        with pytest.raises((KeyError, TypeError, ValueError)) as raised:
            published(inputs)
        assert raised.type.__name__ == vector.expected["error"]
        return
    assert_matches(published(inputs), vector.expected)


def published(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if unused := UNUSED.get(inputs.get("fn", "")):
        return {"score": unused(inputs["verdict"])}
    comment, _ = read_comment(inputs["output_text"] or "", "reference")
    verdict = None if inputs["verdict"] == "RAISE" else inputs["verdict"]
    numbers = reference.reference_numbers(verdict, comment, inputs["row"]["completion"])
    return {"reward": numbers["likeness"], "metrics": as_logged(numbers), "generated": comment}


def judged(vector: Vector, protocol: str) -> tuple[Score, int]:
    """The score of a vector's reply by a judge over HTTP, and how often that one was asked."""
    verdict = vector.input["verdict"]
    words = "" if verdict in (None, "RAISE") else json.dumps(verdict)
    one = example(protocol, **vector.input["row"])
    score, requests = scored(vector.input["output_text"] or "", words, one, protocol)
    return score, len(requests)


def is_read(vector: Vector) -> bool:
    """Whether a judge's words hold six numbers; a yes is none."""
    verdict = vector.input["verdict"]
    if vector.raises or not isinstance(verdict, dict):
        return False
    numbers = [verdict[axis]["score"] for axis in scores.AXES]
    return all(isinstance(n, int | float) and not isinstance(n, bool) and n == n for n in numbers)


@pytest.mark.parametrize("vector", LOOP)
def test_judged_over_http(vector: Vector) -> None:
    """A judge that cannot be read scores nothing in any protocol; all else is the reference's."""
    score, calls = judged(vector, "reference")
    if not is_read(vector):
        assert (score.status, score.reason, calls) == ("unscored", "judge_error", 2)
        return
    numbers = {"likeness": score.value, **score.metrics}
    assert calls == 1 and score.reward == score.value
    assert_matches(as_logged(numbers), vector.expected["metrics"])


@pytest.mark.parametrize("vector", LOOP)
def test_judged_under_paper(vector: Vector) -> None:
    try:
        score, calls = judged(vector, "paper")
    except DataError:
        why = ("empty", "JSON object")
        assert any(word in vector.note for word in why), "nothing to answer, nothing to compare"
        return
    repaired = set(vector.quirks) & set(REPAIRED)
    if score.status == "empty":
        assert (score.reward, calls) == (0.0, 0) and not (vector.input["output_text"] or "").strip()
    elif score.status == "unscored":
        assert calls == 2 and (repaired or not is_read(vector))
    elif not repaired or score.status == "salvaged":
        assert_matches(score.reward, vector.expected["reward"])
    assert all(0 <= n <= 1 for n in score.metrics.values() if n is not None)
