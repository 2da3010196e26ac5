"""Conformance: Hi-ToM's answers, rewards and break-downs under the reference protocol."""

from __future__ import annotations

import pytest
from letter_support import logged
from road_support import score_text, task_of
from vectors_support import Vector, assert_matches, load_vectors

from soulkit.tasks.hitom import reference_aggregates


@pytest.mark.parametrize("vector", load_vectors("hitom.choice"))
def test_choice(vector: Vector) -> None:
    task = task_of("hitom", "reference")
    output = vector.input["output_text"] or ""
    score = score_text(task, task.example(vector.input["row"]), output)
    actual = {
        "predicted": score.words,
        "reward": score.reward,
        "metrics": logged("hitom", vector, score),
    }
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", load_vectors("hitom.lexical", fns={"aggregates"}))
def test_aggregates(vector: Vector) -> None:
    assert_matches(reference_aggregates(vector.input["results"]), vector.expected["result"])
