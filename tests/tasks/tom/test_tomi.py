"""ToMi and ParaToMi under the paper protocol; the reference protocol has its vectors."""

from __future__ import annotations

from typing import Any

import pytest

from soulkit.types import Score
from tests.support.road import score_text, synth_examples, task_of
from tests.tasks.tom.reference import tomi_aggregates

ROW = {
    "story": "1 Ada entered the attic.\n2 The hat is in the box.",
    "question": "Where is the hat really?",
    "answer": "box",
    "cands": ["box", "treasure box", "green_bag"],
    "question_type": "reality",
}


def score(text: str, protocol: str = "paper", **changes: Any) -> Score:
    task = task_of("tomi", protocol)
    return score_text(task, task.example({**ROW, **changes}), f"<answer>{text}</answer>")


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("box", "box", 1),
        ("She looks in the BOX.", "box", 1),
        ("treasure box", "box", 0),
        ("box or green bag", "box", 0),
        ("boxes", "box", 0),
        ("treasure box", "treasure box", 1),
        ("the treasure_box", "treasure box", 1),
        ("box", "treasure box", 0),
        ("green bag", "green_bag", 1),
        ("green-bag", "green_bag", 1),
        ("bag", "green_bag", 0),
        ("nowhere", "box", 0),
    ],
)
def test_the_gold_and_no_other_candidate(answer: str, gold: str, value: float) -> None:
    assert score(answer, answer=gold).value == value


def test_a_candidate_inside_the_gold_is_no_trap() -> None:
    cands = ["box", "treasure box"]
    assert score("treasure box", answer="treasure box", cands=cands).value == 1
    assert score("treasure box", "reference", answer="treasure box", cands=cands).value == 0


def test_an_underscore_is_a_blank() -> None:
    changes = {"answer": "green_bag", "cands": ["green_bag", "box"]}
    assert score("green bag", **changes).value == 1
    assert score("green bag", "reference", **changes).value == 0


def test_chinese_answers() -> None:
    changes = {"answer": "盒子", "cands": ["盒子", "篮子"]}
    assert score("在盒子里", **changes).value == 1
    assert score("在篮子里", **changes).value == 0
    assert score("在盒子里", "reference", **changes).value == 0


@pytest.mark.parametrize("cands", ["box, treasure box", '["box", "treasure box"]', None, []])
def test_candidates_come_in_many_shapes(cands: Any) -> None:
    assert score("box", cands=cands).value == 1
    assert score("the box it is", cands=cands).value == 1
    if cands:
        assert score("the treasure box", cands=cands).value == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [("box", "no_tag"), ("<answer> </answer>", "malformed"), ("", "empty")],
)
def test_statuses(text: str, status: str) -> None:
    task = task_of("tomi")
    grade = score_text(task, task.example(ROW), text)
    assert (grade.value, grade.status) == (0.0, status)


def test_a_story_as_a_list_becomes_lines() -> None:
    task = task_of("paratomi")
    row = {**ROW, "story": "['Ada went in', 'Ben left.']", "correct_answer": "box"}
    example = task.example(row)
    assert example.fields["story"] == "Ada went in.\nBen left."
    assert "Ada went in.\nBen left." in task.preview(example)[0].text
    assert example.id == task.example({**row, "story": ["Ada went in", "Ben left."]}).id


def test_only_paratomi_shows_the_candidates() -> None:
    for name, shown in (("paratomi", True), ("tomi", False)):
        row = {**ROW, "correct_answer": "box"}
        task = task_of(name)
        text = task.preview(task.example(row))[0].text
        assert ("box, treasure box, green_bag" in text) is shown


def test_the_coach_understands_an_answer_in_a_sentence() -> None:
    for name in ("tomi", "paratomi"):
        task = task_of(name)
        for example in synth_examples(name, 20):
            gold = task.gold_text(example)
            texts = [f"<answer>{t}</answer>" for t in (gold, f"It must be in the {gold}, I think")]
            one, two = (task.explain(example, None, score_text(task, example, t)) for t in texts)
            assert one == two and "fits" in one


def test_an_answer_that_names_two_places_is_no_clear_answer() -> None:
    task = task_of("tomi")
    example = synth_examples("tomi", 1)[0]
    both = " or ".join(example.fields["cands"])
    text = task.explain(example, None, score_text(task, example, f"<answer>{both}</answer>"))
    assert text.startswith("The draft gives no clear answer.")


def test_the_leak_view_always_holds_the_gold() -> None:
    task = task_of("tomi")
    for cands in (["bag"], ["Box", "bag"], None):
        view = task.leak_view(task.example({**ROW, "cands": cands}))
        assert view.gold in view.options
        assert len(view.names()) == (2 if cands else 1)


def test_aggregates_skip_what_has_no_result() -> None:
    assert tomi_aggregates([None]) == {}
    assert tomi_aggregates([{}])["accuracy_unknown"] == 0.0
