"""Conformance: ToMBench's answers and rewards in both protocols.

Of the reference's failures one is not kept, in either protocol: it crashes where a model returned
nothing at all (`null-output-crash`); here that is an empty reply and scores the minimum.
"""

from __future__ import annotations

import pytest

from soulkit.errors import DataError
from tests.support.letters import assert_paper, assert_reference, reading
from tests.support.vectors import Vector, load_vectors

VECTORS = load_vectors("tombench.choice")


@pytest.mark.parametrize("vector", VECTORS)
def test_choice(vector: Vector) -> None:
    if "null-output-crash" in vector.quirks:
        actual = reading("tombench", "reference", vector)
        assert (actual["reward"], actual["status"]) == (0.0, "empty")
        return
    if vector.raises:
        with pytest.raises(DataError):
            reading("tombench", "reference", vector)
        return
    assert_reference(reading("tombench", "reference", vector), vector, "tombench")
    length = vector.expected["metrics"]["tombench/response_len"]
    assert length == len((vector.input["output_text"] or "").split())


@pytest.mark.parametrize("vector", VECTORS)
def test_paper(vector: Vector) -> None:
    gold = str(vector.input["row"].get("correct_letter") or "").strip()
    if not gold:
        with pytest.raises(DataError, match="none of the row's options"):
            reading("tombench", "paper", vector)
        return
    if "null-output-crash" in vector.quirks:
        assert reading("tombench", "paper", vector)["status"] == "empty"
        return
    assert_paper(reading("tombench", "paper", vector), vector)
