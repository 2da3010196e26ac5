"""Teachers: what they read is the mirror image of a copy, and their states leave no trace.

Several teachers: every task is read by its own expert, out of one frozen base.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from soulkit.errors import ConfigError
from soulkit.models.api.endpoint import Endpoint
from soulkit.models.base import Cast, Player
from soulkit.models.local.chat_template import Renderer
from soulkit.models.local.loading import adapter_hash
from soulkit.models.local.sampler import LocalModel
from soulkit.models.local.tiny import build_tiny
from soulkit.play.engine import Engine, FeedbackPolicy, Job
from soulkit.train.config import TrainConfig
from soulkit.train.model.policy import Policy, load_policy
from soulkit.train.model.prepare import prepare_step
from soulkit.train.model.teacher import (
    Teacher,
    check_student,
    load_teacher,
    move_ema,
    start_ema,
    task_teachers,
    teacher_of,
    teaching,
)
from soulkit.train.model.update import take_updates
from soulkit.train.objectives.base import make_objective
from soulkit.train.objectives.sdpo import SDPO
from soulkit.train.objectives.sequences import (
    Span,
    TrainSequence,
    copied_spans,
    emitted_spans,
    feedback_sequences,
    feedback_spans,
    filled_context,
    paired_spans,
)
from soulkit.train.rollouts.feedback import with_swapped
from soulkit.train.rollouts.play import feedback_slots
from soulkit.train.setup.data import load_training_data
from soulkit.train.state.model_card import model_note
from soulkit.train.state.stops import Skips
from soulkit.types import Feedback, Record, Sampling, Segment
from tests.support.evaluation import soul, visitor
from tests.support.methods import ROLLOUTS, Numbers, advice, play, slot
from tests.support.resuming import assert_same
from tests.support.training import config, jolt, policy_of, random_model, rows, sequence, span

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
    with pytest.raises(AssertionError, match="start_ema"), teaching(policy, "ema"):
        raise KeyError("entered")
    with pytest.raises(AssertionError, match="start_ema"):
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
    with pytest.raises(ConfigError, match="different vocabularies") as caught:
        load_teacher(settings, make_objective(settings), policy)
    assert all(caught.value.lines())


def test_distillation_without_a_teacher_is_refused_before_anything_is_loaded() -> None:
    settings = config(method="opd", data={"tomi": "synth:4"})
    for refuse in (make_objective, load_training_data):
        with pytest.raises(ConfigError, match="needs a teacher"):
            refuse(settings)


def test_the_base_cannot_teach_where_all_weights_move() -> None:
    settings = config(method="sdpo-token", teacher="base", full=True, data={"tomi": "synth:4"})
    with pytest.raises(ConfigError, match="--full"):
        load_training_data(settings)


def test_distributions_need_hidden_states(policy: Policy) -> None:
    policy.gathers = False
    for method in ("sdpo-logits", "sdpo-logits+grpo"):
        settings = config(method=method)
        with pytest.raises(ConfigError, match="whole distributions"):
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
        pairs = feedback_spans(replace_prompts(record, renderer).episode.traces[0], renderer, full)
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
        for made in feedback_sequences(record, renderer, feedback_slots(jobs)):
            span, other = made.span, made.teacher
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
        (sequence,) = feedback_sequences(record, Numbers(), slot)
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

    assert len(list(feedback_sequences(both, Numbers(), remember))) == 2
    assert seats == ["reader", "other"]


def test_distillation_is_not_done_by_the_student_itself(policy: Policy) -> None:
    settings = config(method="opd", teacher_model="other")
    with pytest.raises(AssertionError, match="needs a teacher model"):
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


TWO = {"tomi": 1.0, "secret_keeper": 1.0}
ROWS = ("--data", "tomi=synth:4", "--data", "hitom=synth:4")
SMALL: dict[str, Any] = {"lora": {"r": 4, "alpha": 8}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("models") / "base", ["a", "few", "words"])


@pytest.fixture(scope="module")
def experts(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Adapters of two ranks, which differ from each other and from nothing."""
    folders, place = {}, tmp_path_factory.mktemp("experts")
    for seed, task in enumerate(TWO, 7):
        settings = config(model=str(base), tasks={task: 1.0}, lora={"r": seed - 4, "alpha": 8})
        policy = load_policy(settings, base)
        jolt(policy, 0.08, seed)
        policy.note = model_note(settings, policy)
        policy.save(place / task)
        folders[task] = str(place / task)
    return folders


def opd(base: Path, experts: dict[str, str], **settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {"method": "opd", "model": str(base), "tasks": TWO, **SMALL}
    return config(**{**plain, "teacher_adapters": experts, **settings})


def expert_teacher_of(settings: TrainConfig, student: Policy) -> Policy:
    teacher = load_teacher(settings, make_objective(settings), student)
    assert teacher is not None
    return teacher


@pytest.fixture
def student(base: Path) -> Policy:
    return policy_of(base, **SMALL)


def spans() -> list[Span]:
    """Six sequences, some with a prefix in common across the tasks."""
    rng = random.Random(5)
    return [span(rng, (301, 302, 303 + i // 3), (3 + i % 3,)) for i in range(6)]


TASKS = ("tomi", "secret_keeper", "secret_keeper", "tomi", "secret_keeper", "tomi")


def alone(base: Path, adapter: str, student: Policy) -> Teacher:
    """The expert as the only teacher of a run."""
    return Teacher(expert_teacher_of(opd(base, {}, teacher_adapter=adapter), student))


@pytest.mark.parametrize(("packing", "budget"), [("auto", 1000), ("off", 8)])
def test_every_span_is_read_by_the_expert_of_its_task(
    base: Path, experts: dict[str, str], student: Policy, packing: str, budget: int
) -> None:
    several = Teacher(expert_teacher_of(opd(base, experts, packing=packing), student))
    assert not several.policy.trained
    all_spans = spans()
    logs, spreads = several.scores(all_spans, budget, TASKS, "values")
    hidden = several.hidden(all_spans, budget, TASKS)
    edges = torch.tensor([0, *(s.n_trained for s in all_spans)]).cumsum(0).tolist()
    assert not several.policy.trained and not hidden.requires_grad
    single = {task: alone(base, adapter, student) for task, adapter in experts.items()}
    readings = {task: one.log_probs(all_spans, None) for task, one in single.items()}
    for i, task in enumerate(TASKS):
        assert torch.allclose(logs[i], readings[task][i], atol=1e-5)
        other = next(name for name in TWO if name != task)
        assert not torch.allclose(logs[i], readings[other][i], atol=1e-2)
        states = single[task].hidden([all_spans[i]], None)
        assert torch.allclose(hidden[edges[i] : edges[i + 1]], states, atol=1e-5)
        assert len(spreads[i]) == all_spans[i].n_trained and (spreads[i] > 0).all()


@pytest.mark.parametrize("form", ["token", "logits"])
def test_the_update_is_that_of_single_teachers_together(
    base: Path, experts: dict[str, str], student: Policy, form: str
) -> None:
    """The gradient of a mixture is the sum of what each expert's own sequences give it."""
    settings = opd(base, experts, opd_form=form, mini_batch_prompts=16)
    lessons = taught(spans(), settings)
    mixed = gradient(student, lessons, settings, Teacher(expert_teacher_of(settings, student)))
    total = [torch.zeros_like(g) for g in mixed]
    tokens = sum(s.span.n_trained for s in lessons)
    for task, adapter in experts.items():
        part = [s for s in lessons if s.task == task]
        share = sum(s.span.n_trained for s in part) / tokens
        single = gradient(student, part, settings, alone(base, adapter, student))
        total = [t + share * g for t, g in zip(total, single, strict=True)]
    for one, other in zip(mixed, total, strict=True):
        assert torch.allclose(one, other, atol=1e-6, rtol=1e-4)
    assert any(bool((g.abs() > 1e-4).any()) for g in mixed)


def taught(all_spans: Sequence[Span], settings: TrainConfig) -> list[TrainSequence]:
    lessons = []
    for i, (one, task) in enumerate(zip(all_spans, TASKS, strict=True)):
        plain = replace(sequence(one, "draft", f"x{i}", 0, 0.0), task=task, compared=False)
        form = {"loss": "divergence"} if settings.opd_form == "logits" else {"teacher_weight": 1.0}
        lessons.append(replace(plain, teacher=one, **form))
    return lessons


def gradient(
    policy: Policy, lessons: list[TrainSequence], settings: TrainConfig, teacher: Teacher
) -> list[Tensor]:
    """Of one update whose step is of no size, with no bound on its norm."""
    free = settings.model_copy(update={"max_grad_norm": 1e9})
    optimizer = torch.optim.SGD([p for _, p in policy.trained], lr=0.0)
    fixed = prepare_step(policy, lessons, free, teacher=teacher)
    assert take_updates(policy, optimizer, fixed, free, Skips()).updates == 1
    return [p.grad.clone() for _, p in policy.trained if p.grad is not None]


# --- who may teach --------------------------------------------------------------------------------


def test_a_bare_adapter_teaches_the_tasks_that_have_no_expert(base: Path) -> None:
    mixed = opd(base, {"tomi": "a"}, teacher_adapter="b")
    assert task_teachers(mixed) == {"tomi": "a", "secret_keeper": "b"}
    assert task_teachers(opd(base, {}, teacher_adapter="b")) == {}


def test_tasks_without_a_teacher_and_teachers_without_a_task_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("train", "opd", "--model", "m", "--task", "tomi,hitom", *ROWS)
    for teachers, words in (
        (("tomi=a",), "There is no teacher for hitom"),
        (("tomi=a", "hitom=b", "fantom=c"), "names fantom, which this run does not train on"),
    ):
        flags = [text for one in teachers for text in ("--teacher-adapter", one)]
        assert soul(*command, *flags) == 2
        shown = capsys.readouterr().err
        assert words in shown and "Traceback" not in shown


def test_an_adapter_of_another_base_or_tokenizer_is_refused_by_name(
    base: Path, experts: dict[str, str], student: Policy, tmp_path: Path
) -> None:
    other = _copied(base, tmp_path / "other")
    _move(other)
    with pytest.raises(ConfigError, match=r"tomi teacher.* not trained on the base") as raised:
        expert_teacher_of(opd(other, experts), student)
    assert all(raised.value.lines())
    build_tiny(tmp_path / "words", ["quite", "another", "vocabulary"])
    foreign = _copied(Path(experts["secret_keeper"]), tmp_path / "foreign")
    (foreign / "tokenizer.json").write_bytes((tmp_path / "words/tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=r"secret_keeper teacher.* a different tokenizer"):
        expert_teacher_of(opd(base, {**experts, "secret_keeper": str(foreign)}), student)


def _move(folder: Path, name: str = "model.safetensors") -> None:
    file = folder / name
    moved = {name: tensor * 1.01 for name, tensor in load_file(file).items()}
    save_file(moved, file, metadata={"format": "pt"})


def _copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_records_its_teachers_and_goes_on_with_them_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the bit without its last step; not at all when a teacher holds other weights."""
    base = random_model(tmp_path / "base", max_context=4096)
    experts = {task: _expert(base, task, tmp_path, seed) for seed, task in enumerate(MIXED)}
    flags = [text for pair in experts.items() for text in ("--teacher-adapter", "=".join(pair))]
    whole, again = tmp_path / "whole", tmp_path / "again"

    def command(out: Path) -> tuple[object, ...]:
        return (
            "train", "opd", "--model", base, "--task", ",".join(MIXED), *MIXED_ROWS, *flags,
            "--steps", 3, "--prompts", 4, "--group-size", 2, "--max-tokens", 4, "--lora-r", 4,
            "--lr", 1e-2, "--checkpoint-every", 1, "--set", "mini_batch_prompts=2",
            "--set", "deterministic=true", "--out", out,
        )  # fmt: skip

    assert soul(*command(whole)) == 0
    teachers = json.loads((whole / "conditions.json").read_text())["teachers"]
    assert {task: one["adapter"] for task, one in teachers.items()} == experts
    weights = {task: one["adapter_weights"] for task, one in teachers.items()}
    assert weights == {task: adapter_hash(folder) for task, folder in experts.items()}
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step_000003")
    assert soul(*command(again)) == 0
    assert_same(again, whole)
    _move(Path(experts["hitom"]), "adapter_model.safetensors")
    capsys.readouterr()
    assert soul(*command(again)) == 2
    assert "teacher of hitom, '" in capsys.readouterr().err


MIXED = ("tomi", "hitom")
MIXED_ROWS = ("--data", "tomi=synth:8", "--data", "hitom=synth:8")


def _expert(base: Path, task: str, folder: Path, seed: int) -> str:
    policy = policy_of(base, **SMALL)
    jolt(policy, 0.05, seed)
    policy.save(folder / f"expert_{task}")
    return str(folder / f"expert_{task}")


@pytest.mark.parametrize("share", [0.0, 0.5, None])
@pytest.mark.parametrize("method", ["sdpo-token", "sdpo-token+grpo"])
def test_only_a_sum_without_its_teacher_is_said_to_be_grpo(
    method: str, share: float | None
) -> None:
    remark = SDPO.remark(config(method=method, distill_weight=share))
    assert ("so this is plain grpo" in remark) == (method.endswith("+grpo") and share == 0)
