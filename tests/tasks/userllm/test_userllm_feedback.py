"""UserLLM's feedback: lessons that give nothing away, the reference's hints, a model coach."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from soulkit.judge.leaks import check_leak
from soulkit.models.base import Cast
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.userllm.fields import CSQA, END, NQ, PRISM
from soulkit.tasks.userllm.metrics import choices_named
from soulkit.types import Example, Feedback, Score
from tests.support.road import NO_ONE, episode_of, played_by, synth_examples, task_of
from tests.support.servers.openai_server import Body
from tests.support.userllm import (
    FIRST,
    LATER,
    QUIZ,
    SEARCH,
    by_rule,
    example,
    scored_by,
    walked,
)


def drafts_of(one: Example) -> list[tuple[str, Score]]:
    task, drafts = task_of("userllm"), []
    texts = [task.gold_completion(one), task.wrong_completion(one), "", END]
    if one.fields["choices"]:
        texts += [" or ".join(one.fields["choices"][:k]) for k in (1, 2, 5)]
    metrics = {CSQA: ("role_adherence",), NQ: ("intent_adherence",),
               PRISM: ("intent_decomposition", "termination", "ai_detector")}  # fmt: skip
    for text in texts:
        for value in (0.0, 1.0):
            numbers = dict.fromkeys(metrics[one.fields["source"]], value)
            drafts.append((text, Score(value=value, reward=value, metrics=numbers)))
    return drafts


def test_lessons_give_nothing_away() -> None:
    task, texts = task_of("userllm"), set()
    for one in synth_examples("userllm", 60):
        view = task.leak_view(one)
        assert view is not None
        lessons = [task.explain(one, episode_of(task, one, text), score)
                   for text, score in drafts_of(one)]  # fmt: skip
        for text in [*lessons, task.explain(one, None, None), task.rehearse(one, random.Random(1))]:
            assert text and not check_leak(Feedback(text=text, author="symbolic"), view).leak, text
            assert not choices_named(one.fields["choices"] or (), text, "paper") and END not in text
            texts.add(text)
    assert len(texts) > 12


def test_a_lesson_knows_how_many_choices_were_named() -> None:
    task, one = task_of("userllm"), example(QUIZ)
    text = task.explain(
        one, episode_of(task, one, "bank or river?"), by_rule(QUIZ, "bank or river?")
    )
    assert "held 2 answers" in text and "bank" not in text


def test_words_of_a_lesson_that_are_choices_are_not_said() -> None:
    row = {**QUIZ, "choices": ["answers", "answering", "own words", "the message"]}
    task, one = task_of("userllm"), example(row)
    text = task.explain(one, episode_of(task, one, "own words?"), by_rule(row, "own words?"))
    assert text == "You are the one who asks."


@pytest.mark.parametrize(
    ("row", "text", "leak"),
    [
        (QUIZ, "Do not mention the department store.", "private_text"),
        (SEARCH, "A judge wants REFUSED here.", "rubric_words"),
        (SEARCH, "You accepted what was proposed; it should be refused.", ""),
        (FIRST, "Just write: shd i move 4 a job", "gold_reference"),
        (LATER, f"Reply with {END} now.", "rubric_words"),
        (LATER, "Compare the answer with what you wanted.", ""),
    ],
)
def test_what_leaks(row: dict[str, Any], text: str, leak: str) -> None:
    view = task_of("userllm").leak_view(example(row))
    assert check_leak(Feedback(text=text, author="x"), view).leak == leak


def test_reference_hints_name_what_they_mean() -> None:
    task = task_of("userllm", "reference")

    def hint(row: dict[str, Any], text: str, label: str = "") -> str | None:
        one = example(row, "reference")
        with played_by(label) as judge:
            cast = Cast(actor=NO_ONE.actor, judges=(judge,))
            score = asyncio.run(scored_by(task, one, text, cast))
        hint_text: str | None = task.explain(one, episode_of(task, one, text), score)
        return hint_text

    assert "river" in (hint(QUIZ, "the bank") or "") and hint(QUIZ, "where") is None
    assert "who painted the ceiling" in (hint(SEARCH, "ok!", "ACCEPTED") or "")
    assert hint(SEARCH, "no!", "REFUSED") is None
    assert END in (hint(LATER, "and then?", "HUMAN") or "")
    words = hint(FIRST, "hey", "HUMAN") or ""
    assert "advice, another, city, get, job, moving, new" in words and END not in words
    assert task.leak_view(example(QUIZ, "reference")) is None


def test_a_refined_message_is_the_draft_with_the_slot_filled() -> None:
    prompts: list[str] = []

    def actor(body: Body) -> str:
        prompts.append(body["messages"][-1]["content"])
        return "is it the bank" if len(prompts) == 1 else "where do i put cash"

    draft, refined = walked(QUIZ, actor, None, FeedbackPolicy())[0]
    assert (draft.score.value, refined.score.value, refined.kind) == (0.0, 1.0, "refined")
    assert draft.received is not None and draft.received.usable
    (before,), (after,) = (r.episode.traces[0].turns[0].context for r in (draft, refined))
    assert before.text == prompts[0] == after.bare and after.text == prompts[1]
    assert after.text.startswith(before.text), "the slot stands at the end"
    assert draft.received.text in after.text and after.text != after.bare


def test_the_published_gate_lets_every_draft_have_feedback() -> None:
    task = task_of("userllm")
    assert task.gate(Score(value=1.0, reward=1.0), 500)


def test_a_model_coach_is_told_what_went_wrong_and_no_choices() -> None:
    task, one = task_of("userllm"), example(QUIZ)
    view = task.coach_view(one, episode_of(task, one, "the bank"), by_rule(QUIZ, "the bank"))
    text = task.prompts.render("coach", **view)
    assert "held an answer" in text and "river" not in text and "money" in text
