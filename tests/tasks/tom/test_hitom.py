"""Hi-ToM under the paper protocol; the reference protocol has its vectors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.types import Episode, Failure, Record, Score, unscored
from tests.support.road import batch_values, score_text, synth_examples, task_of
from tests.tasks.tom.reference import hitom_aggregates

ROW = {
    "story": "1 Ada and Ben entered the attic.\n2 The apple is in the red_box.",
    "question": "Where is the apple really?",
    "choices": "A. blue_bag, B. red_box, C. jar, large, D. tin",
    "correct_answer": "red_box",
    "question_order": 0,
    "deception": "False",
}


def score(text: str, stop: str = "stop", **changes: Any) -> Score:
    task = task_of("hitom")
    return score_text(task, task.example({**ROW, **changes}), text, stop)


@pytest.mark.parametrize(
    ("inside", "status"),
    [("B", "ok"), ("b", "ok"), (" B ", "ok"), ("B.", "salvaged"), ("(B)", "salvaged"),
     ("B. red_box", "salvaged")],
)  # fmt: skip
def test_ways_to_be_right(inside: str, status: str) -> None:
    grade = score(f"I think so. <answer>{inside}</answer>")
    assert (grade.value, grade.status, grade.words) == (1.0, status, "B")


def test_the_last_tag_and_spoken_words_decide() -> None:
    assert score("<answer>A</answer> or rather <answer>B</answer>").value == 1
    assert score("<answer>B</answer> or rather <answer>A</answer>").value == 0
    assert score("maybe <answer>A</answer></think><answer>B</answer>").value == 1
    assert score("<answer>A</answer><think>or <answer>B</answer>").value == 0


def test_options_may_hold_commas_and_stand_on_lines() -> None:
    assert score("<answer>C</answer>", correct_answer="jar, large").value == 1
    lines = "A. blue_bag\nB. red_box\nC. jar"
    assert score("<answer>B</answer>", choices=lines).value == 1


@pytest.mark.parametrize(
    ("text", "stop", "status"),
    [
        ("It is B.", "stop", "no_tag"),
        ("<answer>red_box</answer>", "stop", "malformed"),
        ("<answer></answer>", "stop", "malformed"),
        ("", "stop", "empty"),
        ("  \n", "stop", "empty"),
        ("The apple was", "length", "truncated"),
        ("", "length", "truncated"),
        ("", "content_filter", "refusal"),
        ("<think>so <answer>B</answer>", "length", "truncated"),
    ],
)
def test_the_actors_own_failures_score_the_minimum(text: str, stop: str, status: str) -> None:
    grade = score(text, stop)
    assert (grade.value, grade.reward, grade.status) == (0.0, 0.0, status)


def test_an_answer_that_was_given_before_the_limit_counts() -> None:
    assert score("<answer>B</answer> and then", "length").value == 1


def test_what_broke_outside_the_actor_is_unscored() -> None:
    import asyncio

    from tests.support.road import NO_ONE

    task = task_of("hitom")
    example = task.example(ROW)
    broken = Episode(example_id=example.id, task="hitom", failure=Failure("provider_error", "503"))
    grade = asyncio.run(task.score(example, broken, NO_ONE))
    assert (grade.value, grade.status, grade.reason) == (None, "unscored", "provider_error")


def test_a_gold_that_is_no_option_is_a_bad_row() -> None:
    with pytest.raises(DataError, match="none of the row's choices"):
        score("", correct_answer="suitcase")


def test_break_downs_and_clusters() -> None:
    task = task_of("hitom")
    one, two = (task.example({**ROW, "question": q}) for q in ("Where?", "Where really?"))
    assert one.tags == {"order": "0", "deception": "False"}
    assert one.cluster == two.cluster and one.id != two.id


def record(story: str, order: int, value: float | None, rollout: int = 0) -> Record:
    score = unscored(Failure("x")) if value is None else Score(value=value, reward=value)
    return Record(
        key=f"{story}{order}{rollout}", task="hitom", example_id=story, rollout=rollout,
        kind="draft", episode=Episode(example_id=story, task="hitom"), score=score, cluster=story,
        tags={"order": str(order)},
    )  # fmt: skip


def test_joint_accuracy_needs_every_order_below() -> None:
    records = [record("s", 0, 1), record("s", 1, 0), record("s", 2, 1)]
    records += [record("t", 0, 1), record("t", 1, 1), record("u", 1, 1)]
    assert batch_values(task_of("hitom"), records) == {
        "joint_order_0": 1.0,
        "joint_order_1": 0.5,
        "joint_order_2": 0.0,
    }


def test_joint_accuracy_with_gaps_repeats_and_kinds() -> None:
    summarise = partial(batch_values, task_of("hitom"))
    assert summarise([record("s", 0, None), record("s", 0, 1)]) == {}, "an unscored part: no joint"
    assert summarise([record("s", 0, 1), record("s", 0, 0)]) == {"joint_order_0": 0.0}
    refined = replace(record("s", 0, 0), kind="refined")
    assert summarise([record("s", 0, 1), refined]) == {"joint_order_0": 1.0}, "drafts alone"
    assert summarise([record("s", 0, 1), record("s", 0, 0, rollout=1)]) == {"joint_order_0": 0.5}
    assert summarise([]) == {} and hitom_aggregates([None]) == {}


def test_the_leak_view_holds_every_option_with_its_letter() -> None:
    task = task_of("hitom")
    for example in synth_examples("hitom", 10):
        view = task.leak_view(example)
        assert len(view.options) == len(view.letters) == 15
        assert view.letter == task.gold_letter(example)
        assert task.gold_completion(example) == f"<answer>{view.letter}</answer>"
