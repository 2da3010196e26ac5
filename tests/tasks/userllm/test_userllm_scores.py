"""UserLLM over a batch, and over the drafts of a row: what one message does not have alone.

Conformance of UserLLM: every line under `reference`, and where `paper` differs, why.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from soulkit.errors import DataError, UnreadableVerdict
from soulkit.models.base import Cast
from soulkit.play.engine import Engine, Job
from soulkit.tasks.userllm import fields as rows
from soulkit.tasks.userllm import metrics
from soulkit.tasks.userllm import reference as published
from soulkit.tasks.userllm.fields import END
from soulkit.types import Example, Failure, Record, Score, unscored
from tests.support.letters import released
from tests.support.road import (
    NO_ONE,
    batch_values,
    episode_of,
    played_by,
    player,
    synth_examples,
    task_of,
)
from tests.support.servers.openai_server import Body, ScriptedServer
from tests.support.userllm import FIRST, LATER, OPEN, QUIZ, SEARCH, example
from tests.support.vectors import Vector, assert_matches, conformance
from tests.tasks.userllm import reference

BLAND = "hey, quick one, got a sec?"


def recorded(row: dict[str, Any], text: str, score: Score, key: str, rollout: int = 0) -> Record:
    task, one = task_of("userllm"), example(row)
    return Record(key=f"{key}/{rollout}", task="userllm", example_id=key, rollout=rollout,
                  kind="draft", episode=episode_of(task, one, text), score=score,
                  tags=one.tags)  # fmt: skip


def prism(
    value: float | None, termination: float | None = None, overlap: float | None = None,
    human: float | None = None, status: str = "ok",
) -> Score:  # fmt: skip
    metrics = {"intent_decomposition": overlap, "termination": termination, "ai_detector": human}
    return Score(value=value, reward=value, metrics=metrics, status=status)


def test_the_headline_is_the_mean_of_what_each_source_comes_to() -> None:
    one, zero = Score(value=1.0, reward=1.0), Score(value=0.0, reward=0.0)
    records = [
        recorded(QUIZ, "x", one, "a"), recorded(QUIZ, "x", zero, "b"),
        recorded(QUIZ, "x", zero, "c"), recorded(QUIZ, "x", zero, "d"),
        recorded(SEARCH, "x", one, "e"),
        recorded(FIRST, "a b", prism(0.9, overlap=0.2, human=1.0), "f"),
        recorded(FIRST, "a c", prism(0.9, overlap=0.4, human=0.0), "g"),
        recorded(LATER, "more", prism(0.9, 0.0, overlap=0.3, human=0.5), "h"),
        recorded(LATER, END, prism(1.0, 1.0), "i"),
    ]  # fmt: skip
    metrics = task_of("userllm").batch_metrics(records)
    parts = {"first_turn_diversity": 2 / 3, "own_words": 0.7, "termination_f1": 2 / 3,
             "human_share": 0.5}  # fmt: skip
    assert {name: metrics[name].value for name in parts} == pytest.approx(parts)
    four = sum(parts.values()) / 4
    assert metrics["headline/prism"].value == pytest.approx(four)
    assert metrics["macro_source"].value == pytest.approx((0.25 + 1 + four) / 3)
    counts = {name: (one.n, one.n_scored, one.unit) for name, one in metrics.items()}
    assert counts["macro_source"] == (9, 9, "messages") and counts["own_words"][0] == 3
    assert (counts["termination_f1"][0], counts["first_turn_diversity"][0]) == (2, 2)
    assert all((one.low, one.high) == (0.0, 1.0) for one in metrics.values())
    assert metrics["macro_source"].missing == ()


def test_a_source_without_a_score_or_without_rows_is_named() -> None:
    lost = replace(recorded(SEARCH, "x", Score(value=1, reward=1), "a"),
                   score=unscored(Failure("judge_error")))  # fmt: skip
    right = recorded(QUIZ, "x", Score(value=1.0, reward=1.0), "b")
    metrics = task_of("userllm").batch_metrics([lost, right])
    assert dict(metrics["macro_source"].missing) == {"NQ": "unscored", "PRISM": "no rows"}
    assert metrics["macro_source"].n_scored == 1
    assert metrics["headline/commonsense_qa"].value == 1.0


def test_what_failed_counts_in_every_part() -> None:
    silent = prism(0.0, status="empty")
    good = prism(1.0, overlap=0.0, human=1.0)
    records = [recorded(FIRST, "a b", good, "a"), recorded(FIRST, "c d", good, "b"),
               recorded(FIRST, "", silent, "c"), recorded(LATER, END, prism(1.0, 1.0), "d"),
               recorded(OPEN, "", silent, "e")]  # fmt: skip
    means = batch_values(task_of("userllm"), records)
    assert means["first_turn_diversity"] == pytest.approx(1 / 3), "silence is like everything"
    assert means["own_words"] == means["human_share"] == pytest.approx(2 / 4)
    assert means["termination_precision"] == 0.5, "a failed message went the wrong way"


def test_diversity_and_termination_of_a_batch() -> None:
    records = [
        recorded(FIRST, "a b c", prism(1.0), "a"), recorded(FIRST, "a b d", prism(1.0), "b"),
        recorded(FIRST, "x y", prism(1.0), "c"), recorded(FIRST, "a b c", prism(1.0), "a", 1),
        recorded(LATER, END, prism(1.0), "d"), recorded(LATER, "more", prism(0.5), "e"),
        recorded(OPEN, f"bye {END}", prism(0.5), "f"),
        recorded(OPEN, "a b c", prism(None), "g"), recorded(QUIZ, "a b c", prism(1.0), "h"),
    ]  # fmt: skip
    means = batch_values(task_of("userllm"), records)
    assert means["first_turn_diversity"] == pytest.approx(0.833333, abs=1e-6)
    ends = [means[f"termination_{name}"] for name in ("precision", "recall", "f1")]
    assert ends == [0.5, 0.5, 0.5]


def test_a_batch_without_ends_has_no_score_of_ending() -> None:
    going_on = [recorded(row, "more", prism(0.5, 1.0), "a") for row in (FIRST, OPEN)]
    assert not any(
        name.startswith("termination") for name in batch_values(task_of("userllm"), going_on)
    )
    missed = batch_values(task_of("userllm"), [recorded(LATER, "more", prism(0.5, 0.0), "a")])
    assert (missed["termination_recall"], missed["termination_f1"]) == (0.0, 0.0)
    assert "termination_precision" not in missed


def test_the_end_of_a_message_without_the_tag_follows_from_its_score() -> None:
    old = [
        replace(r, tags={"source": "prism", "turn": "later"})
        for r in (
            recorded(LATER, END, prism(1.0, 1.0), "a"),
            recorded(OPEN, END, prism(0.0, 0.0), "b"),
        )
    ]
    assert batch_values(task_of("userllm"), old)["termination_precision"] == 0.5


def test_the_published_numbers_are_means_of_single_messages() -> None:
    records = [recorded(QUIZ, "x", Score(value=1.0, reward=1.0), "a"),
               recorded(FIRST, "x y", prism(0.5, 1.0), "b"),
               recorded(FIRST, "", prism(0.5, 1.0), "c")]  # fmt: skip
    task = task_of("userllm", "reference")
    assert batch_values(task, records) == {"macro_source": 0.75}
    assert list(task.group_rewards(records)) == records


# -- a lazy actor --------------------------------------------------------------------------------


def kind_judge(body: Body) -> str:
    """Finds that everybody is human and refuses every proposal."""
    return "REFUSED" if "REFUSED" in body["messages"][0]["content"] else "HUMAN"


def test_one_bland_line_to_everybody_is_no_longer_a_person() -> None:
    task, examples = task_of("userllm"), synth_examples("userllm", 120)

    async def run(cast: Cast) -> list[Record]:
        try:
            return await Engine(cast).run([Job(task, e) for e in examples], lambda record: None)
        finally:
            for player in cast.players:
                await player.model.close()

    with played_by(BLAND) as actor, played_by(kind_judge) as judge:
        records = asyncio.run(run(Cast(actor=actor, judges=(judge,))))
    means = batch_values(task, records)
    assert (means["first_turn_diversity"], means["termination_f1"]) == (0.0, 0.0)
    assert means["headline/prism"] == pytest.approx(0.5, abs=0.01)
    single = sum(r.score.value or 0 for r in records) / len(records)
    assert means["macro_source"] < 0.85 < 0.9 < single, "what single messages would have come to"


# -- the drafts of a row -------------------------------------------------------------------------


def group(*texts: str, refined: str | None = None, row: dict[str, Any] = FIRST) -> list[Record]:
    score = prism(0.9, overlap=0.2, human=1.0)
    drafts = [recorded(row, text, score, "a", i) for i, text in enumerate(texts)]
    if refined is None:
        return drafts
    return [*drafts, replace(recorded(row, refined, score, "a"), key="a/r", kind="refined")]


def rewards(records: list[Record]) -> list[float | None]:
    return [r.score.reward for r in task_of("userllm").group_rewards(records)]


def test_a_first_message_is_paid_for_being_unlike_the_other_drafts() -> None:
    records = group("a b", "a b", "c d", refined="a c")
    rewarded = list(task_of("userllm").group_rewards(records))
    assert [r.score.metrics["novelty"] for r in rewarded] == pytest.approx(
        [0.5, 0.5, 1.0, (2 / 3 + 2 / 3) / 2]
    ), "a refined message is compared with the other rollouts' drafts"
    assert [r.score.reward for r in rewarded] == pytest.approx(
        [(0.8 + 1.0 + r.score.metrics["novelty"]) / 3 for r in rewarded]
    )
    assert [r.key for r in rewarded] == [r.key for r in records]
    assert all(r.score.value == 0.9 for r in rewarded), "a score is of the message alone"


def test_without_two_drafts_nothing_is_unlike() -> None:
    assert rewards(group("a b")) == [0.9]
    assert rewards(group("a b", refined="c")) == [0.9, 0.9]
    lost = group("a b", "c d")
    lost[1] = replace(lost[1], score=unscored(Failure("judge_error")))
    assert rewards(lost) == [0.9, None]


def test_later_messages_and_failures_are_paid_as_they_were() -> None:
    assert rewards(group("a b", "c d", row=OPEN)) == [0.9, 0.9]
    silent = group("a b", "c d", "")
    silent[2] = replace(silent[2], score=prism(0.0, status="empty"))
    assert rewards(silent)[2] == 0.0 and rewards(silent)[0] == pytest.approx((0.8 + 1 + 1) / 3)


# -- time ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_leaving_out_one_row_after_another_takes_seconds() -> None:
    words = [f"word{i}" for i in range(400)]
    records = [
        recorded(FIRST, " ".join(words[(i * k) % 400] for k in range(1, 25)),
                 prism(0.9, overlap=0.2, human=1.0), str(i))
        for i in range(600)
    ]  # fmt: skip
    task = task_of("userllm")
    task.summarise(records)
    start = time.process_time()
    for i in range(5):
        task.summarise(records[:i] + records[i + 1 :])
    assert (time.process_time() - start) / 5 < 0.5, "600 of them would take five minutes"


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


def _listed(pair: tuple[str, str] | None) -> list[str] | None:
    return None if pair is None else list(pair)


@conformance("userllm.parse", formula=FORMULAS)
def test_parse(vector: Vector) -> None:
    if vector.family == "end_token":
        assert_matches(end_token(vector.input), vector.expected)
        return
    assert_matches({"result": READ[vector.family](vector.input)}, vector.expected)


@conformance("userllm.parse", fns={"end_token"})
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


@conformance("userllm.lexical", formula=FORMULAS)
def test_lexical(vector: Vector) -> None:
    if vector.family == "role_adherence":
        grade = quiz(vector.input, "reference")
        actual = {"result": grade.metrics["role_adherence"], "reward": grade.reward}
        assert_matches(actual, vector.expected)
        return
    assert_matches({"result": COUNTED[vector.family](vector.input)}, vector.expected)


@conformance("userllm.lexical", fns={"role_adherence"})
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


@conformance("userllm.lexical", fns={"first_turn_diversity"})
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


@conformance("userllm.judged")
def test_judged(vector: Vector) -> None:
    assert_matches(reference_numbers(vector), vector.expected)


@conformance("userllm.judged")
def test_judged_over_http(vector: Vector) -> None:
    """A judge that cannot be heard scores nothing in any protocol; all else is the reference's."""
    if vector.expected["judge_calls"] and not vector.input["judge_text"]:
        with pytest.raises(UnreadableVerdict):
            judged(vector, "reference")
        return
    grade, calls = judged(vector, "reference")
    assert_matches(_as_logged(grade.metrics, grade.reward, calls), vector.expected)
    assert len(grade.verdicts) == calls and grade.value == grade.reward


@conformance("userllm.judged")
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
