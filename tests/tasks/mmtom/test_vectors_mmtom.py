"""Conformance: MMToM's answers, rewards and break-downs; every vector in both protocols.

`paper` gives the same value unless one of DEPARTURES says why not.
"""

from __future__ import annotations

import pytest

from soulkit.errors import DataError
from tests.support.letters import THINKING, logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.mmtom.reference import reference_aggregates

DEPARTURES = {
    **THINKING,
    "empty-gold-matches-empty-prediction": "a row without gold is a bad row",
    "first-tag-wins": "the last tag decides",
    "unicode-casefold-letter": "letters are normalised before they are read",
}


@pytest.mark.parametrize("vector", load_vectors("mmtom.choice"))
def test_reference(vector: Vector) -> None:
    task = task_of("mmtom", "reference")
    output = vector.input["output_text"] or ""
    score = score_text(task, task.example(vector.input["row"]), output)
    actual = {
        "predicted": score.words,
        "reward": score.reward,
        "metrics": logged("mmtom", vector, score),
    }
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", load_vectors("mmtom.choice"))
def test_paper(vector: Vector) -> None:
    task, row = task_of("mmtom"), vector.input["row"]
    gold = str(row.get("answer") or "").strip().lower()
    if gold.strip("(). ") not in ("a", "b"):
        with pytest.raises(DataError):
            task.example(row)
        return
    score = score_text(task, task.example(row), vector.input["output_text"] or "")
    tidied = gold not in ("a", "b")
    if set(vector.quirks) & set(DEPARTURES) or score.status == "salvaged" or tidied:
        return  # the paper reading of these has tests of its own
    assert (score.words, score.value) == (vector.expected["predicted"], vector.expected["reward"])


@pytest.mark.parametrize(
    "vector", load_vectors("mmtom.lexical", fns={"aggregates"}, formula={"aggregates"})
)
def test_aggregates(vector: Vector) -> None:
    assert_matches(reference_aggregates(vector.input["results"]), vector.expected["result"])
