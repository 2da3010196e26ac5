"""Conformance: how thinking is taken out of a completion."""

from __future__ import annotations

import pytest
from vectors_support import Vector, assert_matches, load_vectors

from soulkit.judge.verdict import remove_think


@pytest.mark.parametrize("vector", load_vectors("common.parse", fns={"remove_think"}))
def test_remove_think(vector: Vector) -> None:
    text = vector.input["text"]
    # A missing completion never reaches the parser: there is no text to take anything out of.
    result = None if text is None else remove_think(text, vector.input["remove_unclosed"])
    assert_matches(result, vector.expected["result"])
