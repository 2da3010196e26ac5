"""GRPO and Ditto on records worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from soulkit.train.maths.measure import token_counts
from soulkit.train.objectives.ditto import Ditto
from soulkit.train.objectives.grpo import GRPO
from soulkit.train.objectives.registry import make_objective
from soulkit.train.objectives.sequences import TrainSequence, without_truncated
from soulkit.train.step import with_advantages
from soulkit.types import (
    Completion,
    Episode,
    Failure,
    Kind,
    Record,
    Score,
    Segment,
    Trace,
    Turn,
    record_key,
    unscored,
)
from tests.support.training import config

BARE, HINT = 7, 8


class Plain:
    """Renders a message as one id, or two when it holds feedback."""

    def prompt_ids(self, context: Sequence[Segment]) -> list[int]:
        return [i for s in context for i in ((BARE, HINT) if "hint" in s.text else (BARE,))]

    def bare(self, context: Sequence[Segment]) -> tuple[Segment, ...]:
        return tuple(replace(s, text=s.bare or s.text) for s in context)


def record(example: str, rollout: int, kind: Kind, reward: float | None, length: int = 1) -> Record:
    hinted = kind == "refined"
    ids = tuple(20 + rollout for _ in range(length))
    completion = Completion(
        text="x", prompt_ids=(BARE, HINT) if hinted else (BARE,), token_ids=ids,
        logprobs=(-1.0,) * length,
    )  # fmt: skip
    segment = Segment("user", "task hint" if hinted else "task", bare="task")
    trace = Trace("reader", (Turn((segment,), completion),))
    episode = Episode(example_id=example, task="tomi", kind=kind, rollout=rollout, traces=(trace,))
    score = (
        unscored(Failure("partner_error")) if reward is None else Score(value=reward, reward=reward)
    )
    return Record(
        key=record_key(0, example, rollout, kind), task="tomi", example_id=example,
        rollout=rollout, kind=kind, episode=episode, score=score,
    )  # fmt: skip


SMALL = [
    record("x", 0, "draft", 0.0), record("x", 0, "refined", 1.0, length=2),
    record("x", 1, "draft", 1.0), record("x", 1, "refined", 0.0, length=3),
]  # fmt: skip


def advantages(sequences: list[TrainSequence]) -> dict[tuple[str, str], float]:
    trained = with_advantages(sequences, config())
    return {(s.part, s.rollout.partition("/")[0]): s.advantage for s in trained}


def test_ditto_joins_drafts_and_copies_and_keeps_refined_apart() -> None:
    """Joint rewards 0, 1, 1, 0: mean 1/2, sample deviation √(1/3). Apart 1, 0: √(1/2)."""
    sequences = Ditto().sequences(SMALL, Plain())
    joint, apart = 0.5 / math.sqrt(1 / 3), 0.5 / math.sqrt(1 / 2)
    assert advantages(sequences) == pytest.approx(
        {
            ("draft", "0"): -joint, ("draft", "1"): joint,
            ("copy", "0"): joint, ("copy", "1"): -joint,
            ("refined", "0"): apart, ("refined", "1"): -apart,
        },
        rel=1e-5,
    )  # fmt: skip


def test_an_uneven_case_by_hand() -> None:
    """Draft 1 earned no feedback: three in the base group, one refined alone (advantage 0)."""
    sequences = Ditto().sequences(SMALL[:3], Plain())
    spread = math.sqrt(1 / 3)  # of 0, 1, 1
    assert advantages(sequences) == pytest.approx(
        {
            ("draft", "0"): -2 / 3 / spread, ("copy", "0"): 1 / 3 / spread,
            ("draft", "1"): 1 / 3 / spread, ("refined", "0"): 0.0,
        },
        rel=1e-5,
    )  # fmt: skip


def test_a_copy_has_the_refined_tokens_under_the_plain_prompt() -> None:
    by_part = {s.part: s for s in Ditto().sequences(SMALL[:2], Plain())}
    assert by_part["draft"].span.ids == (BARE, 20)
    assert by_part["copy"].span.ids == (BARE, 20, 20)
    assert by_part["refined"].span.ids == (BARE, HINT, 20, 20)
    assert by_part["copy"].span.sampler == by_part["refined"].span.sampler == (-1.0, -1.0)


def test_grpo_is_ditto_without_what_came_after_the_draft() -> None:
    sequences = GRPO().sequences(SMALL, Plain())
    apart = 0.5 / math.sqrt(1 / 2)
    want = {("draft", "0"): -apart, ("draft", "1"): apart}
    assert advantages(sequences) == pytest.approx(want, rel=1e-5)
    assert not GRPO().uses_feedback and Ditto().uses_feedback


def test_unscored_records_give_no_sequence_and_shift_no_mean() -> None:
    lost = [*SMALL, record("x", 2, "draft", None), record("x", 2, "refined", None)]
    for objective in (GRPO(), Ditto()):
        assert objective.sequences(lost, Plain()) == objective.sequences(SMALL, Plain())
    half = [*SMALL[:2], record("x", 1, "draft", 1.0), record("x", 1, "refined", None)]
    assert token_counts(Ditto().sequences(half, Plain())) == {"draft": 2, "copy": 2, "refined": 2}


def test_examples_do_not_share_groups() -> None:
    both = [*SMALL, record("y", 0, "draft", 0.3), record("y", 1, "draft", 0.3)]
    values = {s.example_id: s.advantage for s in with_advantages(GRPO().sequences(both, Plain()),
                                                                 config())}  # fmt: skip
    assert values["y"] == 0.0 and values["x"] != 0.0


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, {"draft": 2, "copy": 5, "refined": 5}),
        ({"lambda_fb": 0.0}, {"draft": 2, "copy": 5}),
        ({"only_copy": True}, {"copy": 5}),
        ({"method": "grpo"}, {"draft": 2}),
    ],
)
def test_ablations_train_on_what_they_say(
    settings: dict[str, object], tokens: dict[str, int]
) -> None:
    run_settings = config(**settings)
    sequences = make_objective(run_settings).sequences(SMALL, Plain())
    assert token_counts(with_advantages(sequences, run_settings)) == tokens


def test_only_copy_keeps_the_joint_baseline() -> None:
    whole, ablated = (advantages(Ditto(only_copy=o).sequences(SMALL, Plain())) for o in (0, 1))
    assert ablated == {k: v for k, v in whole.items() if k[0] == "copy"}


def test_lambda_weighs_the_feedback_part_alone() -> None:
    sequences = Ditto(lambda_fb=0.25).sequences(SMALL, Plain())
    assert {s.part: s.weight for s in sequences} == {"draft": 1.0, "copy": 1.0, "refined": 0.25}


def test_at_lambda_zero_refined_rollouts_count_and_cut_ones_do_not() -> None:
    plain = [record("x", 0, "draft", 0.0), record("x", 0, "refined", 1.0)]
    cut = record("x", 1, "refined", 0.5)
    (trace,) = cut.episode.traces
    ended = replace(trace.turns[0].completion, stop_reason="length")
    turn = replace(trace.turns[0], completion=ended)
    episode = replace(cut.episode, traces=(replace(trace, turns=(turn,)),))
    records = [*plain, replace(cut, episode=episode)]
    made = without_truncated(Ditto(lambda_fb=0.0).sequences(records, Plain()), records)
    assert [(s.part, s.rollout, s.weight, s.counted) for s in made] == [
        ("draft", "0/draft", 1.0, False),
        ("copy", "0/refined", 1.0, False), ("refined", "0/refined", 0.0, True),
        ("copy", "1/refined", 0.0, False), ("refined", "1/refined", 0.0, False),
    ]  # fmt: skip
    for other in (Ditto(lambda_fb=0.0, only_copy=True), Ditto(lambda_fb=0.5)):
        assert not any(s.counted for s in other.sequences(records, Plain()))
