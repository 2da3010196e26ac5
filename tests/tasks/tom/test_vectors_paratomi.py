"""Conformance: ParaToMi's answers, rewards and break-downs under the reference protocol."""

from __future__ import annotations

import pytest

from tests.support.letters import logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.tom.reference import tomi_aggregates


@pytest.mark.parametrize("vector", load_vectors("paratomi.choice"))
def test_choice(vector: Vector) -> None:
    task = task_of("paratomi", "reference")
    output = vector.input["output_text"] or ""
    score = score_text(task, task.example(vector.input["row"]), output)
    actual = {
        "predicted": score.words,
        "reward": score.reward,
        "metrics": logged("paratomi", vector, score),
    }
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize(
    "vector", load_vectors("paratomi.lexical", fns={"aggregates"}, formula={"aggregates"})
)
def test_aggregates(vector: Vector) -> None:
    assert_matches(tomi_aggregates(vector.input["results"]), vector.expected["result"])
