"""Social-R1 under the paper protocol, and its worked examples; the reference has its vectors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.judge.leaks import check_leak
from soulkit.models.base import Cast
from soulkit.tasks.kit.choice import letter_of
from soulkit.tasks.social_r1.task import SocialR1, leading_letter, split_prompt
from soulkit.types import Score
from tests.support.road import (
    NO_ONE,
    ROLLOUT,
    episode_of,
    played_by,
    score_text,
    synth_examples,
    task_of,
)

TEXT = (
    "Story: Noor stained Ben's coat.\nShe hung it back.\nQuestion: Why does she avoid him?\n"
    "A. She is proud\nB. She is embarrassed\nC. She forgot"
)
ROW = {"prompt_text": TEXT, "answer_text": "B. She is embarrassed"}


def score(text: str, stop: str = "stop", **changes: Any) -> Score:
    task = task_of("social_r1")
    return score_text(task, task.example({**ROW, **changes}), text, stop)


def coached(kind: str) -> SocialR1:
    """The task with that kind of feedback."""
    spec = task_of("social_r1").spec
    feedback = spec.feedback.model_copy(update={"kind": kind})
    return SocialR1("social_r1", spec.model_copy(update={"feedback": feedback}))


@pytest.mark.parametrize(
    ("text", "stop", "value", "status"),
    [
        ("Let me see. <answer>B</answer>", "stop", 1.0, "ok"),
        ("<answer>B. She is embarrassed</answer>", "stop", 1.0, "salvaged"),
        ("<answer>A</answer>", "stop", 0.0, "ok"),
        ("<answer>\u212a</answer>", "stop", 0.0, "malformed"),
        ("The answer is B", "stop", 0.0, "no_tag"),
        ("Noor feels", "length", 0.0, "truncated"),
    ],
)
def test_what_decides(text: str, stop: str, value: float, status: str) -> None:
    grade = score(text, stop)
    assert (grade.value, grade.status) == (value, status)


@pytest.mark.parametrize(
    "gold",
    [{"answer_letter": "b "}, {"answer_letter": "B."}, {"answer_text": "b) She is embarrassed"},
     {"answer_text": "(B) She is embarrassed"}, {"answer_text": "She is embarrassed"},
     {"answer_letter": "B", "answer_text": "She is embarrassed"},
     {"answer_letter": "", "answer_text": "B"}],
)  # fmt: skip
def test_ways_to_write_the_gold_are_one_example(gold: dict[str, str]) -> None:
    task = task_of("social_r1")
    example = task.example({"prompt_text": TEXT, **gold})
    assert task.gold_letter(example) == "B" and task.gold_text(example) == "She is embarrassed"
    assert example.id == task.example(ROW).id


@pytest.mark.parametrize(
    "gold",
    [{}, {"answer_text": "In the box"}, {"answer_letter": "D"}, {"answer_letter": "?"},
     {"answer_letter": "A", "answer_text": "B. She is embarrassed"},
     {"answer_text": "A. She is embarrassed"}],
)  # fmt: skip
def test_a_gold_that_is_no_option_or_two_is_a_bad_row(gold: dict[str, str]) -> None:
    with pytest.raises(DataError, match="matches none of the row's options"):
        task_of("social_r1").example({"prompt_text": TEXT, **gold})


def test_every_place_of_the_prompt_gives_the_same_example() -> None:
    task, messages = task_of("social_r1"), [{"role": "user", "content": TEXT}]
    expected = task.example(ROW).id
    gold = {"answer_text": ROW["answer_text"]}
    for place in (
        {"prompt_text": None, "conversations": [{"messages": messages}]},
        {"prompt_text": " ", "conversations": json.dumps([{"messages": messages}])},
        {"prompt": TEXT},
        {"prompt": messages, "conversations": [{"messages": []}]},
        {"prompt": TEXT, "conversations": [{"messages": [{"content": " "}]}]},
    ):
        assert task.example({**gold, **place}).id == expected
    with pytest.raises(DataError, match="has no question"):
        task.example(gold)
    blank = {**gold, "prompt": TEXT, "conversations": [{"messages": [{"content": " "}]}]}
    with pytest.raises(DataError, match="has no question"):
        task_of("social_r1", "reference").example(blank)


def test_scenes_are_taken_apart() -> None:
    scene = split_prompt(TEXT + "\n\nAnswer with a letter.")
    assert scene.story == "Story: Noor stained Ben's coat.\nShe hung it back."
    assert scene.question == "Question: Why does she avoid him?"
    assert scene.options == {"A": "She is proud", "B": "She is embarrassed", "C": "She forgot"}
    assert split_prompt("Q? A. x B. y").options == {"A": "x", "B": "y"}
    assert split_prompt("Who?\n(A) him\n(B) her").options == {"A": "him", "B": "her"}
    assert split_prompt("A. said hello.\nWho?\nA) he\nB) she").options == {"A": "he", "B": "she"}
    assert split_prompt("Just a question?").options == {}
    assert split_prompt("").question == ""


def test_letters_of_golds() -> None:
    options = {"A": "A. Smith", "B": "B", "C": "x"}
    assert letter_of("A. Smith", options, "ABC") == "A"
    assert letter_of("C", options, "ABC") == "C" and letter_of("", options, "ABC") == ""
    assert letter_of("B. x", options, "ABC") == "", "letter and text contradict each other"
    assert letter_of("b)", {}, "ABC") == "B" and letter_of("by", {}, "ABC") == ""
    twins = {"A": "same", "B": "same"}
    assert letter_of("B. same", twins, "AB") == "B" and letter_of("same", twins, "AB") == ""
    assert leading_letter("In the box") == "I", "as published"


def test_a_row_without_readable_options_can_still_be_scored() -> None:
    task = task_of("social_r1")
    example = task.example({"prompt_text": "Who lies, A or B?", "answer_text": "B. Ben"})
    assert score_text(task, example, "<answer>B</answer>").value == 1
    view = task.leak_view(example)
    assert (view.options, view.letters, view.gold) == (("Ben",), ("B",), "Ben")
    assert task.wrong_completion(example) is None


def test_questions_about_one_scene_are_one_cluster() -> None:
    task = task_of("social_r1")
    other = TEXT.replace("Why does she avoid him?", "What does she feel?")
    one, two = task.example(ROW), task.example({**ROW, "prompt_text": other})
    assert one.cluster == two.cluster and one.id != two.id


def test_feedback_is_a_worked_example_with_the_answer() -> None:
    task = task_of("social_r1")
    for example in synth_examples("social_r1", 12):
        draft = score_text(task, example, "")
        text = task.explain(example, None, draft)
        assert text.startswith(example.fields["why"]) and task.gold_completion(example) in text
        feedback = check_leak(task.symbolic(text), task.leak_view(example))
        assert feedback.leak and feedback.usable and feedback.kind == "worked_example"
    bare = task.example(ROW)
    assert "She is embarrassed. <answer>B</answer>" in task.explain(bare, None, None)


def test_a_model_writes_the_worked_example_from_the_gold() -> None:
    task = task_of("social_r1")
    example = task.example(ROW)
    episode = episode_of(task, example, "I pass.")
    draft = score_text(task, example, "I pass.")
    seen = []

    def answer(body: dict[str, Any]) -> str:
        seen.append(body["messages"][-1]["content"])
        return "<think>hm</think>She hides the stain. <answer>B</answer>"

    async def run() -> Any:
        with played_by(answer) as coach:
            cast = Cast(actor=NO_ONE.actor, coach=coach)
            try:
                return await task.critique(example, episode, draft, cast, ROLLOUT)
            finally:
                await coach.model.close()

    lesson = asyncio.run(run())
    assert lesson.text == "She hides the stain. <answer>B</answer>"
    assert lesson.kind == "worked_example" and "B: She is embarrassed" in seen[0]
    assert "I pass." not in seen[0], "it is written from the gold, not about the draft"


def test_the_other_kind_of_feedback_gives_nothing_away() -> None:
    task = coached("coach")
    for example in synth_examples("social_r1", 36):
        drafts = ("", "B", *(f"<answer>{x}</answer>" for x in "ABCD"))
        scores = [*(score_text(task, example, draft) for draft in drafts), None]
        for text in (task.explain(example, None, s) for s in scores):
            assert text
            assert not check_leak(task.symbolic(text), task.leak_view(example)).leak, text
