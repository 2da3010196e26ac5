"""Rewards that a row's rollouts owe to each other, and the numbers that rows have together.

Every judged task has canaries that a judge would really be shown; no other task has any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from soulkit.data.rows import row_id
from soulkit.errors import CallError
from soulkit.models.base import Cast, Panel
from soulkit.tasks.kit.choice import ChoiceTask
from soulkit.tasks.kit.rewards import (
    CANARY_NAMES,
    canary_episodes,
    canary_texts,
    fixed_examples,
    with_group_rewards,
)
from soulkit.tasks.kit.scoring import as_batch_metrics, macro, mean_of, row_mean
from soulkit.types import BatchMetric, Episode, Failure, Record, Score, unscored
from tests.support.road import TASKS, batch_values, makeable, played_by, synth_examples, task_of


def record(example: str, value: float | None, rollout: int = 0, **more: Any) -> Record:
    score = unscored(Failure("x")) if value is None else Score(value=value, reward=value)
    fields = {"key": f"{example}/{rollout}", "task": "tomi", "example_id": example,
              "rollout": rollout, "kind": "draft", "score": score,
              "episode": Episode(example_id=example, task="tomi")}  # fmt: skip
    return Record(**{**fields, **more})


# -- rewards of a row ----------------------------------------------------------------------------


class Rank(ChoiceTask):
    """Pays for being the best of a row."""

    groups: ClassVar[list[list[str]]] = []

    def parse(self, text: str) -> tuple[str, str]:
        return text, "ok"

    def grade(self, example: Any, answer: str) -> float:
        return 0.0

    def gold_completion(self, example: Any) -> str:
        return "x"

    def group_rewards(self, records: Sequence[Record]) -> Sequence[Record]:
        self.groups.append([r.key for r in records])
        best = max(r.score.value or 0 for r in records)
        return [replace(r, score=replace(r.score, reward=float(r.score.value == best)))
                for r in records]  # fmt: skip


class Lossy(Rank):
    def group_rewards(self, records: Sequence[Record]) -> Sequence[Record]:
        return records[1:]


def live(kind: type[Rank]) -> dict[str, Any]:
    return {"tomi": kind("tomi", task_of("tomi").spec)}


def test_a_task_is_asked_once_a_row_and_step() -> None:
    tasks = live(Rank)
    Rank.groups.clear()
    records = [record("a", 0.2), record("b", 0.9), record("a", 0.7, 1), record("b", 0.1, 1),
               record("a", 0.1, 0, step=1, key="later")]  # fmt: skip
    rewarded = with_group_rewards(tasks, records)
    assert Rank.groups == [["a/0", "a/1"], ["b/0", "b/1"], ["later"]]
    assert {r.key: r.score.reward for r in rewarded} == {
        "a/0": 0.0, "a/1": 1.0, "b/0": 1.0, "b/1": 0.0, "later": 1.0,
    }  # fmt: skip


def test_a_task_that_loses_a_rollout_leaves_the_row_unscored() -> None:
    rewarded = with_group_rewards(live(Lossy), [record("a", 1.0), record("a", 0.0, 1)])
    assert [r.key for r in rewarded] == ["a/0", "a/1"]
    assert {(r.score.reward, r.score.reason) for r in rewarded} == {(None, "task_error")}
    assert all("did not return the records" in r.score.words for r in rewarded)


def test_by_default_a_reward_stands_alone() -> None:
    records = [record("a", 1.0), record("a", 0.0, 1)]
    assert with_group_rewards({"tomi": task_of("tomi")}, records) == records


# -- numbers over rows ---------------------------------------------------------------------------


def test_a_row_in_several_forms_is_one_row() -> None:
    records = [record(f"a-{i}", v) for i, v in enumerate((1, 1, 1, 0, 1))]
    records += [record(f"b-{i}", 0) for i in range(5)]
    mean = row_mean(records)
    assert (mean.value, mean.n, mean.n_scored, mean.unit) == (0.4, 2, 2, "rows")
    assert (mean.low, mean.high) == (0.0, 1.0)
    assert row_id("a-3") == row_id("a") == "a"


def test_a_row_with_an_unscored_form_has_no_value() -> None:
    records = [record("a-0", 1), record("a-1", None), record("b-0", 1), record("b-1", 0)]
    mean = row_mean(records)
    assert (mean.value, mean.n, mean.n_scored) == (0.5, 2, 1)
    again = [replace(r, rollout=1, key=f"{r.key}/again") for r in records[:1]]
    again.append(record("a-1", 1, 1))
    assert row_mean([*records, *again]).value == 0.75, "another play of the row is whole"


def test_a_mean_over_tags_counts_rows_and_needs_tags() -> None:
    records = [record("a-0", 1, tags={"t": "x"}), record("a-1", 0, tags={"t": "x"}),
               record("b", 1, tags={"t": "y"}), record("c", None, tags={"t": "z"})]  # fmt: skip
    mean = macro(records, "t")
    assert mean is not None and (mean.value, mean.n, mean.n_scored) == (0.75, 3, 2)
    assert macro(records, "other") is None
    nothing = macro(records[3:], "t")
    assert nothing is not None and (nothing.value, nothing.n_scored) == (None, 0)


def test_plain_numbers_of_older_tasks_are_over_all_their_episodes() -> None:
    records = [record("a", 1), record("b", None), record("c", 0, kind="refined")]
    exact = mean_of([1.0, None], "stories", (0.0, 2.0))
    metrics = as_batch_metrics({"old": 0.5, "none": None, "new": exact}, records)
    assert metrics["old"] == BatchMetric(0.5, 2, 1) and metrics["none"] == BatchMetric(None, 2, 1)
    assert metrics["new"] == BatchMetric(1.0, 2, 1, "stories", 0.0, 2.0, is_mean=True)


@pytest.mark.parametrize("name", ["tombench", "alignx_demo"])
def test_the_headline_of_tasks_in_several_forms_is_over_rows(name: str) -> None:
    task = task_of(name)
    assert task.spec.metric.headline == "row_accuracy"
    records = [record("a-0", 1), record("a-1", 1), record("b-0", 0)]
    assert task.headline(records) == batch_values(task, records)["row_accuracy"] == 0.5
    assert task_of("tomi").headline(records) == pytest.approx(2 / 3)
    assert task_of("tomi").headline([record("a", None)]) is None


MADE = [name for name in TASKS if name in makeable()]


@pytest.mark.parametrize("name", MADE)
def test_the_actor_says_the_text_and_nothing_else(name):
    task = task_of(name)
    for example in synth_examples(name, 12):
        judged = bool(task.calls(example).get("judge"))
        canaries = canary_episodes(task, [example])
        assert [c.name for c in canaries] == (list(CANARY_NAMES) if judged else [])
        for canary in canaries:
            traces = canary.episode.traces
            assert {trace.seat for trace in traces} == set(task.acted_seats(example))
            texts = [turn.completion.text for trace in traces for turn in trace.turns]
            assert texts and all(words_of(canary_texts()[canary.name], text) for text in texts)
            assert all(turn.context for trace in traces for turn in trace.turns)


def words_of(text: str, speech: str) -> bool:
    """Whether a reply, whatever form it has, holds the words of a canary."""
    return " ".join(text.split())[:60] in " ".join(speech.split())


@pytest.mark.parametrize("name", MADE)
def test_the_judge_is_shown_the_text(name):
    task, shown = task_of(name), []
    examples = [e for e in synth_examples(name, 12) if task.calls(e).get("judge")]
    if not examples:
        return

    def listen(body):
        shown.append("\n".join(m["content"] for m in body["messages"]))
        return "mumble"

    async def score(canary):
        with played_by(listen) as judge:
            cast = Cast(actor=judge, judges=(judge,), panel=Panel())
            try:
                await canary.task.score(canary.example, canary.episode, cast)
            finally:
                await judge.model.close()

    for canary in canary_episodes(task, examples[:1]):
        shown.clear()
        with pytest.raises(CallError):  # a mumbling judge: no score, and no number in its place
            asyncio.run(score(canary))
        assert any(words_of(canary_texts()[canary.name], prompt) for prompt in shown)


def test_the_examples_are_the_same_ones_in_any_order():
    rows = synth_examples("tomi", 9)
    assert (
        fixed_examples(rows, 2) == fixed_examples(rows[::-1], 2)
        and len(fixed_examples(rows, 2)) == 2
    )
