"""Conformance: how the published scores read stories, candidates and choices out of strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from soulkit.data.literals import parse_candidates, parse_choices, parse_story
from soulkit.metrics.overlap import token_f1
from soulkit.tasks.fantom.task import name_list
from soulkit.tasks.social_r1.task import leading_letter
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.humanllm.reference import reformat_history

READERS: dict[str, Callable[[Any], Any]] = {
    "hitom.parse_choices": lambda value: parse_choices(value, "reference"),
    "paratomi.parse_story": lambda value: parse_story(value, "reference"),
    "paratomi.parse_candidates": lambda value: parse_candidates(value, "reference"),
    "humanllm.reformat_history": reformat_history,
    "social_r1.gold_letter": leading_letter,
    "fantom.str_to_list": name_list,
}
DIFFER = {"evaluates-python-source": "a data file must not run code"}


@pytest.mark.parametrize(
    "vector",
    load_vectors(
        "rows.parse",
        fns={*READERS, "fantom.f1"},
        differ=DIFFER,
        formula={"humanllm.reformat_history"},
    ),
)
def test_vector(vector: Vector) -> None:
    if vector.family == "fantom.f1":
        f1 = token_f1(vector.input["gold"], vector.input["pred"])
        assert_matches(f1, vector.expected["result"])
        return
    value = vector.input["text" if "text" in vector.input else "value"]
    assert_matches(READERS[vector.family](value), vector.expected["result"])
