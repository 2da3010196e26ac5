"""Conformance: SimulatorArena's turns, arithmetic and conversations, played and judged over HTTP.

`reference` gives every line's result. `paper` gives it as well where the line tests no quirk; its
departures are named below.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from soulkit.errors import DataError
from soulkit.tasks.kit.base import Rollout
from soulkit.tasks.sim_arena.data import INTERACTION, WRITING
from soulkit.tasks.sim_arena.reference import (
    PublishedPerson,
    published_lines,
    published_mean,
    published_norm,
)
from soulkit.types import Episode, Line, Score
from tests.support.arena import PHRASE, arena, purpose, table, verdicts
from tests.support.letters import released
from tests.support.road import run
from tests.support.table import asked_of, in_turn
from tests.support.vectors import Vector, assert_matches, conformance, vectors_folder
from tests.tasks.sim_arena import reference

TASKS = {"sim_arena_math": "sim_math", "sim_arena_doc": "sim_doc"}
PARSE, JUDGED = ([f"{task}.{kind}" for task in TASKS] for kind in ("parse", "judged"))
STOPS = {"empty": "simulator_no_output", "terminated": "simulator_terminated",
         "partner_silent": "assistant_no_output", "max_turns": "max_turns_reached"}  # fmt: skip
FORMULAS = {"public_chat", "unwrap", "fmt_conversation"}
DIFFERS = {
    "missing-judge-counts-as-zero": "a part that a judge owes leaves the episode unscored",
    "no-features-counts-as-zero": "the mean is over the parts that a row has",
    "results-matched-by-position": "features are matched by name, each once",
    "nan-score-becomes-full-reward": "NaN is no score",
    "terminate-phrase-anywhere": "the phrase ends a conversation on a line of its own",
    "api-error-text-becomes-a-turn": "errors are errors; text of a partner is its line",
    "think-not-stripped": "thinking is removed",
}


def named(vector: Vector) -> str:
    return TASKS[vector.id.partition(".")[0]]


def base_row(vector: Vector) -> dict[str, Any]:
    """The row that a line's row starts from."""
    first = vectors_folder() / f"{vector.id.partition('.')[0]}.judged.jsonl"
    fixture: dict[str, Any] = json.loads(first.read_text("utf-8").splitlines()[0])
    row: dict[str, Any] = fixture["input"]["row"]
    return row


def row_of(vector: Vector) -> dict[str, Any]:
    row = dict(vector.input.get("row") or {"@base_with": {}})
    changes = row.pop("@base_with", None)
    if changes is None:
        return row
    full = {**base_row(vector), **changes}
    return {key: value for key, value in full.items() if value != "@drop"}


def public(episode: Episode, task: PublishedPerson) -> list[dict[str, str]]:
    seat = episode.traces[0].seat
    return [{"role": "user" if line.seat == seat else "assistant", "content": line.text}
            for line in episode.transcript]  # fmt: skip


# -- lexical and parse -----------------------------------------------------------------------------


@conformance("sim_arena.lexical")
def test_numbers(vector: Vector) -> None:
    inputs = vector.input
    if vector.family == "mean":
        actual: Any = published_mean(inputs["values"])
    else:
        actual = published_norm(inputs["x"], inputs["max"])
    assert_matches(actual, vector.expected["result"])


@conformance(*PARSE, fns={"user_query"})
def test_a_turn_under_reference(vector: Vector) -> None:
    task: Any = arena(named(vector), "reference")
    example = task.example(released(base_row(vector)))
    replies = [vector.input["text"] or "", ""]
    episode = task.scripted_talk(example, replies, ["ok, here is a hint."])
    actual = {
        "public_conversation": public(episode, task),
        "termination_reason": STOPS[episode.stop],
        "num_turns": sum(line.seat != episode.traces[0].seat for line in episode.transcript),
    }
    assert_matches(actual, vector.expected)


@conformance(*PARSE, fns={"user_query"}, differ=DIFFERS)
def test_paper_reads_a_turn_alike_where_no_quirk_is_tested(vector: Vector) -> None:
    text = vector.input["text"] or ""
    turn = arena(named(vector)).read(text)
    expected = [m["content"] for m in vector.expected["public_conversation"] if m["role"] == "user"]
    if turn.ended:  # with two blanks between its words as well
        assert " ".join("".join(expected).split()) in ("", PHRASE)
    elif not turn.text:
        assert not "".join(expected).strip() or text.rstrip().endswith(":")
    else:  # a tag counts in capitals, in bold type, and with a blank before its colon
        assert expected[0].endswith(turn.text)


@conformance(*PARSE, fns=FORMULAS, formula=FORMULAS)
def test_what_no_command_runs(vector: Vector) -> None:
    inputs = vector.input
    match vector.family:
        case "unwrap" if vector.raises:
            with pytest.raises(json.JSONDecodeError):
                reference.unwrap(inputs["data"])
            return
        case "unwrap":
            actual: Any = reference.unwrap(inputs["data"])
        case "public_chat":
            actual = reference.public_chat(inputs["assistant_chat"], inputs["first_query"])
        case _:
            task = arena(named(vector), "reference")
            user, assistant = task.labels
            seats = {"user": user}
            talk = [Line(seats.get(m["role"], assistant), m["content"]) for m in inputs["messages"]]
            actual = published_lines(talk, task.labels)
    assert_matches(actual, vector.expected["result"])


# -- judged ----------------------------------------------------------------------------------------


def judge_of(vector: Vector) -> Any:
    """A judge over HTTP that gives the verdicts of a line; None is no verdict."""
    given_verdict = vector.input["verdict"]
    fulfillment = given_verdict.get("fulfillment")

    def number(name: str) -> Any:
        value = given_verdict.get(name)
        return "no verdict" if value is None or math.isnan(value) else value

    return verdicts(number("writing"), number("interaction"), number("document_rating"),
                    "no verdict" if fulfillment is None else fulfillment)  # fmt: skip


def judged(vector: Vector, protocol: str) -> tuple[Score, Episode, set[str]]:
    """(score, conversation, questions) of a line, all of it over HTTP."""
    inputs = vector.input
    task = arena(named(vector), protocol)
    example = task.example(released(row_of(vector)))
    actor, partner = in_turn(inputs["user_outputs"]), in_turn(inputs["assistant_outputs"], "ok")
    with table(actor=actor, partner=partner, judge=judge_of(vector)) as (cast, requests):

        async def road() -> tuple[Episode, Score]:
            if "public_conversation" in vector.expected:
                episode = await task.play(example, cast, Rollout())
            else:  # only its numbers are looked at
                replies, answers = inputs["user_outputs"], inputs["assistant_outputs"]
                episode = task.scripted_talk(example, replies, answers)
            return episode, await task.judged(example, episode, cast)

        episode, score = run(cast, road())
        return score, episode, {purpose(body) for body in asked_of(requests, "judge")}


def logged(vector: Vector, score: Score, episode: Episode) -> dict[str, Any]:
    """The metrics of a score under the published names."""
    name, metrics = vector.id.partition(".")[0], score.metrics
    replies = sum(line.seat != episode.traces[0].seat for line in episode.transcript)
    named_metrics: dict[str, Any] = {
        "reward": score.reward, "num_turn": replies,
        "writing_style_likert": metrics.get("style/writing"),
        "interaction_style_likert": metrics.get("style/interaction"),
    }  # fmt: skip
    if name == "sim_arena_doc":
        named_metrics["document_rating"] = metrics.get("document/rating")
        named_metrics["writing_fulfillment_rate"] = metrics.get("features/writing")
        named_metrics["interaction_fulfillment_rate"] = metrics.get("features/interaction")
    else:
        named_metrics["fulfillment_rate"] = metrics.get("features/met")
    return {f"{name}/{key}": value for key, value in named_metrics.items()} | {
        "all/score": score.value
    }


def without_words(vector: Vector) -> bool:
    """A row that has the person's columns and nothing in them."""
    row = row_of(vector)
    return "human_user_queries" in row and row["human_user_queries"] is None


@conformance(*JUDGED, fns={""})
def test_conversations_and_rewards(vector: Vector) -> None:
    if vector.raises or without_words(vector):
        # The published code plays a row whose person said nothing; such a row is refused here.
        with pytest.raises(DataError):
            arena(named(vector), "reference").example(released(row_of(vector)))
        return
    score, episode, questions = judged(vector, "reference")
    expected = vector.expected
    if "nan-score-becomes-full-reward" in vector.quirks:
        nan_as_full(vector)
        return
    assert_matches(logged(vector, score, episode), expected["metrics"])
    assert_matches(score.reward, expected["reward"])
    assert sorted(questions) == expected["judges_called"]
    if "public_conversation" in expected:
        task: Any = arena(named(vector), "reference")
        assert public(episode, task) == expected["public_conversation"]
        assert STOPS[episode.stop] == expected["termination_reason"]


def nan_as_full(vector: Vector) -> None:
    """NaN cannot come as a verdict; the published arithmetic takes it for the best."""
    task: Any = arena(named(vector), "reference")
    verdict = vector.input["verdict"]
    numbers = {
        "writing_style": (verdict["writing"], 5), "interaction_style": (verdict["interaction"], 5),
        "document": (verdict.get("document_rating"), 10),
    }  # fmt: skip
    shares = {name: published_norm(*pair) for name, pair in numbers.items()}
    example = task.example(released(row_of(vector)))
    columns = {c: example.fields.get(c) for c in (WRITING, INTERACTION)}
    assert all(set(verdict["fulfillment"]) == {"Match"} for c in columns)
    value = task.value({**shares, **dict.fromkeys(columns, 1.0)})
    assert_matches(value, vector.expected["reward"])


@conformance(*JUDGED, fns={""}, differ=DIFFERS)
def test_paper_agrees_where_no_quirk_is_tested(vector: Vector) -> None:
    if vector.raises or without_words(vector):
        with pytest.raises(DataError):
            arena(named(vector)).example(released(row_of(vector)))
        return
    score, episode, _ = judged(vector, "paper")
    verdict, stop = vector.input["verdict"], episode.stop
    scale = {"writing": (1, 5), "interaction": (1, 5), "document_rating": (1, 10)}
    off = any(not low <= verdict[name] <= high for name, (low, high) in scale.items()
              if name in verdict)  # fmt: skip
    if not episode.transcript:
        assert (score.value, score.status) == (0.0, "empty"), "nothing was said"
    elif stop == "failed":
        assert score.reason == "partner_error", "an assistant that says nothing, twice"
    elif off:
        assert score.value is None and score.reason == "judge_error"
    else:
        assert_matches(score.value, vector.expected["reward"])
        assert score.reward == score.value
