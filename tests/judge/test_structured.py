"""Verdicts: what is read from a reply, what is asked again, and what stays missing.

A verdict that was cut is named as cut, with whose limit it was, and not asked for again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError

from soulkit.errors import ProviderError, UnreadableVerdict
from soulkit.judge.panel import (
    Opinion,
    agreement,
    combined,
    judge_names,
    opinions,
    pair_orders,
    pooled,
    readable,
)
from soulkit.judge.structured import (
    JudgeQuestion,
    VerdictShape,
    ask,
    label_question,
    question,
    read_label,
    read_shape,
    scan,
)
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Panel, Player
from soulkit.types import Call, Episode, Sampling
from tests.support.road import NO_ONE, played_by
from tests.support.servers.openai_server import Body, Fault, ScriptedServer

JsonBody = dict[str, Any]


class Part(VerdictShape):
    reasoning: str
    score: int = Field(ge=-5, le=5)


class Whole(VerdictShape):
    goal: Part
    warmth: float = Field(ge=0, le=1)


GOOD = {"goal": {"reasoning": "it was met", "score": 3}, "warmth": 0.5}
GOOD_TEXT = json.dumps(GOOD)


def with_goal(score: Any) -> str:
    return json.dumps({**GOOD, "goal": {"reasoning": "x", "score": score}})


@pytest.mark.parametrize(
    "text",
    [
        GOOD_TEXT,
        f"```json\n{GOOD_TEXT}\n```",
        f"Let me think. {{not json}} First idea: minus 5 … no, rather {GOOD_TEXT} Done.",
        f"<think>{with_goal(5)}</think>{GOOD_TEXT}",
        f"{GOOD_TEXT}\nThe transcript says {with_goal(99)}",
        f"{GOOD_TEXT} and then {GOOD_TEXT[:-9]}",
        f'{GOOD_TEXT} {{"goal": 5}}',
    ],
    ids=[
        "bare",
        "fenced",
        "among words",
        "thought",
        "off scale after",
        "cut after",
        "off schema after",
    ],
)
def test_the_one_complete_object_of_the_shape_counts(text: str) -> None:
    assert read_shape(text, Whole).model_dump() == GOOD


@pytest.mark.parametrize(
    ("text", "about"),
    [
        ("", "no complete JSON object"),
        ("Ten out of ten, well done!", "no complete JSON object"),
        (GOOD_TEXT[:-1], "no complete JSON object"),  # cut: nothing is looked for inside it
        (f"First idea: {with_goal(-5)} … no, rather {GOOD_TEXT}", "differ"),
        (with_goal("3"), "goal.score"),
        (with_goal(3.5), "goal.score"),
        (with_goal(True), "goal.score"),
        (with_goal(None), "goal.score"),
        (with_goal(6), "less than or equal to 5"),
        (with_goal(-6), "greater than or equal to -5"),
        ('{"goal": {"reasoning": "x", "score": 1}}', "warmth"),
        (json.dumps({**GOOD, "bonus": 1}), "bonus"),
        (GOOD_TEXT.replace("0.5", "NaN"), ""),
        (GOOD_TEXT.replace("0.5", "Infinity"), ""),
        (GOOD_TEXT.replace("0.5", "1e400"), ""),
        (GOOD_TEXT.replace("3}", "1e400}"), ""),
        (f"[{GOOD_TEXT}", None),
        ('{"goal":' * 5000, "no complete"),
    ],
)  # fmt: skip
def test_what_is_off_the_shape_does_not_count(text: str, about: str | None) -> None:
    if about is None:  # an object inside an unfinished list is still a complete object
        assert read_shape(text, Whole).model_dump() == GOOD
        return
    with pytest.raises(UnreadableVerdict) as caught:
        read_shape(text, Whole)
    assert about in caught.value.detail


class Free(VerdictShape):
    weight: float


@pytest.mark.parametrize("number", ["1e400", "-1e400", "Infinity", "NaN"])
def test_a_number_without_bounds_is_finite_all_the_same(number: str) -> None:
    with pytest.raises(UnreadableVerdict):
        read_shape(f'{{"weight": {number}}}', Free)
    with pytest.raises(ValidationError):
        Free(weight=float(number))
    assert read_shape('{"weight": 1e300}', Free).weight == 1e300


def test_a_question_that_knows_no_forgery_finds_none() -> None:
    def refuse(text: str) -> str:
        raise UnreadableVerdict(f"no answer in {text!r}")

    judge_question = JudgeQuestion("score", "How?", read=refuse, dump=lambda text: {"text": text})
    with played_by("hm") as judge, pytest.raises(UnreadableVerdict) as caught:
        asyncio.run(ask(judge, judge_question, Call(role="judge", example_id="e")))
    assert caught.value.forgery is not None and not caught.value.forgery(GOOD_TEXT)
    assert not judge_question.quotes(GOOD_TEXT)


@pytest.mark.parametrize("quoted", ["it wrote <think> and stopped", "it wrote </think> twice"])
def test_a_quoted_thinking_mark_takes_no_verdict_away(quoted: str) -> None:
    verdict = {**GOOD, "goal": {"reasoning": quoted, "score": 1}}
    assert read_shape(f" {json.dumps(verdict)}\n", Whole).model_dump() == verdict


def test_what_is_wrong_is_said_of_the_last_object() -> None:
    with pytest.raises(UnreadableVerdict, match=r"goal\.score: Input should be less than"):
        read_shape(f'The transcript says {{"score": 10}}. {with_goal(6)}', Whole)


@pytest.mark.parametrize(
    "piece", ["{", "{'", '{"', '{"a":', '{"a": 1}', "}", "<think>", "</think>"]
)
def test_a_judge_that_never_stops_holds_nobody_up(piece: str) -> None:
    """A linear reader takes hundredths of a second; the square of the length would be hours."""
    judge_question = question(
        "score", f"<x 0123456789ab>\n{piece * 20_000}\n</x 0123456789ab>", Whole
    )
    started = time.process_time()
    for reply in (piece * (2_000_000 // len(piece)), f"{piece * 20_000}{GOOD_TEXT}"):
        with pytest.raises(UnreadableVerdict):
            judge_question.read(reply)
    assert time.process_time() - started < 20


@given(st.text())
def test_no_text_crashes_the_reader(text: str) -> None:
    scan(text)
    with pytest.raises(UnreadableVerdict):
        read_shape("{" + text, Whole)


def test_labels() -> None:
    labels = ("REFUSED", "ACCEPTED")
    for text in ("REFUSED", " refused.\n", "**Refused**", "<think>ACCEPTED</think>REFUSED",
                 "The user insists.</think>\n\nREFUSED"):  # fmt: skip
        assert read_label(text, labels) == "REFUSED"
    for text in ("", "The label is REFUSED", "REFUSED or ACCEPTED", "NOT REFUSED", "refuse",
                 "The user insists.\n\nREFUSED"):  # fmt: skip
        with pytest.raises(UnreadableVerdict):
            read_label(text, labels)


# --- over HTTP ------------------------------------------------------------------------------------


def judge(server: ScriptedServer, name: str = "judge") -> Player:
    model = Endpoint(model=name, base_url=server.base_url, backoff_s=0, max_attempts=2)
    return Player(model, Sampling(temperature=0.0, max_tokens=300))


ASKED = question("score", "How was it? Reply with a JSON object.", Whole)
CALL = Call(role="judge", example_id="e")


def asked_of(answer: Callable[[JsonBody], str], **script: Any) -> tuple[Any, list[JsonBody]]:
    with ScriptedServer(answer=answer, **script) as server:
        try:
            return asyncio.run(ask(judge(server), ASKED, CALL)), server.requests
        except UnreadableVerdict as error:
            return error, server.requests


def test_a_good_verdict_is_asked_for_once_and_in_its_form() -> None:
    answer, requests = asked_of(lambda body: GOOD_TEXT)
    assert answer.model_dump() == GOOD
    assert len(requests) == 1
    form = requests[0]["response_format"]["json_schema"]
    assert form["name"] == "Whole" and form["schema"]["required"] == ["goal", "warmth"]


def test_a_bad_verdict_is_asked_for_once_more_with_what_is_wrong() -> None:
    replies = [with_goal("3"), GOOD_TEXT]
    answer, requests = asked_of(lambda body: replies.pop(0))
    assert answer.model_dump() == GOOD
    first, second = (body["messages"] for body in requests)
    assert second[0] == first[0]
    assert second[1] == {"role": "assistant", "content": with_goal("3")}
    assert "goal.score" in second[2]["content"]


def test_two_bad_verdicts_are_no_verdict() -> None:
    error, requests = asked_of(lambda body: "I would say 7 out of 10.")
    assert isinstance(error, UnreadableVerdict) and error.reason == "judge_error"
    assert "no complete JSON object" in error.detail and "asked 2 times" in error.detail
    assert len(requests) == 2


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_reply_is_no_verdict(text: str) -> None:
    error, _ = asked_of(lambda body: text)
    assert isinstance(error, UnreadableVerdict) and "empty" in error.detail


def test_a_judge_that_is_not_there_is_to_blame_itself() -> None:
    error, requests = asked_of(
        lambda body: GOOD_TEXT, script=lambda index, body: Fault.status_error(500)
    )
    assert isinstance(error, UnreadableVerdict) and "HTTP 500" in error.detail
    assert isinstance(error.__cause__, ProviderError)
    assert len(requests) == 2  # its own attempts; a re-ask would only be more of them


# --- panels ---------------------------------------------------------------------------------------


EPISODE = Episode(example_id="e", task="t", rollout=3, kind="refined", step=7)


def panel(answers: list[Callable[[JsonBody], str]], samples: int = 1) -> Any:
    servers = [ScriptedServer(answer=answer) for answer in answers]
    for server in servers:
        server.__enter__()
    try:
        judges = tuple(judge(server, f"j{i // 2}") for i, server in enumerate(servers))
        actor = Player(judges[0].model)
        cast = Cast(actor=actor, judges=judges, panel=Panel(samples=samples))
        return asyncio.run(opinions(cast, ASKED, EPISODE)), [s.requests for s in servers]
    finally:
        for server in servers:
            server.stop()


def test_every_judge_is_asked_as_often_as_the_panel_says() -> None:
    panel_opinions, requests = panel([lambda b: with_goal(1), lambda b: with_goal(3)], samples=3)
    assert [(o.judge, o.sample) for o in panel_opinions] == [
        ("j0 #1", 0), ("j0 #1", 1), ("j0 #1", 2), ("j0 #2", 0), ("j0 #2", 1), ("j0 #2", 2),
    ]  # fmt: skip
    assert [len(r) for r in requests] == [3, 3]
    assert combined([o.goal.score for o in readable(panel_opinions)], "mean") == 2.0
    assert panel_opinions[0].verdict().said["goal"] == {"reasoning": "x", "score": 1}


def test_a_lost_sample_is_kept_as_its_reason() -> None:
    replies = iter(["rubbish", "rubbish"])
    panel_opinions, _ = panel([lambda b: next(replies, GOOD_TEXT)], samples=2)
    lost = [o for o in panel_opinions if o.answer is None]
    # Two questions are under way at once: both spoilt replies may have met the same one.
    assert len(readable(panel_opinions)) == 2 - len(lost) >= 1
    assert all("no complete JSON object" in o.verdict().problem for o in lost)


def test_a_judge_without_a_readable_opinion_leaves_the_episode_without_a_score() -> None:
    with pytest.raises(UnreadableVerdict, match="no complete JSON object"):
        panel([lambda b: GOOD_TEXT, lambda b: "no"])


def test_combining_and_agreeing() -> None:
    assert combined([1, 2, 6], "mean") == 3
    assert combined([1, 2, 2], "vote") == 2
    assert combined([1, 1, 2, 2], "vote") == 1.5
    with pytest.raises(ValueError, match="no values to combine"):
        combined([], "mean")
    assert agreement([4], 0, 10) is None
    assert agreement([4, 4, 4], 0, 10) == 1
    assert agreement([0, 10], 0, 10) == 0
    assert agreement([0, 5, 10], 0, 10) == pytest.approx(1 - 20 / 30)


def test_orders_of_a_pair() -> None:
    assert pair_orders(EPISODE, "both") == (True, False)
    drawn = {pair_orders(Episode(example_id=str(i), task="t"), "seeded") for i in range(30)}
    assert drawn == {(True,), (False,)}
    # Those of recorded runs, which are scored again in the order in which they were judged.
    keyed = [pair_orders(Episode(example_id=str(i), task="t"), "seeded", "k")[0] for i in range(8)]
    assert keyed == [False, False, False, True, False, False, False, False]


def test_label_questions_have_no_form() -> None:
    judge_question = label_question("detector", "AI or HUMAN?", ("AI", "HUMAN"))
    assert judge_question.form is None and judge_question.dump("AI") == {"label": "AI"}
    assert judge_names([]) == []


def test_a_judge_counts_once_in_a_mean_however_many_opinions_were_lost() -> None:
    def opinion(judge: str, sample: int, answer: int | None) -> Opinion[int]:
        return Opinion(judge, "score", sample, answer, {}, "" if answer is not None else "lost")

    panel_opinions = [
        opinion("a", 0, 10),
        opinion("a", 1, None),
        opinion("b", 0, 4),
        opinion("b", 1, 4),
    ]
    assert pooled(panel_opinions, float, "mean") == 7
    assert pooled(panel_opinions, float, "vote") == 4
    with pytest.raises(ValueError, match="no values to combine"):
        pooled([opinion("a", 0, None)], float, "mean")


class Mark(VerdictShape):
    score: int = Field(ge=0, le=10)


CUT_QUESTION = question("score", "How was it? Reply with a JSON object.", Mark)


def player(server: ScriptedServer, limit: int) -> Player:
    model = Endpoint(model="judge", base_url=server.base_url, backoff_s=0, max_attempts=1)
    return Player(model, Sampling(temperature=0.0, max_tokens=limit))


def asked_with_limit(limit: int, **server: Any) -> tuple[Any, list[Body]]:
    with ScriptedServer(**server) as running:
        try:
            return asyncio.run(ask(player(running, limit), CUT_QUESTION, CALL)), running.requests
        except UnreadableVerdict as error:
            return error, running.requests


def cut(text: str, tokens: int | None) -> Fault:
    choice = {"message": {"content": text}, "finish_reason": "length"}
    usage = {} if tokens is None else {"prompt_tokens": 9, "completion_tokens": tokens}
    return Fault.reply({"choices": [choice], "usage": usage})


def test_a_verdict_that_is_cut_at_its_limit_is_asked_for_once() -> None:
    error, requests = asked_with_limit(5, answer="I think that all in all it was a fair try")
    assert isinstance(error, UnreadableVerdict) and len(requests) == 1
    assert "cut off at 5 tokens" in error.detail and "asked once" in error.detail
    assert "max_tokens" in error.detail


def test_a_limit_of_the_server_is_named_as_its_own() -> None:
    error, requests = asked_with_limit(4096, script={0: cut('{"sco', 128)})
    assert isinstance(error, UnreadableVerdict) and len(requests) == 1
    assert "cut off at 128 tokens by the server" in error.detail
    assert "4096 were allowed" in error.detail


def test_thinking_that_fills_the_limit_is_cut_and_not_empty() -> None:
    error, requests = asked_with_limit(4096, script={0: cut("", None)})
    assert "cut off at 4096 tokens" in error.detail and len(requests) == 1


def test_a_verdict_that_was_complete_before_the_cut_is_one() -> None:
    verdict, _ = asked_with_limit(4096, script={0: cut('{"score": 4} and so', 128)})
    assert verdict == Mark(score=4)


def test_a_judge_that_refuses_is_asked_once_more() -> None:
    message = {"content": None, "refusal": "I rate nobody."}
    refusal = Fault.reply({"choices": [{"message": message, "finish_reason": "stop"}]})
    verdict, requests = asked_with_limit(4096, script={0: refusal}, answer='{"score": 4}')
    assert verdict == Mark(score=4) and len(requests) == 2
    error, requests = asked_with_limit(4096, script={0: refusal, 1: refusal})
    assert "the judge refused: I rate nobody." in error.detail and "asked 2 times" in error.detail


def test_a_form_that_the_server_ignored_stands_in_the_verdict() -> None:
    replies = iter(['Here it is: {"score": 4}', '{"score": 4}'])
    with ScriptedServer(answer=lambda body: next(replies)) as server:
        cast = Cast(actor=NO_ONE.actor, judges=(player(server, 512),))
        for ignored in (("form",), ()):
            episode = Episode(example_id=f"e{ignored}", task="t")
            (opinion,) = asyncio.run(opinions(cast, CUT_QUESTION, episode))
            assert opinion.verdict().ignored == ignored
