"""Conformance: HumanLLM's rankings, ranks and rewards, and where the paper protocol departs."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.errors import DataError
from tests.support.letters import logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors

QUIRKS = {
    "first-tag-wins": "the last tag is the actor's final word",
    "unclosed-think-kept": "thinking that was never closed is no answer",
}
"""Quirk on which `paper` may depart from the published reading → why.

It also reads tags that the reference does not: `<ANSWER>`, blanks, semicolons, small, bold or wide
letters.
"""


def numbers(vector: Vector, protocol: str) -> dict[str, Any]:
    task = task_of("humanllm", protocol)
    output = vector.input["output_text"] or ""
    example = task.example(vector.input["row"])
    score = score_text(task, example, output)
    return {
        "predicted": list(task.ranking(example, score.words)) or None,
        "reward": score.reward,
        "metrics": {
            **logged("humanllm", vector, score),
            **{f"humanllm/{name}": value for name, value in score.metrics.items()},
        },
        "rank": task.rank(example, score.words) or -1,
    }


@pytest.mark.parametrize("vector", load_vectors("humanllm.choice"))
def test_reference(vector: Vector) -> None:
    if vector.raises:
        with pytest.raises(DataError):
            numbers(vector, "reference")
        return
    assert_matches(numbers(vector, "reference"), vector.expected)


@pytest.mark.parametrize("vector", load_vectors("humanllm.choice"))
def test_paper(vector: Vector) -> None:
    if vector.raises:
        with pytest.raises(DataError):
            numbers(vector, "paper")
        return
    actual = numbers(vector, "paper")
    departed = actual["predicted"] != vector.expected["predicted"]
    if departed and not set(vector.quirks) & set(QUIRKS):
        assert vector.expected["predicted"] is None, "without a quirk it only reads more"
        assert "<answer>" in vector.input["output_text"].lower(), "and only from a tag"
    if not departed:
        assert_matches(actual, vector.expected)
