"""Sotopia's feedback: what a coach hears, what must not be said, rules, the reference's gate."""

from __future__ import annotations

import pytest

from soulkit.judge.leaks import check_leak
from soulkit.play.engine import FeedbackPolicy
from soulkit.types import Feedback, Score
from tests.support.sotopia import (
    LEAVE,
    LINE,
    Body,
    example,
    judged,
    ratings,
    records,
    sotopia,
    speak,
)


def test_the_coach_hears_what_was_rated_and_nothing_of_the_other_side() -> None:
    why = "She never asks why. He pays 250 at most, since rent is due on Friday."
    prompts: list[str] = []

    def coach(body: Body) -> str:
        prompts.append(str(body["messages"][0]["content"]))
        return "Ask him what stands in the way.\n\nThen name your sum. " + "word " * 500

    policy = FeedbackPolicy()
    draft, refined = records(judge=judged(ratings(why=why, goal=3)), coach=coach, feedback=policy)
    assert "She never asks why." in prompts[0] and "Friday" not in prompts[0]
    assert "getting what one came for (critical): 3 on a scale from 0 to 10" in prompts[0]
    assert draft.received is not None and not draft.received.leak
    assert draft.received.text.startswith("Ask him what stands in the way.\n\nThen")
    assert refined.kind == "refined" and refined.score.value == refined.score.reward
    opening = refined.episode.traces[0].turns[0].context[0]
    assert "Then name your sum." in opening.text and "name your sum" not in str(opening.bare)


@pytest.mark.parametrize(
    ("text", "leak"),
    [
        ("He can pay 250 at most, as rent is due on Friday.", "private_text"),
        ("Your believability suffered.", "rubric_words"),
        ("Ask Omar Haddad about the piano and name your 300 early.", ""),
    ],
)
def test_what_must_not_be_said_to_the_actor(text: str, leak: str) -> None:
    view = sotopia().leak_view(example())
    assert check_leak(Feedback(text=text, author="coach"), view).leak == leak


def test_a_coach_that_never_ends_gives_nothing() -> None:
    outcomes = records(coach="word " * 1201, feedback=FeedbackPolicy())
    assert len(outcomes) == 1 and "1200 words" in outcomes[0].episode.notes["coach_failure"]


@pytest.mark.parametrize(
    ("replies", "remark"),
    [
        ([LINE, LINE, LEAVE], "more than once"),
        ([speak("Hello."), LEAVE], "left before"),
        (["Good morning!", LINE], "not the JSON object"),
        (["", LINE], "nothing could be read"),
        ([speak("so " * 200)], "nobody talks that long"),
        ([speak(f"line {i}") for i in range(10)], "ran out of turns"),
        ([speak("Nice weather.")], "Sell for at least 300"),
    ],
)
def test_rules_remark_on_the_draft(replies: list[str], remark: str) -> None:
    task, row = sotopia(), example()
    text = task.explain(row, task.scripted(row, replies), None)
    assert text and remark in text
    assert not check_leak(Feedback(text=text, author="symbolic"), task.leak_view(row)).leak


def test_rules_have_advice_without_a_draft() -> None:
    text = sotopia().explain(example(), None, None)
    assert text and text.startswith("You came for this: Sell for at least 300.")
    assert not check_leak(
        Feedback(text=text, author="symbolic"), sotopia().leak_view(example())
    ).leak


def test_feedback_without_a_coach_comes_from_rules() -> None:
    draft, refined = records(actor=LEAVE, feedback=FeedbackPolicy())
    assert draft.received is not None and draft.received.author == "symbolic"
    assert refined.given == draft.received


def test_the_references_gate() -> None:
    task = sotopia("reference")

    def gated(mean: float | None, low: float) -> bool:
        return task.gate(
            Score(value=0.1, reward=0.1, metrics={"eval_avg": mean, "hack_low": low}), 0
        )

    assert gated(4.0, 1.0) and not gated(4.1, 1.0) and not gated(2.0, 0.0)
    assert not gated(None, 1.0)
    assert sotopia().gate(Score(value=0.5, reward=0.5), 0)
