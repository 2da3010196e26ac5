"""Teachers: what they read is the mirror image of a copy, and their states leave no trace."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from soulkit.errors import ConfigError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.models.local.render import Renderer
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.train.forward.policy import Policy
from soulkit.train.forward.teacher import (
    Teacher,
    check_student,
    load_teacher,
    move_ema,
    start_ema,
    teacher_of,
    teaching,
)
from soulkit.train.material.assemble import gather_material
from soulkit.train.objectives.registry import make_objective
from soulkit.train.objectives.sdpo import SDPO
from soulkit.train.objectives.sequences import (
    Span,
    copied_spans,
    emitted_spans,
    filled_context,
    paired_spans,
    told_sequences,
    told_spans,
)
from soulkit.train.rollouts.play import feedback_slots
from soulkit.train.rollouts.shuffle import with_swapped
from soulkit.types import Feedback, Record, Sampling, Segment
from tests.support.evaluation import visitor
from tests.support.methods import ROLLOUTS, Numbers, advice, play, slot
from tests.support.training import config, jolt, policy_of, random_model, rows

SPAN = Span((301, 302, 303, 304), (False, False, True, True), ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def policy(folder: Path) -> Policy:
    return policy_of(folder, lora={"r": 4, "alpha": 8})


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.trained}


def log_prob(policy: Policy) -> list[float]:
    with torch.no_grad():
        return policy.score(policy.packs([SPAN], 100)[0]).log_prob.tolist()


# --- states ---------------------------------------------------------------------------------------


def test_the_moving_average_by_its_formula(policy: Policy) -> None:
    start = weights(policy)
    start_ema(policy)
    assert policy.ema is not None and policy.ema.keys() == start.keys()
    assert any("lora_A" in name for name in start) and any("lora_B" in name for name in start)
    want = {name: t.clone() for name, t in start.items()}
    for seed in (1, 2, 3):
        jolt(policy, 0.1, seed)
        move_ema(policy, 0.25)
        want = {name: 0.75 * t + 0.25 * weights(policy)[name] for name, t in want.items()}
    for name, average in policy.ema.items():
        assert torch.allclose(average, want[name], atol=1e-6) and not average.requires_grad
        assert not torch.equal(average, weights(policy)[name])


def test_the_average_starts_as_the_student_and_does_not_share_its_memory(policy: Policy) -> None:
    before = log_prob(policy)
    start_ema(policy)
    jolt(policy, 0.1, seed=1)
    assert log_prob(policy) != before
    with teaching(policy, "ema"):
        assert log_prob(policy) == before


@pytest.mark.parametrize("state", ["live", "base", "ema"])
def test_a_state_is_left_as_it_was_entered(policy: Policy, state: str) -> None:
    start_ema(policy)
    jolt(policy, 0.1, seed=2)
    version, before = policy.version(), log_prob(policy)
    places = {name: p.data_ptr() for name, p in policy.trained}
    with teaching(policy, state):  # type: ignore[arg-type]
        inside = log_prob(policy)
    assert (inside == before) == (state == "live")
    with pytest.raises(ZeroDivisionError), teaching(policy, state):  # type: ignore[arg-type]
        raise ZeroDivisionError
    assert policy.version() == version and log_prob(policy) == before
    assert {name: p.data_ptr() for name, p in policy.trained} == places


def test_the_base_is_the_model_without_its_adapter(policy: Policy) -> None:
    with torch.no_grad(), policy.model.disable_adapter():
        want = policy.score(policy.packs([SPAN], 100)[0]).log_prob
    (log_prob,) = Teacher(policy, "base").log_probs([SPAN], 100)
    assert torch.equal(log_prob, want)


def test_no_average_no_teaching(policy: Policy) -> None:
    with pytest.raises(ConfigError), teaching(policy, "ema"):
        raise AssertionError("entered")
    with pytest.raises(ConfigError):
        move_ema(policy, 0.1)


@pytest.mark.parametrize("budget", [1, 1000])
def test_hidden_states_come_span_by_span(policy: Policy, budget: int) -> None:
    """Whatever order the packs have, and with a span twice."""
    short = Span((301, 309), (False, True), ())
    spans = [short, SPAN, short, Span((301, 302, 303, 305), SPAN.trained, ())]
    teacher = Teacher(policy)
    hidden = teacher.hidden(spans, budget)
    assert len(hidden) == 6 and not hidden.requires_grad
    log = torch.log_softmax(teacher.logits(hidden), -1)
    targets = [i for s in spans for i, t in zip(s.ids, s.trained, strict=True) if t]
    log_probs = log.gather(-1, torch.tensor(targets)[:, None]).squeeze(-1)
    assert torch.allclose(log_probs, torch.cat(teacher.log_probs(spans, budget)), atol=1e-5)


# --- loading --------------------------------------------------------------------------------------


def test_a_second_model_is_loaded_frozen(folder: Path, policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "expert")
    settings = config(
        method="opd", model=str(folder), teacher_adapter=str(tmp_path / "expert"),
        opd_form="logits",
    )  # fmt: skip
    teacher = load_teacher(settings, make_objective(settings), policy)
    assert teacher is not None and not teacher.trained
    assert log_prob(teacher) == pytest.approx(log_prob(policy), abs=1e-5)
    settings = config(method="opd", model="gone", teacher_model=str(folder))
    base = load_teacher(settings, make_objective(settings), policy)
    assert base is not None
    assert log_prob(base) == pytest.approx(Teacher(policy, "base").log_probs([SPAN], 9)[0].tolist())


@pytest.mark.parametrize("method", ["grpo", "ditto", "sdpo-token", "sdpo-logits+grpo"])
def test_other_methods_have_no_second_model(policy: Policy, method: str) -> None:
    settings = config(method=method, teacher_model="somewhere")
    assert load_teacher(settings, make_objective(settings), policy) is None


def test_a_teacher_with_another_vocabulary_is_refused(policy: Policy, tmp_path: Path) -> None:
    build_tiny(tmp_path / "foreign", ["quite", "another", "vocabulary"])
    settings = config(method="opd", teacher_model=str(tmp_path / "foreign"))
    with pytest.raises(ConfigError, match="vocabulary") as caught:
        load_teacher(settings, make_objective(settings), policy)
    assert all(caught.value.lines())


def test_distillation_without_a_teacher_is_refused_before_anything_is_loaded() -> None:
    settings = config(method="opd", data={"tomi": "synth:4"})
    for refuse in (make_objective, gather_material):
        with pytest.raises(ConfigError, match="no teacher"):
            refuse(settings)


def test_the_base_cannot_teach_where_all_weights_move() -> None:
    settings = config(method="sdpo-token", teacher="base", full=True, data={"tomi": "synth:4"})
    with pytest.raises(ConfigError, match="all weights"):
        gather_material(settings)


def test_distributions_need_hidden_states(policy: Policy) -> None:
    policy.gathers = False
    for method in ("sdpo-logits", "sdpo-logits+grpo"):
        settings = config(method=method)
        with pytest.raises(ConfigError, match="cannot be compared"):
            check_student(settings, make_objective(settings), policy)
    settings = config(method="sdpo-token")
    check_student(settings, make_objective(settings), policy)


# --- what a teacher reads -------------------------------------------------------------------------


Walked = tuple[list[Record], list[Job], Renderer]


def walk(
    model: LocalModel, name: str, partner: Player | None = None
) -> tuple[list[Record], list[Job]]:
    task, examples = rows(name, 4)
    actor = Player(model, Sampling(max_tokens=10, seed=3))
    engine = Engine(Cast(actor=actor, partner=partner), 3, feedback=FeedbackPolicy())
    jobs = [Job(task, e, index) for e in examples[:2] for index in range(2)]
    return asyncio.run(engine.run(jobs, lambda record: None)), jobs


@pytest.fixture(scope="module", params=["tomi", "hitom", "secret_keeper"])
def walked(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Walked:
    where = tmp_path_factory.mktemp("models") / "wide"
    model = LocalModel.load(random_model(where, max_context=4096))
    if request.param != "secret_keeper":
        return *walk(model, request.param), model.renderer()
    with visitor() as url:
        pair = walk(model, request.param, Player(Endpoint(model="visitor", base_url=url)))
    return *pair, model.renderer()


def test_filling_the_slot_undoes_emptying_it(walked: Walked) -> None:
    """filled(bare(refined)) renders to the very ids that the refined rollout was sampled from."""
    records, jobs, renderer = walked
    slot, refined = feedback_slots(jobs), [r for r in records if r.kind == "refined"]
    assert len(refined) == 4
    for record in refined:
        (trace,) = record.episode.traces
        assert record.given is not None
        full = slot(record, trace.seat, record.given)
        for turn in trace.turns:
            emptied = [
                s if s.bare is None else Segment(s.role, s.bare, s.bare) for s in turn.context
            ]
            assert renderer.prompt_ids(filled_context(emptied, full)) == list(
                turn.completion.prompt_ids
            )
        pairs = told_spans(replace_prompts(record, renderer).episode.traces[0], renderer, full)
        assert [copy for copy, _ in pairs] == copied_spans(trace, renderer)
        assert [other for _, other in pairs] == emitted_spans(trace)


def replace_prompts(record: Record, renderer: Renderer) -> Record:
    """A refined rollout as the draft that says the same: its prompts are those of the copy."""
    traces = []
    for trace in record.episode.traces:
        turns = []
        for turn in trace.turns:
            context = tuple(s if s.bare is None else replace(s, text=s.bare) for s in turn.context)
            ids = tuple(renderer.prompt_ids(context))
            turns.append(replace(turn, context=context,
                                 completion=replace(turn.completion, prompt_ids=ids)))  # fmt: skip
        traces.append(replace(trace, turns=tuple(turns)))
    return replace(record, episode=replace(record.episode, traces=tuple(traces)))


def test_a_drafts_mirror_has_the_feedback_and_nothing_else(walked: Walked) -> None:
    records, jobs, renderer = walked
    for record in (r for r in records if r.kind == "draft"):
        assert record.received is not None
        for sequence in told_sequences(record, renderer, feedback_slots(jobs)):
            span, other = sequence.span, sequence.teacher
            assert other is not None and span.sampler == other.sampler
            emitted, again = (
                [i for i, t in zip(s.ids, s.trained, strict=True) if t] for s in (span, other)
            )
            assert emitted == again
            gap = len(other.ids) - len(span.ids)
            places = range(len(span.ids))
            at = next(i for i in places if span.ids[i] != other.ids[i])
            assert other.ids[:at] + other.ids[at + gap :] == span.ids and gap > 0
            hint = renderer.tokenizer.decode(list(other.ids[at - 1 : at + gap + 1]))
            assert record.received.text in hint


def test_missing_and_leaking_feedback_have_no_mirror() -> None:
    draft = play("x", 0, "draft", 0.0, (320,), received=advice("x", leak="answerable"))
    for record in (draft, replace(draft, received=None)):
        (sequence,) = told_sequences(record, Numbers(), slot)
        assert sequence.teacher is None
        for method, left in (("sdpo-token", 0), ("sdpo-logits", 0), ("sdpo-token+grpo", 1)):
            objective = SDPO.of(config(method=method))
            assert len(objective.sequences([record], Numbers(), slot)) == left


def test_a_conversation_without_a_slot_is_no_lesson() -> None:
    with pytest.raises(ValueError, match="no message"):
        filled_context([Segment("user", "hello")], Segment("user", "hello hint", "hello"))


def test_pairs_merge_only_where_both_continue() -> None:
    """The second turn continues the draft, and not the told one: both stay apart."""
    copies = [([1], [2], [-1.0]), ([1, 2, 3], [4], [-2.0])]
    other = [([1, 9], [2], ()), ([8, 9, 2, 3], [4], ())]
    first, second = paired_spans(zip(copies, other, strict=True))
    assert [s.ids for s in first] == [(1, 2), (1, 9, 2)]
    assert [s.ids for s in second] == [(1, 2, 3, 4), (8, 9, 2, 3, 4)]
    assert all(a.n_trained == b.n_trained == 1 for a, b in (first, second))
    joined = [([1, 9], [2], ()), ([1, 9, 2, 3], [4], ())]
    ((a, b),) = paired_spans(zip(copies, joined, strict=True))
    assert a.ids == (1, 2, 3, 4) and b.ids == (1, 9, 2, 3, 4) and a.n_trained == b.n_trained == 2


def test_two_seats_take_their_own_slot() -> None:
    """A task with several characters is asked for the slot of each."""
    seats: list[str] = []
    record = ROLLOUTS[0]
    twin = replace(record.episode.traces[0], seat="other")
    both = replace(record, episode=replace(record.episode, traces=(*record.episode.traces, twin)))

    def remember(record: Record, seat: str, feedback: Feedback) -> Segment:
        seats.append(seat)
        return slot(record, seat, feedback)

    assert len(list(told_sequences(both, Numbers(), remember))) == 2
    assert seats == ["reader", "other"]


def test_distillation_is_not_done_by_the_student_itself(policy: Policy) -> None:
    settings = config(method="opd", teacher_model="other")
    with pytest.raises(ConfigError, match="no second model"):
        teacher_of(settings, make_objective(settings), policy, None)


def test_in_the_control_a_teacher_reads_somebody_elses_feedback() -> None:
    leak, drafts = advice("y", leak="gold_text"), []
    for example in ("x", "y"):
        drafts += [
            play(example, i, "draft", 0.0, (320,), received=advice(example)) for i in range(2)
        ]
    drafts.append(play("y", 2, "draft", 0.0, (320,), received=leak))
    swapped = with_swapped(drafts, "key")
    assert [r.received for r in swapped[:2]] == [advice("y")] * 2
    assert [r.received for r in swapped[2:]] == [advice("x")] * 2 + [None]
    assert [r.key for r in swapped] == [r.key for r in drafts]
