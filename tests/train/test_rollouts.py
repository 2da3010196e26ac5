"""The playing half of a step: the order of records, and batches that no clock decides.

Mixtures hold each task at its ratio; batches walk shuffled epochs; control feedback moves.

One actor in several seats: a sequence for each seat, copies equal to the token, one reward.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from soulkit.errors import DataError
from soulkit.models.base import Cast, Player
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.models.stand_ins import Script, ScriptedModel
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.runs.folder import Run
from soulkit.runs.records import without_tokens
from soulkit.train.objectives.base import make_objective, scored_records
from soulkit.train.objectives.ditto import Ditto
from soulkit.train.objectives.sequences import (
    copied_spans,
    emitted_spans,
    feedback_sequences,
    gold_spans,
    without_truncated,
)
from soulkit.train.rollouts.feedback import swap_feedback
from soulkit.train.rollouts.play import DevScores, Rollouts
from soulkit.train.run import tiny_model_texts
from soulkit.train.setup import feedback_check
from soulkit.train.setup.data import make_cast, make_players
from soulkit.train.setup.rows import TaskRows, batch, mixture
from soulkit.train.state.step_metrics import member_of, token_counts
from soulkit.types import (
    Call,
    Completion,
    Episode,
    Example,
    Feedback,
    Record,
    Sampling,
    Score,
    Segment,
)
from tests.support.scenes import GUESTS, dinner
from tests.support.training import config, policy_of, random_model, rows, step_of
from tests.train.test_objectives import SMALL, made_record


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
    rollouts = Rollouts(
        run_settings, Ditto(), model, cast, [], DevScores(run_settings, model, cast, [])
    )
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
    runs = [sample(sampler, seed, shuffle_feedback=True)[1] for seed in range(8)]
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
    settings = config(max_tokens=3)
    dev = DevScores(settings, sampler, cast, [])
    rollouts = Rollouts(settings, Ditto(), sampler, cast, [], dev)
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


TOMI, TEN = rows("tomi", 10)
HITOM, FOUR = rows("hitom", 4)
TASKS = {"tomi": TOMI, "hitom": HITOM}
EXAMPLES = {"tomi": TEN, "hitom": FOUR}


@pytest.mark.parametrize(("ratio", "rows_"), [(0.5, 5), (1.0, 10), (1.5, 15), (2.0, 20), (0.01, 1)])
def test_a_ratio_is_a_share_of_a_tasks_rows(ratio: float, rows_: int) -> None:
    pool = mixture(TASKS, EXAMPLES, {"tomi": ratio, "hitom": 1.0}, 0)
    names = Counter(task.name for task, _ in pool)
    assert names == {"tomi": rows_, "hitom": 4}
    times = Counter(e.id for task, e in pool if task.name == "tomi")
    assert max(times.values()) - min(times.values()) <= 1
    if ratio >= 1:
        assert len(times) == 10


def test_a_mixture_does_not_depend_on_the_order_of_the_file() -> None:
    turned = {name: rows_[::-1] for name, rows_ in EXAMPLES.items()}
    a, b = (mixture(TASKS, e, {"tomi": 0.5, "hitom": 1.0}, 3) for e in (EXAMPLES, turned))
    assert [e.id for _, e in a] == [e.id for _, e in b]
    other = mixture(TASKS, EXAMPLES, {"tomi": 0.5, "hitom": 1.0}, 4)
    assert [e.id for _, e in other] != [e.id for _, e in a]


def test_nothing_to_train_on_is_told() -> None:
    with pytest.raises(DataError, match="no rows to train on"):
        mixture({"tomi": TOMI}, {"tomi": []}, {"tomi": 1.0}, 0)


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 25), seed=st.integers(0, 5))
def test_every_epoch_holds_every_row_once(size: int, seed: int) -> None:
    pool: TaskRows = [(TOMI, e) for e in TEN]
    drawn = [e.id for step in range(12) for _, e in batch(pool, size, step, seed)]
    assert len(drawn) == 12 * size
    for start in range(0, len(drawn) - 9, 10):
        assert len(set(drawn[start : start + 10])) == 10


def test_a_step_has_its_batch_whoever_asks() -> None:
    pool: TaskRows = [(TOMI, e) for e in TEN]
    assert batch(pool, 4, 7, 1) == batch(pool, 4, 7, 1) != batch(pool, 4, 7, 2)
    firsts = [e.id for _, e in batch(pool, 10, 0, 1)]
    assert firsts != [e.id for _, e in batch(pool, 10, 1, 1)]


def draft_of(example: str, rollout: int, leak: str = "") -> Record:
    text = f"{example}/{rollout}"
    feedback = Feedback(text=text, author="symbolic", leak=leak)
    return replace(made_record(example, rollout, "draft", 0.0), received=feedback)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=2, max_size=6), seed=st.integers(0, 9))
def test_control_feedback_always_comes_from_another_example(sizes: list[int], seed: int) -> None:
    drafts = [draft_of(f"x{i}", r) for i, size in enumerate(sizes) for r in range(size)]
    swapped = swap_feedback(drafts, str(seed))
    for draft, feedback in zip(drafts, swapped, strict=True):
        assert feedback is not None
        assert feedback.text.partition("/")[0] != draft.example_id
    if max(sizes) * 2 <= sum(sizes):
        assert len({f.text for f in swapped if f}) == len(drafts)  # everybody gives one


def test_control_feedback_skips_leaks_and_drafts_without_any() -> None:
    drafts = [draft_of("a", 0), draft_of("a", 1, leak="gold_text"), draft_of("b", 0), SMALL[0]]
    swapped = swap_feedback(drafts, "0")
    assert [f and f.text for f in swapped] == ["b/0", None, "a/0", None]
    assert swap_feedback([draft_of("a", 0), draft_of("a", 1)], "0") == [None, None]


def test_cut_off_replies_leave_the_loss_but_not_the_baseline() -> None:
    sequences = [replace(s, example_id="x") for s in step_of(examples=1, drafts=2)]
    cut = made_record("x", 1, "refined", 0.2)
    (trace,) = cut.episode.traces
    long = replace(trace.turns[0].completion, stop_reason="length")
    assert isinstance(long, Completion)
    turns = (replace(trace.turns[0], completion=long),)
    episode = replace(cut.episode, traces=(replace(trace, turns=turns),))
    masked = without_truncated(sequences, [*SMALL[:3], replace(cut, episode=episode)])
    lost = {(s.part, s.rollout) for s in masked if s.weight == 0}
    assert lost == {("copy", "1/refined"), ("refined", "1/refined")}
    assert [s.reward for s in masked] == [s.reward for s in sequences]


ROWS = 4
ROOM = {
    "rules": [{"purpose": "next", "say": ["ann", "bo"]}, {"purpose": "room", "say": "It rains."}]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    task, examples = dinner(ROWS)
    build_tiny(folder, tiny_model_texts([(task, e) for e in examples]), max_context=1024)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LocalModel:
    return LocalModel.load(folder)


@pytest.fixture(scope="module")
def dinners(model: LocalModel) -> list[Record]:
    """Two rollouts of every row, each refined."""
    task, examples = dinner(ROWS)
    room = Player(ScriptedModel(Script.model_validate(ROOM)))
    actor = Player(model, Sampling(max_tokens=6, seed=3))
    engine = Engine(Cast(actor=actor, environment=room), 3, feedback=FeedbackPolicy())
    jobs = [Job(task, example, index) for example in examples for index in range(2)]
    records = asyncio.run(engine.run(jobs, lambda record: None))
    assert len(records) == 4 * ROWS and all(r.score.scored for r in records)
    return records


def of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind]


def emitted(record: Record) -> dict[str, tuple[int, ...]]:
    """Seat → all ids that the actor emitted in it."""
    return {
        trace.seat: tuple(i for turn in trace.turns for i in turn.completion.token_ids)
        for trace in record.episode.traces
    }


def trained(ids: tuple[int, ...], mask: tuple[bool, ...]) -> tuple[int, ...]:
    return tuple(i for i, is_trained in zip(ids, mask, strict=True) if is_trained)


def test_two_seats_of_a_turn_draw_from_streams_of_their_own(dinners: list[Record]) -> None:
    for record in dinners:
        ids = emitted(record)
        assert set(ids) == {"ann", "bo"} and all(ids.values())
        assert ids["ann"][:4] != ids["bo"][:4]


def test_a_seat_is_one_sequence_of_the_tokens_it_emitted(dinners: list[Record]) -> None:
    for record in dinners:
        for trace in record.episode.traces:
            (one,) = emitted_spans(trace)
            assert trained(one.ids, one.trained) == emitted(record)[trace.seat]


def test_a_copy_equals_its_refined_twin_token_for_token_in_every_seat(
    model: LocalModel, dinners: list[Record]
) -> None:
    renderer, drafts = model.renderer(), of_kind(dinners, "draft")
    prompts = {(d.example_id, t.seat): t.turns[0].completion.prompt_ids for d in drafts
               for t in d.episode.traces}  # fmt: skip
    for record in of_kind(dinners, "refined"):
        for trace in record.episode.traces:
            (copy,), (refined,) = copied_spans(trace, renderer), emitted_spans(trace)
            assert trained(copy.ids, copy.trained) == trained(refined.ids, refined.trained)
            assert copy.sampler == refined.sampler and len(copy.ids) < len(refined.ids)
            if trace.seat == "bo":  # it opens: what it sees first depends on nobody's words
                first = prompts[record.example_id, "bo"]
                assert copy.ids[: len(first)] == first


def test_groups_are_of_a_seat_and_a_rollout_is_one_play(
    folder: Path, dinners: list[Record]
) -> None:
    policy = policy_of(folder)
    objective = make_objective(config(method="ditto"))
    sequences = objective.sequences(dinners, policy.renderer, lambda *_: pytest.fail("no slot"))
    assert {s.group[1] for s in sequences} == {"ann", "bo"}
    for group in {s.group for s in sequences}:
        seats = {s.group[1] for s in sequences if s.group == group}
        parts = [s.part for s in sequences if s.group == group]
        assert len(seats) == 1
        assert sorted(parts) == (
            ["refined"] * 2 if "feedback" in group else ["copy"] * 2 + ["draft"] * 2
        )
    assert len({member_of(s).play for s in sequences}) == 4 * ROWS
    counts = token_counts(sequences)
    tokens = {
        kind: sum(len(ids) for r in of_kind(dinners, kind) for ids in emitted(r).values())
        for kind in ("draft", "refined")
    }
    assert counts["draft"] == tokens["draft"]
    assert counts["copy"] == counts["refined"] == tokens["refined"]


def test_a_teacher_reads_the_feedback_in_every_seat(
    model: LocalModel, dinners: list[Record]
) -> None:
    task, examples = dinner(ROWS)
    rows = {example.id: example for example in examples}
    for record in of_kind(dinners, "draft"):
        sequences = list(feedback_sequences(
            record, model.renderer(), lambda r, seat, f: task.slot(rows[r.example_id], seat, f)
        ))  # fmt: skip
        assert [s.group[1] for s in sequences] == ["ann", "bo"]
        for one in sequences:
            assert one.teacher is not None and len(one.teacher.ids) > len(one.span.ids)
            assert trained(one.teacher.ids, one.teacher.trained) == trained(
                one.span.ids, one.span.trained
            )


def test_gold_lines_train_in_every_seat_and_what_was_there_before_does_not(folder: Path) -> None:
    policy = policy_of(folder)
    task, examples = dinner(ROWS)
    for example in examples:
        gold = task.gold(example)
        assert gold is not None
        ann, bo = gold_spans(gold, policy.renderer, policy.encode_reply)
        texts = [policy.tokenizer.decode(list(trained(one.ids, one.trained))) for one in (ann, bo)]
        assert [text.split("<|im_end|>") for text in texts] == [
            ["[So late.] Sit down.", ""], ["Good day.", "Yes.", ""],
        ]  # fmt: skip
        opening = str(example.fields.get("opening") or "")
        assert opening in policy.tokenizer.decode(list(ann.ids))


def test_scripted_trials_go_over_every_seat() -> None:
    task, (example, *_) = dinner(1)
    episodes = [
        episode for episode, _ in asyncio.run(feedback_check.scripted_drafts(task, example))
    ]
    assert [trace.seat for trace in episodes[-1].traces] == list(GUESTS), "nobody says anything"
    turns = asyncio.run(feedback_check.gold_turns(task, example, None))
    assert turns and {seat for seat, _ in turns} <= set(GUESTS)
