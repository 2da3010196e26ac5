"""Conformance: TwinVoice's answers, rewards and break-downs in both protocols."""

from __future__ import annotations

import pytest

from soulkit.errors import DataError
from tests.support.letters import assert_paper, assert_reference, reading
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.twinvoice.reference import reference_aggregates


@pytest.mark.parametrize("vector", load_vectors("twinvoice.choice"))
def test_choice(vector: Vector) -> None:
    if vector.raises:
        with pytest.raises(DataError):
            reading("twinvoice", "reference", vector)
        return
    assert_reference(reading("twinvoice", "reference", vector), vector, "twinvoice")


@pytest.mark.parametrize("vector", load_vectors("twinvoice.choice"))
def test_paper(vector: Vector) -> None:
    if vector.raises or "negative-index-wraps" in vector.quirks:
        with pytest.raises(DataError):
            reading("twinvoice", "paper", vector)
        return
    assert_paper(reading("twinvoice", "paper", vector), vector)


@pytest.mark.parametrize(
    "vector", load_vectors("twinvoice.lexical", fns={"aggregates"}, formula={"aggregates"})
)
def test_aggregates(vector: Vector) -> None:
    assert_matches(reference_aggregates(vector.input["results"]), vector.expected["result"])
