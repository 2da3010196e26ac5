"""Conformance: Social-R1's answers and rewards; every vector in both protocols.

`paper` gives the same value unless one of DEPARTURES says why not.
"""

from __future__ import annotations

import pytest

from soulkit.errors import DataError
from tests.support.letters import THINKING, logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors

DEPARTURES = {
    **THINKING,
    "first-tag-wins": "the last tag decides",
    "gold-first-character": "a gold is an option's letter or text, or the row is bad",
    "unicode-casefold-letter": "the Kelvin sign and the long s are no letters of an option",
    "gold-letter-not-trimmed": "`B.` is the letter B",
}


@pytest.mark.parametrize("vector", load_vectors("social_r1.choice"))
def test_reference(vector: Vector) -> None:
    task = task_of("social_r1", "reference")
    if vector.raises:
        with pytest.raises(DataError):
            task.example(vector.input["row"])
        return
    output = vector.input["output_text"] or ""
    example = task.example(vector.input["row"])
    score = score_text(task, example, output)
    actual = {"predicted": score.words or None, "reward": score.reward,
              "metrics": logged("social_r1", vector, score),
              "correct": task.gold_letter(example)}  # fmt: skip
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", load_vectors("social_r1.choice"))
def test_paper(vector: Vector) -> None:
    task = task_of("social_r1")
    if vector.raises:
        with pytest.raises(DataError):
            task.example(vector.input["row"])
        return
    score = score_text(task, task.example(vector.input["row"]), vector.input["output_text"] or "")
    if set(vector.quirks) & set(DEPARTURES) or score.status == "salvaged":
        return  # the paper reading of these has tests of its own
    assert (score.words or None, score.value) == (
        vector.expected["predicted"],
        vector.expected["reward"],
    )
