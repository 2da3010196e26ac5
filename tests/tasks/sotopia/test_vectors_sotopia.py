"""Conformance: Sotopia's actions, arithmetic and scenes. `reference` gives every line's result.

`paper` gives it as well where the line is in the form asked for and tests no quirk; its departures
are named below.
"""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Any

import pytest

from soulkit.errors import UnreadableVerdict
from soulkit.judge.hacking import RISKS
from soulkit.tasks.base import Rollout
from soulkit.tasks.sotopia import scores
from soulkit.tasks.sotopia.actions import (
    Action,
    narrate,
    parse_action,
    parse_json,
    parse_line,
    read_action,
)
from soulkit.types import Episode, Example
from tests.support.road import run
from tests.support.sotopia import LOW, example, judged, scored, sotopia, table
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.sotopia import reference

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


def lines(
    name: str,
    family: str = "",
    differ: dict[str, str] | None = None,
    formula: Set[str] = frozenset(),
) -> list[Any]:
    """The lines of one function; the others are another test's."""
    params = load_vectors(name, differ=differ, formula=formula)
    return [p for p in params if p.values[0] is None or p.values[0].family == family]


def action_result(name: str, action: Action) -> dict[str, Any]:
    plain = {"action_type": action.kind, "argument": action.argument}
    return {"action": plain, "natural_language": narrate(name, action)}


@pytest.mark.parametrize("vector", load_vectors("sotopia.parse", formula=FORMULAS))
def test_parse(vector: Vector) -> None:
    inputs, actual = vector.input, {}
    match vector.family:
        case "parse_action":
            actual = action_result(inputs["name"], parse_action(inputs["text"]))
        case "action_to_natural_language":
            actual = {"result": reference.narrated(inputs["name"], inputs["action"])}
        case "parse_json":
            actual = {"result": parse_json(inputs["text"])}
        case "extract_json_from_text":
            value, calls = reference.extract_json(inputs["text"], lambda _: inputs["repair_output"])
            actual = {"result": value, "repair_calls": calls}
        case "parse_rollout_conversation":
            names = inputs["actor_name"], inputs["partner_name"]
            actual = {"result": reference.parse_rollout(inputs["rollout_output"], *names)}
    assert_matches(actual, vector.expected)


@pytest.mark.parametrize("vector", lines("sotopia.parse", "parse_action", REPAIRED))
def test_the_repaired_reader_agrees_on_what_was_asked_for(vector: Vector) -> None:
    action = read_action(vector.input["text"] or "", "paper", vector.input["name"])
    if action.status == "ok":
        assert_matches(action_result(vector.input["name"], action), vector.expected)
    else:
        assert '"action_type"' not in action.argument and "{'" not in action.argument
        assert action.status in ("salvaged", "empty", "malformed")


@pytest.mark.parametrize("vector", load_vectors("sotopia.lexical", formula=FORMULAS))
def test_numbers(vector: Vector) -> None:
    inputs = vector.input
    match vector.family:
        case "normalize_score":
            actual: Any = scores.DIMENSIONS[inputs["dimension"]].normal(inputs["score"])
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


@pytest.mark.parametrize("vector", lines("sotopia.judged", formula={""}))
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
    assert_matches(result.raw, {name: metrics[f"sotopia/{name}"] for name in scores.DIMENSIONS})
    flags = {level: int(result.risk == level) for level in RISKS}
    assert flags == {level: metrics[f"sotopia/hack_{level}"] for level in RISKS}
    assert audited is expected["hack_judge_called"]
    if "transcript" in expected:
        assert_matches(transcript(row, episode), expected["transcript"])
        view, _ = sotopia("reference").view(row, "agent1", "judge")
        assert view["scenario"] == expected["scenario"]


@pytest.mark.parametrize(
    "vector", lines("sotopia.judged", "evaluate_text", formula={"evaluate_text"})
)
def test_a_judge_of_free_text(vector: Vector) -> None:
    texts = iter(vector.input["judge_texts"])
    raw, calls = reference.evaluate_text(lambda: next(texts, ""))
    actual = {"reward": scores.weighted(raw), "actor_avg": scores.average(raw),
              "actor_scores": reference.shares(raw), "calls": calls}  # fmt: skip
    assert_matches(actual, vector.expected)


def well_formed(verdict: Any) -> bool:
    return isinstance(verdict, dict) and set(verdict) == set(scores.DIMENSIONS)


def spoken_verdict(verdict: Any) -> str:
    if not well_formed(verdict):
        return json.dumps(verdict)
    return json.dumps({name: {"reasoning": "as written", **mark} for name, mark in verdict.items()})


def in_range(verdict: Any) -> bool:
    limits = scores.DIMENSIONS.items()
    return well_formed(verdict) and all(d.low <= verdict[n]["score"] <= d.high for n, d in limits)


@pytest.mark.parametrize("vector", lines("sotopia.judged", differ=JUDGED))
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
