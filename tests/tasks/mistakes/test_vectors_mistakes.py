"""Conformance: MISTAKES' answers, rewards and break-downs; every vector in both protocols.

`paper` gives the same value unless one of DEPARTURES says why not.
"""

from __future__ import annotations

import pytest

from soulkit.errors import DataError
from tests.support.letters import THINKING, logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.mistakes.reference import reference_aggregates

DEPARTURES = {
    **THINKING,
    "first-tag-wins": "the last tag decides",
}
TIDIED = "target longer than a letter"
"""`A)` is no letter to the reference, and the letter A to `paper`."""


@pytest.mark.parametrize("vector", load_vectors("mistakes.choice"))
def test_reference(vector: Vector) -> None:
    task = task_of("mistakes", "reference")
    output = vector.input["output_text"] or ""
    example = task.example(vector.input["row"])
    score = score_text(task, example, output)
    actual = {"predicted": score.words or None, "reward": score.reward,
              "metrics": logged("mistakes", vector, score),
              "correct": task.gold_letter(example)}  # fmt: skip
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", load_vectors("mistakes.choice"))
def test_paper(vector: Vector) -> None:
    task = task_of("mistakes")
    if not vector.expected["correct"]:
        with pytest.raises(DataError, match="names none of the row's options"):
            task.example(vector.input["row"])
        return
    score = score_text(task, task.example(vector.input["row"]), vector.input["output_text"] or "")
    if set(vector.quirks) & set(DEPARTURES) or score.status == "salvaged" or vector.note == TIDIED:
        return  # the paper reading of these has tests of its own
    assert (score.words or None, score.value) == (
        vector.expected["predicted"],
        vector.expected["reward"],
    )


@pytest.mark.parametrize(
    "vector", load_vectors("mistakes.lexical", fns={"aggregates"}, formula={"aggregates"})
)
def test_aggregates(vector: Vector) -> None:
    assert_matches(reference_aggregates(vector.input["results"]), vector.expected["result"])
