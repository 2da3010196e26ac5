"""Conformance: how thinking is taken out of a completion, and how long texts are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from soulkit.judge.verdict import remove_think
from soulkit.tasks.budgets import first_words, last_words
from tests.support.reference import split_think, turns_within
from tests.support.vectors import Vector, assert_matches, load_vectors

Input = Mapping[str, Any]


def split(fields: Input) -> dict[str, str]:
    think, content = split_think(fields["text"] or "")
    return {"think": think, "content": content}


READERS: dict[str, Callable[[Input], Any]] = {
    "remove_think": lambda fields: remove_think(fields["text"], fields["remove_unclosed"]),
    "split_think": split,
    "truncate_text": lambda fields: first_words(fields["text"], fields["n_words"]),
    "truncate_text_left": lambda fields: last_words(fields["text"], fields["n_words"]),
    "truncate_turns_for_reference": lambda fields: turns_within(
        fields["turns"], fields["max_words_per_turn"]
    ),
}
FORMULAS = {"split_think", "truncate_turns_for_reference"}


@pytest.mark.parametrize("vector", load_vectors("common.parse", fns=set(READERS), formula=FORMULAS))
def test_vector(vector: Vector) -> None:
    if vector.family != "split_think" and vector.input.get("text", "") is None:
        # A missing completion never gets here: there is no text to take anything out of.
        assert vector.expected["result"] is None
        return
    assert_matches(READERS[vector.family](vector.input), vector.expected["result"])
