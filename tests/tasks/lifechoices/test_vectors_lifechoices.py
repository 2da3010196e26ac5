"""Conformance: LifeChoices' answers and rewards; every vector in both protocols.

`paper` gives the same value unless one of DEPARTURES says why not, or the reference found the
letter on its ladder below the tag.
"""

from __future__ import annotations

import pytest

from soulkit.errors import DataError
from soulkit.judge.verdict import spoken
from soulkit.tasks.lifechoices.reference import climb
from tests.support.letters import THINKING, logged
from tests.support.road import score_text, task_of
from tests.support.vectors import Vector, assert_matches, load_vectors

DEPARTURES = {
    **THINKING,
    "first-abcd-character-fallback": "prose is not searched for letters",
    "first-tag-wins": "the last tag decides",
    "letter-taken-from-a-word": "prose is not searched for letters",
}
BAD_ROWS = ("gold missing", "fewer options")


@pytest.mark.parametrize("vector", load_vectors("lifechoices.choice"))
def test_reference(vector: Vector) -> None:
    task = task_of("lifechoices", "reference")
    output = vector.input["output_text"] or ""
    example = task.example(vector.input["row"])
    score = score_text(task, example, output)
    actual = {"predicted": score.words or None, "reward": score.reward,
              "metrics": logged("lifechoices", vector, score),
              "correct_answer": task.gold_letter(example)}  # fmt: skip
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", load_vectors("lifechoices.choice"))
def test_paper(vector: Vector) -> None:
    task, output = task_of("lifechoices"), vector.input["output_text"] or ""
    if vector.note in BAD_ROWS:
        with pytest.raises(DataError):
            task.example(vector.input["row"])
        return
    score = score_text(task, task.example(vector.input["row"]), output)
    below_the_tag = climb(spoken(output, "reference"))[1] == "salvaged"
    if set(vector.quirks) & set(DEPARTURES) or below_the_tag:
        return  # the paper reading of these has tests of its own
    assert (score.words or None, score.value) == (
        vector.expected["predicted"],
        vector.expected["reward"],
    )
