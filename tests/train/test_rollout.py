"""The playing half of a step: the order of records, and batches that no clock decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from soulkit.models.base import Cast, Player
from soulkit.models.local.sampler import LocalModel
from soulkit.play.engine import Job
from soulkit.runs.folder import Run
from soulkit.runs.records import without_tokens
from soulkit.train.material.assemble import make_cast, make_players
from soulkit.train.objectives.base import scored_records
from soulkit.train.objectives.ditto import Ditto
from soulkit.train.rollouts.play import Rollouts
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Record,
    Sampling,
    Score,
    Segment,
)
from tests.support.training import config, random_model, rows


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return LocalModel.load(random_model(tmp_path_factory.mktemp("models") / "tiny"))


class Hesitant:
    """A coach that answers after some turns of the event loop, never the same number."""

    name = "hesitant"

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    async def complete(
        self, context: Sequence[Segment], sampling: Sampling, call: Call
    ) -> Completion:
        for _ in range(self.random.randrange(14)):
            await asyncio.sleep(0)
        return Completion(text=f"Read it once more, {call.example_id}.")

    async def close(self) -> None: ...


class Watched(LocalModel):
    """Remembers which calls shared a batch."""

    batches: list[list[str]]

    def _reply(self, batch: list[Any]) -> list[Completion]:
        self.batches.append([f"{r.call.example_id}/{r.call.kind}" for r in batch])
        return super()._reply(batch)


def jobs() -> list[Job]:
    """Prompts of two tasks in turn."""
    tasks = [rows("tomi", 4), rows("paratomi", 2)]
    (tomi, some), (paratomi, others) = tasks
    pairs = [(tomi, some[0]), (paratomi, others[0]), (tomi, some[1]), (paratomi, others[1]),
             (tomi, some[2]), (tomi, some[3])]  # fmt: skip
    return [Job(task, example, index) for task, example in pairs for index in range(2)]


def sample(sampler: LocalModel, seed: int, **settings: Any) -> tuple[list[Record], list[list[str]]]:
    """The records of one step and the batches of its deterministic sampler."""
    run_settings = config(max_tokens=3, concurrency=2, **settings)
    model: Any = Watched(sampler.model, sampler.tokenizer, deterministic=True)
    model.batches = []
    cast = Cast(actor=Player(model), coach=Player(Hesitant(seed)))
    rollouts = Rollouts(run_settings, Ditto(), model, cast, [], [])
    return asyncio.run(asyncio.wait_for(rollouts.sample(jobs()), 60)), model.batches


def test_records_are_in_the_order_of_their_prompts_not_task_by_task(sampler: LocalModel) -> None:
    for shuffle in (False, True):
        records, _ = sample(sampler, 1, shuffle_feedback=shuffle)
        order = [(job.example.id, job.index) for job in jobs()]
        assert [(r.example_id, r.rollout) for r in records if r.kind == "draft"] == order
        refined = [(r.example_id, r.rollout) for r in records if r.kind == "refined"]
        assert refined == [who for who in order if who in refined] and refined


@pytest.mark.slow
def test_shuffled_feedback_of_two_tasks_is_sampled_in_batches_that_no_clock_decides(
    sampler: LocalModel,
) -> None:
    runs = [sample(sampler, seed, shuffle_feedback=True)[1] for seed in range(24)]
    assert all(batches == runs[0] for batches in runs)


def test_what_is_kept_for_the_summary_has_no_tokens(sampler: LocalModel) -> None:
    records, _ = sample(sampler, 1)
    assert records[0].episode.traces
    slim = without_tokens(records[0])
    replies = [turn.completion for trace in slim.episode.traces for turn in trace.turns]
    assert replies and not any(reply.token_ids or reply.logprobs for reply in replies)
    assert not any(turn.context for trace in slim.episode.traces for turn in trace.turns)
    assert slim.score == records[0].score


def test_a_rollout_without_a_reward_is_unscored_and_gets_no_feedback(sampler: LocalModel) -> None:
    """An auditor that cannot be read leaves the value and takes the reward, say."""
    task, examples = rows("tomi", 2)

    class Unaudited(type(task)):  # type: ignore[misc]
        async def score(self, example: Example, episode: Episode, cast: Cast) -> Score:
            score: Score = await super().score(example, episode, cast)
            known = episode.rollout % 2 == 0
            return score if known else replace(score, reward=None, reason="judge_error")

    unaudited = Unaudited(task.name, task.spec)
    mixed = [Job(unaudited, example, index) for example in examples for index in range(4)]
    cast = Cast(actor=Player(sampler), coach=Player(Hesitant(1)))
    rollouts = Rollouts(config(max_tokens=3), Ditto(), sampler, cast, [], [])
    records = asyncio.run(asyncio.wait_for(rollouts.sample(mixed), 60))
    drafts = [record for record in records if record.kind == "draft"]
    for draft in drafts:
        known = draft.rollout % 2 == 0
        assert draft.score.scored == known and (draft.received is not None) == known
        assert draft.score.reason == ("" if known else "judge_error")
    assert len(scored_records(records, "draft")) == len(drafts) / 2 == 4


def actor_coach(seed: int, sampler: LocalModel, run: Run) -> Player | None:
    settings = config(coach="actor", seed=seed)
    return make_cast(settings, sampler, make_players(settings, sampler, run)).coach


def test_an_actor_that_coaches_itself_draws_with_the_seed_of_the_run(
    sampler: LocalModel, tmp_path: Path
) -> None:
    run = Run(path=tmp_path, command="train ditto", resumed=False)
    for seed in (0, 7):
        coach = actor_coach(seed, sampler, run)
        assert coach is not None and coach.sampling.seed == seed
