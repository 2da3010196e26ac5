"""GRPO and Ditto on records worked out by hand.

Episodes → sequences: merged iff the ids continue, copies differ by the feedback alone.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.models.local.chat_template import Renderer
from soulkit.models.local.sampler import LocalModel
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.train.model.policy import Policy
from soulkit.train.objectives.base import make_objective
from soulkit.train.objectives.ditto import Ditto
from soulkit.train.objectives.grpo import GRPO
from soulkit.train.objectives.sequences import (
    TrainSequence,
    copied_spans,
    emitted_spans,
    gold_spans,
    sequences_of,
    spans,
    without_truncated,
)
from soulkit.train.state.step_metrics import token_counts
from soulkit.train.step import with_advantages
from soulkit.types import (
    Completion,
    Episode,
    Failure,
    Kind,
    Record,
    Sampling,
    Score,
    Segment,
    Trace,
    Turn,
    record_key,
    unscored,
)
from tests.support.evaluation import visitor
from tests.support.training import config, policy_of, random_model, rows

BARE, HINT = 7, 8


class Plain:
    """Renders a message as one id, or two when it holds feedback."""

    def prompt_ids(self, context: Sequence[Segment]) -> list[int]:
        return [i for s in context for i in ((BARE, HINT) if "hint" in s.text else (BARE,))]

    def bare(self, context: Sequence[Segment]) -> tuple[Segment, ...]:
        return tuple(replace(s, text=s.bare or s.text) for s in context)


def made_record(
    example: str, rollout: int, kind: Kind, reward: float | None, length: int = 1
) -> Record:
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
    made_record("x", 0, "draft", 0.0), made_record("x", 0, "refined", 1.0, length=2),
    made_record("x", 1, "draft", 1.0), made_record("x", 1, "refined", 0.0, length=3),
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
    lost = [*SMALL, made_record("x", 2, "draft", None), made_record("x", 2, "refined", None)]
    for objective in (GRPO(), Ditto()):
        assert objective.sequences(lost, Plain()) == objective.sequences(SMALL, Plain())
    half = [*SMALL[:2], made_record("x", 1, "draft", 1.0), made_record("x", 1, "refined", None)]
    assert token_counts(Ditto().sequences(half, Plain())) == {"draft": 2, "copy": 2, "refined": 2}


def test_examples_do_not_share_groups() -> None:
    both = [*SMALL, made_record("y", 0, "draft", 0.3), made_record("y", 1, "draft", 0.3)]
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
    plain = [made_record("x", 0, "draft", 0.0), made_record("x", 0, "refined", 1.0)]
    cut = made_record("x", 1, "refined", 0.5)
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


Ids = Sequence[int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def model(folder: Path) -> LocalModel:
    return LocalModel.load(folder)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return policy_of(folder)


# --- merging --------------------------------------------------------------------------------------


def test_one_turn_is_one_sequence() -> None:
    (one,) = spans([([1, 2, 3], [4, 5], [-0.5, -0.25])])
    assert one.ids == (1, 2, 3, 4, 5)
    assert one.trained == (False, False, False, True, True)
    assert one.sampler == (-0.5, -0.25) and one.n_trained == 2


def test_turns_that_continue_share_a_sequence() -> None:
    turns = [([1, 2], [3, 4], [-1.0, -2.0]), ([1, 2, 3, 4, 9], [5], [-3.0])]
    (one,) = spans(turns)
    assert one.ids == (1, 2, 3, 4, 9, 5)
    assert one.trained == (False, False, True, True, False, True)
    assert one.sampler == (-1.0, -2.0, -3.0)


@pytest.mark.parametrize("later", [[1, 2, 3, 9, 9], [1, 2, 3], [7, 2, 3, 4, 9]])
def test_a_turn_that_does_not_continue_stands_alone(later: list[int]) -> None:
    first, second = spans([([1, 2], [3, 4], [-1.0, -2.0]), (later, [5], [-3.0])])
    assert first.ids == (1, 2, 3, 4) and second.ids == (*later, 5)
    assert first.n_trained == 2 and second.n_trained == 1


def test_a_third_turn_may_continue_the_second_alone() -> None:
    turns = [([1], [2], [0.0]), ([8], [3], [0.0]), ([8, 3, 4], [5], [0.0])]
    assert [s.ids for s in spans(turns)] == [(1, 2), (8, 3, 4, 5)]


def test_a_prompt_that_only_repeats_the_earlier_sequence_is_a_continuation() -> None:
    (one,) = spans([([1], [2], [0.0]), ([1, 2], [3], [0.0])])
    assert one.ids == (1, 2, 3) and one.trained == (False, True, True)


def test_turns_without_emission_give_no_trained_sequence(policy: Policy) -> None:
    silent = Trace("reader", (Turn((Segment("user", "a"),), Completion(text="", prompt_ids=(5,))),))
    task, (example, *_) = rows("tomi", 1)
    job = Job(task, example)
    record = _record(job, Episode(example_id=example.id, task="tomi", traces=(silent,)))
    assert list(sequences_of(record, "draft", policy.renderer)) == []


def _record(job: Job, episode: Episode) -> Record:
    from soulkit.play.engine import record_of
    from soulkit.types import Score

    return record_of(job, job.rollout(0), episode, Score(value=1.0, reward=1.0))


# --- real episodes --------------------------------------------------------------------------------


def walk(model: LocalModel, name: str, partner: Player | None = None) -> list[Record]:
    """Two rollouts of two examples, with feedback for every draft."""
    task, examples = rows(name, 4)
    actor = Player(model, Sampling(max_tokens=12, seed=3))
    engine = Engine(Cast(actor=actor, partner=partner), 3, feedback=FeedbackPolicy())
    jobs = [Job(task, e, index) for e in examples[:2] for index in range(2)]
    return asyncio.run(engine.run(jobs, lambda record: None))


@pytest.fixture(scope="module")
def dialogues(model: LocalModel) -> list[Record]:
    with visitor() as url:
        return walk(model, "secret_keeper", Player(Endpoint(model="visitor", base_url=url)))


@pytest.fixture(scope="module")
def choices(model: LocalModel) -> list[Record]:
    return walk(model, "tomi")


def removed(long: Ids, short: Ids) -> tuple[int, ...]:
    """The one contiguous run of ids that `short` lacks; fails when they differ otherwise."""
    gap = len(long) - len(short)
    assert gap > 0
    at = next((i for i, (a, b) in enumerate(zip(long, short, strict=False)) if a != b), len(short))
    assert tuple(long[:at]) + tuple(long[at + gap :]) == tuple(short)
    return tuple(long[at : at + gap])


def of_kind(records: list[Record], kind: str) -> list[Record]:
    matches = [r for r in records if r.kind == kind]
    assert len(matches) == 4 and all(r.episode.failure is None for r in matches)
    return matches


def test_trained_ids_are_the_samplers(
    model: LocalModel, policy: Policy, dialogues: list[Record], choices: list[Record]
) -> None:
    for record in [*dialogues, *choices]:
        (trace,) = record.episode.traces
        (one,) = emitted_spans(trace)
        trained = tuple(i for i, t in zip(one.ids, one.trained, strict=True) if t)
        assert trained == tuple(i for turn in trace.turns for i in turn.completion.token_ids)
        assert one.sampler == tuple(p for turn in trace.turns for p in turn.completion.logprobs)
        last = trace.turns[-1].completion
        assert one.ids == (*last.prompt_ids, *last.token_ids)
        for turn in trace.turns:
            assert tuple(policy.renderer.prompt_ids(turn.context)) == turn.completion.prompt_ids


def test_a_copied_dialogue_lacks_the_feedback_and_nothing_else(
    model: LocalModel, dialogues: list[Record]
) -> None:
    renderer = model.renderer()
    for record in of_kind(dialogues, "refined"):
        assert record.given is not None
        (trace,) = record.episode.traces
        assert len(trace.turns) >= 4
        hints = set()
        for turn in trace.turns:
            prompt = renderer.prompt_ids(renderer.bare(turn.context))
            hints.add(removed(turn.completion.prompt_ids, prompt))
        (hint,) = hints  # the same span in every turn's prompt
        assert model.tokenizer.decode(list(hint)).strip() == f"Hint: {record.given.text}"
        (copy,), (refined,) = copied_spans(trace, renderer), emitted_spans(trace)
        assert removed(refined.ids, copy.ids) == hint
        assert copy.n_trained == refined.n_trained and copy.sampler == refined.sampler
        assert copy.trained == refined.trained[len(hint) :]


def test_a_copied_choice_has_the_prompt_of_its_draft(
    model: LocalModel, choices: list[Record]
) -> None:
    renderer = model.renderer()
    drafts = {(r.example_id, r.rollout): r for r in of_kind(choices, "draft")}
    for record in of_kind(choices, "refined"):
        assert record.given is not None
        (copy,) = copied_spans(record.episode.traces[0], renderer)
        final, draft = record.episode.final, drafts[record.example_id, record.rollout].episode.final
        assert final is not None and draft is not None
        assert copy.ids == (*draft.prompt_ids, *final.token_ids)
        hint = removed(final.prompt_ids, draft.prompt_ids)
        assert record.given.text in model.tokenizer.decode(list(hint))


def test_a_draft_copied_is_the_draft(model: LocalModel, dialogues: list[Record]) -> None:
    for record in of_kind(dialogues, "draft"):
        (trace,) = record.episode.traces
        assert copied_spans(trace, model.renderer()) == emitted_spans(trace)


def test_records_become_sequences_with_their_groups(
    policy: Policy, dialogues: list[Record]
) -> None:
    record = of_kind(dialogues, "refined")[0]
    (copy,) = sequences_of(record, "copy", policy.renderer, 0.5)
    (refined,) = sequences_of(record, "refined", policy.renderer)
    assert copy.group == (record.example_id, "keeper")
    assert refined.group == (record.example_id, "keeper", "feedback")
    assert copy.rollout == refined.rollout == f"{record.rollout}/refined"
    assert (copy.component, refined.component) == ("base", "feedback")
    assert copy.reward == refined.reward == record.score.reward and copy.weight == 0.5


# --- gold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["secret_keeper", "tomi"])
def test_gold_turns_share_one_sequence(policy: Policy, name: str) -> None:
    task, examples = rows(name, 6)
    end = policy.renderer.end_of_turn
    for example in examples:
        episode = task.gold(example)
        assert episode is not None
        (one,) = gold_spans(episode, policy.renderer, policy.encode_reply)
        text = policy.tokenizer.decode([i for i, t in zip(one.ids, one.trained, strict=True) if t])
        replies = [turn.completion.text for turn in episode.traces[0].turns]
        assert text.split("<|im_end|>") == [*replies, ""]
        assert one.ids[-1] == end and one.sampler == ()
        assert not one.trained[0]


def test_gold_with_feedback_holds_it_in_the_prompt(policy: Policy) -> None:
    from soulkit.types import Feedback

    task, (example, *_) = rows("tomi", 1)
    text = task.rehearse(example, random.Random(0))
    assert text
    plain, hinted = task.gold(example), task.gold(example, Feedback(text=text, author="symbolic"))
    assert plain is not None and hinted is not None
    (a,) = gold_spans(plain, policy.renderer, policy.encode_reply)
    (b,) = gold_spans(hinted, policy.renderer, policy.encode_reply)
    assert text in policy.tokenizer.decode(list(removed(b.ids, a.ids)))


class Restless(Renderer):
    """A template that rewrites its beginning with every turn, so that nothing continues."""

    def prompt_ids(self, context: Sequence[Segment]) -> list[int]:
        return [300 + len(context), *super().prompt_ids(context)]


def test_a_template_that_does_not_continue_gives_a_sequence_a_turn(
    policy: Policy, dialogues: list[Record]
) -> None:
    task, (example, *_) = rows("secret_keeper", 1)
    renderer = Restless(policy.tokenizer)
    episode = task.gold(example)
    assert episode is not None
    spans = gold_spans(episode, renderer, policy.encode_reply)
    assert len(spans) == len(episode.traces[0].turns) >= 4
    record = of_kind(dialogues, "refined")[0]
    copies = list(sequences_of(record, "copy", renderer))
    assert len(copies) == len(record.episode.traces[0].turns)
    assert {c.rollout for c in copies} == {f"{record.rollout}/refined"}
