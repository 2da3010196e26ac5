"""SimulatorArena's feedback: what a coach hears, what must not be said, rules, refined rollouts."""

from __future__ import annotations

import time
from typing import Any

import pytest

from soulkit.judge.leaks import check_leak
from soulkit.play.engine import FeedbackPolicy
from soulkit.types import Feedback, Score
from tests.support.arena import (
    LESSON,
    PHRASE,
    arena,
    by,
    example,
    purpose,
    record,
    student,
    verdicts,
    walked,
)
from tests.support.road import synth_examples
from tests.support.servers.openai_server import Body

QUOTE = "oh so minus three on both sides then"


def remarks(task: Any, row: Any, replies: list[str]) -> str:
    text = task.explain(row, task.scripted(row, replies), None)
    assert isinstance(text, str)
    return text


def test_the_coach_hears_the_judges_and_not_the_person() -> None:
    prompts: list[str] = []

    def coach(body: Body) -> str:
        prompts.append(str(body["messages"][0]["content"]))
        return "Write in small letters.\n\nAsk for one step at a time."

    why = f"Far too formal for this student. They write “{QUOTE}”. No doubts show."
    (draft, refined), requests = walked(
        judge=verdicts(writing=2, why=why), coach=coach, feedback=FeedbackPolicy()
    )
    (prompt,) = prompts
    assert "Far too formal for this student." in prompt and "No doubts show." in prompt
    assert QUOTE not in prompt and "550" not in prompt
    assert "how do i start" in prompt, "the attempt"
    assert "the manner of writing: 2.0 on a scale from 1 to 5" in prompt
    assert draft.received is not None and not draft.received.leak
    assert refined.kind == "refined" and refined.score.value == refined.score.reward
    opening = refined.episode.traces[0].turns[0].context[0]
    assert opening.text.endswith("Write in small letters.\n\nAsk for one step at a time.")
    assert opening.bare == draft.episode.traces[0].turns[0].context[0].text
    draft_questions = {purpose(body) for body in by(requests, "judge")}
    assert len(by(requests, "judge")) == 2 * len(draft_questions), "one judge for both"


def test_the_document_of_a_refined_conversation_is_asked_for_and_rated_too() -> None:
    (draft, refined), requests = walked(
        "sim_doc", actor=student(2), coach="Be brief.", feedback=FeedbackPolicy()
    )
    assert {"final_document"} <= set(draft.episode.notes) & set(refined.episode.notes)
    assert len([b for b in by(requests, "judge") if purpose(b) == "document"]) == 2
    assert refined.score.metrics["document/rating"] == 8.0


@pytest.mark.parametrize(
    ("text", "leak"),
    [
        (f"Say something like “{QUOTE}”.", "gold_reference"),
        ("You should arrive at 550 in the end.", "private_text"),
        ("Your similarity score was low.", "rubric_words"),
        ("Write in small letters, leave out full stops, and ask for one step at a time.", ""),
        ("Say that you are stuck where 2x + 3 = 1103 has to be solved.", ""),
    ],
)
def test_what_must_not_be_said_to_the_actor(text: str, leak: str) -> None:
    view = arena().leak_view(example())
    assert check_leak(Feedback(text=text, author="coach"), view).leak == leak


def test_one_whole_message_is_a_leak_however_long_the_conversation_was() -> None:
    talk = [f"so {n} what should come now with term {n}" for n in range(20)]
    row = example(human_user_queries=[*talk, "lemme check my notes first", "ty so much"])
    for text, leak in [("Say: lemme check my notes first.", "gold_reference"),
                       ("End with ty so much.", ""), ("Check your work first.", "")]:  # fmt: skip
        view = arena().leak_view(row)
        assert check_leak(Feedback(text=text, author="coach"), view).leak == leak, text


LONG = "Response: " + "so I was thinking about this for quite some time and now " * 3


@pytest.mark.parametrize(
    ("replies", "remark"),
    [
        (["how do i start", PHRASE], "not in the form"),
        (["Query: how do i even start here", ""], "held nothing"),
        ([PHRASE], "Nothing was said"),
        (["Query: how", LONG, LONG.upper()], "far longer"),
        (["Query: go", "Response: ok", PHRASE], "far shorter"),
        (["Query: Where do I begin?", "Response: I see it.", PHRASE], "seldom begins a message"),
        (["Query: same words again here", "Response: same words again here"], "came twice"),
        ([f"Query: {i} what would you do at this point" for i in range(8)], "never ended"),
    ],
)
def test_rules_remark_on_the_draft(replies: list[str], remark: str) -> None:
    text = remarks(arena(), example(), replies)
    assert remark in text
    assert not check_leak(Feedback(text=text, author="symbolic"), arena().leak_view(example())).leak


def test_a_message_of_nothing_but_marks_is_remarked_on_at_once() -> None:
    task, row = arena(), example()
    start = time.process_time()
    text = remarks(task, row, ["Query: " + "!" * 300_000 + "a", PHRASE])
    # A search that tries every mark anew takes a quarter of an hour for this one.
    assert time.process_time() - start < 5
    assert "ends messages with a mark" not in text
    assert "seldom ends a message" in remarks(task, row, ["Query: help me (now!)", PHRASE])


def test_rules_remark_on_a_copied_problem_and_an_early_end() -> None:
    problem = "A garden is four metres longer than it is wide and its fence is long."
    row = example(problem=problem, human_user_queries=["a b c d e"] * 6)
    text = remarks(arena(), row, [f"Query: {problem}", PHRASE])
    assert "copied what lies before" in text and "content far sooner" in text


@pytest.mark.parametrize("name", ["sim_math", "sim_doc"])
def test_feedback_by_rules_leaks_on_no_made_row(name: str) -> None:
    task = arena(name)
    for row in synth_examples(name, 30):
        for draft in (None, task.wrong(row), task.gold(row)):
            text = task.explain(row, draft, None)
            assert text
            assert not check_leak(
                Feedback(text=text, author="symbolic"), task.leak_view(row)
            ).leak, text


def test_feedback_without_a_coach_comes_from_rules() -> None:
    (draft, refined), _ = walked(feedback=FeedbackPolicy())
    assert draft.received is not None and draft.received.author == "symbolic"
    assert refined.given == draft.received


def test_the_reference_gives_nobody_feedback() -> None:
    task = arena(protocol="reference")
    for value in (0.0, 0.5, 1.0):
        assert not task.gate(Score(value=value, reward=value), 0)
        assert arena().gate(Score(value=value, reward=value), 0) == (value < 1.0)


def test_a_judge_that_quotes_the_person_in_part_is_not_passed_on() -> None:
    seen: list[str] = []

    def coach(body: Body) -> str:
        seen.append(str(body["messages"][0]["content"]))
        return "Be brief."

    short = {**LESSON, "human_user_queries": ["thx mate", "lemme try again"]}
    row = arena().example(short)
    judge = verdicts(why="The real one says thx mate. Warmer in tone.")
    walked(row=row, judge=judge, coach=coach, feedback=FeedbackPolicy())
    assert "Warmer in tone." in seen[0] and "thx mate" not in seen[0]
    assert record().score.scored
