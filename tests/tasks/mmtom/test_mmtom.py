"""MMToM under the paper protocol; the reference protocol has its vectors."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.mmtom.task import statements_of
from soulkit.types import Score
from tests.support.road import score_text, task_of

ROW: dict[str, Any] = {
    "question": "A hall. Ada walks to the oven.\nQuestion: Which is likely? (a) Ada wants a pan. "
    "(b) Ada wants a (small) cup. Please respond with either a or b.",
    "answer": "b",
    "question_type": 2.1,
    "episode": 3,
}


def score(text: str, **changes: Any) -> Score:
    task = task_of("mmtom")
    return score_text(task, task.example({**ROW, **changes}), text)


@pytest.mark.parametrize(
    ("text", "value", "status"),
    [
        ("<reasoning>a?</reasoning><answer>b</answer>", 1, "ok"),
        ("<answer>(B)</answer>", 1, "salvaged"),
        ("<answer>b. Ada wants a cup</answer>", 1, "salvaged"),
        ("<answer>a</answer>", 0, "ok"),
        ("<answer>c</answer>", 0, "malformed"),
        ("(b)", 0, "no_tag"),
        ("", 0, "empty"),
    ],
)
def test_what_decides(text: str, value: float, status: str) -> None:
    grade = score(text)
    assert (grade.value, grade.status, grade.words) == (
        value,
        status,
        "b" if value else grade.words,
    )


def test_a_gold_is_one_of_the_two_letters() -> None:
    assert score("<answer>b</answer>", answer="(B)").value == 1
    for bad in ("", None, "c", "ab"):
        with pytest.raises(DataError, match="neither a nor b"):
            score("", answer=bad)


def test_the_two_statements_are_found() -> None:
    assert statements_of(ROW["question"]) == {
        "a": "Ada wants a pan.",
        "b": "Ada wants a (small) cup.",
    }
    assert statements_of("Where is the cup?") == {}
    assert task_of("mmtom").leak_view(task_of("mmtom").example(ROW)).letters == ("A", "B")


def test_break_downs_and_clusters() -> None:
    task = task_of("mmtom")
    one, two = (task.example({**ROW, "answer": letter}) for letter in "ab")
    assert one.tags == {"type": "2.1"} and one.cluster == two.cluster and one.id != two.id
    other, stray = (task.example({**ROW, "episode": episode}) for episode in (4, None))
    assert len({one.cluster, other.cluster, stray.cluster}) == 3
