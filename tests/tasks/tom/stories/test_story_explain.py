"""Explanations: true, short, and useless without the story."""

from __future__ import annotations

import re
from typing import Any

import pytest

from soulkit.tasks.tom.stories.explain import explain
from soulkit.tasks.tom.stories.generate import StoryTask, synth_rows

STORY = (
    "1 Otto came into the loft.\n2 Mei came into the loft.\n3 The coin lay in the urn.\n"
    "4 The urn stood in the loft.\n5 Mei went out of the loft.\n6 Otto put the coin into the jar."
)


def tomi(question: str, answer: str | None, story: str = STORY, **kw: Any) -> str | None:
    row = {"story": story, "question": question, "cands": ["jar", "urn", "loft"]}
    return explain("tomi", row, answer, **kw)


def test_a_draft_that_took_reality() -> None:
    assert tomi("Where would Mei search for the coin?", "jar") == (
        "The draft follows what really happened, not what Mei could know. Mei did not see the move."
    )


def test_a_correct_draft_hears_a_witness_fact() -> None:
    text = tomi("Where would Otto search for the coin?", "the jar.")
    assert text == "The draft fits what Otto could know. Otto saw the move."
    assert tomi("Where would Otto search for the coin?", "jar", terse=True) == "Otto saw the move."


def test_other_mistakes() -> None:
    assert "took the end" in str(tomi("Where was the coin at first?", "jar"))
    assert "took the start" in str(tomi("Where is the coin now?", "urn"))
    assert "never held" in str(tomi("Where is the coin now?", "loft"))
    assert "no clear answer" in str(tomi("Where is the coin now?", None))


def test_second_order_says_who_missed_what() -> None:
    text = tomi("Where does Otto believe that Mei would search for the coin?", "jar")
    assert text is not None
    assert "last in the room together before the move. Mei did not see it." in text


def test_an_unreadable_story_is_not_explained() -> None:
    assert tomi("Where is the coin now?", "jar", story="1 Otto flew.") is None
    assert tomi("Who has the coin?", "jar") is None


CLAIM = (
    "1 Otto, Mei and Rosa came into the loft.\n2 The coin lay in the teal_urn.\n"
    "3 Otto went out of the loft.\n4 Mei went out of the loft.\n5 Rosa went out of the loft.\n"
    "6 Otto, Mei and Rosa came into the foyer.\n"
    "7 Mei told everyone that the coin was in the teal_jar."
)


def hitom(question: str, answer: str) -> str:
    row = {"story": CLAIM, "question": question, "choices": "A. teal_urn, B. teal_jar, C. teal_tin"}
    return str(explain("hitom", row, answer))


def test_trust_is_explained_by_who_left_when() -> None:
    believes = hitom("Where does Otto believe the coin is?", "A")
    assert "Otto believes Mei in sentence 7, who left later." in believes
    doubts = hitom("Where does Rosa believe the coin is?", "teal_jar")
    assert "The draft follows the talk." in doubts
    assert "Rosa does not believe Mei, who left earlier." in doubts
    deep = hitom("Where does Rosa believe Otto believes Mei believes the coin is?", "B")
    assert "together in sentence 3" in deep or "together in sentence 2" in deep
    assert "Talk changes no thoughts this deep." in deep


@pytest.mark.slow
@pytest.mark.parametrize("task", ["tomi", "paratomi", "hitom"])
def test_no_candidate_and_no_option_letter_is_ever_named(task: StoryTask) -> None:
    for row in synth_rows(task, 300, 5):
        choices = str(row.get("choices", ""))
        options = row.get("cands") or [part.split(". ")[1] for part in choices.split(", ")]
        for answer in (None, *options, "nonsense"):
            text = explain(task, row, answer)
            assert text, row
            plain = text.lower().replace("_", " ")
            assert not any(re.search(rf"\b{o.replace('_', ' ')}\b", plain) for o in options)
            assert not re.search(r"\b[A-Z]\b", text)
            if task == "tomi" and row["order"] <= 1:
                assert len(text.split()) <= 25


def test_a_candidate_object_is_left_unnamed() -> None:
    row = {"story": CLAIM, "question": "Where is the coin now?", "cands": ["coin", "teal_urn"]}
    text = explain("hitom", row, "teal_urn")
    assert text is not None and "coin" not in text and "object" in text


@pytest.mark.parametrize("task", ["tomi", "paratomi", "hitom"])
def test_remarks_about_different_drafts_share_one_fact(task: StoryTask) -> None:
    """The fact depends on the story alone, so it cannot leak through the draft."""
    for row in synth_rows(task, 60, 9):
        fact = explain(task, row, None, terse=True)
        gold = str(row.get("correct_answer", row.get("answer")))
        for answer in (None, gold, "nonsense"):
            assert str(explain(task, row, answer)).endswith(str(fact))
