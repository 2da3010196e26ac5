"""Lessons and remarks that give nothing away, and what rules see in a player's texts."""

from __future__ import annotations

import pytest

from soulkit.judge.leaks import LeakView
from soulkit.tasks.kit.coaching import (
    first_safe_lesson,
    first_verdict,
    longest_text,
    repeated_texts,
    without_secrets,
)
from soulkit.types import Score, Verdict

SECRET = "He lost the ferry ticket to Ostend in a game of cards."
VIEWS = {
    "private": LeakView(private=(SECRET,), public="Two people talk."),
    "of one seat": LeakView(private_by_seat={"ben": (SECRET,)}, public="Two people talk."),
    "reference": LeakView(reference=SECRET, public="Two people talk."),
    "part of it": LeakView(reference_parts=("Well.", SECRET), public="Two people talk."),
}


def test_the_fullest_lesson_that_points_at_no_option_is_said() -> None:
    view = LeakView("What to drink?", ("Tea, with honey", "Cold beer"), "Tea, with honey")
    assert first_safe_lesson((("Think of honey.", "Ask."), ("", "Ask.")), view) == "Ask."
    assert first_safe_lesson((("Ask.", "Then wait."),), view) == "Ask. Then wait."
    assert first_safe_lesson((("Take the beer.",), ("",)), view) is None


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_sentences_that_repeat_a_secret_are_left_out(view: LeakView) -> None:
    text = "He lost the ferry ticket in a game of cards; a pity. She never asks!\nOr does she?\n"
    assert without_secrets(text, view) == "She never asks! Or does she?"
    assert without_secrets(text, view, ends=".!?;") == "a pity. She never asks! Or does she?"


def test_what_is_public_may_be_repeated() -> None:
    view = LeakView(private=(SECRET,), question=f"Who said this? {SECRET}")
    assert without_secrets(SECRET, view) == SECRET
    assert without_secrets(SECRET, LeakView(private=(SECRET,))) == ""


def test_the_first_readable_verdict_on_a_question_counts() -> None:
    read = [("audit", {"risk": 1}), ("score", {}), ("score", {"goal": 2}), ("score", {"goal": 3})]
    verdicts = [Verdict(judge="a", purpose=purpose, said=fields) for purpose, fields in read]
    score = Score(value=1.0, reward=1.0, verdicts=tuple(verdicts))
    assert first_verdict(score, "score") == {"goal": 2} and first_verdict(score, "pairwise") == {}


def test_rules_see_repeats_and_the_longest_text() -> None:
    texts = ["I ask.", "What now", "", "what, now?", "one two three", ""]
    assert repeated_texts(texts) == [1, 3] and repeated_texts([]) == []
    assert longest_text(texts) == (4, 3) and longest_text(["", " "]) == longest_text([]) == (-1, 0)
