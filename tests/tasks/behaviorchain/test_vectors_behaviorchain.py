"""Conformance: BehaviorChain's answers and rewards in both protocols.

A row without options cannot be answered: `paper` refuses it, where the reference pays for a letter
that was never offered.
"""

from __future__ import annotations

import json

import pytest

from soulkit.errors import DataError
from tests.support.letters import assert_paper, assert_reference, reading
from tests.support.vectors import Vector, load_vectors

VECTORS = load_vectors("behavior_chain.choice")


def offers_nothing(vector: Vector) -> bool:
    row = json.loads(vector.input["row"]["raw"])
    return not (row.get("options_dict") or row.get("options"))


@pytest.mark.parametrize("vector", VECTORS)
def test_choice(vector: Vector) -> None:
    if vector.raises:
        with pytest.raises(DataError):
            reading("behaviorchain", "reference", vector)
        return
    assert_reference(reading("behaviorchain", "reference", vector), vector, "behavior_chain")


@pytest.mark.parametrize("vector", VECTORS)
def test_paper(vector: Vector) -> None:
    if vector.raises or offers_nothing(vector):
        with pytest.raises(DataError):
            reading("behaviorchain", "paper", vector)
        return
    assert_paper(reading("behaviorchain", "paper", vector), vector)
