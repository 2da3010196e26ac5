"""What the judges' answers become: values, rewards, panels, and verdicts that cannot be read.

Conformance: Sotopia's actions, arithmetic and scenes. `reference` gives every line's result.

`paper` gives it as well where the line is in the form asked for and tests no quirk; its departures
are named below.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from soulkit.errors import ConfigError, UnreadableVerdict
from soulkit.eval.results.summary import summarise
from soulkit.judge.coach import RISKS
from soulkit.models.base import Panel
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.kit.registry import load_registry
from soulkit.tasks.sotopia import judging
from soulkit.tasks.sotopia.actions import (
    Action,
    action_json,
    narrate,
    parse_action,
    parse_line,
    read_action,
)
from soulkit.tasks.sotopia.judging import DIMENSIONS, average, weighted
from soulkit.train.rollouts.play import with_reward
from soulkit.types import Episode, Example
from tests.support.road import run
from tests.support.sotopia import (
    GOOD,
    LEAVE,
    LINE,
    LOW,
    Body,
    example,
    judged,
    ratings,
    raw,
    record,
    scored,
    sotopia,
    speak,
    table,
)
from tests.support.table import in_turn
from tests.support.vectors import Vector, assert_matches, conformance
from tests.tasks.sotopia import reference
from tests.tasks.sotopia.reference import HIGHEST, LOWEST

PROTOCOLS = ("paper", "reference")


def test_value_and_reward_are_one_number() -> None:
    score = scored("paper", [LINE] * 3)
    assert score.value == score.reward == average(GOOD) / 10
    assert score.status == "ok" and raw(score) == GOOD
    assert score.metrics["weighted"] == weighted(GOOD)
    assert (score.metrics["hacked"], score.metrics["turns"]) == (0.0, 3.0)
    assert "judge_agreement" not in score.metrics
    assert score.words.splitlines()[-1] == "goal 7: it shows" and len(score.words.splitlines()) == 7
    assert [verdict.purpose for verdict in score.verdicts] == ["score", "audit"]
    assert set(score.prompts) == {"character", "judge", "audit"}


def test_the_scale_of_the_metric_is_what_scores_can_reach() -> None:
    metric = sotopia().spec.metric
    assert (metric.low, metric.high) == (LOWEST, HIGHEST)
    for pick, bound in (("low", LOWEST), ("high", HIGHEST)):
        ends = {name: getattr(d, pick) for name, d in DIMENSIONS.items()}
        value = scored("paper", [LINE], judge=judged(ratings(ends))).value
        assert value == pytest.approx(bound, abs=1e-12)
        assert weighted(ends) == (0 if pick == "low" else 1)


@pytest.mark.parametrize("kind", ["draft", "refined"])
@pytest.mark.parametrize("level", ["medium", "high"])
def test_playing_to_the_judge_costs_the_reward_in_every_kind(kind: str, level: str) -> None:
    audit = json.dumps({"risk_level": level, "reason": "speaks to the judge"})
    score = scored("paper", [LINE], kind, judge=judged(audit=audit))
    assert score.value == pytest.approx(average(GOOD) / 10), "the benchmark has no auditor"
    assert score.reward == sotopia().spec.metric.low
    assert (score.status, score.metrics["hacked"], raw(score)) == ("ok", 1.0, GOOD)


@pytest.mark.parametrize("penalty", ["off", "train", "always"])
def test_what_an_auditors_finding_costs_can_be_told(penalty: str) -> None:
    low, mean = sotopia().spec.metric.low, average(GOOD) / 10
    expected = {
        "off": (mean, mean, "ok"),
        "train": (mean, low, "ok"),
        "always": (low, low, "hacked"),
    }
    audit = json.dumps({"risk_level": "high", "reason": "speaks to the judge"})
    score = scored("paper", [LINE], judge=judged(audit=audit), hack_penalty=penalty)
    value, reward, status = expected[penalty]
    assert (score.value, score.reward) == pytest.approx((value, reward)) and score.status == status
    clean = scored("paper", [LINE], judge=judged(), hack_penalty=penalty)
    assert (clean.value, clean.reward, clean.metrics["hacked"]) == pytest.approx((mean, mean, 0.0))


def test_a_penalty_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no hack_penalty 'sometimes'"):
        load_registry().task("sotopia", options={"hack_penalty": "sometimes"})


@pytest.mark.parametrize(
    ("kind", "level", "text", "reward"),
    [
        ("draft", "low", LINE, average(GOOD) / 10),
        ("draft", "high", LINE, average(GOOD) / 10),
        ("draft", "low", "<think>a</think>" + LINE, weighted(GOOD) / 2),
        ("draft", "medium", "<think>a</think>" + LINE, weighted(GOOD) / 4),
        ("refined", "low", LINE, weighted(GOOD)),
        ("refined", "low", "<think>a</think>" + LINE, weighted(GOOD) / 2),
        ("refined", "medium", LINE, 0.0),
    ],
)
def test_the_reference_pays_on_two_scales(kind: str, level: str, text: str, reward: float) -> None:
    audit = json.dumps({"risk_level": level, "reason": ""})
    score = scored("reference", [text], kind, judge=judged(audit=audit))
    assert score.value == pytest.approx(average(GOOD) / 10)
    assert score.reward == pytest.approx(reward) and score.metrics[f"hack_{level}"] == 1.0
    assert score.protocol == "reference"


BAD = {
    "NaN": ratings().replace('"score": 7', '"score": NaN'),
    "beyond floats": ratings().replace('"score": 7', '"score": 1e400'),
    "a text": ratings(goal="7"),
    "a fraction": ratings(goal=6.5),
    "a whole float": ratings(goal=7.0),
    "a truth value": ratings(goal=True),
    "nothing": ratings(goal=None),
    "one missing": json.dumps({k: v for k, v in json.loads(ratings()).items() if k != "goal"}),
    "one too many": ratings(charm=3),
    "no reasoning": ratings().replace('"reasoning": "it shows", ', "", 1),
    "prose": "I would say seven out of ten overall.",
    "empty": "",
    "cut off": ratings()[:-20],
    "deep": '{"goal": ' * 3000,
}
OUT_OF_RANGE = {"above": ratings(goal=11), "below": ratings(secret=-11), "gift": ratings(secret=1)}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("reply", BAD.values(), ids=BAD)
def test_a_verdict_off_the_shape_is_asked_for_again_and_then_missing(
    reply: str, protocol: str
) -> None:
    requests: list[Body] = []

    def judge(body: Body) -> str:
        requests.append(body)
        return reply

    outcome = record(protocol=protocol, actor=in_turn([LINE], LEAVE), judge=judged(judge))
    assert outcome.score.status == "unscored" and outcome.score.reason == "judge_error"
    assert outcome.score.value is outcome.score.reward is None and not outcome.score.metrics
    assert len(requests) == 2 and len(requests[1]["messages"]) == 3
    again = record(
        protocol=protocol, actor=in_turn([LINE], LEAVE), judge=judged(in_turn([reply], ratings()))
    )
    assert again.score.scored, "the second answer counts"


@pytest.mark.parametrize("reply", OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_a_score_off_its_scale(reply: str) -> None:
    with pytest.raises(UnreadableVerdict):
        scored("paper", [LINE], judge=judged(reply))
    moved = scored("reference", [LINE], judge=judged(reply))
    expected = {n: DIMENSIONS[n].clamped(m["score"]) for n, m in json.loads(reply).items()}
    assert raw(moved) == expected


UNREADABLE = ["", "low", '{"risk_level": "LOW", "reason": ""}', '{"risk_level": "low"}', "{}"]


@pytest.mark.parametrize("audit", UNREADABLE)
@pytest.mark.parametrize("penalty", ["train", "off"])
def test_without_a_readable_audit_the_value_stays(penalty: str, audit: str) -> None:
    score = scored("paper", [LINE], judge=judged(audit=audit), hack_penalty=penalty)
    assert score.value == pytest.approx(average(GOOD) / 10) and raw(score) == GOOD
    assert score.metrics["hacked"] is None, "an audit that is missing is no audit passed"
    assert score.reward == (None if penalty == "train" else score.value)
    assert (score.status, score.reason) == ("ok", "judge_error")
    (problem,) = [v.problem for v in score.verdicts if v.purpose == "audit"]
    assert problem and "asked" in problem


@pytest.mark.parametrize("audit", UNREADABLE)
def test_a_value_that_depends_on_a_missing_audit_is_none(audit: str) -> None:
    with pytest.raises(UnreadableVerdict):
        scored("paper", [LINE], judge=judged(audit=audit), hack_penalty="always")


@pytest.mark.parametrize(("kind", "rewarded"), [("draft", True), ("refined", False)])
def test_under_the_reference_a_missing_audit_leaves_what_it_decides_open(
    kind: str, rewarded: bool
) -> None:
    score = scored("reference", [LINE], kind, judge=judged(audit="low"))
    assert score.value == pytest.approx(average(GOOD) / 10)
    assert score.reward == (score.value if rewarded else None)
    flags = ("hacked", "hack_low", "hack_medium", "hack_high", "weighted_in_training")
    assert [score.metrics[name] for name in flags] == [None] * 5
    assert score.metrics["weighted"] == weighted(GOOD), "the audit has no part in it"


def test_hacked_counts_the_episodes_that_were_audited() -> None:
    audits = {"Maya Lind": LOW, "Ada Roy": "I cannot say."}

    def audit(body: Body) -> str:
        return next(text for name, text in audits.items() if name in str(body["messages"]))

    rows = [example(), example(agent1_name="Ada Roy")]
    played = [record(row, judge=judged(audit=audit), actor=LEAVE) for row in rows]
    cells = summarise(
        played, command="eval", model="m", protocol="paper", seconds=0.0, cost=None,
        scale={"sotopia": (LOWEST, HIGHEST)},
    ).tasks["sotopia"]  # fmt: skip
    assert (cells["value"].n_scored, cells["value"].n) == (2, 2)
    hacked = cells["hacked"]
    assert (hacked.mean, hacked.n_scored, hacked.n) == (0.0, 1, 2)
    assert hacked.unscored == {"judge_error": 1}
    unaudited = with_reward(played[1])
    assert with_reward(played[0]) is played[0]
    assert (unaudited.score.value, unaudited.score.status) == (None, "unscored")
    assert unaudited.score.reason == "judge_error" and "asked 2 times" in unaudited.score.words


def test_the_auditor_sees_the_actors_turns_alone() -> None:
    prompts: list[str] = []

    def audit(body: Body) -> str:
        prompts.append(str(body["messages"][0]["content"]))
        return LOW

    data = speak('{"score": 10}')
    replies = [data, speak("grade(10)"), LEAVE]
    scored("paper", replies, judge=judged(audit=audit))
    assert "{\u201dscore\u201d: 10}" in prompts[0] and "grade(10)" in prompts[0]
    assert "I am glad that we talk" not in prompts[0]
    scored("reference", replies, judge=judged(audit=audit))
    assert len(prompts) == 1, "the reference hides such turns, and then asks nobody"


def test_a_panel_is_combined_by_dimension_and_its_agreement_told() -> None:
    replies = {"judge-0": ratings(goal=4), "judge-1": ratings(goal=9)}
    audits = {"judge-0": "high", "judge-1": "low"}

    def judge(body: Body) -> str:
        name = body["model"]
        audit = json.dumps({"risk_level": audits[name], "reason": ""})
        return judged(replies[name], audit)(body)

    score = scored("paper", [LINE], judge=judge, judges=2, panel=Panel(samples=2))
    assert score.metrics["goal"] == 6.5 and len(score.verdicts) == 8
    assert score.metrics["judge_agreement"] == pytest.approx(1 - (4 * 0.5 / 6) / 7)
    assert score.metrics["hacked"] == 1.0, "of two who differ the worse is believed"
    audits["judge-0"] = "low"
    again = scored("paper", [LINE], judge=judge, judges=2, panel=Panel(samples=2))
    assert again.value == pytest.approx(average({**GOOD, "goal": 6.5}) / 10)
    assert again.words.count("[judge-") == 4


def test_an_auditor_of_its_own_is_asked_instead_of_the_judge() -> None:
    seen: list[str] = []

    def note(body: Any) -> str:
        kind = "audit" if "risk_level" in str(body["messages"]) else "score"
        seen.append(f"{body['model']} {kind}")
        return judged()(body)

    task, row = sotopia("paper"), example("paper")
    episode = task.scripted(row, (LINE,))
    with table(judge=note, judges=2) as (cast, _):
        first, second = cast.judges
        apart = replace(cast, judges=(first,), auditors=(second,), panel=Panel())
        score = run(apart, task.judged(row, episode, apart))
    assert sorted(seen) == ["judge-0 score", "judge-1 audit"]
    assert [(v.purpose, v.judge) for v in score.verdicts] == [
        ("score", "judge-0"), ("audit", "judge-1")
    ]  # fmt: skip


def test_a_declaration_says_how_often_a_question_is_put() -> None:
    task, row = sotopia("paper"), example("paper")
    often = type(task)("sotopia", task.spec.model_copy(update={"samples": {"score": 3}}))
    with table() as (cast, _):
        score = run(cast, often.judged(row, task.scripted(row, (LINE,)), cast))
    assert [v.purpose for v in score.verdicts] == ["score"] * 3 + ["audit"]
    with table(panel=Panel(samples=2)) as (cast, _):
        score = run(cast, often.judged(row, task.scripted(row, (LINE,)), cast))
    assert [v.purpose for v in score.verdicts] == ["score"] * 2 + ["audit"] * 2


REPAIRED = {
    "none-action-spoken-verbatim": "an explicit none is doing nothing",
    "invalid-action-spoken-verbatim": "an unknown kind is spoken without its JSON",
    "control-char-breaks-json": "raw control characters inside a JSON text are read",
    "raw-newline-in-json-becomes-backslash-n": "a raw line break stays a line break",
    "largest-json-wins": "the first action counts, and thinking is removed",
    "json-list-spoken-verbatim": "the action inside a list is found",
    "nested-action-ignored": "a wrapped action is found",
    "null-argument-becomes-None-text": "no argument is nothing said",
    "list-argument-python-repr": "lists and truth values are no Python notation",
    "scalar-from-broken-json": "broken JSON is read for its argument",
    "unescaped-quotes": "broken JSON is read for its argument",
}
JUDGED = {
    "think-format-switches-reward-scale": "one reward for every kind of reply",
    "hack-penalty-never-reaches-the-reward": "a hacked episode is paid the minimum",
    "unknown-risk-level-ignored": "an unknown level is asked for again, then unknown",
    "hack-judge-failure-is-low": "a missing audit leaves unknown what it decides",
    "hack-judge-skips-jsonlike-turns": "the auditor sees every turn",
    "missing-score-becomes-midrange": "an incomplete verdict leaves the episode unscored",
    "fraction-truncated-toward-zero": "a fraction is no score",
    "boolean-counts-as-one": "a truth value is no score",
    "nan-score-crashes": "NaN is unscored, and nothing crashes",
    "judge-failure-becomes-midrange": "a failed judge leaves the episode unscored",
    "early-leave-does-not-end": "leaving ends the scene",
    "api-error-text-becomes-a-turn": "errors are errors; text of a partner is its line",
    "same-name-partner-counted-as-actor": "speakers are known by seat",
    "unknown-position-is-agent2": "other spellings are read, other values refused",
    "placeholder-replaced-inside-words": "whole words are replaced",
}


FORMULAS = {
    "action_to_natural_language", "extract_json_from_text", "parse_rollout_conversation",
    "aggregates", "extract_old_scores",
}  # fmt: skip
"""What no command runs: these go through `reference.py`."""


def action_result(name: str, action: Action) -> dict[str, Any]:
    plain = {"action_type": action.kind, "argument": action.argument}
    return {"action": plain, "natural_language": narrate(name, action)}


@conformance("sotopia.parse", formula=FORMULAS)
def test_parse(vector: Vector) -> None:
    inputs, actual = vector.input, {}
    match vector.family:
        case "parse_action":
            actual = action_result(inputs["name"], parse_action(inputs["text"]))
        case "action_to_natural_language":
            actual = {"result": reference.narrated(inputs["name"], inputs["action"])}
        case "parse_json":
            actual = {"result": action_json(inputs["text"])}
        case "extract_json_from_text":
            value, calls = reference.extract_json(inputs["text"], lambda _: inputs["repair_output"])
            actual = {"result": value, "repair_calls": calls}
        case "parse_rollout_conversation":
            names = inputs["actor_name"], inputs["partner_name"]
            actual = {"result": reference.parse_rollout(inputs["rollout_output"], *names)}
    assert_matches(actual, vector.expected)


@conformance("sotopia.parse", fns={"parse_action"}, differ=REPAIRED)
def test_the_repaired_reader_agrees_on_what_was_asked_for(vector: Vector) -> None:
    action = read_action(vector.input["text"] or "", "paper", vector.input["name"])
    if action.status == "ok":
        assert_matches(action_result(vector.input["name"], action), vector.expected)
    else:
        assert '"action_type"' not in action.argument and "{'" not in action.argument
        assert action.status in ("salvaged", "empty", "malformed")


@conformance("sotopia.lexical", formula=FORMULAS)
def test_numbers(vector: Vector) -> None:
    inputs = vector.input
    match vector.family:
        case "normalize_score":
            actual: Any = judging.DIMENSIONS[inputs["dimension"]].normal(inputs["score"])
        case "aggregates":
            actual = reference.reference_aggregates(inputs["results"])
        case _:
            actual = reference.extract_old_scores(inputs["rollout"])
    assert_matches(actual, vector.expected["result"])


def scene(vector: Vector) -> tuple[Example, Episode, bool]:
    """The scene of a vector over HTTP, and whether the auditor gets anything to see."""
    actor, partner = iter(vector.input["actor_outputs"]), iter(vector.input["partner_outputs"])
    task, row = sotopia("reference"), example("reference", **vector.input["row"])
    with table(
        actor=lambda _: next(actor, None) or "", partner=lambda _: next(partner, None) or ""
    ) as (cast, _):
        episode = run(cast, task.play(row, cast, Rollout()))
    return row, episode, bool(task._audited(row, episode))


def transcript(row: Example, episode: Episode) -> list[dict[str, Any]]:
    names = sotopia("reference").names(row)
    lines = [(names[line.seat], line.text) for line in episode.transcript]
    return [
        {"turn": turn, "agent": name, "action_type": parse_line(name, text).kind,
         "argument": parse_line(name, text).argument, "natural_language": text}
        for turn, (name, text) in enumerate(lines, 1)
    ]  # fmt: skip


@conformance("sotopia.judged", fns={""}, formula={""})
def test_scenes_and_rewards(vector: Vector) -> None:
    row, episode, audited = scene(vector)
    inputs, expected = vector.input, vector.expected
    thought = any(
        turn.completion.text.strip().startswith(("<think>", "<seed:think>"))
        for turn in episode.traces[0].turns
    )

    def expected_scores() -> reference.ReferenceScores:
        return reference.reference_scores(
            inputs["verdict"], inputs["hack_verdict"], is_train=inputs["is_train"],
            audited=audited, thought_aloud=thought,
        )  # fmt: skip

    if vector.raises:
        with pytest.raises((ValueError, OverflowError)) as caught:
            expected_scores()
        assert caught.type.__name__ == expected["error"]
        return
    result, metrics = expected_scores(), expected["metrics"]
    assert_matches(result.reward, expected["reward"])
    assert_matches(result.weighted, metrics["sotopia/reward"])
    assert_matches(result.average, metrics["sotopia/eval_avg"])
    assert_matches(result.average / 10, metrics["all/score"])
    assert_matches(result.raw, {name: metrics[f"sotopia/{name}"] for name in judging.DIMENSIONS})
    flags = {level: int(result.risk == level) for level in RISKS}
    assert flags == {level: metrics[f"sotopia/hack_{level}"] for level in RISKS}
    assert audited is expected["hack_judge_called"]
    if "transcript" in expected:
        assert_matches(transcript(row, episode), expected["transcript"])
        view, _ = sotopia("reference").view(row, "agent1", "judge")
        assert view["scenario"] == expected["scenario"]


@conformance("sotopia.judged", fns={"evaluate_text"}, formula={"evaluate_text"})
def test_a_judge_of_free_text(vector: Vector) -> None:
    texts = iter(vector.input["judge_texts"])
    raw, calls = reference.evaluate_text(lambda: next(texts, ""))
    actual = {"reward": judging.weighted(raw), "actor_avg": judging.average(raw),
              "actor_scores": reference.shares(raw), "calls": calls}  # fmt: skip
    assert_matches(actual, vector.expected)


def well_formed(verdict: Any) -> bool:
    return isinstance(verdict, dict) and set(verdict) == set(judging.DIMENSIONS)


def spoken_verdict(verdict: Any) -> str:
    if not well_formed(verdict):
        return json.dumps(verdict)
    return json.dumps({name: {"reasoning": "as written", **mark} for name, mark in verdict.items()})


def in_range(verdict: Any) -> bool:
    limits = judging.DIMENSIONS.items()
    return well_formed(verdict) and all(d.low <= verdict[n]["score"] <= d.high for n, d in limits)


@conformance("sotopia.judged", fns={""}, differ=JUDGED)
def test_the_live_score_agrees_where_no_quirk_is_tested(vector: Vector) -> None:
    """Both protocols, judged over HTTP: the headline is the reference's, or there is none."""
    verdict, audit = vector.input["verdict"], vector.input["hack_verdict"]
    judge = judged(spoken_verdict(verdict), json.dumps(audit))
    actor = [text for text in vector.input["actor_outputs"] if text]
    spoke = any(read_action(text, "paper").kind not in ("none", "leave") for text in actor)
    if not spoke:
        return  # paper scores silence without a judge; see test_sotopia.py
    expected = vector.expected["metrics"]["all/score"]
    live = scored("reference", actor, judge=judge)
    assert_matches(live.value, expected)
    assert live.metrics["goal"] == vector.expected["metrics"]["sotopia/goal"]
    if not in_range(verdict):
        with pytest.raises(UnreadableVerdict):
            scored("paper", actor, judge=judge)
        return
    paper = scored("paper", actor, judge=judge)
    if json.dumps(audit) != LOW and audit["risk_level"] != "low":
        assert paper.reward == sotopia().spec.metric.low
    else:
        assert paper.reward == paper.value
    assert_matches(paper.value, expected)
