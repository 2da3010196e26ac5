"""UserLLM over a batch, and over the drafts of a row: what one message does not have alone."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from soulkit.models.base import Cast
from soulkit.play.engine import Engine, Job
from soulkit.tasks.userllm.fields import END
from soulkit.types import Failure, Record, Score, unscored
from tests.support.road import batch_values, episode_of, played_by, synth_examples, task_of
from tests.support.servers.openai_server import Body
from tests.support.userllm import FIRST, LATER, OPEN, QUIZ, SEARCH, example

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


def test_runs_from_before_the_tag_know_their_ends_from_the_score() -> None:
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
    for i in range(20):
        task.summarise(records[:i] + records[i + 1 :])
    assert (time.process_time() - start) / 20 < 0.5, "600 of them would take five minutes"
