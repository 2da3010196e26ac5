"""Conformance: Hi-ToM's answers, rewards and break-downs under the reference protocol."""

from __future__ import annotations

import pytest

from tests.support.letters import logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.tom.reference import hitom_aggregates


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


@pytest.mark.parametrize(
    "vector", load_vectors("hitom.lexical", fns={"aggregates"}, formula={"aggregates"})
)
def test_aggregates(vector: Vector) -> None:
    assert_matches(hitom_aggregates(vector.input["results"]), vector.expected["result"])
