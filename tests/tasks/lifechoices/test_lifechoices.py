"""LifeChoices under the paper protocol, and the published ladder step by step."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.tasks.kit.base import READABLE
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.lifechoices.task import NESTED, climb
from soulkit.types import Completion, Feedback, Score
from tests.support.road import episode_of, score_text, synth_examples, task_of

ASKED = {
    "Scenario": "The magistrate's men are at the landing.",
    "Question": "What will Corin do?",
    "Options": ["Leave at dawn", "Confess all of it", "Hide the boy in the boat", "Wait and pray"],
    "Correct Answer": "C",
}
ROW = {
    "character_name": "Corin Vale",
    "book": "The Salt Road",
    "input_text": "Corin is a ferryman. He once hid a deserter for a winter.",
    NESTED: ASKED,
}


def row_with(**changes: Any) -> dict[str, Any]:
    return {**ROW, NESTED: {**ASKED, **changes}}


def score(text: str, stop: str = "stop") -> Score:
    task = task_of("lifechoices")
    return score_text(task, task.example(ROW), text, stop)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<answer>C</answer>", "ok"),
        ("<answer>C. Hide the boy in the boat</answer>", "salvaged"),
        ("c", "salvaged"),
        ("(C)", "salvaged"),
        ("**C.**", "salvaged"),
        ("He would. <answer>C", "salvaged"),
        ("<think>A or B?</think> C", "salvaged"),
    ],
)
def test_ways_to_be_right(text: str, status: str) -> None:
    grade = score(text)
    assert (grade.value, grade.status, grade.words) == (1.0, status, "C")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("The answer is C", "no_tag"),
        ("Option C", "no_tag"),
        ("C) Hide the boy in the boat", "no_tag"),
        ("It is a hard thing", "no_tag"),
        ("Final answer: **C**", "no_tag"),
        ("<answer>E</answer> so C", "malformed"),
        ("<answer>Hide the boy</answer>", "malformed"),
        ("<think>I pick <answer>C</answer>", "no_tag"),
        ("  ", "empty"),
    ],
)
def test_no_letter_is_guessed_out_of_prose(text: str, status: str) -> None:
    grade = score(text)
    assert (grade.value, grade.status, grade.words) == (0.0, status, "")


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("b", "B"),
        ("see <answer> d </answer>", "D"),
        ("c: it suits him", "C"),
        ("His choice depends on it, (a)", "D"),
        ("answer: b or (c)", "B"),
        ("First (see above), then (B) is", "B"),
        ("I would go with C", "C"),
        ("who would know", "D"),
        ("no", ""),
        ("", ""),
    ],
)
def test_the_ladder(text: str, letter: str) -> None:
    status = "no_tag" if not letter else "ok" if "<answer>" in text else "salvaged"
    assert climb(text) == (letter, status)


@given(st.text(alphabet="ABCDEabc <>/answer()*.\n", max_size=40))
def test_any_reply_can_be_read(text: str) -> None:
    for protocol in ("paper", "reference"):
        for name in ("lifechoices", "mistakes", "social_r1"):
            letter, status = task_of(name, protocol).parse(text)
            assert (status in READABLE) == bool(letter)


def test_the_question_may_be_json_or_flat_or_full_of_gaps() -> None:
    task = task_of("lifechoices")
    expected = task.example(ROW)
    rest = {k: v for k, v in ROW.items() if k != NESTED}
    for row in (
        {**ROW, NESTED: json.dumps(ASKED)},
        {**ROW, NESTED: {**ASKED, "Options": json.dumps(ASKED["Options"]), "raw": None}},
        {**ROW, "history": None, "index": 4, "scenario": None},
        {**rest, NESTED: None, **ASKED},
        {**rest, "scenario": ASKED["Scenario"], "question": ASKED["Question"],
         "options": ASKED["Options"], "correct_answer": "c"},
        row_with(Options=[f"{x}. {t}" for x, t in zip("ABCD", ASKED["Options"], strict=True)]),
        row_with(Options=dict(zip("ABCD", ASKED["Options"], strict=True))),
        row_with(**{"Correct Answer": " (C) "}),
        row_with(**{"Correct Answer": "C. Hide the boy in the boat"}),
        row_with(**{"Correct Answer": "Hide the boy in the boat"}),
    ):  # fmt: skip
        other = task.example(row)
        assert other.id == expected.id and other.fields["options"] == tuple(ASKED["Options"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"Correct Answer": ""}, "matches none"),
        ({"Correct Answer": "E"}, "matches none"),
        ({"Correct Answer": "Burn the will"}, "matches none"),
        ({"Options": ["x"]}, "no complete question"),
        ({"Options": None}, "no complete question"),
        ({"Options": ["x", "y", "", "z"]}, "no complete question"),
        ({"Options": [*"abcde"]}, "no complete question"),
        ({"Question": None}, "no complete question"),
    ],
)
def test_rows_that_cannot_be_played_are_bad(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        task_of("lifechoices").example(row_with(**changes))


def test_a_memory_is_cut_at_its_budget_and_the_instructions_are_not() -> None:
    task = task_of("lifechoices")
    budget = task.spec.columns["input_text"].max_words
    example = task.example({**ROW, "input_text": " ".join(f"w{i}" for i in range(budget + 9))})
    (segment,) = task.context(example, Feedback(text="Think of the winter.", author="x"))
    assert "[...] w9 w10 " in segment.text and "w8 " not in segment.text, "the last words stay"
    assert f"w{budget + 8}" in segment.text
    assert "Wait and pray" in segment.text and "<answer> and </answer>" in segment.text
    assert segment.text.index("Think of the winter.") > segment.text.index("Wait and pray")
    episode = task._episode(example, (segment,), Completion(text=""), 0, "draft")
    assert episode.notes["cut_words"] == {"input_text": 9}
    assert (example.tags["memory"], task.example(ROW).tags["memory"]) == ("cut", "whole")
    draft = episode_of(task, example, "Hm.")
    coach = task.coach_view(example, draft, Score(value=0.0, reward=0.0))
    assert coach["input_text"].startswith("[...]") and "correct_answer" not in coach


def test_training_has_a_smaller_budget_than_evaluation() -> None:
    budgets = [
        load_registry().task("lifechoices", protocol, training=training).spec.columns["input_text"]
        for protocol in ("paper", "reference") for training in (False, True)
    ]  # fmt: skip
    assert [column.max_words for column in budgets] == [7000, 5500, 7000, 5500]
    assert all(column.keep == "last" for column in budgets)
    assert load_registry().spec("lifechoices").columns["input_text"].max_words == 7000


def test_one_character_of_one_book_is_one_cluster() -> None:
    task = task_of("lifechoices")
    one, two = task.example(ROW), task.example(row_with(Question="And then?"))
    assert one.cluster == two.cluster and one.id != two.id
    assert one.cluster != task.example({**ROW, "book": "Ashes"}).cluster


def test_lessons_fit_the_draft_and_the_row() -> None:
    task = task_of("lifechoices")
    for example in synth_examples("lifechoices", 24):
        texts = {}
        for letter in "ABCD":
            scored = score_text(task, example, f"<answer>{letter}</answer>")
            texts[scored.value] = task.explain(example, None, scored)
        name = example.fields["character_name"]
        assert texts[1.0].startswith(f"That is how {name} acts.")
        assert texts[0.0].startswith(f"That is not how {name} acts.")
        assert ("order the episodes" in texts[0.0]) == (example.fields["kind"] == "changed")
        unread = task.explain(example, None, score_text(task, example, "Well."))
        assert "between the answer tags" in unread
        for text in (*texts.values(), unread):
            assert not check_leak(task.symbolic(text), task.leak_view(example)).leak
