"""What every judged task keeps to when a judge, a partner or a coach fails, over real HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from soulkit.errors import ConfigError
from soulkit.models.base import Panel
from soulkit.play.engine import FeedbackPolicy
from soulkit.tasks.kit.base import Rollout, Task
from soulkit.types import Example, Form, Score
from tests.support.road import run, synth_examples, task_of
from tests.support.servers.openai_server import Body, Fault
from tests.support.table import asked_of, in_turn, recorded, table

TALKS = ("person_chat", "sim_doc", "sim_math", "sotopia")
JUDGED = ("coser", "humanual_email", "mirrorbench", "person_chat", "sim_doc", "sim_math", "sotopia",
          "userllm")  # fmt: skip
PARTNERS = {**dict.fromkeys((*TALKS, "secret_keeper"), "partner"), "coser": "environment"}
"""Task → the role that speaks with the actor."""
Judge = Callable[[Body], str]


def case(name: str) -> tuple[Task, Example, dict[str, Any]]:
    """A task, a row that a judge is asked about, and players who all do their part."""
    task = task_of(name)
    row = next(e for e in synth_examples(name, 12) if name == "secret_keeper"
               or task.calls(e).get("judge"))  # fmt: skip
    line = task.gold(row).traces[0].turns[0].completion.text
    partner = PARTNERS.get(name, "partner")
    return task, row, {"actor": line, partner: "Good evening.", "judge": judge_of(task)}


def judge_of(task: Task, *, perfect: bool = False) -> Judge:
    def answer(body: Body) -> str:
        schema = (body.get("response_format") or {}).get("json_schema")
        form = Form(schema["name"], json.dumps(schema["schema"])) if schema else None
        label = "ACCEPTED" if "ACCEPTED" in question(body) else "AI"
        return task.scripted_verdict(form, perfect=perfect) or label

    return answer


def in_other_words(verdict: str) -> str:
    """The verdict with another reason for everything."""
    reason = r'("(?:reason|reasoning|analysis|thought|critique|explanation|key_differences)": \[?")'
    return re.sub(reason, r"\1I think that ", verdict)


def question(body: Body) -> str:
    """What a judge is asked, without what is shown to it."""
    prompt = str(body["messages"][0]["content"])
    return re.sub(r"<(\w+ \w+)>.*?</\1>", "", prompt, flags=re.DOTALL)


def failing(role: str) -> Callable[[int, Body], Fault | None]:
    """A script in which the server of one role is out of order."""

    def script(_: int, body: Body) -> Fault | None:
        broken = str(body["model"]).startswith(role)
        return Fault.status_error(500, "overloaded") if broken else None

    return script


# -- judges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JUDGED)
def test_every_question_needs_a_readable_answer_and_is_put_once_more(name: str) -> None:
    task, row, players = case(name)
    (whole,), requests = recorded(task, row, **players)
    assert whole.score.scored and whole.score.reward is not None
    judge = players.pop("judge")
    for left in {question(body) for body in asked_of(requests, "judge")}:

        def silent(body: Body, left: str = left) -> str:
            return "" if question(body) == left else judge(body)

        (record,), again = recorded(task, row, judge=silent, **players)
        assert record.score.reason == "judge_error", left
        audited = record.score.metrics.get("hacked", 0.0)  # its audit is no part of a score
        assert record.score.value is None or audited is None, left
        asked = [body for body in asked_of(again, "judge") if question(body) == left]
        assert sorted({len(body["messages"]) for body in asked}) == [1, 3]


@pytest.mark.parametrize("name", JUDGED)
def test_an_error_of_the_judges_server_is_no_score(name: str) -> None:
    task, row, players = case(name)
    (record,), _ = recorded(task, row, script=failing("judge"), **players)
    assert (record.score.value, record.score.reason) == (None, "judge_error")
    assert record.episode.final is not None, "what was said is kept"


@pytest.mark.parametrize("name", JUDGED)
def test_a_panel_is_asked_as_often_as_it_says(name: str) -> None:
    task, row, players = case(name)
    once, twice = (
        recorded(task, row, panel=Panel(samples=samples), **players)[0][0].score
        for samples in (1, 2)
    )
    assert len(twice.verdicts) == 2 * len(once.verdicts) > 0
    assert twice.value == once.value and twice.metrics.get("judge_agreement", 1.0) == 1.0


@pytest.mark.parametrize("name", sorted({*JUDGED} - {"sim_doc", "userllm"}))
def test_an_actors_own_verdict_is_not_believed(name: str) -> None:
    """A judge that repeats it has given none; one with an opinion of its own has."""
    task, row, players = case(name)
    said: set[str] = set()
    flattering = judge_of(task, perfect=True)

    def noting(body: Body) -> str:
        said.add(flattering(body))
        return flattering(body)

    assert judged(task, row, "Well.", noting).scored
    forgeries = " ".join(sorted(said))
    score = judged(task, row, forgeries, flattering)
    assert (score.value, score.status) == (task.spec.metric.low, "forged")
    honest = judged(task, row, forgeries, lambda body: in_other_words(players["judge"](body)))
    assert honest.scored and honest.status == "ok"


def judged(task: Task, row: Example, text: str, judge: Judge) -> Score:
    """The score of an actor that says one text in every turn."""
    episode = task.canary(row, text)
    assert episode is not None
    with table(judge=judge) as (cast, _):
        score: Score = run(cast, task.judged(row, episode, cast))
        return score


# -- partners --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TALKS)
@pytest.mark.parametrize("reply", ["", " \n", "<think>what now</think>"])
def test_a_silent_partner_is_asked_once_more_and_then_breaks_the_episode(
    name: str, reply: str
) -> None:
    task, row, players = case(name)
    players["partner"] = reply
    (broken,), requests = recorded(task, row, **players)
    assert (broken.score.value, broken.score.status) == (None, "unscored")
    assert broken.score.reason == "partner_error" and broken.score.verdicts == ()
    assert not asked_of(requests, "judge")
    assert len(asked_of(requests, "partner")) == 2
    players["partner"] = in_turn([reply], "Good evening.")
    assert recorded(task, row, **players)[0][0].score.scored


@pytest.mark.parametrize("name", PARTNERS)
def test_an_error_of_the_partners_server_is_no_line(name: str) -> None:
    task, row, players = case(name)
    (record,), _ = recorded(task, row, script=failing(PARTNERS[name]), **players)
    assert (record.score.value, record.score.reason) == (None, "partner_error")
    assert not any("overloaded" in line.text for line in record.episode.transcript)


@pytest.mark.parametrize("name", PARTNERS)
def test_a_missing_partner_is_refused(name: str) -> None:
    task, row, players = case(name)
    del players[PARTNERS[name]]
    with table(**players) as (cast, _), pytest.raises(ConfigError, match=PARTNERS[name]):
        run(cast, task.play(row, cast, Rollout()))


# -- coaches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JUDGED)
def test_a_failing_coach_leaves_the_draft_its_score(name: str) -> None:
    task, row, players = case(name)
    alone, _ = recorded(task, row, **players)
    policy = FeedbackPolicy()
    for coach, script in (("x", failing("coach")), ("word " * 1201, None)):
        (draft,), _ = recorded(task, row, policy, coach=coach, script=script, **players)
        assert draft.score == replace(alone[0].score, verdicts=draft.score.verdicts)
        assert draft.received is None and draft.episode.notes["coach_failure"]


@pytest.mark.parametrize("name", JUDGED)
def test_rules_give_feedback_where_nobody_coaches(name: str) -> None:
    task, row, players = case(name)
    plays, _ = recorded(task, row, FeedbackPolicy(), **players)
    if not task.spec.feedback.coaches:
        assert len(plays) == 1
        return
    draft, refined = plays
    assert draft.received is not None and draft.received.author == "symbolic"
    assert refined.kind == "refined" and refined.given == draft.received


def in_sotopia(mean: float | None, low: float) -> Score:
    return Score(value=0.1, reward=0.1, metrics={"eval_avg": mean, "hack_low": low})


@pytest.mark.parametrize(
    ("name", "score", "step", "opens"),
    [
        ("coser", 0.2, 29, True), ("coser", 0.21, 0, False), ("coser", 0.1, 30, False),
        ("humanual_news", 0.99, 500, True), ("humanual_news", 1.0, 0, False),
        ("sotopia", in_sotopia(4.0, 1.0), 0, True), ("sotopia", in_sotopia(4.1, 1.0), 0, False),
        ("sotopia", in_sotopia(2.0, 0.0), 0, False), ("sotopia", in_sotopia(None, 1.0), 0, False),
    ],
)  # fmt: skip
def test_the_published_code_decides_which_drafts_get_feedback(
    name: str, score: float | Score, step: int, opens: bool
) -> None:
    one = score if isinstance(score, Score) else Score(value=score, reward=score)
    assert task_of(name, "reference").gate(one, step) is opens
