"""ToMBench under the paper protocol: two languages, two to four options, break-downs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from letter_support import assert_lessons_keep_quiet, record, released
from road_support import score_text, synth_examples, task_of

from soulkit.data.synth import synth
from soulkit.errors import DataError
from soulkit.tasks.tombench import group_of

ROW: dict[str, Any] = {
    "language": "en",
    "story": "Mei leaves. Tao moves the rope to the crate.",
    "question": "Where will Mei look?",
    "options_dict": {"A": "In the crate", "B": "On the hook", "C": None, "D": float("nan")},
    "correct_letter": " b ",
    "ability": "Belief: Location false beliefs",
}


def test_every_made_row_has_one_id_in_every_form() -> None:
    task = task_of("tombench")
    union = dict.fromkeys(("prompt", "r_min", "options", "story_id"))
    for row in synth("tombench", 32, 5):
        listed = {k: v for k, v in row.items() if k != "options_dict"}
        in_order = [row["options_dict"][x] for x in sorted(row["options_dict"])]
        gaps = {x: row["options_dict"].get(x) for x in "ABCD"}
        forms = [
            row, released(row), released({**union, **row}), {**listed, "options": in_order},
            {**listed, "options": json.dumps(in_order)}, released({**row, "options_dict": gaps}),
            {**row, "options_dict": json.dumps(row["options_dict"])},
        ]  # fmt: skip
        assert len({task.example(form).id for form in forms}) == 1


def test_what_a_gap_left_behind_is_no_option() -> None:
    task = task_of("tombench")
    example = task.example(released(ROW))
    assert example.fields["options"] == {"A": "In the crate", "B": "On the hook"}
    text = task.preview(example)[0].text
    assert "\nC." not in text and "nan" not in text.lower()
    assert score_text(task, example, "<answer>D</answer>").value == 0
    assert score_text(task, example, "<answer>b</answer>").value == 1
    padded = {**ROW, "options_dict": {"A": "x", "B": "y", "C": "nan", "D": " "}}
    assert list(task.example(padded).fields["options"]) == ["A", "B"]
    named = {**ROW, "options_dict": {"A": "Nan", "B": "Ada", "C": "NaN"}}
    assert task.example(named).fields["options"] == {"A": "Nan", "B": "Ada"}


@pytest.mark.parametrize(
    "change",
    [{"correct_letter": "C"}, {"correct_letter": None}, {"options_dict": None},
     {"options_dict": {"A": "alone"}, "correct_letter": "A"}, {"options_dict": "{A"},
     {"options_dict": ["a", "b"]}, {"language": None}],
)  # fmt: skip
def test_rows_that_cannot_be_asked_are_bad(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        task_of("tombench").example({**released(ROW), **change})


def test_each_language_is_asked_and_taught_in_its_own_words() -> None:
    task = task_of("tombench")
    for example in synth_examples("tombench", 16):
        chinese = example.tags["language"] == "zh"
        assert ("## 问题" in task.preview(example)[0].text) == chinese
        lesson = task.explain(example, None, score_text(task, example, "hm"))
        assert any("\u4e00" <= sign <= "\u9fff" for sign in lesson) == chinese
    other = task.example({**released(ROW), "language": "German"})
    assert other.tags["language"] == "en", "every other language is asked in English"


def test_thinking_is_no_answer_here_but_in_the_reference() -> None:
    text = "<think><answer>A</answer></think><answer>B</answer>"
    values = [score_text(t, t.example(released(ROW)), text).value
              for t in (task_of("tombench"), task_of("tombench", "reference"))]  # fmt: skip
    assert values == [1.0, 0.0]


def test_break_downs() -> None:
    task = task_of("tombench")
    tags = task.example({**released(ROW), "subtask": "False Belief Task"}).tags
    assert tags == {"language": "en", "subtask": "False Belief Task", "ability": "Belief",
                    "skill": "Belief: Location false beliefs"}  # fmt: skip
    assert group_of("Belief: Content false beliefs Belief: Second-order beliefs") == "Belief"
    assert group_of("Belief") == "Belief" and group_of("") == ""
    records = [
        record("a", 1.0, ability="Belief"),
        record("b", 0.0, ability="Belief"),
        record("c", 1.0, ability="Desire"),
        record("d", None, ability="Emotion"),
    ]
    assert task.summarise(records) == {"macro_ability": 0.75}
    assert task.summarise([]) == {}


def test_both_languages_of_a_story_are_one_cluster() -> None:
    examples = synth_examples("tombench", 16)
    for one, other in zip(examples[::2], examples[1::2], strict=True):
        assert one.cluster == other.cluster and one.id != other.id
    task = task_of("tombench")
    same = [task.example({**released(ROW), "question": q}).cluster for q in ("x?", "y?")]
    assert same[0] == same[1], "without an id the story itself is the unit"


def test_lessons_give_nothing_away() -> None:
    assert_lessons_keep_quiet("tombench", 64)
