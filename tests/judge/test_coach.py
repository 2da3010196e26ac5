"""The model coach over HTTP: its words, or an error, and never an error in place of words.

What the auditor is shown, and what several audits come to.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from soulkit.errors import CallError, UnreadableVerdict
from soulkit.judge.coach import MAX_COACH_WORDS, Audit, agreed_risk, ask_coach, auditable_texts
from soulkit.judge.structured import read_shape
from soulkit.models.base import Cast
from soulkit.play.engine import Engine, FeedbackPolicy, Job, record_of
from soulkit.tasks.sotopia.judging import DIMENSIONS
from soulkit.types import Call, Feedback
from tests.support import sotopia
from tests.support.road import NO_ONE, episode_of, played_by, score_text, synth_examples, task_of
from tests.support.servers.openai_server import Fault

CALL = Call(role="coach", example_id="e")


def coached(answer: Any, max_tokens: int = 512, **server: Any) -> Feedback:
    async def ask() -> Feedback:
        with played_by(answer, **server) as coach:
            player = type(coach)(coach.model, type(coach.sampling)(max_tokens=max_tokens))
            try:
                return await ask_coach(player, "What now?", CALL)
            finally:
                await coach.model.close()

    return asyncio.run(ask())


def test_the_words_of_a_coach() -> None:
    feedback = coached("<think>secret plan</think>\n Look at\n sentence 4. ")
    assert (feedback.text, feedback.author) == ("Look at sentence 4.", "scripted")


@pytest.mark.parametrize("reply", ["", "   \n", "<think>I am still at it"])
def test_an_empty_reply_is_no_feedback(reply: str) -> None:
    with pytest.raises(CallError) as caught:
        coached(reply)
    assert caught.value.reason == "judge_error"


def test_a_rambling_coach_is_not_passed_on() -> None:
    with pytest.raises(UnreadableVerdict, match=str(MAX_COACH_WORDS)):
        coached("word " * (MAX_COACH_WORDS + 1))
    assert coached("word " * MAX_COACH_WORDS).text


def test_a_coach_that_was_cut_off_is_not_passed_on() -> None:
    with pytest.raises(UnreadableVerdict, match="cut off"):
        coached("one two three four five", max_tokens=3)


def test_what_a_filter_left_over_is_not_passed_on() -> None:
    choice = {"message": {"content": "Mind that the"}, "finish_reason": "content_filter"}
    with pytest.raises(UnreadableVerdict, match="filter"):
        coached("fine", script={0: Fault.reply({"choices": [choice]})})


@pytest.mark.parametrize("status", [400, 500, 503])
def test_an_error_text_never_becomes_feedback(status: int) -> None:
    with pytest.raises(CallError) as caught:
        coached("fine", script=lambda i, b: Fault.status_error(status, "overloaded"))
    assert caught.value.reason == "judge_error"


def critique(answer: Any, **server: Any) -> tuple[Any, list[str]]:
    """The engine's record of a wrong draft with a coach behind HTTP, and the coach's prompts."""
    task = task_of("tomi")
    example = synth_examples("tomi", 1)[0]
    prompts: list[str] = []
    text = "<answer>nowhere</answer>"
    score = score_text(task, example, text)

    def reply(body: dict) -> str:
        prompts.append(body["messages"][-1]["content"])
        return answer

    async def run() -> Any:
        with played_by(reply, **server) as coach:
            cast = Cast(actor=NO_ONE.actor, coach=coach)
            engine = Engine(cast, feedback=FeedbackPolicy())
            job = Job(task, example)
            draft = record_of(job, job.rollout(0), episode_of(task, example, text), score)
            try:
                return await engine.critique(job, draft)
            finally:
                await coach.model.close()

    return asyncio.run(run()), prompts


def test_the_coach_is_shown_the_attempt_and_its_score() -> None:
    record, prompts = critique("Ask who was there.")
    assert record.received.text == "Ask who was there." and record.received.leak == ""
    assert "<answer>nowhere</answer>" in prompts[0] and "0.0" in prompts[0]


def test_a_coach_that_tells_the_answer_is_caught() -> None:
    gold = task_of("tomi").gold_text(synth_examples("tomi", 1)[0])
    assert critique(f"It is the {gold}.")[0].received.leak == "gold_text"


def test_a_coach_that_fails_leaves_the_draft_as_it_was() -> None:
    record, _ = critique("x", script=lambda i, b: Fault.status_error(500, "overloaded"))
    assert record.received is None and record.score.scored
    assert record.episode.notes["coach_failure"].startswith("judge_error")


# --- what a coach may know ------------------------------------------------------------------------


def coach_prompt(task_name: str, protocol: str, *, sees_gold: bool = False) -> tuple[str, str]:
    """What a coach is asked about a wrong answer, and the right one."""
    task = task_of(task_name, protocol)
    row = synth_examples(task_name, 1, protocol)[0]
    wrong = task.wrong(row)
    score = asyncio.run(task.score(row, wrong, NO_ONE))
    cast = Cast(actor=NO_ONE.actor, coach_sees_gold=sees_gold)
    return task.coach_prompt(row, wrong, score, cast), task.gold_text(row)


GOLD_IN_REFERENCE = ("fantom", "hitom", "paratomi", "lifechoices", "twinvoice", "mistakes")


@pytest.mark.parametrize("name", [*GOLD_IN_REFERENCE, "humanllm"])
def test_the_published_codes_coach_knows_the_answer_and_ours_where_it_is_told(name: str) -> None:
    published, gold = coach_prompt(name, "reference")
    ends = "For you alone, the right answer:\n" + gold
    assert (ends in published) == (name in GOLD_IN_REFERENCE)
    assert "right answer:" not in coach_prompt(name, "paper")[0]
    shown, gold = coach_prompt(name, "paper", sees_gold=True)
    assert "For you alone, the right answer:\n" + gold in shown


def test_feedback_of_a_model_names_what_was_judged() -> None:
    draft = sotopia.record(feedback=FeedbackPolicy(), coach="Ask what stands in the way.")
    assert draft.received is not None and draft.received.dimensions == tuple(DIMENSIONS)
    assert critique("Ask who was there.")[0].received.dimensions == ("accuracy",)


SAID = ["Hello there.", "  ", '{"goal": 10}', "[I win]", "score(10)", "I paid (all of it)."]


def test_the_reference_hides_what_looks_like_data_and_paper_shows_it():
    assert auditable_texts(SAID, "reference") == ["Hello there.", "I paid (all of it)."]
    assert auditable_texts(SAID, "paper") == [s for s in SAID if s.strip()]


@pytest.mark.parametrize(
    ("levels", "agreed"),
    [
        (["low"], "low"),
        (["low", "high"], "high"),
        (["low", "low", "high"], "low"),
        (["high", "medium", "low"], "medium"),
    ],
)
def test_several_opinions_agree_on_the_middle_one(levels, agreed):
    assert agreed_risk(levels) == agreed


def test_no_opinion_is_no_risk():
    with pytest.raises(ValueError):
        agreed_risk([])


@pytest.mark.parametrize("reply", ['{"risk_level": "none", "reason": ""}', '{"risk_level": "low"}'])
def test_an_audit_has_one_of_three_levels_and_a_reason(reply):
    with pytest.raises(UnreadableVerdict):
        read_shape(reply, Audit)
