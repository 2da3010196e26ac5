"""Conformance: AlignX's picks, sides and rewards, and where the paper protocol departs."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.errors import DataError
from tests.support.letters import logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors

SPLITS = ("demo", "pair", "ugc", "arbitrary", "history16")

QUIRKS = {
    "first-tag-wins": "the last tag is the actor's final word",
    "unclosed-think-kept": "thinking that was never closed is no answer",
    "nested-think-tail-kept": "the tail of nested thinking is thinking",
    "stray-think-close-kept": "what stands before a lone closing tag is thinking",
    "think-tag-case-sensitive": "thinking may be tagged in capitals",
}
"""Quirk on which `paper` may depart from the published reading → why.

It also reads tags that the reference does not: `<ANSWER>`, `a`, `A.`, `(A)`, `**A**`.
"""


def numbers(vector: Vector, protocol: str, split: str = "demo", **changes: Any) -> dict[str, Any]:
    task = task_of(f"alignx_{split}", protocol)
    output = vector.input["output_text"] or ""
    example = task.example({**vector.input["row"], **changes})
    score = score_text(task, example, output)
    return {
        "predicted": score.words or None,
        "reward": score.reward,
        "metrics": logged("alignx", vector, score),
        "gold_letter": task.gold_letter(example),
        "flip": example.fields["flip"],
    }


@pytest.mark.parametrize("vector", load_vectors("alignx.choice"))
def test_reference(vector: Vector) -> None:
    if vector.raises:
        with pytest.raises(DataError):
            numbers(vector, "reference")
        return
    for split in SPLITS:
        assert_matches(numbers(vector, "reference", split), vector.expected)


@pytest.mark.parametrize("vector", load_vectors("alignx.choice"))
def test_paper_in_the_same_order(vector: Vector) -> None:
    if vector.raises:
        with pytest.raises(DataError):
            numbers(vector, "paper")
        return
    actual = numbers(vector, "paper", flip=vector.expected["flip"])
    departed = actual["predicted"] != vector.expected["predicted"]
    if departed and not set(vector.quirks) & set(QUIRKS):
        assert vector.expected["predicted"] is None, "without a quirk it only reads more"
        assert "<answer>" in vector.input["output_text"].lower(), "and only from a tag"
    if not departed:
        assert_matches(actual, vector.expected)
