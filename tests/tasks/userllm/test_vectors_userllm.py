"""Conformance of UserLLM: every line under `reference`, and where `paper` differs, why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from soulkit.errors import DataError, UnreadableVerdict
from soulkit.models.base import Cast
from soulkit.tasks.userllm import fields as rows
from soulkit.tasks.userllm import metrics
from soulkit.tasks.userllm import reference as published
from soulkit.types import Example, Score
from tests.support.letters import released
from tests.support.road import NO_ONE, episode_of, player, task_of
from tests.support.servers.openai_server import ScriptedServer
from tests.support.vectors import Vector, assert_matches, load_vectors
from tests.tasks.userllm import reference

FAILED = ("", None, "RAISE", "Error after 3 attempts: x")
"""What a judge call of the vectors gave when it gave nothing."""

REPAIRED = {
    "intent-overlap-rewarded": "low overlap is good",
    "ending-turn-gets-no-humanlike-score": "a bare end token has no text to be compared or judged",
    "judge-label-not-exact-becomes-zero": "a label in decoration is read, any other asked again",
    "judge-failure-becomes-zero": "the episode is unscored",
    "empty-output-rewarded": "who says nothing scores the minimum",
    "naming-all-choices-scores-zero": "who names all choices repeats the question",
    "naming-three-or-more-scores-one": "who names some choices answers",
    "missing-choices-score-zero": "a row without choices is bad",
    "unclosed-think-kept": "unclosed thinking is not said",
    "one-text-gives-zero-diversity": "diversity of one text is undefined",
    "non-ascii-dropped": "choices are found in every script",
    # Without slugs of their own in the vectors:
    "unknown-last-turn": "termination applies only where the truth is known",
    "unusable-row": "a row that cannot be scored is bad",
    "wrapped-token": "marks around the end token are no text",
}
"""Quirk → what `paper` does instead."""


def choices(row: Mapping[str, Any]) -> list[str]:
    return list(rows.extract_choices(row.get("choices")))


def end_token(inputs: Mapping[str, Any], protocol: str = "reference") -> dict[str, Any]:
    reply = rows.read_reply(inputs["text"], protocol)  # type: ignore[arg-type]
    return {"output": reply.output, "pred_endconversation": reply.ended}


READ: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "normalize_intent": lambda i: rows.normalize_intent(i["text"]),
    "extract_intent": lambda i: rows.extract_intent(i["row"]),
    "extract_choice_texts": lambda i: choices(i["row"]),
    "normalize_for_choice_match": lambda i: metrics.choice_form(i["text"]),
    "to_optional_bool": lambda i: rows.to_optional_bool(i["value"]),
    "resolve_related_metrics": lambda i: sorted(rows.related_metrics(i["row"])),
    "extract_intent_adherence_fields": lambda i: _listed(reference.adherence_fields(i["row"])),
    "extract_ai_detector_score": lambda i: reference.reference_detector_score(i["response"]),
    "tokenize": lambda i: metrics.tokenize(i["text"]),
    "tokenize_fallback": lambda i: reference.tokenize_fallback(i["text"]),
}
COUNTED: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "intent_overlap": lambda i: metrics.intent_overlap(i["intent"], i["user_turn"]),
    "intent_overlap_fallback": lambda i: metrics.intent_overlap(
        i["intent"], i["user_turn"], reference.tokenize_fallback
    ),
    "first_turn_diversity": lambda i: metrics.first_turn_diversity(i["texts"]) or 0.0,
    "termination_f1": lambda i: metrics.termination_scores(i["pred"], i["true"])[2],
    "aggregates": lambda i: reference.reference_aggregates(i["results"]),
}
FORMULAS = {
    "extract_intent_adherence_fields", "extract_ai_detector_score", "tokenize_fallback",
    "intent_overlap_fallback", "aggregates",
}  # fmt: skip
"""What no command runs: these go through `reference.py`."""


def family(name: str, group: str) -> list[Any]:
    """The lines of one function; the line that says that the file is missing stays."""
    return [p for p in load_vectors(name) if p.values[0] is None or p.values[0].family == group]


def _listed(pair: tuple[str, str] | None) -> list[str] | None:
    return None if pair is None else list(pair)


@pytest.mark.parametrize("vector", load_vectors("userllm.parse", formula=FORMULAS))
def test_parse(vector: Vector) -> None:
    if vector.family == "end_token":
        assert_matches(end_token(vector.input), vector.expected)
        return
    assert_matches({"result": READ[vector.family](vector.input)}, vector.expected)


@pytest.mark.parametrize("vector", family("userllm.parse", "end_token"))
def test_replies_under_paper(vector: Vector) -> None:
    actual, expected = end_token(vector.input, "paper"), vector.expected
    wrapped = actual["output"] == rows.END == expected["output"].strip('`"')
    assert actual == expected or wrapped or set(vector.quirks) & set(REPAIRED)


def quiz(inputs: Mapping[str, Any], protocol: str) -> Score:
    row = {"source": rows.CSQA, "intent": "settle a quiz", "choices": inputs["choices"]}
    task = task_of("userllm", protocol)
    return score(task, task.example(released(row)), inputs["output_text"])


def score(task: Any, example: Example, text: str | None, cast: Cast = NO_ONE) -> Score:
    grade: Score = asyncio.run(task.score(example, episode_of(task, example, text or ""), cast))
    return grade


@pytest.mark.parametrize("vector", load_vectors("userllm.lexical", formula=FORMULAS))
def test_lexical(vector: Vector) -> None:
    if vector.family == "role_adherence":
        grade = quiz(vector.input, "reference")
        actual = {"result": grade.metrics["role_adherence"], "reward": grade.reward}
        assert_matches(actual, vector.expected)
        return
    assert_matches({"result": COUNTED[vector.family](vector.input)}, vector.expected)


@pytest.mark.parametrize("vector", family("userllm.lexical", "role_adherence"))
def test_role_adherence_under_paper(vector: Vector) -> None:
    try:
        grade = quiz(vector.input, "paper")
    except DataError:
        assert "missing-choices-score-zero" in vector.quirks
        return
    if not set(vector.quirks) & set(REPAIRED):
        assert_matches(grade.reward, vector.expected["reward"])
    elif grade.status == "ok":
        assert grade.reward != vector.expected["reward"], "a repair that repairs nothing"


@pytest.mark.parametrize("vector", family("userllm.lexical", "first_turn_diversity"))
def test_diversity_of_fewer_than_two_is_undefined(vector: Vector) -> None:
    quirk = "one-text-gives-zero-diversity" in vector.quirks
    assert (metrics.first_turn_diversity(vector.input["texts"]) is None) is quirk


# -- judged --------------------------------------------------------------------------------------


def judged(vector: Vector, protocol: str) -> tuple[Score, int]:
    """The score of a vector's reply by a judge over HTTP, and how often that one was asked."""
    task = task_of("userllm", protocol)
    example = task.example(released(vector.input["row"]))
    with ScriptedServer(answer=vector.input["judge_text"] or "") as server:
        judge = player(server.base_url)

        async def run() -> Score:
            episode = episode_of(task, example, vector.input["output_text"] or "")
            try:
                grade: Score = await task.score(
                    example, episode, Cast(actor=NO_ONE.actor, judges=(judge,))
                )
                return grade
            finally:
                await judge.model.close()

        return asyncio.run(run()), len(server.requests)


def reference_numbers(vector: Vector) -> dict[str, Any]:
    """The published numbers without a judge that has to be reached: failures are texts, too."""
    inputs = vector.input
    row, judge_text = inputs["row"], inputs["judge_text"]
    source = rows.read_source(row.get("source"))
    reply = rows.read_reply(inputs["output_text"], "reference")
    asks = published.asks(source, reply, reference.adherence_fields(row) is not None)
    right = "REFUSED" if source == rows.NQ else "HUMAN"
    label = published.worth(None if judge_text == "RAISE" else judge_text, right) if asks else 0.0
    numbers = published.numbers(
        source, rows.extract_intent(row), reply, rows.to_optional_bool(row.get("is_last_turn")),
        choices(row), label,
    )  # fmt: skip
    return _as_logged(numbers, published.mean(numbers), int(asks))


def _as_logged(numbers: Mapping[str, Any], value: float | None, calls: int) -> dict[str, Any]:
    names = {
        "intent_decomposition": "intent_decomposition", "termination_f1": "termination",
        "ai_detector_score": "ai_detector", "role_adherence": "role_adherence",
        "intent_adherence": "intent_adherence",
    }  # fmt: skip
    paid = dict.fromkeys(("userllm/reward", "all/score", "all/score_v1"), value)
    # The reference's judge of quality never says anything but "low".
    quality = {"userllm/quality_low": 1, "userllm/quality_medium": 0, "userllm/quality_high": 0}
    logged = {f"userllm/{name}": numbers.get(metric) for name, metric in names.items()}
    return {"reward": value, "metrics": {**paid, **logged, **quality}, "judge_calls": calls}


@pytest.mark.parametrize("vector", load_vectors("userllm.judged"))
def test_judged(vector: Vector) -> None:
    assert_matches(reference_numbers(vector), vector.expected)


@pytest.mark.parametrize("vector", load_vectors("userllm.judged"))
def test_judged_over_http(vector: Vector) -> None:
    """A judge that cannot be heard scores nothing in any protocol; all else is the reference's."""
    if vector.expected["judge_calls"] and not vector.input["judge_text"]:
        with pytest.raises(UnreadableVerdict):
            judged(vector, "reference")
        return
    grade, calls = judged(vector, "reference")
    assert_matches(_as_logged(grade.metrics, grade.reward, calls), vector.expected)
    assert len(grade.verdicts) == calls and grade.value == grade.reward


@pytest.mark.parametrize("vector", load_vectors("userllm.judged"))
def test_judged_under_paper(vector: Vector) -> None:
    quirks = set(vector.quirks)
    try:
        grade, calls = judged(vector, "paper")
    except DataError:
        assert vector.expected["reward"] == 0 and vector.expected["judge_calls"] == 0
        return
    except UnreadableVerdict:
        assert quirks & {"judge-label-not-exact-becomes-zero", "judge-failure-becomes-zero"}
        return
    assert calls == 0 or vector.input["judge_text"] not in FAILED, "scored from a failed call"
    if grade.status == "unscored":
        assert grade.reason == "unknown_truth"
    elif grade.status == "empty":
        assert grade.reward == 0
    elif "intent_decomposition" in grade.metrics:
        assert_matches(grade.reward, paper_mean(grade.metrics))
    elif not quirks & set(REPAIRED):
        assert_matches((grade.reward, calls),
                       [vector.expected["reward"], vector.expected["judge_calls"]])  # fmt: skip


def paper_mean(parts: Mapping[str, float | None]) -> float:
    """The mean of what applies."""
    overlap, end, human = (parts[n] for n in ("intent_decomposition", "termination", "ai_detector"))
    values = [x for x in (None if overlap is None else 1 - overlap, end, human) if x is not None]
    return sum(values) / len(values)
