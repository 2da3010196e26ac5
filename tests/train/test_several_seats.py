"""One actor in several seats: a sequence for each seat, copies equal to the token, one reward."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from soulkit.models.base import Cast, Player
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.models.roles.scripted import Script, ScriptedModel
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.train.material import trial
from soulkit.train.maths.measure import member_of, token_counts
from soulkit.train.objectives.registry import make_objective
from soulkit.train.objectives.sequences import (
    copied_spans,
    emitted_spans,
    gold_spans,
    told_sequences,
)
from soulkit.train.run import words_of
from soulkit.types import Record, Sampling
from tests.support.scenes import GUESTS, dinner
from tests.support.training import config, policy_of

ROWS = 4
ROOM = {
    "rules": [{"purpose": "next", "say": ["ann", "bo"]}, {"purpose": "room", "say": "It rains."}]
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    task, examples = dinner(ROWS)
    build_tiny(folder, words_of([(task, e) for e in examples]), max_context=1024)
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
        sequences = list(told_sequences(
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
    episodes = [episode for episode, _ in asyncio.run(trial.play_drafts(task, example))]
    assert [trace.seat for trace in episodes[-1].traces] == list(GUESTS), "nobody says anything"
    turns = asyncio.run(trial.turns(task, example, None))
    assert turns and {seat for seat, _ in turns} <= set(GUESTS)
